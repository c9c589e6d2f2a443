"""Starts a daemon in the background: one for many callers at once, detached from everything of theirs.

Two processes take part. The first, a child of the caller, forks the daemon as an orphan in a session of its own, watches until
it answers or ends, and says which by its exit status (`server/boot.py`). So the caller has no child left, and learns of a
failure at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from kserve.config import Settings, daemon_environment, python_command
from kserve.errors import DaemonUnreachable, KserveError, from_wire
from kserve.ownership import listens, private_runtime


def log_path(settings: Settings) -> Path:
    """Where a daemon that was started in the background writes its log; the one before it is kept as `daemon.log.1`."""
    return settings.socket.parent / "daemon.log"


def start_daemon(settings: Settings, *, idle_s: float) -> None:
    """Start a daemon unless there is one, and wait until it answers. The caller's environment does not reach it.

    Raises: what kept it from starting; DaemonUnreachable with the end of its log when it took too long or crashed.
    """
    log = log_path(settings)
    try:
        folder = private_runtime(settings.socket)
        with _held(folder / "start.lock"):
            if not listens(settings.socket) and _start(settings, idle_s, log) != 0:
                raise _reason(settings, log.read_text(errors="replace").strip() if log.exists() else "")
    except OSError as error:
        raise DaemonUnreachable(
            f"a kserve daemon for store {settings.store} could not be started: {error}",
            hint="its socket and log lie in the directory that KSERVE_RUNTIME_DIR names",
        ) from None


def _start(settings: Settings, idle_s: float, log: Path) -> int:
    """Run the first of the two processes to its end; its exit status. Raises: OSError."""
    import subprocess

    environment = daemon_environment()
    environment.update(KSERVE_STORE=settings.stores, KSERVE_RUNTIME_DIR=str(settings.runtime_dir))
    descriptor = _opened(log)
    try:
        done = subprocess.run(
            python_command(sys.executable, "kserve.server.boot", str(idle_s)),
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=descriptor,
            cwd="/",
            env=environment,
            start_new_session=True,
            check=False,
        )
    finally:
        os.close(descriptor)
    return done.returncode


def _opened(log: Path) -> int:
    """A new log file; nothing where the disk has no room for one: the daemon runs all the same."""
    try:
        if log.exists():
            log.replace(log.with_suffix(".log.1"))
        return os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)


def _reason(settings: Settings, text: str) -> KserveError:
    """The daemon's own error where it wrote one as its last line, else the end of its log."""
    with contextlib.suppress(ValueError, KeyError, IndexError, TypeError):
        return from_wire(json.loads(text.splitlines()[-1])["error"])
    return DaemonUnreachable(
        f"a kserve daemon for store {settings.store} could not be started",
        facts={"log": str(log_path(settings)), "why": text[-2000:] or "it did not answer in time"},
    )


@contextlib.contextmanager
def _held(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
