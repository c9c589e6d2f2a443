"""The benchmark of extensions: its rows are kept where the docs say."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.processes import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "benchmarks"))

import extensions


@pytest.mark.toolchain
def test_rows_are_written_as_well_as_printed(own_place: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("torch")
    extensions.main(["--part", "tree", "--headers", "20", "--out", str(own_place / "out")])
    printed = capsys.readouterr().out.splitlines()
    (path,) = (own_place / "out").glob("extensions-*.json")
    assert printed[-1] == str(path)
    found = json.loads(path.read_text())
    (row,) = found["rows"]
    assert row["case"] == "20 headers outside" and printed[0].startswith(row["case"])
    assert row["kserve_s"] > min(row["hits_s"]) > 0.0
    assert found["torch"] and found["date"]
