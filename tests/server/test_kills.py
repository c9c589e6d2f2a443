"""Kills in the middle of the work: the next request builds within seconds, and nothing that was acknowledged is lost."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import random
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kserve import client, get_kernel, protocol
from kserve.artifact import manifest_from_bytes
from kserve.build.reaper import members
from kserve.client import connection, start
from kserve.config import Settings
from kserve.errors import KserveError
from tests.support.daemon import Daemon, answers, ask, assert_sound, daemon, settings_of, variables
from tests.support.definitions import write_cuda
from tests.support.processes import REPOSITORY, compilers_of, daemon_pid, wait_for, workers
from tests.support.slow_kernel import write_slow, write_slow_triton

pytestmark = [pytest.mark.toolchain, pytest.mark.slow]

# A cycle takes about a second and a half on two cores. 200 of them are run by hand before a release.
N_CYCLES = 20
# No cycle may take longer: a kill, and a daemon that answers again.
CYCLE_S = 10.0
# What a request may take after a kill besides its own compile: a process, a toolchain.
SECONDS = 10.0
# Compiles of one to three seconds.
SLOW = {"cuda": ("slow", {"depth": 6}), "triton": ("tslow", {"rounds": 150})}


@pytest.fixture
def root(own_place: Path) -> Path:
    write_cuda(own_place / "kernels" / "scale")
    write_slow(own_place / "kernels" / "slow")
    write_slow_triton(own_place / "kernels" / "tslow")
    return own_place


def resolve(found: Daemon, name: str, *, wait_s: float = 60.0, client: str = "next", **spec: Any) -> Any:
    with contextlib.closing(found.connection()) as connection:
        return ask(connection, found.settings, name, wait_s=wait_s, client=client, **spec)


def seconds_of(act: Callable[[], Any]) -> float:
    began = time.monotonic()
    answer = act()
    assert "variants" in answer, answer
    return time.monotonic() - began


def begin(found: Daemon, name: str, **spec: Any) -> str:
    """Somebody asks; the build's id, in the middle of its compile."""
    before = ids(found, name)

    def known() -> list[str]:
        resolve(found, name, wait_s=0.0, client="somebody", **spec)  # the toolchain may have to be loaded first
        return sorted(ids(found, name) - before)

    (build,) = wait_for(known, what="the build to be known")  # type: ignore[misc]
    wait_for(lambda: state(found, build) != "queued", what="the build to begin")
    wait_for(lambda: compilers_of(found.root), what="the compiler")
    assert state(found, build) == "running", "a build of seconds was met"
    return build


def ids(found: Daemon, name: str) -> set[str]:
    return {build["id"] for build in found.call("GET", protocol.BUILDS)["builds"] if build["name"] == name}


def state(found: Daemon, build: str) -> str:
    told: str = found.call("GET", f"{protocol.BUILDS}/{build}")["state"]
    return told


@pytest.mark.parametrize("language", SLOW)
def test_after_a_kill_in_the_middle_of_a_build_the_next_request_builds_it(root: Path, language: str):
    """The worker first, then the daemon: the same key, within seconds, with nothing to delete by hand."""
    name, spec = SLOW[language]
    with daemon(root) as found:
        resolve(found, name, **dict.fromkeys(spec, 1))  # the toolchain is loaded
        alone = seconds_of(lambda: resolve(found, name, **spec))
        build = begin(found, name, tag=1, **spec)
        (worker,) = (one for one in found.call("GET", protocol.STATUS)["workers"] if one["language"] == language)
        os.kill(worker["pid"], signal.SIGKILL)
        wait_for(lambda: not members(worker["pid"]), deadline_s=2, what="its compilers to end")
        wait_for(lambda: state(found, build) == "failed", deadline_s=2, what="the build to be given up")
        assert seconds_of(lambda: resolve(found, name, tag=1, **spec)) < alone + SECONDS

        begin(found, name, tag=2, **spec)
        os.kill(found.process.pid, signal.SIGKILL)
        wait_for(lambda: not workers(root), deadline_s=2, what="the compilers to end")
    began = time.monotonic()
    with daemon(root) as found:
        assert "variants" in resolve(found, name, tag=2, **spec)
        assert time.monotonic() - began < alone + SECONDS
    locks = [path.name for path in root.rglob("*") if "lock" in path.name]
    assert locks == ["lock"], "the store's own, which the next daemon takes"
    assert_sound(root / "store")


LOOP = """
import os, sys
from kserve import client, get_kernel
from kserve.errors import KserveError
first, step, stop = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
size = first
while not os.path.exists(stop):
    client.forget()
    try:
        kernel = get_kernel("scale", target="sm_90", size=1 + size % 4096)
        print(kernel.key, kernel.digest, kernel.generic.key, flush=True)
        size += step
    except KserveError as error:
        print("error", error.code, error.message.replace(" ", "_"), flush=True)
"""


@contextlib.contextmanager
def looping_clients(root: Path, n: int) -> Iterator[list[Path]]:
    """Processes that ask for one new kernel after another; each one's file of what it was given. They end with the block."""
    stop, outputs = root / "stop", [root / f"client-{number}" for number in range(n)]
    environment = {**os.environ, **variables(root, KSERVE_AUTOSTART="1")}
    processes = []
    for number, output in enumerate(outputs):
        command = [sys.executable, "-c", LOOP, str(number), str(n), str(stop)]
        with output.open("w") as file:
            processes.append(subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=file))
    try:
        yield outputs
    finally:
        stop.touch()
        for process in processes:
            assert process.wait(timeout=60) == 0


