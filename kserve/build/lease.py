"""Single flight: one build per key. Everybody who asks while it runs gets its result, the failure included."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from kserve.artifact import Manifest
from kserve.errors import BuildError, CompileFailed, DaemonEnding, KserveError, RequestError, from_wire

_REMEMBERED = 1000
# Of so many ended builds the log and the result are kept too; an older log lies with its artifact.
_KEPT_WHOLE = 100


class Lease:
    """The sole right to build one key, and afterwards the record of that build.

    Attributes:
        number:  counts up, whatever becomes of the clock.
        state:   queued, running, done or failed.
        reason:  why the key had to be built.
        cpu_s:   processor seconds of the compile's process and of the programs it ran.
        starter: the client whose request began it; joiners are the others that waited for it.
        owed:    clients that were told "pending" and have not come back for the result.
        log:     returns the compiler's output so far.
        result_key: of what it gave, where that is known only then.
        remembers:  whether a failure answers for the key a while.
    """

    def __init__(self, number: int, *, key: str, name: str, target: str, variant: str, starter: str) -> None:
        self.number = number
        self.id = f"b{number}"
        self.key = key
        self.name = name
        self.target = target
        self.variant = variant
        self.starter = starter
        self.joiners: set[str] = set()
        self.owed: set[str] = set()
        self.reason = ""
        self.state = "queued"
        self.asked_at = time.time()
        self.seconds = 0.0
        self.cpu_s = 0.0
        self.ended_at = 0.0
        self.error: KserveError | None = None
        self.log: Callable[[], str] = str
        self.result_key = key
        self.remembers = True
        self.task: asyncio.Task[Manifest] | None = None
        self._began = time.monotonic()

    def origin_for(self, client: str) -> str:
        return "built" if client == self.starter else "joined"

    @property
    def elapsed_s(self) -> float:
        """Seconds since it was asked for; fixed once it has ended."""
        return self.seconds if self.state in ("done", "failed") else time.monotonic() - self._began

    def end(self, error: KserveError | None) -> None:
        self.ended_at = time.monotonic()
        self.seconds = self.ended_at - self._began
        self.state, self.error = ("failed", error) if error else ("done", None)

    def strip(self) -> None:
        """Keep the record only: no result, no log, no frames of where the error was raised."""
        self.task, self.log = None, str
        if self.error is not None:
            self.error = self.error.with_traceback(None)
            self.error.__cause__ = self.error.__context__ = None

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "key": self.key,
            "name": self.name,
            "target": self.target,
            "variant": self.variant,
            "state": self.state,
            "reason": self.reason,
            "asked_at": self.asked_at,
            "seconds": self.elapsed_s,
            "cpu_s": self.cpu_s,
            "n_joined": len(self.joiners),
            "error": self.error.to_wire() if self.error else None,
        }


class FailureMemory(Protocol):
    """Where remembered failures survive a restart: key, error as JSON, seconds since 1970 when it is forgotten."""

    def failures(self) -> list[tuple[str, str, float]]:
        """Those that are still remembered."""

    def remember_failure(self, key: str, error: str, *, for_s: float) -> None:
        """Keep one."""


class Leases:
    """All running builds by key, the last ended ones, and the failures that are remembered.

    Args:
        failure_memory_s: how long a compile error answers for its key without a new attempt.
        failures:         keeps it over a restart of the daemon.
    """

    def __init__(self, *, failure_memory_s: float, failures: FailureMemory | None = None) -> None:
        self._failure_memory_s = failure_memory_s
        self._failures = failures
        self._numbers = itertools.count(1)
        self.running: dict[str, Lease] = {}
        self.ended: deque[Lease] = deque(maxlen=_REMEMBERED)
        self._last: dict[str, Lease] = {}
        self._failed: dict[str, tuple[float, KserveError]] = {}
        for key, error, until in failures.failures() if failures else ():
            left_s = min(until - time.time(), failure_memory_s)  # whatever became of the clock
            with contextlib.suppress(ValueError, RecursionError):
                self._failed[key] = (time.monotonic() + left_s, from_wire(json.loads(error)))

    def join(self, key: str, client: str) -> Lease | None:
        """The running build of that key, if there is one."""
        lease = self.running.get(key)
        if lease is not None and client != lease.starter:
            lease.joiners.add(client)
        return lease

    def start(self, lease: Lease, build: Callable[[Lease], Awaitable[Manifest]]) -> Lease:
        """Begin the build of a key that `join` found nobody building."""
        self.running[lease.key] = lease
        lease.task = asyncio.create_task(self._run(lease, build))
        # A caller that gave up, or raised the other variant's error, never asks for this one's.
        lease.task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return lease

    def check(self, key: str) -> None:
        """Raises the remembered error of a compile of that key that failed a moment ago."""
        until, error = self._failed.get(key, (0.0, None))
        if error is not None and time.monotonic() < until:
            raise error.with_traceback(None)  # or each raise would add its frames to those before

    def new(self, *, key: str, name: str, target: str, variant: str, starter: str, reason: str = "") -> Lease:
        """A lease, not yet started."""
        lease = Lease(next(self._numbers), key=key, name=name, target=target, variant=variant, starter=starter)
        lease.reason = reason
        return lease

    async def _run(self, lease: Lease, build: Callable[[Lease], Awaitable[Manifest]]) -> Manifest:
        try:
            manifest = await build(lease)
        except KserveError as error:
            if lease.remembers and isinstance(error, CompileFailed | RequestError):
                await self._remember(lease.key, error)
            self._finish(lease, error)
            raise
        except asyncio.CancelledError:
            self._finish(lease, DaemonEnding(f"build of {lease.name} was cancelled: the daemon is going down"))
            raise
        except BaseException as error:  # whatever it was, the key must not stay taken
            self._finish(lease, BuildError(f"build of {lease.name} failed inside the daemon: {error!r}"))
            raise
        self._finish(lease, None)
        return manifest

    async def _remember(self, key: str, error: KserveError) -> None:
        now = time.monotonic()
        self._failed = {other: failure for other, failure in self._failed.items() if failure[0] > now}
        self._failed[key] = (now + self._failure_memory_s, error)
        if self._failures:
            text = json.dumps(error.to_wire())
            await asyncio.to_thread(self._failures.remember_failure, key, text, for_s=self._failure_memory_s)

    def _finish(self, lease: Lease, error: KserveError | None) -> None:
        lease.end(error)
        self.running.pop(lease.key, None)
        if len(self.ended) == self.ended.maxlen and self._last.get(self.ended[0].key) is self.ended[0]:
            del self._last[self.ended[0].key]
            self._last.pop(self.ended[0].result_key, None)
        self.ended.append(lease)
        if len(self.ended) > _KEPT_WHOLE:
            self.ended[-_KEPT_WHOLE - 1].strip()
        self._last[lease.key] = self._last[lease.result_key] = lease

    def collect(self, key: str, client: str) -> Lease | None:
        """The build whose result this client is owed, once: one that has ended, or is just ending behind its publication."""
        builds = (self.running.get(key), self._last.get(key))
        lease = next((lease for lease in builds if lease is not None and client in lease.owed), None)
        if lease is None:
            return None
        lease.owed.discard(client)
        is_stale = lease.error is not None and time.monotonic() > lease.ended_at + self._failure_memory_s
        return None if is_stale else lease

    def n_ahead(self, lease: Lease) -> int:
        """Builds that wait in front of it."""
        if lease.state != "queued":
            return 0
        return sum(other.state == "queued" and other.number < lease.number for other in self.running.values())

    def find(self, build_id: str) -> Lease | None:
        return next((lease for lease in self.all() if lease.id == build_id), None)

    def all(self) -> list[Lease]:
        """Running builds first, then ended ones, newest first."""
        return [*self.running.values(), *reversed(self.ended)]

    async def cancel(self) -> None:
        tasks = [lease.task for lease in self.running.values() if lease.task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
