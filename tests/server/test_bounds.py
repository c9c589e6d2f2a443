"""A store at its limit, with a real daemon, real compilers and many processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kserve import client, get_kernel, protocol
from kserve.client.direct import Wanted, resolve
from kserve.errors import CompileFailed
from kserve.key import digest_of
from kserve.store.files import FileStore
from tests.support.daemon import ask, assert_sound, daemon, variables
from tests.support.definitions import CUDA_SOURCE, write_cuda
from tests.support.entries import looked_up
from tests.support.processes import REPOSITORY, wait_for

pytestmark = pytest.mark.toolchain
N_WRITERS = N_READERS = 8
N_KERNELS = 4  # each writer's
LIMIT_FILES = 60
# One artifact: manifest, payload, PTX, log. One publication is one of the two variants.
FILES_OF_ONE = 4

# Both print what they saw: kernels they got, errors, wrong bytes, origins. A reader ends when its input does.
HEAD = """
import collections, json, select, sys, time
from kserve.client.direct import Wanted, resolve
from kserve.errors import KserveError
from kserve.key import digest_of
me, n_kernels = int(sys.argv[1]), int(sys.argv[2])
errors, origins, digests = [], collections.Counter(), collections.defaultdict(set)
def get(size):
    try:
        (kernel,) = resolve([Wanted("scale", "sm_90", {"size": size})], load=False)
    except KserveError as error:
        errors.append(f"{error.code}: {error.message}")
        return
    for found in kernel._roads.artifacts:
        digests[found.manifest.key] |= {found.manifest.digest, digest_of(found.payload)}
    origins[kernel.origin] += 1