def served(outputs: list[Path]) -> list[int]:
    """How many kernels each client was given."""
    return [output.read_text().count("\n") for output in outputs]


def test_cycles_of_kill_and_start_lose_nothing_and_take_no_longer(root: Path):
    """Clients ask for new kernels all the while and start the next daemon; none of them sees an error.

    Every other daemon dies at any moment, before it has built anything; the others when each client was served once more.
    """
    moments, settings, slowest = random.Random("cycles"), settings_of(root), 0.0
    with looping_clients(root, 3) as outputs:
        wait_for(lambda: all(served(outputs)), deadline_s=60, what="every client's first kernel")
        for cycle in range(N_CYCLES):
            so_far, moment = served(outputs), time.monotonic() + moments.uniform(0.0, 0.5)
            if cycle % 2:
                wait_for(lambda: time.monotonic() >= moment)  # noqa: B023
            else:
                wait_for(lambda: all(n > m for n, m in zip(served(outputs), so_far, strict=True)), deadline_s=60)  # noqa: B023
            before, began = daemon_pid(root), time.monotonic()
            if before is not None:
                os.kill(before, signal.SIGKILL)
            wait_for(
                lambda: daemon_pid(root) not in (None, before) and answers(settings),  # noqa: B023
                deadline_s=CYCLE_S,
                what=f"the next daemon, cycle {cycle}",
            )
            slowest = max(slowest, time.monotonic() - began)
    print(f"slowest cycle {slowest:.2f} s")
    lines = [line.split() for output in outputs for line in output.read_text().splitlines()]
    assert [line for line in lines if line[0] == "error"] == []
    assert len(lines) >= N_CYCLES, "they were served all the while"
    store = root / "store"
    assert_sound(store)
    for key, digest, generic in lines:
        path = store / "manifest" / key[:2] / f"{key}.json"
        assert manifest_from_bytes(path.read_bytes(), key=key).digest == digest
        assert (store / "manifest" / generic[:2] / f"{generic}.json").exists()


def test_a_daemon_that_dies_as_soon_as_it_was_started_is_followed_by_the_next(root: Path, monkeypatch: pytest.MonkeyPatch):
    """Between the start and the first word to it: too short a time to hit by chance."""
    died: list[int] = []

    def start_and_die(settings: Settings, *, idle_s: float) -> None:
        start.start_daemon(settings, idle_s=idle_s)
        pid = daemon_pid(root)
        if len(died) < 3 and pid is not None:
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda: daemon_pid(root) is None, what="its end")
            died.append(pid)

    for name, value in variables(root, KSERVE_AUTOSTART="1").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(connection, "start_daemon", start_and_die)
    client.forget()
    assert get_kernel("scale", target="sm_90").origin == "built"
    assert len(died) == 3


@contextlib.contextmanager
def at_terminal(command: list[str], **environment: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A process in the foreground of a terminal of its own, and the end at which a person types."""
    keyboard, terminal = pty.openpty()
    process = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env={**os.environ, **environment},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - a terminal has to be taken by the child
    )
    try:
        yield process, keyboard
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(10)
        os.close(keyboard)
        os.close(terminal)


def test_ctrl_c_at_the_terminal_of_a_daemon_ends_it_with_its_builds(root: Path):
    """The terminal signals the whole foreground group, builds of both languages are running: down in 5 s, nothing left."""
    command, settings = [sys.executable, "-m", "kserve", "up"], settings_of(root)
    with at_terminal(command, **variables(root)) as (process, keyboard):
        wait_for(lambda: answers(settings), what="the daemon to answer")
        found = Daemon(root, settings, process)
        begin(found, "slow")
        begin(found, "tslow", rounds=200)
        started = [worker["pid"] for worker in found.call("GET", protocol.STATUS)["workers"]]
        began = time.monotonic()
        os.write(keyboard, b"\x03")
        assert process.wait(10) == 0
        assert time.monotonic() - began < 5
        assert [pid for session in started for pid in members(session)] == []
        assert workers(root) == []


# A daemon whose look through the store takes a minute, as that of a large one does.
LOOKS_LONG = """
import sys, time
from kserve.server import routes
routes.verify_store = lambda *arguments, **options: (print("looking", file=sys.stderr, flush=True), time.sleep(60))
from kserve.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_signal_ends_it_while_it_looks_through_the_store(root: Path):
    with daemon(root, program=("-c", LOOKS_LONG)) as found, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(found.call, "POST", protocol.VERIFY)
        wait_for(lambda: "looking" in found.log, what="the look")
        began = time.monotonic()
        found.process.terminate()
        assert found.process.wait(20) == 0
        assert time.monotonic() - began < 5
        with pytest.raises(KserveError):
            asked.result(10)


WAIT = "from kserve import get_kernel; get_kernel('slow', target='sm_90')"


def test_ctrl_c_at_the_terminal_of_a_client_ends_the_wait_not_the_build(root: Path):
    environment = variables(root, KSERVE_AUTOSTART="1")
    with at_terminal([sys.executable, "-c", WAIT], **environment) as (process, keyboard):
        wait_for(lambda: compilers_of(root), what="the compiler")
        began = time.monotonic()
        os.write(keyboard, b"\x03")
        assert process.wait(10) != 0
        assert time.monotonic() - began < 5
    pid = daemon_pid(root)
    assert pid is not None
    assert compilers_of(root), "the build goes on"
    assert answers(settings_of(root))
