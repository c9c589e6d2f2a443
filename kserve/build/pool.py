"""The workers: one process an environment and language, a bound on the jobs that run at once, a deadline for each."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from kserve.build import reaper
from kserve.build.limits import is_limit, no_process
from kserve.build.staging import Scratch, Staging
from kserve.config import Settings, python_command, worker_environment
from kserve.definition import EXTENSION
from kserve.errors import BuildError, BuildTimeout, ToolchainMissing, from_wire
from kserve.toolchain.base import Fingerprint, Job

_START_TIMEOUT_S = 120.0
# A worker holds 100 MB and more; this many languages times environments stay loaded.
_MOST_WORKERS = 8
_TRIES = 3
_END_S = 1.0


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


class _NotTakenError(Exception):
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
        self._jobs: dict[int, asyncio.Future[int]] = {}
        self._pids: dict[int, int] = {}
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
        self.dead = True  # before anything is awaited: no further job is given to it
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
                self._pids[event["id"]] = event["pid"]
            case "finished":
                self._pids.pop(event["id"], None)
                future = self._jobs.pop(event["id"], None)
                if future and not future.done():
                    future.set_result(event["status"])

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
        for future in self._jobs.values():
            if not future.done():
                future.set_exception(error)
        self._jobs.clear()

    async def run(self, job: Job, staging: Staging, *, memory_bytes: int) -> int:
        """Run one job to its end; the child's exit status. Cancelling this kills the job's whole process group."""
        number = next(self._numbers)
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._jobs[number] = future
        order = {"id": number, "job": job.to_json(), "directory": str(staging.root), "memory_bytes": memory_bytes}
        assert self.process is not None and self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(order).encode() + b"\n")
            await self.process.stdin.drain()
            self.n_jobs += 1
            return await future
        except (BrokenPipeError, ConnectionResetError):
            self.dead = True
            raise _NotTakenError from None
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
        pid = self._pids.get(number)
        if pid is None:  # not even started: the worker itself hangs
            self.kill()
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)

    async def end(self) -> None:
        """Kill it, and wait a moment until its directory is removed."""
        self.kill()
        if self._attending is not None:
            await asyncio.wait({self._attending}, timeout=_END_S)

    def kill(self) -> None:
        if self.process is not None and self.process.returncode is None:
            reaper.kill_session(self.process.pid)


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
                status = await self._run_on_worker(job, environment, staging)
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
                f"the compiler of {job.function} died with status {status}", facts={"compiler": "\n" + staging.log()}
            )
        if "error" in answer:
            raise from_wire(answer["error"])
        built: dict[str, Any] = answer["built"]
        return built

    async def _run_on_worker(self, job: Job, environment: Environment, staging: Staging) -> int:
        for _ in range(_TRIES):
            worker = await self.worker(job.language, environment)
            with contextlib.suppress(_NotTakenError):
                return await worker.run(job, staging, memory_bytes=self._settings.job_memory_bytes)
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
