"""docs/reliability.md names only tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "reliability.md").read_text()
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and "held by" not in line]
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)


def defined_in(file: Path) -> set[str]:
    """The tests that pytest would collect from it."""
    return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_every_promise_names_a_test():
    assert len(ROWS) > 50
    assert [
        row for row in ROWS if not re.search(r"`tests/[\w/]+\.py::test_\w+`(, `tests/[\w/]+\.py::test_\w+`)* \|$", row)
    ] == []
    assert PAGE.count("::test_") == len(NAMED), "a name that is written in another way"


@pytest.mark.parametrize("file", sorted({file for file, _ in NAMED}))
def test_every_named_test_exists(file):
    named = {name for other, name in NAMED if other == file}
    assert named <= defined_in(ROOT / file)
