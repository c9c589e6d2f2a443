"""A daemon that does nothing is recognised at once, once per process, and forgiven when it goes on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kserve import client, get_kernel
from kserve.client import connection
from kserve.errors import DaemonUnreachable
from tests.support.definitions import write_cuda
from tests.support.processes import daemon_pid

pytestmark = pytest.mark.toolchain
TARGET = "cuda:sm_90"


@pytest.fixture
def stopped(kernels: Path, own_place: Path) -> Iterator[int]:
    """The pid of a daemon that is stopped."""
    write_cuda(kernels / "scale")
    get_kernel("scale", target=TARGET)
    pid = daemon_pid(own_place)
    assert pid is not None
    client.forget()
    os.kill(pid, signal.SIGSTOP)
    yield pid
    os.kill(pid, signal.SIGCONT)


def test_it_is_recognised_at_once_and_once(stopped: int):
    took = []
    for size in (16, 32):
        began = time.monotonic()
        with pytest.raises(DaemonUnreachable, match=r"h[ua]ng"):
            get_kernel("scale", target=TARGET, size=size)
        took.append(time.monotonic() - began)
    # 0.2 s and what the machine adds; without the look at the process it is seconds.
    assert took[0] < 1.5
    assert took[1] < 0.15


def test_a_connection_that_was_open_notices_too(kernels: Path, own_place: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connection, "_SLOWEST_S", 0.2)
    write_cuda(kernels / "scale")
    get_kernel("scale", target=TARGET)
    pid = daemon_pid(own_place)
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(DaemonUnreachable, match="hangs"):
            get_kernel("scale", target=TARGET, size=16)
    finally:
        os.kill(pid, signal.SIGCONT)


def test_it_is_forgiven(stopped: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connection, "_SHUNNED_S", 0.0)
    with pytest.raises(DaemonUnreachable):
        get_kernel("scale", target=TARGET, size=16)
    os.kill(stopped, signal.SIGCONT)
    assert get_kernel("scale", target=TARGET, size=16).origin in ("built", "joined", "disk")


def test_a_busy_daemon_is_waited_for():
    assert connection._is_trying(os.getpid())
