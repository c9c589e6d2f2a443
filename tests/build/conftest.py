"""Fixtures of the builds' tests."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from kserve.build.scratch import Scratch


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scratch:
    """`home` stands for the store's tmp/, `temporary` for TMPDIR."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return Scratch(tmp_path / "home")
