"""Becomes a daemon: in the background, for a client that finds none (`client/start.py` runs this file), or right here.

Little is imported before the fork: the parent only watches until the child answers, and says by its exit status how it went.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import NoReturn

from kserve.config import Settings, load_settings
from kserve.errors import DaemonUnreachable, KserveError, ToolchainMissing
from kserve.ownership import listens

_START_TIMEOUT_S = 30.0
_PACKAGES = ("fastapi", "uvicorn", "uvloop", "httptools", "diskcache")


def main() -> int:
    """Start a daemon that ends when it was idle for the seconds on the command line; an error is the last line printed."""
    try:
        settings = load_settings({"idle_s": float(sys.argv[1])})
        status = _fork_orphan(settings)
        if status is None:
            run(settings)
    except KserveError as error:
        print(json.dumps({"error": error.to_wire()}), flush=True)  # noqa: T201 - read by who started us
        return error.exit_status
    return status


def run(settings: Settings) -> NoReturn:
    """Run a daemon; the process ends with it. Raises: ToolchainMissing when a package it needs is not installed."""
    from importlib.util import find_spec

    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise ToolchainMissing(
            f"the daemon needs packages that are not installed: {', '.join(missing)}", hint="pip install 'kserve-jit[daemon]'"
        )
    from kserve.server import daemon

    daemon.run(settings)


def _fork_orphan(settings: Settings) -> int | None:
    """Fork; None in the child, which is to become the daemon. In the parent: 0 when the child answers, 1 when it ended."""
    try:
        pid = os.fork()
    except OSError as error:
        raise DaemonUnreachable(f"the daemon's process could not be started: {error}") from None
    if pid == 0:
        os.setsid()
        return None
    until = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < until:
        ended, _ = os.waitpid(pid, os.WNOHANG)
        if listens(settings.socket):
            return 0
        if ended:
            return 1
        time.sleep(0.002)
    return 1
