"""Where builds are staged: the store's disk, or another one."""

from __future__ import annotations

import shutil
import stat
import tempfile
from pathlib import Path

import pytest

from kserve.build import scratch as scratch_module
from kserve.build.scratch import Scratch
from kserve.errors import ForeignPeer, StoreError


def test_builds_are_staged_in_the_store(scratch: Scratch):
    assert scratch.stage({}).root.parent == scratch.home
    assert scratch.directory("worker-1") == scratch.home / "worker-1"
    assert scratch.refused == ""


def spoil(scratch: Scratch) -> None:
    """What even root cannot write into: a file in the directory's place."""
    scratch.home.write_text("")


def test_while_the_store_refuses_they_are_staged_in_a_private_directory_elsewhere(scratch: Scratch, tmp_path: Path):
    spoil(scratch)
    staging = scratch.stage({"kernel.cu": b"a"})
    place = staging.root.parent
    assert place.parent == tmp_path / "temporary"
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert scratch.directory("worker-1").parent == place
    assert str(scratch.home) in scratch.refused
    scratch.home.unlink()
    assert scratch.refused == ""
    assert scratch.stage({}).root.parent == scratch.home


def test_a_full_disk_refuses_before_a_build_is_lost(scratch: Scratch, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scratch_module, "_ROOM_BYTES", 1 << 60)
    assert "full" in scratch.refused
    assert scratch.stage({}).root.parent != scratch.home


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_place_elsewhere_that_is_not_ours_alone_is_refused(scratch: Scratch, mode: int):
    spoil(scratch)
    scratch.stage({}).root.parent.chmod(mode)
    with pytest.raises(ForeignPeer):
        scratch.stage({})


def test_where_nothing_takes_a_build_both_reasons_are_said(scratch: Scratch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    spoil(scratch)
    monkeypatch.setattr(tempfile, "tempdir", str(scratch.home / "inside"))
    with pytest.raises(StoreError) as caught:
        scratch.stage({})
    assert str(scratch.home) in caught.value.facts["store"]
    assert "TMPDIR" in (caught.value.hint or "")


def test_both_places_are_swept(scratch: Scratch, tmp_path: Path):
    scratch.stage({"kernel.cu": b"a"})
    (scratch.home / "unfinished").write_text("")
    (scratch.home / "link").symlink_to(tmp_path / "temporary")
    scratch.home.rename(tmp_path / "kept")
    spoil(scratch)
    elsewhere = scratch.stage({"kernel.cu": b"a"}).root
    scratch.sweep()
    assert not elsewhere.parent.exists()
    scratch.home.unlink()
    (tmp_path / "kept").rename(scratch.home)
    scratch.sweep()
    assert list(scratch.home.iterdir()) == []
    assert (tmp_path / "temporary").exists(), "a link is removed, not followed"


def test_a_link_that_somebody_put_in_the_place_elsewhere_is_not_followed(scratch: Scratch, tmp_path: Path):
    spoil(scratch)
    place = scratch.stage({}).root.parent
    shutil.rmtree(place)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "text").write_text("years of it")
    place.symlink_to(tmp_path / "thesis")
    scratch.sweep()
    assert (tmp_path / "thesis" / "text").exists()
    with pytest.raises(ForeignPeer):
        scratch.stage({})
