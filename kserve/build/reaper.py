"""Kills what a dead daemon or a dead worker left behind.

Each worker is the leader of a session of its own, and every compiler it starts stays in that session whatever process group
it joins. So `kill_session` finds them all, also those whose parents are gone. This file runs alone as a small process beside
the daemon: it reads session ids from a pipe, and when the pipe closes, because the daemon ended in any way, it kills them.
A death signal on the workers alone would leave the compilers' own children running.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

_ROUNDS = 50


def members(session: int) -> list[int]:
    """Process ids of the session, zombies aside."""
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            # After the command's closing bracket: state, parent, process group, session.
            fields = Path(f"/proc/{entry.name}/stat").read_text(errors="replace").rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] not in "ZX":
                found.append(int(entry.name))
    return found


def kill_session(session: int, *, spare: int = 0) -> None:
    """SIGKILL every process of the session but `spare`, until none is left.

    Repeated, because a process can fork between the look and the kill. The kernel does not reuse the id while a member
    lives, so no stranger is hit; a session without members is left alone.
    """
    for _ in range(_ROUNDS):
        found = [pid for pid in members(session) if pid != spare]
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def main() -> None:
    """Read `+ID` and `-ID` lines until the pipe closes, then kill the sessions that are still listed."""
    # The daemon's terminal or service manager signals the whole group: this process outlives it, to clean up.
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    sessions: set[int] = set()
    for line in filter(str.strip, sys.stdin):
        action, number = line[0], int(line[1:])
        (sessions.add if action == "+" else sessions.discard)(number)
    for session in sessions:
        kill_session(session)


if __name__ == "__main__":
    main()
