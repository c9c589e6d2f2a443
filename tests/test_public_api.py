"""What a user imports: the names, what importing them costs, and that they explain themselves."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import kserve
from kserve import errors
from tests.support.processes import python

PACKAGE = Path(kserve.__file__).parent
BUDGET_MS = 60
NOT_IMPORTED = [
    "fastapi",
    "starlette",
    "pydantic",
    "uvicorn",
    "diskcache",
    "torch",
    "triton",
    "cupy",
    "numpy",
    "cuda",
    "http.client",
    "tomllib",
    "importlib.metadata",
    "kserve.client.compiled",
    "kserve.client.quick",
    "kserve.client._launcher",
]
# What the interpreter itself imported before the first line does not count.
IMPORT = """
import sys, time
before = set(sys.modules)
began = time.perf_counter()
from kserve import get_kernel
print((time.perf_counter() - began) * 1000)
print(*sorted(set(sys.modules) - before))
"""


def fresh_import() -> tuple[float, set[str]]:
    """Milliseconds of `from kserve import get_kernel` in a new process, and the modules it imported."""
    milliseconds, modules = python(IMPORT).stdout.splitlines()
    return float(milliseconds), set(modules.split())


@pytest.mark.parametrize("name", kserve.__all__)
def test_every_public_name_resolves(name):
    assert getattr(kserve, name) is not None
    assert name in dir(kserve)


def test_the_public_names_are_these():
    assert set(kserve.__all__) == {
        "Kernel",
        "KserveError",
        "Target",
        "__version__",
        "get_extension",
        "get_kernel",
        "get_kernels",
        "report",
        "warmed",
    }


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="get_kernle"):
        _ = kserve.get_kernle


def test_a_wildcard_import_gives_the_public_names():
    names = python("from kserve import *\nprint(*[name for name in dir() if name != '__builtins__'])").stdout.split()
    assert set(kserve.__all__) - {"__version__"} <= set(names)


def test_importing_get_kernel_imports_nothing_heavy():
    _, imported = fresh_import()
    assert "kserve.client" in imported
    assert sorted(imported & set(NOT_IMPORTED)) == []


def test_importing_get_kernel_is_quick():
    # The quickest of several: what others do on the machine is not the import's.
    assert any(fresh_import()[0] <= BUDGET_MS for _ in range(20))


def test_importing_kserve_alone_imports_no_client():
    modules = python("import sys, kserve\nprint(*[m for m in sys.modules if m.startswith('kserve')])").stdout.split()
    assert modules == ["kserve"]


def is_error_class(node: ast.AST) -> bool:
    """The classes of errors.py: the tree at the top of the file describes them."""
    return isinstance(node, ast.ClassDef) and issubclass(getattr(errors, node.name, object), kserve.KserveError)


def undocumented(file: Path) -> list[str]:
    """Public classes and functions without a docstring. A function of one statement is its own description."""
    found = []
    for node in ast.parse(file.read_text()).body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
            continue
        is_one_statement = not isinstance(node, ast.ClassDef) and len(node.body) == 1
        if ast.get_docstring(node) is None and not is_one_statement and not is_error_class(node):
            found.append(f"{file.relative_to(PACKAGE.parent)}:{node.name}")
    return found


def test_every_public_class_and_function_says_what_it_does():
    assert [name for file in sorted(PACKAGE.rglob("*.py")) for name in undocumented(file)] == []


@pytest.mark.parametrize("name", [name for name in kserve.__all__ if name != "__version__"])
def test_what_a_user_imports_explains_itself(name):
    value = getattr(kserve, name)
    assert inspect.getdoc(value)
    if not isinstance(value, type):
        return
    methods = [method for text, method in vars(value).items() if inspect.isfunction(method) and not text.startswith("_")]
    assert [method.__name__ for method in methods if not method.__doc__] == []
