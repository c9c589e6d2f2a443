"""From wished-for kernels to loaded ones: definition and sources, one request, payloads, driver."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any, NamedTuple

import kserve
from kserve import catalog, protocol
from kserve.artifact import Artifact
from kserve.client.connection import Connection
from kserve.client.launch import Kernel
from kserve.client.loader import driver
from kserve.config import Settings, environment_of_process, load_settings
from kserve.errors import BuildTimeout, CorruptArtifact, KserveError, LoadError, StoreError
from kserve.key import digest_of
from kserve.protocol import Pending, Resolved
from kserve.store.files import FileStore
from kserve.target import parse_target

# After this long a wait is worth a line, and the daemon is asked again.
_PATIENCE_S = 2.0
_WORST_ORIGIN = ("built", "joined", "remote", "disk", "memo")


class Wanted(NamedTuple):
    """One wish: an entry's name, a target, a value for each axis."""

    name: str
    target: str
    spec: dict[str, Any]


class _Session:
    """What a process keeps between calls: its settings, its connection, its name to the daemon."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.settings: Settings = load_settings()
        self.client = os.urandom(8).hex()
        self.connection = Connection(self.settings)
        self.store = FileStore(self.settings.store, writable=False)


_session: _Session | None = None
_lock = threading.Lock()


def session() -> _Session:
    """This process's session; a forked child gets its own."""
    global _session  # noqa: PLW0603 - one session a process
    if _session is None or _session.pid != os.getpid():
        _session = _Session()
    return _session


def disconnect() -> None:
    """End the session: the next one reads the settings again."""
    global _session  # noqa: PLW0603 - one session a process
    if _session is not None:
        _session.connection.close()
    _session = None


def resolve(wanted: list[Wanted], *, timeout_s: float | None = None, load: bool = True) -> list[Kernel]:
    """Resolve and load kernels in one round trip.

    Args:
        load: False leaves the driver alone, for builds ahead of time.
    Raises: the first error of any of them, and BuildTimeout when builds outlast the deadline (they go on).
    """
    began = time.monotonic()
    with _lock:
        here = session()
        deadline = began + (timeout_s or here.settings.client_timeout_s)
        answers = _ask(here, wanted, deadline)
        kernels = []
        for wish, variants in zip(wanted, answers, strict=True):
            artifacts = [_artifact(here, variant) for variant in variants]
            origin = min((variant.origin for variant in variants), key=_WORST_ORIGIN.index)
            device = _device_for(artifacts[0]) if load else None
            kernels.append(Kernel(artifacts, origin=origin, seconds=time.monotonic() - began, device=device))
            del wish
    return kernels


def _ask(here: _Session, wanted: list[Wanted], deadline: float) -> list[list[Resolved]]:
    """One request, repeated while sources are missing or builds are running."""
    found = [catalog.find(wish.name, here.settings) for wish in wanted]
    for wish, item in zip(wanted, found, strict=True):  # the client's own check, for the message
        item.definition.resolve_target(item.entry, parse_target(wish.target))
        item.definition.specialise(item.entry, wish.spec)
    environment = environment_of_process()
    requests = [
        protocol.kernel_request(wish.name, files=item.digests, spec=wish.spec, target=wish.target, environment=environment)
        for wish, item in zip(wanted, found, strict=True)
    ]
    contents = {digest_of(content): content for item in found for content in item.files.values()}
    began = time.monotonic()
    while True:
        wait_s = max(0.0, min(_PATIENCE_S, deadline - time.monotonic()))
        body = protocol.resolve_request(requests, client=here.client, version=kserve.__version__, wait_s=wait_s)
        plain = here.connection.call("POST", protocol.RESOLVE, body, wait_s=wait_s, start=True)["results"]
        missing = {digest for result in plain for digest in result.get("missing", ())}
        for digest in missing:
            here.connection.call("POST", protocol.SOURCES, contents[digest])
        if missing:
            continue
        results = [protocol.read_result(result) for result in plain]
        for result in results:
            if isinstance(result, KserveError):
                raise result
        pending = [(wish, result) for wish, result in zip(wanted, results, strict=True) if isinstance(result, Pending)]
        if not pending:
            return [result for result in results if isinstance(result, list)]
        _wait_on(pending, began=began, deadline=deadline)


def _wait_on(pending: list[tuple[Wanted, Pending]], *, began: float, deadline: float) -> None:
    wish, state = pending[0]
    more = f" and {len(pending) - 1} more" if len(pending) > 1 else ""
    if time.monotonic() > deadline:
        raise BuildTimeout(
            f"{wish.name} for {wish.target}{more} is still being built after {time.monotonic() - began:.0f} s",
            facts={"build": state.build},
            hint="the build goes on: call again, or raise timeout_s",
        )
    ahead = f", {state.n_ahead} ahead" if state.n_ahead else ""
    print(  # noqa: T201 - a person is waiting
        f"kserve: building {wish.name} for {wish.target}{more}, {state.seconds:.0f} s{ahead}", file=sys.stderr, flush=True
    )


def _artifact(here: _Session, variant: Resolved) -> Artifact:
    """The variant's bytes: from the store's files where this process can read them, else from the daemon. Verified."""
    manifest = variant.manifest
    try:
        content = here.store.get(f"payload/{manifest.digest}")
    except StoreError:
        content = None
    if content is None:
        content = here.connection.call_raw("GET", f"{protocol.ARTIFACTS}/{manifest.key}/payload")
    if digest_of(content) != manifest.digest:
        raise CorruptArtifact(f"payload of {manifest.name} arrived with another digest", facts={"key": manifest.key})
    return Artifact(manifest, content)


def _device_for(artifact: Artifact) -> int | None:
    """The current device when it runs this binary; None when there is no device, or it does not."""
    try:
        found = driver()
        device = found.current_device()
        fits = parse_target(artifact.manifest.target).runs_on(found.target_of(device).capability)
    except LoadError:
        return None
    return device if fits else None
