"""Single flight, without a compiler: what callers of one key get, and what is remembered."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kserve.build.lease import Lease, Leases
from kserve.errors import BuildError, BuildTimeout, CompileFailed, DaemonEnding, UnsupportedTarget

MEMORY_S = 60.0


def start(leases: Leases, build: Callable[[Lease], Awaitable[Any]], *, key: str = "k", starter: str = "a") -> Lease:
    return leases.start(leases.new(key=key, name="n", target="cuda:sm_90", variant="declared", starter=starter), build)


async def give(lease: Lease) -> Any:
    return "manifest"


def raising(error: Exception) -> Callable[[Lease], Awaitable[Any]]:
    async def build(lease: Lease) -> Any:
        raise error

    return build


async def ended(lease: Lease) -> BaseException | None:
    assert lease.task is not None
    await asyncio.wait([lease.task], timeout=5)
    return None if lease.task.cancelled() else lease.task.exception()


def test_everybody_gets_the_one_builds_result():
    async def body() -> None:
        leases, go, n_builds = Leases(failure_memory_s=MEMORY_S), asyncio.Event(), 0

        async def build(lease: Lease) -> Any:
            nonlocal n_builds
            n_builds += 1
            await go.wait()
            return "manifest"

        lease = start(leases, build)
        joined = [leases.join("k", client) for client in ("b", "c", "b", "a")]
        assert all(found is lease for found in joined)
        assert leases.join("other", "b") is None
        go.set()
        assert await lease.task == "manifest"
        assert n_builds == 1
        assert lease.joiners == {"b", "c"}
        assert [lease.origin_for(client) for client in "abc"] == ["built", "joined", "joined"]
        assert (lease.state, lease.error, leases.running) == ("done", None, {})
        assert leases.join("k", "d") is None, "an ended build has no more places"

    asyncio.run(body())


@pytest.mark.parametrize(
    ("error", "remembered"),
    [
        (CompileFailed("kernel.cu(3): error"), True),
        (UnsupportedTarget("no such arch"), True),
        (BuildTimeout("too long"), False),
        (BuildError("the worker died"), False),
    ],
)
def test_only_what_would_fail_again_is_remembered(error: Exception, remembered: bool):
    async def body() -> None:
        leases = Leases(failure_memory_s=MEMORY_S)
        lease = start(leases, raising(error))
        assert await ended(lease) is error
        assert (lease.state, lease.error) == ("failed", error)
        if remembered:
            with pytest.raises(type(error)) as caught:
                leases.check("k")
            assert caught.value is error
        else:
            leases.check("k")
        leases.check("another")
        assert leases.running == {}
        assert await start(leases, give).task == "manifest"

    asyncio.run(body())


def test_a_remembered_failure_ends():
    async def body() -> None:
        leases = Leases(failure_memory_s=0.0)
        await ended(start(leases, raising(CompileFailed("no"))))
        leases.check("k")

    asyncio.run(body())


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyError("format"), ValueError("bad")])
def test_a_fault_of_our_own_frees_the_key(error: Exception):
    """Otherwise every later caller joins a build that ended long ago."""

    async def body() -> None:
        leases = Leases(failure_memory_s=MEMORY_S)
        lease = start(leases, raising(error))
        await ended(lease)
        assert lease.state == "failed"
        assert leases.running == {}
        assert leases.join("k", "b") is None
        assert await start(leases, give).task == "manifest"

    asyncio.run(body())


def test_a_caller_that_gives_up_does_not_end_the_build():
    async def body() -> None:
        leases, go = Leases(failure_memory_s=MEMORY_S), asyncio.Event()

        async def build(lease: Lease) -> Any:
            await go.wait()
            return "manifest"

        lease = start(leases, build)
        waiting = asyncio.create_task(asyncio.wait([lease.task], timeout=60))
        await asyncio.sleep(0)
        waiting.cancel()
        go.set()
        assert await lease.task == "manifest"

    asyncio.run(body())


def test_cancel_ends_all_builds():
    async def body() -> None:
        leases, cleaned = Leases(failure_memory_s=MEMORY_S), []

        async def build(lease: Lease) -> Any:
            try:
                await asyncio.Event().wait()
            finally:
                cleaned.append(lease.key)

        held = [start(leases, build, key=key) for key in "xyz"]
        await asyncio.sleep(0)
        await leases.cancel()
        assert sorted(cleaned) == ["x", "y", "z"]
        assert leases.running == {}
        assert {lease.state for lease in held} == {"failed"}
        assert {type(lease.error) for lease in held} == {DaemonEnding}

    asyncio.run(body())


def test_builds_are_listed_running_first_then_newest_first():
    async def body() -> None:
        leases, go = Leases(failure_memory_s=MEMORY_S), asyncio.Event()

        async def build(lease: Lease) -> Any:
            await go.wait()

        for key in ("old", "new"):
            await start(leases, give, key=key).task
        running = start(leases, build, key="now")
        assert [lease.key for lease in leases.all()] == ["now", "new", "old"]
        assert leases.find(running.id) is running
        assert leases.find("b999") is None
        first, second = running.elapsed_s, running.elapsed_s
        assert second > first
        go.set()
        await running.task
        assert running.elapsed_s == running.elapsed_s == running.to_json()["seconds"]
        assert running.to_json()["error"] is None

    asyncio.run(body())
