"""Processes in tests: run Python in a child, find who is left, wait for a fact with a deadline."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent.parent


def wait_for(fact: Callable[[], object], *, deadline_s: float = 20.0, what: str = "") -> object:
    """The first true value of `fact`; fails the test when it never comes."""
    until = time.monotonic() + deadline_s
    while not (found := fact()):
        assert time.monotonic() < until, f"still waiting after {deadline_s} s for {what or fact}"
        time.sleep(0.01)
    return found


def python(code: str, *arguments: str, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter, from the repository's root, in this process's environment."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=REPOSITORY,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=check,
        timeout=120,
    )


@contextlib.contextmanager
def mounted(path: Path, *options: str, kind: str = "tmpfs") -> Iterator[Path]:
    """A file system of that kind, in memory if not told, for the length of the block; the test is skipped where none may be."""
    path.mkdir(parents=True, exist_ok=True)
    command = [
        "mount",
        *(("-t", kind) if kind != "bind" else ()),
        *options,
        *(("tmpfs",) if kind == "tmpfs" else ()),
        str(path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount: {done.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def fill(path: Path, *, leave: int = 0) -> Path:
    """Take what is left of the disk, but for so many pages; the file that takes it."""
    filler = path / "filler"
    with contextlib.suppress(OSError), filler.open("ab") as file:  # what it holds already stays taken
        while True:
            file.write(bytes(4096))
            file.flush()
    os.truncate(filler, max(0, filler.stat().st_size - leave * 4096))
    return filler


def kserve(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command `kserve`."""
    return subprocess.run(
        [sys.executable, "-m", "kserve", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def daemon_pid(root: Path) -> int | None:
    """The pid in the store's lock file, when that process lives."""
    with contextlib.suppress(FileNotFoundError, ValueError, ProcessLookupError):
        pid = int((root / "store" / "lock").read_text())
        os.kill(pid, 0)
        if "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]:
            return pid
    return None


def end_daemon(root: Path) -> None:
    """Kill the daemon of that place, if there is one, and wait for what it started."""
    pid = daemon_pid(root)
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not workers(root), deadline_s=10, what="workers to end")


def workers(root: Path) -> list[int]:
    """Worker and compiler processes whose working directory or command line lies under that place's store."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError, IndexError):
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            where = str((entry / "cwd").readlink()) + (entry / "cmdline").read_text()
            if state not in "ZX" and str(root / "store") in where:
                found.append(int(entry.name))
    return found


def compilers_of(root: Path) -> list[int]:
    """Processes that work in a staging directory of that place's store, or in the folder that its sources are shared in."""
    found = []
    for pid in workers(root):
        with contextlib.suppress(OSError):
            folder = str(Path(f"/proc/{pid}/cwd").readlink())
            if "/tmp/job-" in folder or "/tmp/src-" in folder:
                found.append(pid)
    return found
