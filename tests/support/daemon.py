"""A real daemon for tests: started in the foreground by this process, ended with the test, asked over its socket."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import kserve
from kserve import catalog, protocol
from kserve.artifact import manifest_from_bytes
from kserve.client.connection import Connection
from kserve.config import Settings, environment_of_process, load_settings
from kserve.errors import KserveError
from kserve.key import digest_of
from tests.support.processes import REPOSITORY, end_daemon, wait_for

LOG = "daemon.txt"


class Daemon(NamedTuple):
    """A running `kserve up`."""

    root: Path
    settings: Settings
    process: subprocess.Popen[bytes]

    @property
    def log(self) -> str:
        return (self.root / LOG).read_text()

    def connection(self) -> Connection:
        return Connection(self.settings)

    def call(self, method: str, path: str, body: object = None, *, wait_s: float = 0.0) -> Any:
        with contextlib.closing(self.connection()) as connection:
            return connection.call(method, path, body, wait_s=wait_s)


def variables(root: Path, **more: str) -> dict[str, str]:
    """The environment that puts everything of kserve below `root`."""
    return {
        "KSERVE_STORE": str(root / "store"),
        "KSERVE_RUNTIME_DIR": str(root / "run"),
        "KSERVE_PATH": str(root / "kernels"),
        "KSERVE_IDLE_S": "60",
        **more,
    }


def settings_of(root: Path, **more: str) -> Settings:
    return load_settings(environ={**variables(root, **more), "HOME": str(root)})


@contextlib.contextmanager
def place() -> Iterator[Path]:
    """A short-named directory for one daemon; whatever runs there is ended with the block."""
    root = Path(tempfile.mkdtemp(prefix="kt-", dir="/tmp"))
    (root / "kernels").mkdir()
    try:
        yield root
    finally:
        end_daemon(root)
        shutil.rmtree(root, ignore_errors=True)


@contextlib.contextmanager
def daemon(
    root: Path,
    *,
    arguments: tuple[str, ...] = (),
    program: tuple[str, ...] = ("-m", "kserve"),
    checkout: Path = REPOSITORY,
    wrapper: tuple[str, ...] = (),
    python: str = sys.executable,
    uid: int | None = None,
    awaited: bool = True,
    **environment: str,
) -> Iterator[Daemon]:
    """`kserve up` in the foreground, answering; ended with SIGTERM if the block has not ended it.

    Args:
        program:  what Python runs; another one must end up as `kserve` does.
        checkout: the directory that holds the package.
        wrapper:  a command before Python, such as `unshare -Ur`.
        uid:      the user it runs as.
        awaited:  whether to wait until it answers this process.
    """
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KSERVE_")}
    # A file, not a pipe: nobody reads it while the daemon runs.
    with (root / LOG).open("a") as log:
        process = subprocess.Popen(
            [*wrapper, python, *program, "up", *arguments],
            cwd=checkout,
            env={**clean, **variables(root, **environment)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            user=uid,
            group=uid,
            extra_groups=None if uid is None else [],
        )
    found = Daemon(root, settings_of(root, **environment), process)
    try:
        if awaited:
            wait_for(lambda: answers(found.settings) or process.poll() is not None, what="the daemon to answer")
        yield found
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(timeout=20)


def answers(settings: Settings) -> bool:
    """Whether a daemon of those settings answers now."""
    with contextlib.closing(Connection(settings)) as connection:
        try:
            return connection.call("GET", protocol.HEALTH)["status"] == "ok"
        except KserveError:
            return False


def wish(settings: Settings, name: str, *, target: str = "cuda:sm_90", **spec: object) -> tuple[dict[str, Any], list[bytes]]:
    """One kernel as a client sends it, and the contents of its files."""
    found = catalog.find(name, settings)
    request = protocol.kernel_request(name, files=found.digests, spec=spec, target=target, environment=environment_of_process())
    return request, list(found.files.values())


def resolve_body(*kernels: dict[str, Any], wait_s: float = 60.0, client: str = "test", **changes: object) -> dict[str, Any]:
    """The body of a resolve request; `changes` replaces or adds fields."""
    body = protocol.resolve_request(list(kernels), client=client, version=kserve.__version__, wait_s=wait_s)
    return {**body, **changes}


def ask(
    connection: Connection, settings: Settings, name: str, *, wait_s: float = 60.0, client: str = "test", **wanted: Any
) -> Any:
    """Upload a kernel's files and resolve it: the one result, as JSON."""
    request, contents = wish(settings, name, **wanted)
    for content in contents:
        connection.call("POST", protocol.SOURCES, content)
    body = resolve_body(request, wait_s=wait_s, client=client)
    return connection.call("POST", protocol.RESOLVE, body, wait_s=wait_s)["results"][0]


def assert_sound(store: Path) -> int:
    """Every record of the store is whole; how many manifests there are."""
    for kind in ("payload", "source"):
        for path in (store / kind).glob("??/*"):
            assert digest_of(path.read_bytes()) == path.name, f"{path} is damaged"
    manifests = list((store / "manifest").glob("??/*"))
    for path in manifests:
        manifest = manifest_from_bytes(path.read_bytes(), key=path.stem)
        for digest in (manifest.digest, *manifest.attachments.values()):
            assert (store / "payload" / digest[:2] / digest).is_file(), f"{path} names a payload that is not there"
    return len(manifests)
