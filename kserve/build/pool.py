"""The workers: one process an environment and language, a bound on the jobs that run at once, a deadline for each."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from kserve.build import reaper
from kserve.build.limits import no_process
from kserve.build.scratch import Scratch
from kserve.build.staging import Staging
from kserve.build.worker_handle import Ended, Environment, NotTakenError, Worker
from kserve.config import Settings
from kserve.errors import BuildError, BuildTimeout, DaemonEnding, from_wire
from kserve.toolchain.base import Job

_START_TIMEOUT_S = 120.0
# A worker holds 100 MB and more; this many languages times environments stay loaded.
_MOST_WORKERS = 8
_TRIES = 3


class Pool:
    """All workers of a daemon.

    Args:
        scratch: the place for the workers' own files; each gets a directory in it.
    """

    def __init__(self, settings: Settings, scratch: Scratch) -> None:
        self._settings = settings
        self._scratch = scratch
        self._slots = asyncio.Semaphore(settings.jobs)
        self._workers: dict[tuple[Any, ...], Worker] = {}
        self._numbers = itertools.count(1)
        self._retired: list[Worker] = []
        self._reaper: subprocess.Popen[bytes] | None = None
        self._closing = False
        self.n_queued = 0
        self.n_running = 0

    async def worker(self, language: str, environment: Environment) -> Worker:
        """The live worker for that language and environment, started if need be; its toolchain is loaded."""
        place = environment.place(language)
        worker = self._workers.get(place)
        if self._closing:
            raise DaemonEnding(f"no {language} worker is started: the daemon is going down", hint="call again")
        if worker is None or worker.dead:
            self._start_reaper()  # before there is anything to kill
            self._make_room()
            worker = Worker(language, environment, self._scratch.directory(f"worker-{next(self._numbers)}"))
            self._workers[place] = worker
            await worker.start(on_end=lambda session: self._tell_reaper(f"-{session}"))
            if worker.process is not None:
                self._tell_reaper(f"+{worker.process.pid}")
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await asyncio.shield(worker.fingerprint)
        except TimeoutError:
            worker.kill()
            raise BuildTimeout(f"the {language} toolchain did not load in {_START_TIMEOUT_S:.0f} s") from None
        return worker

    def retire(self, language: str, environment: Environment) -> None:
        """Forget a worker whose toolchain changed on disk: it ends its jobs, the next call starts a fresh one."""
        worker = self._workers.pop(environment.place(language), None)
        if worker is not None:
            self._retired.append(worker)
            worker.end_after_jobs()

    def _make_room(self) -> None:
        """Retire workers without jobs, the oldest first, while there are too many."""
        for place, worker in list(self._workers.items()):
            if len(self._workers) < _MOST_WORKERS:
                return
            if not worker.is_busy:
                del self._workers[place]
                self._retired.append(worker)
                worker.end_after_jobs()

    async def run(
        self, job: Job, environment: Environment, staging: Staging, *, on_start: Callable[[], None]
    ) -> dict[str, Any]:
        """Build a job when a slot is free; the worker's answer.

        Raises: BuildTimeout at the deadline, BuildError when the child died, and what the toolchain raised.
        """
        self.n_queued += 1
        try:
            await self._slots.acquire()
        finally:
            self.n_queued -= 1
        self.n_running += 1
        try:
            on_start()
            async with asyncio.timeout(self._settings.build_timeout_s):
                ended = await self._run_on_worker(job, environment, staging)
        except TimeoutError:
            raise BuildTimeout(
                f"build of {job.function} for {job.target} passed its deadline of {self._settings.build_timeout_s:.0f} s",
                hint="raise KSERVE_BUILD_TIMEOUT_S",
            ) from None
        finally:
            self.n_running -= 1
            self._slots.release()
        answer = staging.result()
        if answer is None:
            raise BuildError(
                f"the compiler of {job.function} died with status {ended.status}", facts={"compiler": "\n" + staging.log()}
            )
        if "error" in answer:
            raise from_wire(answer["error"])
        return {**answer["built"], "cpu_s": ended.cpu_s}

    async def _run_on_worker(self, job: Job, environment: Environment, staging: Staging) -> Ended:
        for _ in range(_TRIES):
            worker = await self.worker(job.language, environment)
            try:
                return await worker.run(job, staging, memory_bytes=self._settings.job_memory_bytes)
            except NotTakenError:
                staging.forget_result()  # it may have run all the same, and its worker died before it said so
        raise BuildError(f"{_TRIES} {job.language} workers ended before they took the job", hint="call again")

    def to_json(self) -> list[dict[str, Any]]:
        return [
            {
                "language": worker.language,
                "python": worker.environment.python,
                "pid": worker.process.pid if worker.process else None,
                "alive": not worker.dead,
                "n_jobs": worker.n_jobs,
            }
            for worker in self._workers.values()
        ]

    def _start_reaper(self) -> None:
        """Start it if it does not run, and tell it of every living worker. Raises: BuildError."""
        if self._closing or (self._reaper is not None and self._reaper.poll() is None):
            return
        try:
            self._reaper = subprocess.Popen(
                [sys.executable, "-I", "-S", reaper.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise no_process("the process that ends compilers with their daemon", error) from None
        self._retired = [worker for worker in self._retired if not worker.dead]
        workers = (*self._workers.values(), *self._retired)
        self._write_to_reaper("\n".join(f"+{worker.process.pid}" for worker in workers if worker.process and not worker.dead))

    def _tell_reaper(self, line: str) -> None:
        with contextlib.suppress(BuildError):  # the next worker's start tries again, and tells it of all
            self._start_reaper()
            self._write_to_reaper(line)

    def _write_to_reaper(self, text: str) -> None:
        if self._closing or self._reaper is None or self._reaper.stdin is None:
            return
        with contextlib.suppress(OSError, ValueError):  # closed, or killed this instant: the next call starts another
            self._reaper.stdin.write(f"{text}\n".encode())
            self._reaper.stdin.flush()

    async def close(self) -> None:
        """Kill every worker and everything they started."""
        self._closing = True
        await asyncio.gather(*(worker.end() for worker in (*self._workers.values(), *self._retired)))
        if self._reaper is not None and self._reaper.stdin is not None:
            self._reaper.stdin.close()
            while self._reaper.poll() is None:  # not in a thread: there may be no room for one
                await asyncio.sleep(0.005)
