"""The private directory of one build."""

from __future__ import annotations

import json
import shutil
import stat
import tempfile
from pathlib import Path

import pytest

from kserve.build import staging as staging_module
from kserve.build.staging import LOG_NAME, Scratch, Staging
from kserve.errors import ForeignPeer, StoreError


def test_holds_the_declared_files_and_nothing_else(tmp_path: Path):
    files = {"kernel.cu": b"a", "include/kserve/access.cuh": b"b", "empty.h": b""}
    staging = Staging(tmp_path, files)
    source = staging.root / "src"
    assert {str(path.relative_to(source)): path.read_bytes() for path in source.rglob("*") if path.is_file()} == files
    assert [stat.S_IMODE(path.stat().st_mode) for path in (staging.root, *staging.root.iterdir())] == [0o700] * 4


def test_two_builds_of_one_source_share_nothing(tmp_path: Path):
    first, second = (Staging(tmp_path, {"kernel.cu": b"a"}) for _ in range(2))
    assert first.root != second.root
    first.remove()
    assert not first.root.exists()
    assert (second.root / "src" / "kernel.cu").read_bytes() == b"a"
    first.remove()  # a second time is no error


@pytest.mark.parametrize("content", [None, b"", b"{", b"[1]", b'"text"', b"\xff\xfe"])
def test_an_answer_that_was_never_finished_is_none(tmp_path: Path, content: bytes | None):
    staging = Staging(tmp_path, {})
    if content is not None:
        (staging.root / "out" / "result.json").write_bytes(content)
    assert staging.result() is None


def test_gives_the_answer_and_the_outputs(tmp_path: Path):
    staging = Staging(tmp_path, {})
    (staging.root / "out" / "result.json").write_text(json.dumps({"built": {}}))
    (staging.root / "out" / "payload").write_bytes(b"\x7fELF")
    assert staging.result() == {"built": {}}
    assert staging.output("payload") == b"\x7fELF"


def test_log_is_text_and_keeps_its_end(tmp_path: Path):
    staging = Staging(tmp_path, {})
    assert staging.log() == ""
    (staging.root / LOG_NAME).write_bytes(b"\xff first" + b"." * (1 << 20) + b"last")
    text = staging.log()
    assert text.endswith("last")
    assert "first" not in text
    assert len(text) < 1 << 20


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scratch:
    """`home` stands for the store's tmp/, `temporary` for TMPDIR."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return Scratch(tmp_path / "home")


def test_builds_of_the_same_files_may_read_them_from_one_folder(scratch: Scratch):
    files = {"kernel.cu": b"a", "include/kserve/access.cuh": b"b"}
    first, second = (scratch.stage(files, is_shared=True) for _ in range(2))
    other = scratch.stage({"kernel.cu": b"b", "include/kserve/access.cuh": b"b"}, is_shared=True)
    folders = [(staging.root / "src").resolve() for staging in (first, second, other)]
    assert folders[0] == folders[1] != folders[2]
    for staging in (first, second):
        source = staging.root / "src"
        assert {name: (source / name).read_bytes() for name in files} == files
        assert not (source / "kernel.cu").stat().st_mode & 0o222
    first.remove()
    first.remove()  # a second time is no error, and takes nothing from the other
    assert (second.root / "src" / "kernel.cu").read_bytes() == b"a"
    second.remove()
    again = scratch.stage(files, is_shared=True)
    assert (again.root / "src").resolve() == folders[0], "kept for the next build"


@pytest.mark.parametrize("change", ["written to", "removed", "another file", "the folder is removed"])
def test_a_shared_folder_that_was_changed_serves_no_further_build(scratch: Scratch, change: str):
    files = {"kernel.cu": b"a"}
    first = scratch.stage(files, is_shared=True)
    folder = (first.root / "src").resolve()
    if change == "written to":
        (folder / "kernel.cu").chmod(0o600)
        (folder / "kernel.cu").write_bytes(b"b")
    elif change == "removed":
        (folder / "kernel.cu").unlink()
    elif change == "another file":
        (folder / "other.cuh").write_bytes(b"c")
    else:
        shutil.rmtree(folder.parent)
    second = scratch.stage(files, is_shared=True)
    assert (second.root / "src" / "kernel.cu").read_bytes() == b"a"
    assert (second.root / "src").resolve() != folder
    first.remove()
    assert not folder.exists() and (second.root / "src" / "kernel.cu").exists()


def test_a_shared_folder_that_cannot_be_filled_is_not_left_behind(scratch: Scratch):
    with pytest.raises(StoreError, match="staged"):
        scratch.stage({"a": b"a file", "a/kernel.cu": b"in a folder of its name"}, is_shared=True)
    assert list(scratch.home.glob("src-*")) == []


def test_only_the_last_few_shared_folders_are_kept_and_none_at_the_end(scratch: Scratch):
    held = scratch.stage({"kernel.cu": b"held"}, is_shared=True)
    for number in range(2 * staging_module._MOST_TREES):
        scratch.stage({"kernel.cu": bytes([number])}, is_shared=True).remove()
    assert len(list(scratch.home.glob("src-*"))) == staging_module._MOST_TREES
    assert (held.root / "src" / "kernel.cu").read_bytes() == b"held", "a build that runs keeps its own"
    held.remove()
    scratch.leave()
    assert list(scratch.home.iterdir()) == []


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
    monkeypatch.setattr(staging_module, "_ROOM_BYTES", 1 << 60)
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
