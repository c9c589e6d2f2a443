"""A lock file: hits without compiler, daemon and write access, and refusals of anything it does not name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from kserve import client, get_kernel
from kserve.errors import LockMismatch, RequestError
from kserve.lockfile import Locked, LockedArtifact, read_lock
from tests.support.definitions import CUDA_SOURCE, write_cuda
from tests.support.processes import kserve, python

pytestmark = pytest.mark.toolchain
TARGET = "cuda:sm_90"


@pytest.fixture
def lock(kernels: Path, own_place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A lock of `scale` with size 8 and 16, in force."""
    write_cuda(kernels / "scale")
    path = own_place / "kserve.lock"
    for size in (8, 16):
        done = kserve("lock", "scale", "--set", f"size={size}", "--target", TARGET, "--file", str(path))
        assert done.returncode == 0, done.stderr
    monkeypatch.setenv("KSERVE_LOCK", str(path))
    client.forget()
    return path


def test_what_it_names_is_served_and_nothing_else(lock: Path):
    assert get_kernel("scale", target=TARGET).origin == "disk"  # the default, 8
    assert get_kernel("scale", target=TARGET, size=16).origin == "disk"
    for wish in ({"size": 32}, {"size": True}, {"width": 8}):
        with pytest.raises(LockMismatch, match="scale"):
            get_kernel("scale", target=TARGET, **wish)
    with pytest.raises(LockMismatch, match="tscale"):
        get_kernel("tscale", target=TARGET)
    with pytest.raises(LockMismatch, match="sm_80"):
        get_kernel("scale", target="cuda:sm_80")


def test_a_hit_under_a_lock_needs_a_baked_store_and_nothing_else(lock: Path, kernels: Path, own_place: Path):
    """No daemon, no sources, no compiler (an interpreter that finds no packages), no write access, another user."""
    assert kserve("down").returncode == 0
    baked = own_place / "baked"
    shutil.copytree(own_place / "store", baked)
    for path in (baked, *baked.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o444)
    own_place.chmod(0o755)
    shutil.rmtree(kernels / "scale")
    code = (
        "import os, sys\nsys.path = [p for p in sys.path if 'site-packages' not in p]\n"
        "import kserve.client.direct, kserve.lockfile\nfrom kserve import get_kernel\nos.setuid(54321)\n"
        f"kernel = get_kernel('scale', target='{TARGET}', size=16)\nprint(kernel.origin, kernel.manifest.spec['size'])"
    )
    done = python(code, KSERVE_STORE=f"/proc/nowhere:{baked}", KSERVE_AUTOSTART="0", KSERVE_NO_BUILD="1", HOME="/proc/nowhere")
    assert done.stdout.split() == ["disk", "16"]


def test_a_changed_source_does_not_reach_who_has_a_lock(lock: Path, kernels: Path):
    before = get_kernel("scale", target=TARGET)
    write_cuda(kernels / "scale", source=CUDA_SOURCE.replace("factor * x", "x * factor"))
    client.forget()
    assert get_kernel("scale", target=TARGET).digest == before.digest


def test_an_entry_that_was_lost_is_built_again_where_it_gives_the_same_bytes(lock: Path, own_place: Path):
    for path in (own_place / "store" / "manifest").glob("??/*"):
        path.unlink()
    assert get_kernel("scale", target=TARGET).origin == "built"


def test_other_bytes_are_refused(lock: Path):
    plain = json.loads(lock.read_text())
    plain["kernels"][0]["artifacts"][0]["digest"] = "0" * 64
    lock.write_text(json.dumps(plain))
    client.forget()
    with pytest.raises(LockMismatch, match="other bytes"):
        get_kernel("scale", target=TARGET, size=16)