"""
TAIL = """
print(json.dumps({"errors": errors, "origins": origins, "wrong": sum(len(found) != 1 for found in digests.values())}))
"""
WRITER = HEAD + "for number in range(n_kernels): get(100 + me * n_kernels + number)" + TAIL
READER = HEAD + "while not select.select([sys.stdin], [], [], 0.02)[0]: get(1 + (me + origins.total()) % 3)" + TAIL


@pytest.fixture
def root(own_place: Path) -> Path:
    write_cuda(own_place / "kernels" / "scale")
    return own_place


@contextlib.contextmanager
def crowd(root: Path, **environment: str) -> Iterator[tuple[list[subprocess.Popen[str]], list[subprocess.Popen[str]]]]:
    """Writers and readers."""

    def start(code: str, number: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code, str(number), str(N_KERNELS)]
        place = {**os.environ, **variables(root, **environment)}
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=REPOSITORY, env=place, stdin=pipe, stdout=pipe, text=True)

    readers = [start(READER, number) for number in range(N_READERS)]
    writers = [start(WRITER, number) for number in range(N_WRITERS)]
    try:
        yield writers, readers
    finally:
        for child in (*readers, *writers):
            child.kill()
            with contextlib.suppress(ValueError):  # it was heard already
                child.communicate()


def snapshot(reader: FileStore) -> tuple[int, int, int] | None:
    """Bytes, files and artifacts at one moment; None when records came or went during the look."""
    before = reader.shape()
    found = looked_up(reader.root)
    return found if reader.shape() == before else None


@pytest.mark.slow
def test_a_store_at_its_limit_with_many_writers_and_readers(root: Path):
    """Never above the limit and one entry; no reader fails; what is in use survives."""
    environment = {"KSERVE_MAX_FILES": str(LIMIT_FILES), "KSERVE_JOBS": "2"}
    with daemon(root, **environment) as found, contextlib.closing(found.connection()) as connection:
        for size in (1, 2, 3):
            ask(connection, found.settings, "scale", size=size)
        reader, sizes = FileStore(root / "store", writable=False), []
        with crowd(root, **environment) as (writers, readers):
            while any(child.poll() is None for child in writers):
                sizes.append(snapshot(reader))
            wrote, read = ([json.loads(child.communicate()[0]) for child in children] for children in (writers, readers))
        seen = [n_files for found_ in sizes if found_ for _, n_files, _ in [found_]]
        assert len(seen) > 20
        assert max(seen) <= LIMIT_FILES + FILES_OF_ONE
        assert [one for one in (*wrote, *read) if one["errors"] or one["wrong"]] == []
        assert [one["origins"] for one in wrote] == [{"built": N_KERNELS}] * N_WRITERS
        assert {origin for one in read for origin in one["origins"]} == {"disk"}, "what is in use was evicted"
        assert sum(one["origins"]["disk"] for one in read) > 100
        assert assert_sound(root / "store") > 0
        status = connection.call("GET", protocol.STATUS)["store"]
        assert (status["size_bytes"], status["n_files"], status["n_artifacts"]) == looked_up(root / "store")
        assert status["index"] == "sound"


def test_a_process_that_has_its_kernels_outlasts_their_eviction(root: Path, monkeypatch: pytest.MonkeyPatch):
    """What it has loaded is its own. What is pinned never goes."""
    monkeypatch.setenv("KSERVE_PATH", str(root / "kernels"))
    monkeypatch.setenv("KSERVE_MAX_FILES", "40")
    with daemon(root, KSERVE_MAX_FILES="40") as found:
        old = get_kernel("scale", target="sm_90", size=1)
        pinned = get_kernel("scale", target="sm_90", size=2)
        before = [artifact.payload for artifact in old._roads.artifacts]
        assert pinned.generic is not None
        found.call("POST", protocol.PINS, {"keys": [pinned.key, pinned.generic.key]})
        for size in range(10, 25):
            resolve([Wanted("scale", "sm_90", {"size": size})], load=False)
        keys = {row["key"] for row in found.call("GET", protocol.ARTIFACTS)["artifacts"]}
        assert old.key not in keys
        assert {pinned.key, pinned.generic.key} <= keys
        assert get_kernel("scale", target="sm_90", size=1).origin == "memo"
        assert [artifact.payload for artifact in old._roads.artifacts] == before
        assert found.call("POST", protocol.PRUNE, {"all": True})["pinned"] == sorted([pinned.key, pinned.generic.key])
        assert {row["key"] for row in found.call("GET", protocol.ARTIFACTS)["artifacts"]} == {pinned.key, pinned.generic.key}
        client.forget()
        again = get_kernel("scale", target="sm_90", size=1)
        assert (again.origin, again.digest, digest_of(before[0])) == ("built", old.digest, old.digest)
        assert again.manifest.reason == "evicted"


def test_the_limit_of_the_next_daemon_holds_from_its_start(root: Path):
    with daemon(root) as found, contextlib.closing(found.connection()) as connection:
        for size in range(1, 9):
            ask(connection, found.settings, "scale", size=size)
    with daemon(root, KSERVE_MAX_FILES="30") as found:
        wait_for(lambda: looked_up(root / "store")[1] <= 30, deadline_s=5, what="the first collection")
        status = found.call("GET", protocol.STATUS)["store"]
        assert (status["max_files"], status["n_files"]) == (30, looked_up(root / "store")[1])
        assert assert_sound(root / "store") > 0


def test_counters_of_the_store_outlast_its_daemons(root: Path):
    def lifetime(found: Any) -> dict[str, int]:
        with contextlib.closing(found.connection()) as connection:
            ask(connection, found.settings, "scale")
            return dict(connection.call("GET", protocol.STATUS)["lifetime"])

    with daemon(root) as found:
        first = lifetime(found)
    with daemon(root) as found:
        second = lifetime(found)
        wait_for(lambda: lifetime(found)["hits"] > second["hits"] + 2, what="the counters")
        begun = time.monotonic()
        wait_for(lambda: time.monotonic() - begun > 1.5, what="the daemon to write them down")
        third = lifetime(found)
        os.kill(found.process.pid, signal.SIGKILL)
    with daemon(root) as found:
        fourth = lifetime(found)
    assert (first["built"], second["built"], fourth["built"]) == (2, 2, 2)
    assert first["requests"] < second["requests"] < third["requests"]
    assert fourth["requests"] >= third["requests"] - 1, "a killed daemon loses a second of counts"


def test_a_compile_error_is_remembered_over_a_restart_and_then_forgotten(root: Path):
    """One compile, however many daemons: until the memory of it ends."""
    (root / "kernels" / "scale" / "kernel.cu").write_text(CUDA_SOURCE.replace("factor * x[i]", "no_such_thing"))

    def failed(found: Any) -> tuple[str, int]:
        with contextlib.closing(found.connection()) as connection:
            error = ask(connection, found.settings, "scale")["error"]
            assert "no_such_thing" in json.dumps(error)
            return error["code"], connection.call("GET", protocol.STATUS)["counters"].get("failed", 0)

    with daemon(root, KSERVE_FAILURE_MEMORY_S="60") as found:
        assert failed(found)[0] == CompileFailed.code
        os.kill(found.process.pid, signal.SIGKILL)
    with daemon(root, KSERVE_FAILURE_MEMORY_S="60") as found:
        assert failed(found) == (CompileFailed.code, 0)
    with daemon(root, KSERVE_FAILURE_MEMORY_S="0.01") as found:  # no longer than this daemon remembers
        code, n_failed = failed(found)
        assert (code, n_failed > 0) == (CompileFailed.code, True)
