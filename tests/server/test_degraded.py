"""What lets the daemon down, a disk, a limit, a clock: clients get their kernels, status says so, it heals by itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kserve import client, get_kernel, protocol
from tests.support.daemon import Daemon, assert_sound, daemon, variables
from tests.support.definitions import write_cuda, write_triton
from tests.support.disks import FAULTS, Disk, small_disk
from tests.support.processes import kserve

pytestmark = [pytest.mark.toolchain, pytest.mark.slow]
TARGET = "cuda:sm_90"


def again(name: str = "scale", **spec: Any) -> Any:
    """get_kernel as if this process had never asked."""
    client.forget()
    return get_kernel(name, target=TARGET, **spec)


@pytest.fixture
def root(own_place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place with a kernel of each language and a directory for temporary files; no daemon starts by itself."""
    write_cuda(own_place / "kernels" / "scale")
    write_triton(own_place / "kernels" / "tscale")
    (own_place / "temporary").mkdir()
    return own_place


@pytest.fixture
def disk(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    with small_disk(root / "disk") as found:
        for name, value in variables(root, KSERVE_STORE=str(found.store)).items():
            monkeypatch.setenv(name, value)
        client.forget()
        yield found


def on(disk: Disk) -> dict[str, str]:
    """What a daemon over that disk is started with."""
    return {"KSERVE_STORE": str(disk.store), "TMPDIR": str(disk.path.parent / "temporary")}


def degraded(found: Daemon) -> str:
    state: str = found.call("GET", protocol.STATUS)["store"]["degraded"]
    return state


def assert_serves_without_the_disk(found: Daemon, *, first: int) -> None:
    """New kernels of both languages are built and found again; who asks for the state is told."""
    built = again(size=first)
    assert built.origin == "built"
    assert (again(size=first).origin, again(size=first).digest) == ("disk", built.digest)
    assert again("tscale", block=16 * first).origin == "built"
    assert degraded(found)
    assert degraded(found) in kserve("status").stdout


def assert_healed(found: Daemon, *, size: int) -> None:
    assert again(size=size).origin == "built"
    assert degraded(found) == ""
    assert "sound" in kserve("status").stdout
    assert found.process.poll() is None
    assert_sound(found.settings.store)
    assert list((found.root / "temporary").rglob("job-*")) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_disk_that_lets_a_running_daemon_down(root: Path, disk: Disk, fault: str):
    with daemon(root, **on(disk)) as found:
        warm = again(size=1)
        FAULTS[fault](disk)
        assert (again(size=1).origin, again(size=1).digest) == ("disk", warm.digest)
        assert_serves_without_the_disk(found, first=2)
        disk.mend()
        assert_healed(found, size=3)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_disk_that_lets_a_daemon_down_before_it_starts(root: Path, disk: Disk, fault: str):
    with daemon(root, **on(disk)):
        warm = again(size=1)
    FAULTS[fault](disk)
    with daemon(root, **on(disk)) as found:
        assert (again(size=1).origin, again(size=1).digest) == ("disk", warm.digest)
        assert_serves_without_the_disk(found, first=2)
        second = kserve("up", **on(disk))
        assert (second.returncode, str(found.process.pid) in second.stderr or fault == "read-only") == (6, True)
        disk.mend()
        assert_healed(found, size=3)
    with daemon(root, **on(disk)):
        assert (again(size=1).origin, again(size=3).origin) == ("disk", "disk")


@pytest.mark.parametrize("fault", ["full", "out of inodes"])
def test_a_new_store_on_a_full_disk(root: Path, disk: Disk, fault: str):
    """It becomes a store when there is room."""
    disk.store.mkdir(mode=0o700)
    FAULTS[fault](disk)
    with daemon(root, **on(disk)) as found:
        assert_serves_without_the_disk(found, first=2)
        disk.mend()
        assert_healed(found, size=3)
    with daemon(root, **on(disk)):
        assert again(size=3).origin == "disk"


def test_a_new_store_on_a_read_only_disk_is_refused_with_what_to_set(root: Path, disk: Disk):
    disk.store.mkdir(mode=0o700)
    disk.make_read_only()
    refused = kserve("up", **on(disk))
    assert refused.returncode == 5
    assert "KSERVE_STORE" in refused.stderr
    assert "Read-only" in refused.stderr
