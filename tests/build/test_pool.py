"""The pool over real workers and a real compiler: bounds, deadlines, deaths."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kserve.build.pool import Pool
from kserve.build.reaper import members
from kserve.build.worker_handle import Environment
from kserve.errors import BuildError, BuildTimeout, CompileFailed, DaemonEnding, KserveError, ToolchainMissing
from tests.support.jobs import CUDA_FILES, HERE, SLOW_FILES, cuda_job, pool, slow_job, staging
from tests.support.processes import workers

pytestmark = pytest.mark.toolchain


async def until(fact: Callable[[], object], *, deadline_s: float = 20.0) -> object:
    """`wait_for` that lets the loop run."""
    async with asyncio.timeout(deadline_s):
        while not (found := fact()):
            await asyncio.sleep(0.01)
    return found


async def build(held: Pool, root: Path, **changes: Any) -> dict[str, Any]:
    return await held.run(cuda_job(**changes), HERE, staging(root, CUDA_FILES), on_start=lambda: None)


def start_slow(held: Pool, root: Path) -> asyncio.Task[dict[str, Any]]:
    return asyncio.create_task(held.run(slow_job(), HERE, staging(root, SLOW_FILES), on_start=lambda: None))


async def load(held: Pool) -> None:
    """Load the only worker: while it loads, its session has programs that are no compilers."""
    await held.worker("cuda", HERE)


async def ordered(held: Pool, number: int) -> None:
    """The only worker has been sent so many jobs."""
    await until(lambda: held.to_json()[0]["n_jobs"] == number)


def compilers(held: Pool) -> list[int]:
    """Processes of the only worker's session but the worker."""
    (worker,) = held.to_json()
    return [pid for pid in members(worker["pid"]) if pid != worker["pid"]]


def test_jobs_that_run_at_once_are_bounded(own_place: Path):
    async def body() -> None:
        async with pool(own_place, jobs=2) as held:
            await load(held)
            tasks = [start_slow(held, own_place) for _ in range(3)]
            await until(lambda: len(compilers(held)) == 2)
            assert (held.n_running, held.n_queued) == (2, 1)
            tasks[0].cancel()
            await until(lambda: held.n_queued == 0)
            assert held.n_running == 2
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert (held.n_running, held.n_queued) == (0, 0)
            await until(lambda: not compilers(held), deadline_s=2)
            (worker,) = held.to_json()
            assert worker["alive"], "cancelling jobs leaves the worker"
            assert (await build(held, own_place))["format"] == "cubin"
        assert workers(own_place) == []

    asyncio.run(body())


def test_a_job_past_its_deadline_is_killed_and_costs_nothing_else(own_place: Path):
    async def body() -> None:
        async with pool(own_place, jobs=2, build_timeout_s=1.0) as held:
            await build(held, own_place)
            (before,) = held.to_json()
            with pytest.raises(BuildTimeout):
                await start_slow(held, own_place)
            await until(lambda: not compilers(held), deadline_s=2)
            assert (await build(held, own_place))["format"] == "cubin"
            assert held.to_json()[0]["pid"] == before["pid"]

    asyncio.run(body())


def test_a_job_cancelled_before_it_started_costs_nothing_else(own_place: Path):
    async def body() -> None:
        async with pool(own_place, jobs=2) as held:
            await load(held)
            other = start_slow(held, own_place)
            (pid,) = await until(lambda: compilers(held))
            (before,) = held.to_json()
            os.kill(before["pid"], signal.SIGSTOP)  # it takes no job meanwhile
            cancelled = start_slow(held, own_place)
            await ordered(held, 2)
            cancelled.cancel()
            await asyncio.gather(cancelled, return_exceptions=True)
            os.kill(before["pid"], signal.SIGCONT)
            assert (await build(held, own_place))["format"] == "cubin"
            assert held.to_json()[0]["pid"] == before["pid"]
            await until(lambda: compilers(held) == [pid], deadline_s=2)
            assert not other.done()
            other.cancel()
            await asyncio.gather(other, return_exceptions=True)

    asyncio.run(body())


@pytest.mark.parametrize("ending", ["cancelled", "past its deadline"])
def test_a_worker_that_takes_no_job_is_replaced(own_place: Path, ending: str):
    async def body() -> None:
        async with pool(own_place, jobs=2, build_timeout_s=3.0) as held:
            await build(held, own_place)
            (before,) = held.to_json()
            os.kill(before["pid"], signal.SIGSTOP)
            task = start_slow(held, own_place)
            await ordered(held, 2)
            if ending == "cancelled":
                task.cancel()
            (answer,) = await asyncio.gather(task, return_exceptions=True)
            assert isinstance(answer, asyncio.CancelledError if ending == "cancelled" else BuildTimeout)
            await until(lambda: not members(before["pid"]), deadline_s=4)
            assert (await build(held, own_place))["format"] == "cubin"

    asyncio.run(body())


def test_a_job_that_no_worker_has_begun_is_given_to_the_next_one(own_place: Path):
    async def body() -> None:
        async with pool(own_place, jobs=2) as held:
            await load(held)
            (before,) = held.to_json()
            os.kill(before["pid"], signal.SIGSTOP)
            task = asyncio.create_task(build(held, own_place))
            await ordered(held, 1)
            os.kill(before["pid"], signal.SIGKILL)
            assert (await asyncio.wait_for(task, 20))["format"] == "cubin"
            assert held.to_json()[0]["pid"] != before["pid"]

    asyncio.run(body())


