"""What builds share: folders of sources, directories one after the other."""

from __future__ import annotations

import asyncio
import json
import shutil
import stat
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kserve import service as service_module
from kserve.artifact import Contract
from kserve.build import sandbox, shared
from kserve.build import scratch as scratch_module
from kserve.build.plan import Plan, contract_of
from kserve.build.scratch import Scratch
from kserve.build.staging import LOG_NAME, Staging
from kserve.errors import StoreError
from kserve.toolchain.base import Built
from tests.support.definitions import TRITON_SOURCE, TRITON_TOML
from tests.support.inprocess import service, wanted


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


def test_a_changed_folder_that_nobody_uses_is_not_left_behind(scratch: Scratch):
    first = scratch.stage({"kernel.cu": b"a"}, is_shared=True)
    first.remove()
    (first.sources / "other.cuh").write_bytes(b"c")
    scratch.stage({"kernel.cu": b"a"}, is_shared=True).remove()
    assert not first.sources.exists()


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
    staging.is_reusable = True


def test_a_directory_is_made_when_the_turn_of_its_build_has_come(scratch: Scratch):
    waiting = scratch.stage({"kernel.cu": b"a"}, is_shared=True)
    assert list(scratch.home.glob("job-*")) == []
    assert waiting.log() == ""
    waiting.begin_log("words")
    waiting.enter()
    assert waiting.log() == "words\n"
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


def test_the_directory_of_a_build_that_was_not_published_serves_no_other(scratch: Scratch):
    first = entered(scratch)
    answer(first)
    first.is_reusable = False
    first.remove()
    assert not first.root.exists()


LEFT = {
    "a temporary file": lambda root: (root / "scratch" / "x").touch(),
    "a file of its own": lambda root: (root / "x").touch(),
    "a folder": lambda root: (root / "out" / "x").mkdir(),
    "a link to a file of somebody else": lambda root: (root / "out" / "x").symlink_to(root.parent / "theirs"),
    "a second name of that file": lambda root: (root / "out" / "x").hardlink_to(root.parent / "theirs"),
    "a file that cannot be written to": lambda root: (root / "out" / "payload").chmod(0o400),
    "outputs for everybody": lambda root: (root / "out").chmod(0o777),
    "a directory for everybody": lambda root: root.chmod(0o755),
    "temporary files for nobody": lambda root: (root / "scratch").chmod(0o000),
    "another folder for outputs": lambda root: (shutil.rmtree(root / "out"), (root / "out").symlink_to(root.parent / "folder")),
    "very many files": lambda root: [(root / "out" / str(number)).touch(0o600) for number in range(99)],
    "no place for outputs": lambda root: shutil.rmtree(root / "out"),
    "nothing": shutil.rmtree,
}


@pytest.mark.parametrize("moment", ["before it ended", "after it ended"])
@pytest.mark.parametrize("left", LEFT)
def test_a_directory_in_which_something_is_left_serves_no_other_build(scratch: Scratch, left: str, moment: str):
    first = entered(scratch)
    answer(first)
    (scratch.home / "folder").mkdir(mode=0o700)
    theirs, others = scratch.home / "theirs", scratch.home / "folder" / "result.json"
    for file in (theirs, others):
        file.touch(0o600)
        file.write_text("theirs")
    if moment == "before it ended":
        LEFT[left](first.root)
        first.remove()
    else:
        first.remove()
        LEFT[left](first.root)
    second = entered(scratch)
    assert second.root != first.root
    assert not first.root.exists()
    assert theirs.read_text() == others.read_text() == "theirs"
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


@pytest.mark.toolchain
@pytest.mark.parametrize("delay_s", [0.002, 0.01, 0.02])
def test_a_daemon_that_goes_down_during_a_publication_stores_the_whole_of_it_or_nothing(
    own_place: Path, monkeypatch: pytest.MonkeyPatch, delay_s: float
):
    """The thread that reads what a build gave goes on after its build was cancelled."""
    begun = threading.Event()

    def slowly(plan: Plan, built: Built) -> Contract:
        begun.set()
        time.sleep(delay_s)
        return contract_of(plan, built)

    async def goes_down() -> None:
        async with service() as held:
            task = asyncio.create_task(held.resolve(wanted(held), client="a", wait_s=60))
            while not begun.is_set():
                await asyncio.sleep(0.001)
        await asyncio.gather(task, return_exceptions=True)

    async def sizes() -> list[int]:
        async with service() as held:
            return [manifest.size_bytes for manifest in held.artifacts.manifests()]

    with monkeypatch.context() as patch:
        patch.setattr(service_module, "contract_of", slowly)
        asyncio.run(goes_down())
    assert 0 not in asyncio.run(sizes())


@pytest.mark.toolchain
@pytest.mark.skipif(not sandbox.is_available(), reason="no Landlock: builds share nothing")
def test_a_source_that_is_run_gets_a_directory_of_its_own(own_place: Path, monkeypatch: pytest.MonkeyPatch):
    """A Triton file is Python, and what it starts may write to its directory later on; a CUDA source is only read."""
    files = {"kernel.toml": TRITON_TOML.encode(), "kernel.py": TRITON_SOURCE.encode()}
    staged: dict[str, Staging] = {}

    async def body() -> None:
        async with service() as held:
            for asked in (wanted(held, files, name="tscale"), wanted(held)):
                await held.resolve(asked, client="a", wait_s=60)
            assert held.counters["built"] == 4

    def stage(self: Scratch, files: dict[str, bytes], **options: Any) -> Staging:
        staged[min(files)] = found = own_stage(self, files, **options)
        return found

    own_stage = Scratch.stage
    monkeypatch.setattr(Scratch, "stage", stage)
    asyncio.run(body())
    assert {name: found.is_reusable for name, found in staged.items()} == {"kernel.py": False, "kernel.cu": True}
