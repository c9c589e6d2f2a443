"""Sessions and their end: real processes, also those that left the group or lost their parent."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kserve.build import reaper
from tests.support.processes import wait_for

# A session leader with a child in another process group and a grandchild whose parent is gone.
FAMILY = """
import os, signal, time
if os.fork() == 0:
    os.setpgid(0, 0)
    parent = os.getpid()
    if os.fork() == 0:
        while {orphan} and os.getppid() == parent:
            time.sleep(0.001)
        print("complete", flush=True)
        signal.pause()
    os._exit(0) if {orphan} else signal.pause()
signal.pause()
"""


@contextlib.contextmanager
def family(*, orphan: bool = True) -> Iterator[int]:
    command = [sys.executable, "-c", FAMILY.format(orphan=orphan)]
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "complete\n"
        yield process.pid
    finally:
        reaper.kill_session(process.pid)
        process.communicate(timeout=10)


@pytest.fixture
def reaping() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", reaper.__file__], stdin=subprocess.PIPE, text=True, start_new_session=True
    )
    yield process
    if process.stdin and not process.stdin.closed:
        process.stdin.close()
    process.wait(10)


@pytest.mark.parametrize("orphan", [True, False])
def test_a_session_is_killed_whole(orphan: bool):
    with family(orphan=orphan) as session:
        reaper.kill_session(session)
        assert reaper.members(session) == []


def test_one_process_may_be_spared():
    with family() as session:
        reaper.kill_session(session, spare=session)
        assert reaper.members(session) == [session]


def test_another_session_is_left_alone():
    with family() as first, family() as second:
        reaper.kill_session(first)
        assert len(reaper.members(second)) == 2
    reaper.kill_session(first)  # nobody left: no error


def test_it_kills_what_is_listed_when_the_pipe_closes(reaping: subprocess.Popen[str]):
    with family() as listed, family() as withdrawn:
        reaping.stdin.write(f"+{listed}\n+{withdrawn}\n-{withdrawn}\n")
        reaping.stdin.close()
        assert reaping.wait(5) == 0
        assert reaper.members(listed) == []
        assert len(reaper.members(withdrawn)) == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_it_outlives_what_ends_the_daemon(reaping: subprocess.Popen[str], number: signal.Signals):
    def ignores() -> bool:
        text = Path(f"/proc/{reaping.pid}/status").read_text()
        mask = next(int(line.split()[1], 16) for line in text.splitlines() if line.startswith("SigIgn"))
        return bool(mask >> (number - 1) & 1)

    with family() as session:
        reaping.stdin.write(f"+{session}\n")
        reaping.stdin.flush()
        wait_for(ignores, what="the reaper to be ready")
        os.kill(reaping.pid, number)
        assert len(reaper.members(session)) == 2
        reaping.stdin.close()
        assert reaping.wait(5) == 0
        assert reaper.members(session) == []
