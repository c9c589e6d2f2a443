"""What this process's kernels cost it: seconds by part, origin and reason. Kept in a small file that `kserve why-cold` reads.

The file is rewritten after each load, in the runtime directory, where that can be written. It is a help and never an error.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import json
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import kserve
from kserve.config import Settings, load_settings
from kserve.errors import KserveError
from kserve.ownership import private_runtime

FOLDER = "report"
_MOST_CALLS = 200
_WRITTEN_EVERY_S = 0.05
_OPS_EVERY_S = 1.0


class Loaded(NamedTuple):
    """One kernel of one call.

    Fields:
        knobs:  values that are not the defaults, and who chose them.
        why:    why the store's files alone did not do; empty for a hit on them.
        reason: why it had to be built, where it was.
    """

    name: str
    target: str
    key: str
    origin: str
    rung: str
    why: str
    reason: str
    knobs: str = ""


class Call(NamedTuple):
    """One get_kernel or get_kernels that was no memo hit: seconds of each part.

    Fields:
        look_s: reading the store's files. ask_s: the daemon, builds included. load_s: the driver.
    """

    at: float
    look_s: float
    ask_s: float
    load_s: float
    kernels: list[Loaded]


class Report:
    """The calls of one process."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.warm = False
        self.calls: deque[Call] = deque(maxlen=_MOST_CALLS)
        self.seconds: Counter[str] = Counter({"import": kserve.import_s})
        self.origins: Counter[str] = Counter()
        self.missed_after_warm = 0
        self._look: Callable[[], dict[str, Any]] | None = None
        self._ops: dict[str, Any] = {}
        self._written_at = float("-inf")
        self._owed = False

    def add(self, call: Call, settings: Settings) -> None:
        """Note a call, and rewrite the file: at most twenty times a second, and at the end."""
        self.calls.append(call)
        self.seconds.update({"look": call.look_s, "ask": call.ask_s, "load": call.load_s})
        self.origins.update(kernel.origin for kernel in call.kernels)
        if self.warm or settings.lock is not None:
            self.missed_after_warm += sum(kernel.origin in ("built", "joined") for kernel in call.kernels)
        self._write_soon(settings)

    def watch(self, look: Callable[[], dict[str, Any]]) -> None:
        """Keep what the ops of this process do in the file too. A thread looks once a second: their calls pay nothing for it.

        Args:
            look: op -> plain values.
        """
        import threading

        if self._look is not None:
            return
        self._look = look
        thread = threading.Thread(target=self._keep, args=(load_settings(),), name="kserve-report", daemon=True)
        with contextlib.suppress(RuntimeError):  # no thread can be started any more: the process's own report has it all
            thread.start()

    def _keep(self, settings: Settings) -> None:
        while True:
            time.sleep(_OPS_EVERY_S)
            # Where no daemon has been there is nobody to tell.
            if self._seen() != self._ops and settings.socket.parent.is_dir():
                self.write(settings)

    def _seen(self) -> dict[str, Any]:
        for _ in range(3):
            try:
                return self._look() if self._look is not None else {}
            except RuntimeError:  # another thread has changed what was being read
                continue
        return self._ops

    def _write_soon(self, settings: Settings) -> None:
        if time.monotonic() >= self._written_at + _WRITTEN_EVERY_S:
            self.write(settings)
        elif not self._owed:
            self._owed = True
            atexit.register(self.write, settings)

    def write(self, settings: Settings) -> None:
        """Rewrite the file now."""
        self._written_at = time.monotonic()
        try:
            folder = private_runtime(settings.socket) / FOLDER
            folder.mkdir(mode=0o700, exist_ok=True)
            temporary = folder / f"{self.pid}-{_thread.get_ident()}.tmp"
            plain = self.to_json()
            temporary.write_text(json.dumps(plain))
            temporary.replace(folder / f"{self.pid}.json")
            self._ops = plain["ops"]
        except (OSError, KserveError):  # read-only, full, somebody else's: the process's own report stays
            return

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain JSON values; `started` tells this process from a later one with the same pid."""
        return {
            "pid": self.pid,
            "started": process_start(self.pid),
            "program": Path(sys.argv[0]).name if sys.argv else "",
            "written_at": time.time(),
            "seconds": dict(self.seconds),
            "origins": dict(self.origins),
            "missed_after_warm": self.missed_after_warm,
            "ops": self._seen(),
            "calls": [{**call._asdict(), "kernels": [kernel._asdict() for kernel in call.kernels]} for call in [*self.calls]],
        }

    def __str__(self) -> str:
        return shown(self.to_json())


_report: Report | None = None


def report() -> Report:
    """What the kernels of this process cost it so far. A forked child has its own."""
    global _report  # noqa: PLW0603 - one a process
    if _report is None or _report.pid != os.getpid():
        _report = Report()
    return _report


def warmed() -> None:
    """Say that this process has loaded what it needs: a build from now on is counted as missed after warm."""
    report().warm = True


def process_start(pid: int) -> str:
    """When that process began, in the kernel's clock ticks since boot; empty when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def reports_of(settings: Settings) -> list[dict[str, Any]]:
    """The reports of every process that lives, by pid; files of others are removed."""
    found = []
    folder = settings.socket.parent / FOLDER
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        try:
            plain = json.loads(path.read_text())
            is_alive = plain["started"] == process_start(plain["pid"]) != ""
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if is_alive:
            found.append(plain)
        else:
            path.unlink(missing_ok=True)
    return sorted(found, key=lambda plain: plain["pid"])


