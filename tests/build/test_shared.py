"""What builds share: folders of sources, directories one after the other."""

from __future__ import annotations

import json
import shutil
import stat

import pytest

from kserve.build import scratch as scratch_module
from kserve.build import shared
from kserve.build.scratch import Scratch
from kserve.build.staging import LOG_NAME, Staging
from kserve.errors import StoreError


def test_builds_of_the_same_files_may_read_them_from_one_folder(scratch: Scratch):
    files = {"kernel.cu": b"a", "include/kserve/access.cuh": b"b"}
    first, second = (scratch.stage(files, is_shared=True) for _ in range(2))
    other = scratch.stage({"kernel.cu": b"b", "include/kserve/access.cuh": b"b"}, is_shared=True)
    folders = [staging.sources for staging in (first, second, other)]
    assert folders[0] == folders[1] != folders[2]
    for staging in (first, second):
        source = staging.sources
        assert {name: (source / name).read_bytes() for name in files} == files
        assert not (source / "kernel.cu").stat().st_mode & 0o222
    first.remove()
    first.remove()  # a second time is no error, and takes nothing from the other
    assert (second.sources / "kernel.cu").read_bytes() == b"a"
    second.remove()
    again = scratch.stage(files, is_shared=True)
    assert again.sources == folders[0], "kept for the next build"


@pytest.mark.parametrize("change", ["written to", "removed", "another file", "the folder is removed"])
def test_a_shared_folder_that_was_changed_serves_no_further_build(scratch: Scratch, change: str):
    files = {"kernel.cu": b"a"}
    first = scratch.stage(files, is_shared=True)
    folder = first.sources
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
    assert (second.sources / "kernel.cu").read_bytes() == b"a"
    assert second.sources != folder
    first.remove()
    assert not folder.exists() and (second.sources / "kernel.cu").exists()


def test_a_shared_folder_that_cannot_be_filled_is_not_left_behind(scratch: Scratch):
    with pytest.raises(StoreError, match="staged"):
        scratch.stage({"a": b"a file", "a/kernel.cu": b"in a folder of its name"}, is_shared=True)
    assert list(scratch.home.glob("src-*")) == []


def test_only_the_last_few_shared_folders_are_kept_and_none_at_the_end(scratch: Scratch):
    held = scratch.stage({"kernel.cu": b"held"}, is_shared=True)
    for number in range(2 * shared._MOST_TREES):
        scratch.stage({"kernel.cu": bytes([number])}, is_shared=True).remove()
    assert len(list(scratch.home.glob("src-*"))) == shared._MOST_TREES
    assert (held.sources / "kernel.cu").read_bytes() == b"held", "a build that runs keeps its own"
    held.remove()
    scratch.leave()
    assert list(scratch.home.iterdir()) == []


def entered(scratch: Scratch) -> Staging:
    found = scratch.stage({"kernel.cu": b"a"}, is_shared=True)
    found.enter()
    return found


def answer(staging: Staging) -> None:
    """What a build leaves."""
    out = staging.root / "out"
    files = {out / "result.json": json.dumps({"built": {}}), out / "payload": "binary", staging.root / LOG_NAME: "words"}
    for path, text in files.items():
        path.touch(0o600)
        path.write_text(text)
    assert staging.result() == {"built": {}}


def test_a_directory_is_made_when_the_turn_of_its_build_has_come(scratch: Scratch):
    waiting = scratch.stage({"kernel.cu": b"a"}, is_shared=True)
    assert list(scratch.home.glob("job-*")) == []
    assert waiting.log() == ""
    waiting.enter()
    assert [path.name for path in scratch.home.glob("job-*")] == [waiting.root.name]


def test_builds_have_a_directory_one_after_the_other_and_find_nothing_in_it(scratch: Scratch):
    first = entered(scratch)
    beside = entered(scratch)
    assert beside.root != first.root
    answer(first)
    first.remove()
    second = entered(scratch)
    assert second.root == first.root
    assert second.result() is None
    assert second.log() == ""
    assert {path.stat().st_size for path in second.root.rglob("*") if path.is_file()} == {0}
    assert stat.S_IMODE(second.root.stat().st_mode) == 0o700
    assert entered(scratch).root not in (first.root, beside.root)


def test_the_directory_of_a_build_that_was_killed_serves_no_other(scratch: Scratch):
    first = entered(scratch)
    (first.root / "out" / "payload").write_bytes(b"half")
    first.remove()
    assert not first.root.exists()


LEFT = {
    "a temporary file": lambda root: (root / "scratch" / "x").touch(),
    "a file of its own": lambda root: (root / "x").touch(),
    "a folder": lambda root: (root / "out" / "x").mkdir(),
    "a link to a file of somebody else": lambda root: (root / "out" / "x").symlink_to(root.parent / "theirs"),
    "a second name of that file": lambda root: (root / "out" / "x").hardlink_to(root.parent / "theirs"),
    "a file that cannot be written to": lambda root: (root / "out" / "payload").chmod(0o400),
    "very many files": lambda root: [(root / "out" / str(number)).touch(0o600) for number in range(99)],
    "no place for outputs": lambda root: shutil.rmtree(root / "out"),
    "nothing": shutil.rmtree,
}


@pytest.mark.parametrize("moment", ["before it ended", "after it ended"])
@pytest.mark.parametrize("left", LEFT)
def test_a_directory_in_which_something_is_left_serves_no_other_build(scratch: Scratch, left: str, moment: str):
    first = entered(scratch)
    answer(first)
    theirs = scratch.home / "theirs"
    theirs.write_text("theirs")
    theirs.chmod(0o600)
    if moment == "before it ended":
        LEFT[left](first.root)
        first.remove()
    else:
        first.remove()
        LEFT[left](first.root)
    second = entered(scratch)
    assert second.root != first.root
    assert not first.root.exists()
    assert theirs.read_text() == "theirs"
    answer(second)


def test_no_directory_is_left_at_the_end(scratch: Scratch):
    held = entered(scratch)
    answer(held)
    held.remove()
    scratch.leave()
    assert list(scratch.home.iterdir()) == []


def test_no_directory_is_kept_outside_of_the_store(scratch: Scratch, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scratch_module, "_ROOM_BYTES", 1 << 60)
    held = entered(scratch)
    assert held.root.parent != scratch.home
    answer(held)
    held.remove()
    assert not held.root.exists()
