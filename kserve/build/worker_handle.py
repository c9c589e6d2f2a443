"""A worker as its daemon holds it: one process, the jobs it runs, and how they are ended."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from kserve.build import reaper
from kserve.build.limits import is_limit, no_process
from kserve.build.staging import Staging
from kserve.config import python_command, worker_environment
from kserve.definition import EXTENSION
from kserve.errors import BuildError, ToolchainMissing, from_wire
from kserve.toolchain.base import Fingerprint, Job

_END_S = 1.0
# A worker takes a job in milliseconds; one that let this pass hangs.
_TAKE_S = 2.0


class Environment(NamedTuple):
    """Which compilers a request means: an interpreter, its extra path, what the caller has imported of them, a CUDA toolkit."""

    python: str
    python_path: tuple[str, ...]
    loaded: tuple[tuple[str, str], ...] = ()
    cuda_home: str = ""

    def place(self, language: str) -> tuple[Any, ...]:
        """What tells the workers of two environments apart. A toolkit is named for extensions only."""
        named = (self.cuda_home,) if language == EXTENSION and self.cuda_home else ()
        return (language, self.python, self.python_path, *named)


class Ended(NamedTuple):
    """How a job's process ended: its exit status, and the processor seconds that it and its programs took."""

    status: int
    cpu_s: float


class NotTakenError(Exception):
    """The worker ended before it took a job: another one may."""


class Worker:
    """One worker process and the jobs it runs.

    Attributes:
        fingerprint: resolves when the toolchain is loaded; raises what kept it from loading.
        n_jobs:      jobs it has run.
    """

    def __init__(self, language: str, environment: Environment, scratch: Path) -> None:
        self.language = language
        self.environment = environment
        self.scratch = scratch
        self.n_jobs = 0
        self.dead = False
        self._is_last = False
        self.process: asyncio.subprocess.Process | None = None
        self.fingerprint: asyncio.Future[Fingerprint] = asyncio.get_running_loop().create_future()
        self.fingerprint.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._jobs: dict[int, asyncio.Future[Ended]] = {}
        self._pids: dict[int, int] = {}
        # When each job was ordered, until it starts.
        self._not_taken: dict[int, float] = {}
        self._numbers = itertools.count(1)
        self._attending: asyncio.Task[None] | None = None

    async def start(self, *, on_end: Callable[[int], None]) -> None:
        """Start the process; `on_end` is called with its session when nothing of it is left."""
        command = python_command(self.environment.python, "kserve.build.worker", self.language)
        try:
            with (self.scratch / "stderr.txt").open("wb") as errors:
                self.process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    cwd=self.scratch,
                    env=worker_environment([*self.environment.python_path], self.scratch, cuda_home=self.environment.cuda_home),
                    start_new_session=True,
                    limit=1 << 24,
                )
        except (OSError, ValueError) as error:  # ValueError: a null byte in the name
            self.dead = True
            self.fingerprint.set_exception(self._not_started(error))
            return
        self._attending = asyncio.create_task(self._attend(on_end))

    def _not_started(self, error: Exception) -> BuildError:
        if is_limit(error):
            return no_process(f"the {self.language} worker", error)
        return ToolchainMissing(
            f"interpreter {self.environment.python!r} cannot be run by the daemon: {error}",
            hint="run the daemon where the client's interpreter exists, or mount the store read-only",
        )

    async def _attend(self, on_end: Callable[[int], None]) -> None:
        """Hear the worker until it ends or talks nonsense, then end everything it started."""
        assert self.process is not None
        watched = {asyncio.create_task(self._read()), asyncio.create_task(self.process.wait())}
        await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        self.dead = True  # before anything is awaited
        reaper.kill_session(self.process.pid)
        await asyncio.gather(*watched, return_exceptions=True)
        self._fail()
        on_end(self.process.pid)

    async def _read(self) -> None:
        assert self.process is not None and self.process.stdout is not None
        # An interpreter that is none may print anything: what cannot be read ends it like a crash.
        with contextlib.suppress(ValueError, KeyError, TypeError):
            async for line in self.process.stdout:
                self._heard(json.loads(line))

    def _heard(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "ready":
                self.fingerprint.set_result(Fingerprint(**event["fingerprint"]))
            case "failed":
                self.fingerprint.set_exception(from_wire(event["error"]))
            case "started":
                self._not_taken.pop(event["id"], None)
                self._pids[event["id"]] = event["pid"]
                if event["id"] not in self._jobs:  # cancelled since it was ordered
                    self._kill(event["id"])
            case "finished":
                self._not_taken.pop(event["id"], None)
                self._pids.pop(event["id"], None)
                ended = Ended(event["status"], event["cpu_s"])
                future = self._jobs.pop(event["id"], None)
                if future and not future.done():
                    future.set_result(ended)

    def _fail(self) -> None:
        """The worker is gone: tell everybody who waits for it."""
        text = ""
        with contextlib.suppress(OSError):
            text = (self.scratch / "stderr.txt").read_text(errors="replace").strip()
        shutil.rmtree(self.scratch, ignore_errors=True)
        facts = {"worker": "\n" + text[-4000:]} if text else {}
        error = BuildError(f"the {self.language} worker ended while it was needed", facts=facts, hint="call again")
        if not self.fingerprint.done():
            self.fingerprint.set_exception(error)
        for number, future in self._jobs.items():
            if not future.done():
                future.set_exception(NotTakenError() if number in self._not_taken else error)
        self._jobs.clear()

    async def run(self, job: Job, staging: Staging, *, memory_bytes: int) -> Ended:
        """Run one job to its end. Cancelling this kills the job's whole process group."""
        number = next(self._numbers)
        future: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self._jobs[number] = future
        self._not_taken[number] = time.monotonic()
        places = {"directory": str(staging.root), "sources": str(staging.sources)}
        order = {"id": number, "job": job.to_json(), **places, "memory_bytes": memory_bytes}
        assert self.process is not None and self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(order).encode() + b"\n")
            await self.process.stdin.drain()
            self.n_jobs += 1
            return await future
        except (BrokenPipeError, ConnectionResetError):
            self.dead = True
            if number in self._not_taken:
                raise NotTakenError from None
            return await future  # it runs: its end is told with the worker's
        except asyncio.CancelledError:
            self._kill(number)
            raise
        finally:
            self._jobs.pop(number, None)
            if self._is_last and not self._jobs:
                self.kill()

    @property
    def is_busy(self) -> bool:
        return bool(self._jobs) or not self.fingerprint.done()

    def end_after_jobs(self) -> None:
        """Take no further jobs; end with the last one."""
        self._is_last = True
        if not self._jobs:
            self.kill()

    def _kill(self, number: int) -> None:
        """End a job that nobody waits for: now, or as soon as it starts. A worker that does not start it is killed whole."""
        pid = self._pids.get(number)
        if pid is None:
            patience_s = self._not_taken.get(number, 0.0) + _TAKE_S - time.monotonic()
            asyncio.get_running_loop().call_later(patience_s, self._end_if_hung, number)
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)

    def _end_if_hung(self, number: int) -> None:
        if number in self._not_taken:
            self.kill()

    async def end(self) -> None:
        """Kill it, and wait a moment until its directory is removed."""
        self.kill()
        if self._attending is not None:
            await asyncio.wait({self._attending}, timeout=_END_S)

    def kill(self) -> None:
        self.dead = True  # at once: no further job is given to it
        if self.process is not None and self.process.returncode is None:
            reaper.kill_session(self.process.pid)