def test_the_answer_of_a_try_that_was_lost_is_not_taken_for_that_of_the_next(own_place: Path):
    """The first worker died before it said that it had begun; the second try is killed before it answers."""

    async def body() -> None:
        async with pool(own_place, jobs=2) as held:
            await load(held)
            (before,) = held.to_json()
            os.kill(before["pid"], signal.SIGSTOP)
            place = staging(own_place, SLOW_FILES)
            task = asyncio.create_task(held.run(slow_job(), HERE, place, on_start=lambda: None))
            await ordered(held, 1)
            (place.root / "out" / "result.json").write_text('{"built": {"format": "cubin"}}')
            os.kill(before["pid"], signal.SIGKILL)
            await until(lambda: held.to_json()[0]["pid"] not in (None, before["pid"]))
            await load(held)
            (pid,) = await until(lambda: compilers(held))
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(BuildError, match="-9"):
                await asyncio.wait_for(task, 5)

    asyncio.run(body())


def test_a_pool_that_is_closed_starts_no_worker_for_a_job_that_none_has_begun(own_place: Path):
    async def body() -> None:
        async with pool(own_place, jobs=2) as held:
            await load(held)
            os.kill(held.to_json()[0]["pid"], signal.SIGSTOP)
            task = start_slow(held, own_place)
            await ordered(held, 1)
        with pytest.raises(DaemonEnding, match="call again"):
            await asyncio.wait_for(task, 5)
        assert workers(own_place) == []

    asyncio.run(body())


def test_a_killed_compiler_costs_one_build(own_place: Path):
    async def body() -> None:
        async with pool(own_place, jobs=2) as held:
            await load(held)
            task = start_slow(held, own_place)
            (pid,) = await until(lambda: compilers(held))
            (before,) = held.to_json()
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(BuildError, match="-9"):
                await asyncio.wait_for(task, 5)
            assert (await build(held, own_place))["format"] == "cubin"
            assert held.to_json()[0]["pid"] == before["pid"]

    asyncio.run(body())


def test_a_killed_worker_takes_its_compilers_with_it_and_is_replaced(own_place: Path):
    async def body() -> None:
        async with pool(own_place, jobs=2) as held:
            await load(held)
            tasks = [start_slow(held, own_place) for _ in range(2)]
            await until(lambda: len(compilers(held)) == 2)
            (before,) = held.to_json()
            os.kill(before["pid"], signal.SIGKILL)
            await until(lambda: not members(before["pid"]), deadline_s=2)
            for task in tasks:  # given up, or tried again with a fresh worker
                task.cancel()
            answers = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(answer, BuildError | asyncio.CancelledError) for answer in answers)
            assert (await build(held, own_place))["format"] == "cubin"
            (after,) = held.to_json()
            assert after["alive"]
            assert after["pid"] != before["pid"]

    asyncio.run(body())


def test_a_job_out_of_memory_costs_one_build(own_place: Path):
    async def body() -> None:
        async with pool(own_place, jobs=1, job_memory_bytes=180 << 20) as held:
            with pytest.raises(KserveError):
                await asyncio.wait_for(start_slow(held, own_place), 60)
            assert held.to_json()[0]["alive"]

    asyncio.run(body())


@pytest.mark.parametrize(
    ("python", "error"),
    [
        ("/nonexistent/python", ToolchainMissing),
        ("/", ToolchainMissing),
        ("/bin/false", BuildError),
        ("/bin/echo", BuildError),  # talks, but not our language
    ],
)
def test_an_interpreter_that_is_none_is_refused_at_once(own_place: Path, python: str, error: type[Exception]):
    async def body() -> None:
        async with pool(own_place, jobs=1) as held:
            for _ in range(2):
                with pytest.raises(error):
                    await asyncio.wait_for(held.worker("cuda", Environment(python, ())), 10)

    asyncio.run(body())


def test_workers_are_one_an_environment(own_place: Path):
    async def body() -> None:
        async with pool(own_place, jobs=4) as held:
            found = await asyncio.gather(*(held.worker("cuda", HERE) for _ in range(5)))
            assert len({id(worker) for worker in found}) == 1
            other = await held.worker("cuda", HERE._replace(python_path=(str(own_place),)))
            assert other is not found[0]
            held.retire("cuda", HERE)
            assert await held.worker("cuda", HERE) is not found[0]

    asyncio.run(body())


def test_the_toolchains_own_error_comes_through(own_place: Path):
    async def body() -> None:
        async with pool(own_place, jobs=1) as held:
            with pytest.raises(CompileFailed, match=r"kernel\.cu\(2\).*nonsense"):
                broken = {"kernel.cu": b"\nnonsense x;\n"}
                await held.run(cuda_job(), HERE, staging(own_place, broken), on_start=lambda: None)
            started = []
            await held.run(cuda_job(), HERE, staging(own_place, CUDA_FILES), on_start=lambda: started.append(1))
            assert started == [1]

    asyncio.run(body())
