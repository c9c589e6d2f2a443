"""A disk that refuses, and bytes that change on it, under a real daemon."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kserve import client, get_kernel, protocol
from kserve.client.connection import Connection
from kserve.client.resolve import session
from kserve.errors import KserveError, NotBuilt
from kserve.key import digest_of
from kserve.store.files import FileStore
from tests.support.daemon import Daemon, ask, assert_sound, daemon
from tests.support.definitions import write_cuda
from tests.support.entries import looked_up
from tests.support.processes import fill, mounted, wait_for

pytestmark = pytest.mark.toolchain
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can mount")


@pytest.fixture
def root(own_place: Path) -> Path:
    write_cuda(own_place / "kernels" / "scale")
    return own_place


def status(connection: Connection) -> Any:
    return connection.call("GET", protocol.STATUS)["store"]


def keys_on_disk(store: Path) -> set[str]:
    return set(FileStore(store, writable=False).keys("manifest"))


# ---- a disk that refuses -------------------------------------------------------------------------------------------


@needs_root
def test_what_a_full_disk_refuses_is_served_and_written_down_when_there_is_room(root: Path):
    """No restart: within seconds of the space that somebody frees. A build that cannot be staged fails with that reason."""
    with contextlib.ExitStack() as stack:
        small = stack.enter_context(mounted(root / "small", "-o", "size=96m,mode=0700"))
        found = stack.enter_context(daemon(root, KSERVE_STORE=str(small / "store")))
        connection = stack.enter_context(contextlib.closing(found.connection()))
        first = ask(connection, found.settings, "scale", size=1)["variants"][0]["manifest"]["key"]
        served = until_degraded(found, connection, small)
        assert served, "no build was staged and refused"
        assert status(connection)["degraded"]
        before = keys_on_disk(small / "store")
        in_memory = {key for size in served for key in keys_of(found, connection, size)} - before
        assert in_memory, "everything reached the disk"
        assert first in before
        listed = {row["key"] for row in connection.call("GET", protocol.ARTIFACTS)["artifacts"]}
        assert listed >= in_memory | before
        assert status(connection)["n_artifacts"] == len(listed)
        for key in in_memory:
            content = connection.call_raw("GET", f"{protocol.ARTIFACTS}/{key}/payload")
            digest = connection.call("GET", f"{protocol.ARTIFACTS}/{key}")["manifest"]["digest"]
            assert digest_of(content) == digest
        (small / "filler").unlink()
        wait_for(lambda: not status(connection)["degraded"], deadline_s=5, what="the disk to be used again")
        assert keys_on_disk(small / "store") == listed
        assert_sound(small / "store")
        wait_for(lambda: status(connection)["index"] == "sound", what="the index")
        shown = status(connection)
        assert (shown["size_bytes"], shown["n_files"], shown["n_artifacts"]) == looked_up(small / "store")
        again = [origin for size in served for origin in origins(found, connection, size)]
        assert set(again) == {"disk"}


def until_degraded(found: Daemon, connection: Connection, small: Path) -> list[int]:
    """Ask for new kernels while ever more of the disk is free: the sizes that were built although it refused something."""
    served = []
    for leave in range(0, 60, 3):
        (small / "filler").unlink(missing_ok=True)
        fill(small, leave=leave)
        answer = ask(connection, found.settings, "scale", size=100 + leave)
        if "variants" in answer:
            served.append(100 + leave)
            if status(connection)["degraded"]:
                fill(small)
                break
        else:
            assert (answer["error"]["code"], "No space left" in json.dumps(answer)) == ("store-unusable", True), answer
    return served


def keys_of(found: Daemon, connection: Connection, size: int) -> list[str]:
    return [variant["manifest"]["key"] for variant in ask(connection, found.settings, "scale", size=size)["variants"]]


def origins(found: Daemon, connection: Connection, size: int) -> list[str]:
    return [variant["origin"] for variant in ask(connection, found.settings, "scale", size=size)["variants"]]


# ---- bytes that change ---------------------------------------------------------------------------------------------


def overwrite(path: Path, content: bytes, *, keep_times: bool) -> None:
    before = path.stat()
    path.chmod(0o600)
    path.write_bytes(content)
    path.chmod(0o400)
    if keep_times:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert path.stat().st_mtime_ns == before.st_mtime_ns


def flipped(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.fixture
def asking(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("KSERVE_PATH", str(root / "kernels"))
    client.forget()
    yield
    client.forget()


def path_of(root: Path, digest: str) -> Path:
    return root / "store" / "payload" / digest[:2] / digest


def test_damage_that_keeps_the_modification_time_is_noticed_at_the_next_hit(root: Path, asking: None):
    """The size and the time are as they were; the time of the change is not."""
    with daemon(root) as found:
        kernel = get_kernel("scale", target="sm_90")
        client.forget()
        assert get_kernel("scale", target="sm_90").origin == "disk"  # the daemon has checked it
        path = path_of(root, kernel.digest)
        good = path.read_bytes()
        overwrite(path, flipped(good), keep_times=True)
        client.forget()
        again = get_kernel("scale", target="sm_90")
        assert (again.origin, again.digest) == ("built", kernel.digest)
        assert again._roads.artifacts[0].payload == good
        assert again.manifest.reason == "quarantined: digest mismatch"
        shown = found.call("GET", protocol.STATUS)["store"]
        assert (shown["n_quarantined"], shown["n_in_quarantine"]) == (1, 1)
        assert_sound(root / "store")


def test_a_payload_that_is_replaced_after_the_daemon_looked_never_reaches_the_caller(
    root: Path, asking: None, monkeypatch: pytest.MonkeyPatch
):
    """The client hashes what it reads, asks the daemon, which puts it aside; the client asks again and gets the right bytes."""
    with daemon(root) as found:
        kernel = get_kernel("scale", target="sm_90")
        path = path_of(root, kernel.digest)
        good = path.read_bytes()
        client.forget()
        session()  # the client's own view of the store
        get, spoilt = FileStore.get, []

        def late(store: FileStore, name: str) -> bytes | None:
            """Between the daemon's answer and the client's read."""
            if name == f"payload/{kernel.digest}" and not spoilt:
                spoilt.append(name)
                overwrite(path, flipped(good), keep_times=True)
            return get(store, name)

        monkeypatch.setattr(FileStore, "get", late)
        again = get_kernel("scale", target="sm_90")
        assert spoilt
        assert again._roads.artifacts[0].payload == good
        assert (again.origin, digest_of(good)) == ("built", again.digest)
        assert found.call("GET", protocol.STATUS)["store"]["n_quarantined"] == 1
        assert path.read_bytes() == good


def test_an_artifact_that_is_evicted_after_the_daemon_looked_is_built_again(
    root: Path, asking: None, monkeypatch: pytest.MonkeyPatch
):
    with daemon(root) as found:
        kernel = get_kernel("scale", target="sm_90")
        client.forget()
        session()
        get, gone = FileStore.get, []

        def late(store: FileStore, name: str) -> bytes | None:
            if not gone:
                gone.append(found.call("POST", protocol.PRUNE, {"all": True})["keys"])
            return get(store, name)

        monkeypatch.setattr(FileStore, "get", late)
        again = get_kernel("scale", target="sm_90")
        assert gone == [sorted([kernel.key, kernel.generic.key])]  # type: ignore[union-attr]
        assert (again.origin, again.digest) == ("built", kernel.digest)
        assert again.manifest.reason == "evicted"
        assert "quarantined" not in found.log


@pytest.mark.parametrize(("n_lost", "code"), [(3, ""), (10**6, "service-failed")])
def test_sources_that_are_lost_again_are_sent_again_but_not_for_ever(
    root: Path, asking: None, monkeypatch: pytest.MonkeyPatch, n_lost: int, code: str
):
    with daemon(root):
        call, lost = Connection.call, []

        def losing(connection: Connection, method: str, path: str, body: object = None, **more: Any) -> Any:
            answer = call(connection, method, path, body, **more)
            if path == protocol.SOURCES and len(lost) < n_lost:
                lost.append(FileStore(root / "store", writable=False).path(f"source/{answer['digest']}"))
                lost[-1].unlink()
            return answer

        monkeypatch.setattr(Connection, "call", losing)
        try:
            origin = get_kernel("scale", target="sm_90").origin
        except KserveError as error:
            assert (error.code, len(lost) < 30) == (code, True)
        else:
            assert (origin, code) == ("built", "")


SWAPS: dict[str, Callable[[Path, Path], object]] = {
    "two payloads": Path.rename,
    "a payload and a link to another": lambda one, other: (one.unlink(), one.symlink_to(other)),
    "a payload and a directory": lambda one, _: (one.unlink(), one.mkdir()),
}


@pytest.mark.parametrize("how", SWAPS)
def test_swapped_payloads_are_never_served(root: Path, asking: None, how: str):
    with daemon(root):
        kernels = [get_kernel("scale", target="sm_90", size=size) for size in (1, 2)]
        contents = [kernel._roads.artifacts[0].payload for kernel in kernels]
        SWAPS[how](*(path_of(root, kernel.digest) for kernel in kernels))
        client.forget()
        again = [get_kernel("scale", target="sm_90", size=size) for size in (1, 2)]
        assert [kernel._roads.artifacts[0].payload for kernel in again] == contents


def test_verify_beside_evictions_calls_nothing_damaged(root: Path):
    """Records that are evicted while they are checked are gone, not damaged."""
    with daemon(root) as found, contextlib.closing(found.connection()) as connection, ThreadPoolExecutor(1) as pool:
        for size in range(1, 10):
            ask(connection, found.settings, "scale", size=size)
        evicting = pool.submit(evict_one_by_one, found)
        checks = []
        while not evicting.done():
            checks.append(connection.call("POST", protocol.VERIFY))
        assert evicting.result() == 18
        assert [check for check in checks if check["damaged"] or check["orphaned"]] == []
        assert checks


def evict_one_by_one(found: Daemon) -> int:
    with contextlib.closing(found.connection()) as connection:
        keys = [row["key"] for row in connection.call("GET", protocol.ARTIFACTS)["artifacts"]]
        return sum(len(connection.call("POST", protocol.PRUNE, {"keys": [key]})["keys"]) for key in keys)


def test_a_client_that_may_not_build_learns_that_the_bytes_are_gone(root: Path, asking: None, monkeypatch: pytest.MonkeyPatch):
    with daemon(root):
        kernel = get_kernel("scale", target="sm_90")
        path_of(root, kernel.digest).unlink()
        monkeypatch.setenv("KSERVE_NO_BUILD", "1")
        client.forget()
        with pytest.raises(NotBuilt):
            get_kernel("scale", target="sm_90")