def shown(plain: Mapping[str, Any]) -> str:
    """A report as text: the sum first, then each call, its parts, and why it was not free."""
    seconds, origins = plain["seconds"], plain["origins"]
    lost = ", ".join(f"{part} {1e3 * value:.1f} ms" for part, value in seconds.items())
    kernels = ", ".join(f"{count} {origin}" for origin, count in sorted(origins.items())) or "none"
    lines = [
        f"process {plain['pid']} {plain['program']}: {1e3 * sum(seconds.values()):.1f} ms ({lost})",
        f"kernels: {kernels}; missed after warm: {plain['missed_after_warm']}",
    ]
    for call in plain["calls"]:
        parts = ", ".join(f"{part} {1e3 * call[part + '_s']:.1f}" for part in ("look", "ask", "load"))
        lines.append(
            f"  {len(call['kernels'])} kernels in {1e3 * sum(call[p + '_s'] for p in ('look', 'ask', 'load')):.1f} ms ({parts})"
        )
        for kernel in call["kernels"]:
            told = [kernel["knobs"]] if kernel.get("knobs") else []
            told += [f"asked because {kernel['why']}"] if kernel["why"] else []
            told += [f"built because {kernel['reason']}"] if kernel["origin"] in ("built", "joined") else []
            tail = ": " + "; ".join(told) if told else ""
            lines.append(
                f"    {kernel['name']} {kernel['target']} {kernel['key'][:12]} {kernel['origin']}, {kernel['rung']}{tail}"
            )
    lines += [f"  {line}" for line in ops_lines(plain)]
    return "\n".join(lines)


def ops_lines(plain: Mapping[str, Any]) -> list[str]:
    """What the ops of a process were served by, one a line: calls by rung, what latched, and why modules were left to torch."""
    lines = []
    for op, found in sorted(plain.get("ops", {}).items()):
        counts = ", ".join(f"{count} {rung}" for rung, count in sorted(found["served"].items()))
        told = [f"{op}: {counts or 'not served yet'}"]
        told += [f"latched: {found['latch']}"] if found["latch"] else []
        for label, last in sorted(found["last_declines"].items()):
            n_modules = found["declines"].get(label, {})
            modules = ", ".join(f"{count} {reason}" for reason, count in sorted(n_modules.items()))
            told.append(f"{label} left to torch{f' ({modules})' if modules else ''}, last {last['reason']}: {last['detail']}")
        lines.append("; ".join(told))
    return lines
