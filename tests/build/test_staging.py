"""The private directory of one build."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from kserve.build.staging import LOG_NAME, Staging


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
