"""Tables and plots from result files: the committed ones, and a small one of the op benchmark."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "benchmarks"))

import report

PNG = b"\x89PNG"


def row(arm: str, time_us: float, **changes: Any) -> dict[str, Any]:
    found = {"op": "scale", "direction": "fwd", "shape": "n=8", "dtype": "float32", "arm": arm, "time_us": time_us}
    found |= {"low_us": 0.99 * time_us, "high_us": 1.01 * time_us, "ratio": time_us / 10.0}
    return found | {"gb_s": 1e5 / time_us, "tflop_s": 20.0 / time_us, "share_of_copy": 9.0 / time_us} | changes


@pytest.fixture
def results(tmp_path: Path) -> Path:
    facts = {"device": "some GPU", "versions": "torch 2", "date": "2026-01-01"}
    ceilings = {"copy_gb_s": 4000.0, "matmul_tflop_s": 700.0}
    refused = [
        {
            "op": "scale",
            "direction": "fwd",
            "shape": "n=8",
            "dtype": "float32",
            "arm": "vendor",
            "reason": "no library has this op",
        },
        {"op": "scale", "direction": "bwd", "shape": "n=8", "dtype": "float32", "arm": "kserve", "reason": "off by 1\nmore"},
    ]
    path = tmp_path / "ops.json"
    path.write_text(
        json.dumps({**facts, "ceilings": ceilings, "rows": [row("kserve", 10.0), row("eager", 35.0)], "refused": refused})
    )
    return path


def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *arguments: str) -> Path:
    page = tmp_path / "page.md"
    if not page.exists():
        page.write_text("before\n<!-- table ops -->\nold\n<!-- end -->\nafter\n")
    images = tmp_path / "images"
    monkeypatch.setattr(sys, "argv", ["report.py", "--page", str(page), "--images", str(images), *arguments])
    assert report.main() == 0
    return page


def test_the_ops_table_takes_the_place_of_the_old_one(monkeypatch, tmp_path, results):
    page = run(monkeypatch, tmp_path, "--ops", str(results))
    text = page.read_text()
    assert text.startswith("before\n<!-- table ops -->\nsome GPU")
    assert text.endswith("<!-- end -->\nafter\n")
    assert "| scale fwd | float32 | n=8 | 10.0 ± 1.0% | 0.90 | 3.50 |  |  |" in text
    assert "No number: scale bwd n=8 kserve: off by 1" in text and "no library" not in text
    assert (tmp_path / "images" / "roofline-scale.png").read_bytes().startswith(PNG)
    again = run(monkeypatch, tmp_path, "--ops", str(results)).read_text()
    assert again == text


def test_a_page_without_a_place_is_left_alone(monkeypatch, tmp_path, results):
    page = tmp_path / "page.md"
    page.write_text("nothing here\n")
    with pytest.raises(SystemExit, match="no place for the table"):
        run(monkeypatch, tmp_path, "--ops", str(results))
    assert page.read_text() == "nothing here\n"


def test_the_committed_cold_start_has_bars(monkeypatch, tmp_path):
    run(monkeypatch, tmp_path, "--coldstart", str(REPOSITORY / "benchmarks" / "results" / "coldstart-nvidia-h200.json"))
    assert (tmp_path / "images" / "coldstart.png").read_bytes().startswith(PNG)
