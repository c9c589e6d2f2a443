"""A daemon in whose environment the web framework cannot be imported: kernels are served, the rest says what is wrong."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kserve import protocol
from kserve.errors import ServiceError
from kserve.server.hot import Activity, HotRoad
from tests.support.daemon import Daemon, ask, daemon
from tests.support.definitions import write_cuda
from tests.support.processes import REPOSITORY, kserve

REASON = "No module named 'opentelemetry'"


@pytest.fixture
def broken(own_place: Path) -> Path:
    """A folder with a fastapi that lacks something."""
    package = own_place / "broken" / "fastapi"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"raise ModuleNotFoundError({REASON!r}, name='opentelemetry')\n")
    return package.parent


@pytest.fixture
def found(own_place: Path, broken: Path) -> Iterator[Daemon]:
    with daemon(own_place, PYTHONPATH=os.pathsep.join([str(broken), str(REPOSITORY)]), KSERVE_IDLE_S="10") as running:
        yield running


@pytest.mark.toolchain
def test_kernels_are_served_without_it(own_place: Path, found: Daemon):
    write_cuda(own_place / "kernels" / "scale")
    with contextlib.closing(found.connection()) as connection:
        assert "variants" in ask(connection, found.settings, "scale")


def test_every_other_request_says_what_is_wrong_until_it_is_mended(broken: Path, found: Daemon):
    for method, route in (("GET", protocol.STATUS), ("GET", protocol.ARTIFACTS), ("PUT", "/nowhere")):
        with pytest.raises(ServiceError) as failure:
            found.call(method, route)
        assert f"the daemon cannot import its HTTP application: {REASON}" in failure.value.message
        assert "kserve-jit[daemon]" in str(failure.value.hint)
    listed = kserve("cache", "ls")
    assert (listed.returncode, REASON in listed.stderr) == (6, True), listed.stderr
    assert found.log.count(REASON) == 1
    shutil.rmtree(broken)
    assert found.call("GET", protocol.STATUS)["pid"] == found.process.pid


def test_it_ends_when_told(found: Daemon):
    assert kserve("down").returncode == 0
    assert found.process.wait(timeout=20) == 0


def test_it_ends_when_idle(own_place: Path, broken: Path):
    """It tries to import the application in a quiet moment, and outlives that."""
    with daemon(own_place, PYTHONPATH=os.pathsep.join([str(broken), str(REPOSITORY)]), KSERVE_IDLE_S="2") as running:
        assert running.process.wait(timeout=30) == 0
        assert running.log.count(REASON) == 1


def test_what_the_application_raises_before_it_answers_has_the_one_shape():
    async def application(*_: object) -> None:
        raise RuntimeError("odd")

    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    hot = HotRoad(None, Activity(), lambda: application, stop=lambda: None)
    asyncio.run(hot({"type": "http", "method": "GET", "path": "/v1/status"}, None, send))
    assert sent[0]["status"] == 500
    error = json.loads(sent[1]["body"])["error"]
    assert error["code"] == "internal" and "GET /v1/status" in error["message"] and "odd" in error["message"]