def test_check_fails_where_this_node_builds_otherwise_and_update_accepts_it(lock: Path, kernels: Path):
    assert kserve("lock", "--check").returncode == 0
    write_cuda(kernels / "scale", source=CUDA_SOURCE.replace("factor * x", "factor + x"))
    failed = kserve("lock", "--check")
    assert (failed.returncode, "lock-mismatch" in kserve("lock", "--check", "--json").stdout) == (5, True)
    assert "another key" in failed.stderr
    before = read_lock(lock)
    assert kserve("lock", "--update").returncode == 0
    assert read_lock(lock).keys.isdisjoint(before.keys)
    assert kserve("lock", "--check").returncode == 0


def test_what_it_names_is_pinned(lock: Path):
    listed = json.loads(kserve("cache", "pin", "--json").stdout)["pins"]
    assert set(listed) == set(read_lock(lock).keys)


def test_adding_the_same_kernel_again_replaces_it(lock: Path):
    assert kserve("lock", "scale", "--target", TARGET, "--set", "size=8").returncode == 0
    assert len(read_lock(lock).kernels) == 2


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"schema": 1}',
        '{"schema": 1, "kernels": [{}]}',
        '{"schema": 9, "kernels": []}',
        "[" * 100_000,
        "\0",
        '{"schema": 1, "kernels": [{"name": 1, "target": 2, "exact": 3, "spec": 4, "defaults": 5, "artifacts": [[]]}]}',
    ],
    ids=range(9),
)
def test_a_damaged_file_is_named(lock: Path, text):
    lock.write_text(text)
    client.forget()
    with pytest.raises(RequestError, match=lock.name):
        get_kernel("scale", target=TARGET)


def test_a_missing_file_is_named(lock: Path):
    lock.unlink()
    with pytest.raises(RequestError, match=lock.name):
        get_kernel("scale", target=TARGET)


def test_a_lock_needs_a_target(lock: Path):
    done = kserve("lock", "scale")
    assert (done.returncode, "--target" in done.stderr) == (2, True)


def test_everything_the_store_holds_can_be_locked(kernels: Path, own_place: Path, monkeypatch: pytest.MonkeyPatch):
    write_cuda(kernels / "scale")
    for size in (8, 16, 24):
        get_kernel("scale", target=TARGET, size=size)
    path = own_place / "all.lock"
    monkeypatch.setenv("KSERVE_LOCK", str(path))  # not there yet
    done = kserve("lock", "--all")
    assert done.returncode == 0, done.stderr
    assert {locked.spec["size"] for locked in read_lock(path).kernels} == {8, 16, 24}
    client.forget()
    assert get_kernel("scale", target=TARGET, size=24).origin == "disk"


@pytest.mark.parametrize(
    ("locked", "exact", "wished", "answers"),
    [
        ("cuda:sm_90", "cuda:sm_90a", "sm_90", True),
        ("cuda:sm_90", "cuda:sm_90a", "cuda:sm_90a", True),
        ("cuda:sm_90a", "cuda:sm_90a", "cuda:sm_90", True),
        ("cuda:sm_90", "cuda:sm_90", "cuda:sm_90a", False),
        ("cuda:sm_90a", "cuda:sm_90a", "cuda:sm_80", False),
        ("hip:gfx942", "hip:gfx942", "gfx942", True),
        ("hip:gfx942", "hip:gfx942", "cuda:sm_90", False),
    ],
)
def test_a_bare_target_stands_for_the_exact_one_that_is_locked(locked, exact, wished, answers):
    entry = Locked("k", locked, exact, {"n": 1}, {}, (LockedArtifact("declared", "a" * 64, "b" * 64),))
    assert entry.answers("k", {"n": 1}, wished) == answers


def test_a_lock_from_before_there_were_knobs_still_holds(lock: Path):
    plain = json.loads(lock.read_text())
    for kernel in plain["kernels"]:
        assert (kernel.pop("knobs"), kernel.pop("variables")) == ({}, {})
    lock.write_text(json.dumps({**plain, "schema": 1}))
    client.forget()
    assert get_kernel("scale", target=TARGET).origin == "disk"
