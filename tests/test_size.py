"""Limits on files and functions."""

from __future__ import annotations

import ast
import fnmatch
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / "kserve").rglob("*.py"))
LONGEST_FILE = 350
LONGEST_FUNCTION = 40
MOST_POSITIONAL = 4

# file:function -> why it is longer than LONGEST_FUNCTION lines. The docstring does not count.
LONG_FOR_A_REASON: dict[str, str] = {}

# The same for MOST_POSITIONAL.
MANY_FOR_A_REASON = dict.fromkeys(
    ("kserve/doors/cpp_extension.py:load", "kserve/doors/cpp_extension.py:load_inline"), "the signature is torch's"
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(file: Path) -> Iterator[tuple[str, Function, bool]]:
    """(place, function, whether it is a method) of every function, nested ones included."""

    def walk(node: ast.AST, *, in_class: bool) -> Iterator[tuple[str, Function, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Function):
                yield f"{file.relative_to(ROOT)}:{child.name}", child, in_class
            yield from walk(child, in_class=isinstance(child, ast.ClassDef))

    yield from walk(ast.parse(file.read_text()), in_class=False)


def every_function() -> list[tuple[str, Function, bool]]:
    return [found for file in FILES for found in functions(file)]


def lines_of(function: Function) -> int:
    """Lines from `def` to the end, without the docstring."""
    first = function.body[0]
    docstring = first.end_lineno - first.lineno + 1 if ast.get_docstring(function) is not None else 0
    return function.end_lineno - function.lineno + 1 - docstring


def n_positional(function: Function, *, is_method: bool) -> int:
    bound = is_method and not any(ast.unparse(decorator) == "staticmethod" for decorator in function.decorator_list)
    return len(function.args.posonlyargs) + len(function.args.args) - bound


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_file_fits_in_the_head(file):
    assert len(file.read_text().splitlines()) <= LONGEST_FILE


def test_a_long_function_has_a_reason():
    long = {place for place, function, _ in every_function() if lines_of(function) > LONGEST_FUNCTION}
    assert long == set(LONG_FOR_A_REASON)


def test_a_function_takes_few_positional_parameters():
    many = [
        place
        for place, function, is_method in every_function()
        if n_positional(function, is_method=is_method) > MOST_POSITIONAL
    ]
    assert set(many) == set(MANY_FOR_A_REASON)


def test_every_function_says_what_it_returns():
    assert [place for place, function, _ in every_function() if function.returns is None] == []


def test_no_folder_of_tests_is_passed_over(pytestconfig):
    passed_over = pytestconfig.getini("norecursedirs")
    folders = {path.parent.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert {"build", "unit"} <= folders
    assert [name for name in folders if any(fnmatch.fnmatch(name, pattern) for pattern in passed_over)] == []


def test_every_module_says_what_it_is_for():
    assert [str(file) for file in FILES if not ast.get_docstring(ast.parse(file.read_text()))] == []
