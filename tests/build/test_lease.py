"""Single flight, without a compiler: what callers of one key get, and what is remembered."""

from __future__ import annotations

import asyncio
import json
import time
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


def test_a_result_is_owed_while_its_build_is_ending():
    """A poll may find what is published before the build that published it has ended: it is built all the same."""

    async def body() -> None:
        leases, go = Leases(failure_memory_s=MEMORY_S), asyncio.Event()

        async def build(lease: Lease) -> Any:
            await go.wait()
            return "manifest"

        lease = start(leases, build)
        lease.owed.add("a")
        assert leases.collect("k", "b") is None
        assert leases.collect("k", "a") is lease
        assert leases.collect("k", "a") is None, "once"
        assert (lease.error, lease.elapsed_s >= 0.0) == (None, True)
        lease.owed.add("a")
        go.set()
        await lease.task
        assert leases.collect("k", "a") is lease

    asyncio.run(body())


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


def test_of_old_builds_only_the_record_is_kept():
    """A result is tens of kilobytes, and an error holds every frame it passed."""

    async def body() -> None:
        leases = Leases(failure_memory_s=0.0)
        failed, done = start(leases, raising(CompileFailed("no")), key="0"), start(leases, give, key="1")
        await asyncio.wait([failed.task, done.task])
        failed.log = done.log = lambda: "text"
        assert failed.error.__traceback__ is not None
        for number in range(2, 102):
            await start(leases, give, key=str(number)).task
        assert [lease.id for lease in leases.all()[-2:]] == [done.id, failed.id]
        assert (done.task, done.log(), failed.task, failed.log()) == (None, "", None, "")
        assert failed.to_json()["error"]["message"] == "no"
        assert failed.error.__traceback__ is None

    asyncio.run(body())


def test_an_error_that_is_raised_again_and_again_stays_as_small_as_it_was():
    async def body() -> None:
        leases = Leases(failure_memory_s=MEMORY_S)
        await ended(start(leases, raising(CompileFailed("no"))))
        for _ in range(50):
            with pytest.raises(CompileFailed) as caught:
                leases.check("k")
        assert len(caught.traceback) <= 3

    asyncio.run(body())


class Kept:
    """What outlives a daemon: (key, error as JSON, seconds since 1970 when it is forgotten)."""

    def __init__(self, *rows: tuple[str, str, float]) -> None:
        self.rows = list(rows)

    def failures(self) -> list[tuple[str, str, float]]:
        return self.rows

    def remember_failure(self, key: str, error: str, *, for_s: float) -> None:
        self.rows.append((key, error, time.time() + for_s))


def is_remembered(leases: Leases, key: str = "k") -> bool:
    try:
        leases.check(key)
    except CompileFailed:
        return True
    return False


def test_a_failure_outlasts_its_daemon_with_all_it_said():
    async def body() -> None:
        kept = Kept()
        await ended(start(Leases(failure_memory_s=MEMORY_S, failures=kept), raising(CompileFailed("no", facts={"line": "3"}))))
        with pytest.raises(CompileFailed) as caught:
            Leases(failure_memory_s=MEMORY_S, failures=kept).check("k")
        assert (caught.value.message, caught.value.facts) == ("no", {"line": "3"})

    asyncio.run(body())


COMPILE_FAILED = json.dumps(CompileFailed("no").to_wire())


@pytest.mark.parametrize(
    ("ends_in_s", "left_s"),
    [(40.0, 40.0), (0.0, 0.0), (-5.0, 0.0), (1e9, MEMORY_S), (float("inf"), MEMORY_S), (float("nan"), 0.0)],
    ids=["in time", "now", "past: the clock was set forward", "far: it was set back", "never", "no number"],
)
def test_a_kept_failure_is_never_remembered_for_longer_than_a_new_one(
    monkeypatch: pytest.MonkeyPatch, ends_in_s: float, left_s: float
):
    leases = Leases(failure_memory_s=MEMORY_S, failures=Kept(("k", COMPILE_FAILED, time.time() + ends_in_s)))
    began = time.monotonic()
    for after_s in (0.5, MEMORY_S - 1, MEMORY_S + 1, 1e8):
        monkeypatch.setattr(time, "monotonic", lambda at=began + after_s: at)
        assert is_remembered(leases) == (after_s < left_s), after_s


@pytest.mark.parametrize(
    "text", ["", "{", "null", "[]", "5", '"x"', '{"code": 5}', "[" * 100_000, '{"code": "compile-failed"}']
)
def test_a_damaged_memory_does_not_keep_the_daemon_from_starting(text: str):
    leases = Leases(
        failure_memory_s=MEMORY_S, failures=Kept(("k", text, time.time() + 5), ("good", COMPILE_FAILED, time.time() + 5))
    )
    assert is_remembered(leases, "good")


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


def test_what_waits_in_front_is_counted_whatever_becomes_of_the_clock(monkeypatch: pytest.MonkeyPatch):
    async def body() -> None:
        leases, go = Leases(failure_memory_s=MEMORY_S), asyncio.Event()

        async def build(lease: Lease) -> Any:
            await go.wait()

        first = start(leases, build, key="first")
        monkeypatch.setattr(time, "time", lambda: first.asked_at - 1e9)
        second = start(leases, build, key="second")
        assert (leases.n_ahead(first), leases.n_ahead(second)) == (0, 1)
        go.set()
        await asyncio.gather(first.task, second.task)

    asyncio.run(body())
