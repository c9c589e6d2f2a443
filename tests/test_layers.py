"""Imports point down only, and a few facts are known in one place."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "kserve"
LAYERS = [
    ["errors"],
    ["spec", "target", "expression"],
    ["artifact", "key", "config", "ownership", "occupancy", "setting_values"],
    ["definition", "kernel_toml", "kernel_schema", "knobs", "outline", "catalog", "protocol", "alias", "lockfile", "tuning"],
    ["store", "toolchain"],
    ["build"],
    ["service"],
    ["server", "client"],
    ["ops"],
    ["measure", "fleet", "doors"],
    ["cli"],
]
LAYERS[3] += ["toml_table", "extension_toml"]
LAYER_OF = {unit: layer for layer, units in enumerate(LAYERS) for unit in units}
# From this layer on, units of one layer are strangers to each other.
FIRST_APART = LAYER_OF["store"]
# `kserve` itself is a version and names that are resolved lazily; `__main__` is the command line.
FACE = ("__init__", "__main__")
# What a client may import from above layer 3.
CLIENT_READS = {"kserve.store", "kserve.store.base", "kserve.store.files"}

# Package -> the only units that may import it, wherever in a file.
OWNERS = {
    "fastapi": {"server"},
    "starlette": {"server"},
    "pydantic": {"server"},
    "uvicorn": {"server"},
    "uvloop": {"server"},
    "diskcache": {"store"},
    "cuda": {"toolchain"},
    "triton": {"toolchain", "ops", "doors", "measure"},
    "torch": {"toolchain", "ops", "doors", "measure"},
    "cupy": {"client", "doors", "measure"},
    "numpy": {"ops", "measure"},
}
HEAVY = {"torch", "triton", "cupy", "numpy"}


class Import(NamedTuple):
    """One imported module, in full; `deferred` inside a function, `typing` under TYPE_CHECKING."""

    file: Path
    line: int
    module: str
    deferred: bool
    typing: bool

    @property
    def unit(self) -> str:
        """The first name below `kserve`; empty for `kserve` itself."""
        return self.module.partition(".")[2].partition(".")[0]

    def __str__(self) -> str:
        return f"{self.file.relative_to(PACKAGE.parent)}:{self.line} imports {self.module}"


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def unit_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def is_module(name: str) -> bool:
    path = PACKAGE.parent.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def names_of(node: ast.AST) -> list[str]:
    """The modules one statement imports; a call of import_module counts."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "relative import"
        inner = [f"{node.module}.{alias.name}" for alias in node.names]
        return [name if name.startswith("kserve.") and is_module(name) else node.module for name in inner]
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
        return [argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant)]
    return []


def imports_of(file: Path) -> Iterator[Import]:
    def walk(node: ast.AST, *, deferred: bool, typing: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            for module in names_of(child):
                yield Import(file, child.lineno, module, deferred, typing)
            in_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            in_typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            yield from walk(child, deferred=deferred or in_function, typing=typing or in_typing)

    yield from walk(ast.parse(file.read_text()), deferred=False, typing=False)


def every_import() -> list[Import]:
    return [found for file in modules() for found in imports_of(file)]


def own_imports() -> list[Import]:
    return [found for found in every_import() if found.module.split(".")[0] == "kserve"]


def test_every_unit_has_a_layer():
    units = {unit_of(file) for file in modules()} - set(FACE)
    assert units <= set(LAYER_OF)


def test_the_walk_sees_imports_of_every_kind(tmp_path):
    code = """
import os.path
from kserve import protocol, __version__
from kserve.errors import KserveError
if TYPE_CHECKING:
    import ast
def f():
    import kserve.cli
    importlib.import_module("kserve.service")
class C:
    import torch
"""
    file = tmp_path / "code.py"
    file.write_text(code)
    assert [(found.module, found.deferred, found.typing) for found in imports_of(file)] == [
        ("os.path", False, False),
        ("kserve.protocol", False, False),
        ("kserve", False, False),
        ("kserve.errors", False, False),
        ("ast", False, True),
        ("kserve.cli", True, False),
        ("kserve.service", True, False),
        ("torch", False, False),
    ]


def is_upward(found: Import) -> bool:
    importer = unit_of(found.file)
    if importer in FACE or found.unit in ("", importer):
        return False
    ours, theirs = LAYER_OF[importer], LAYER_OF[found.unit]
    return theirs > ours or (theirs == ours >= FIRST_APART)


def test_imports_point_down_only():
    assert [str(found) for found in own_imports() if is_upward(found)] == []


def test_the_client_imports_the_lower_layers_and_the_files_of_a_store():
    def allowed(found: Import) -> bool:
        return found.unit in ("", "client") or LAYER_OF[found.unit] <= 3 or found.module in CLIENT_READS

    assert [str(found) for found in own_imports() if unit_of(found.file) == "client" and not allowed(found)] == []


def test_the_clients_road_needs_nothing_but_the_standard_library():
    low = [unit for layer in LAYERS[:4] for unit in layer]
    files = [file for file in modules() if unit_of(file) in (*low, "client", "store", *FACE)]
    foreign = [
        found
        for file in files
        for found in imports_of(file)
        if found.module.split(".")[0] not in ("kserve", *sys.stdlib_module_names)
        and file.name not in ("index.py", "safe_disk.py")
    ]
    assert {(found.module, found.deferred) for found in foreign} <= {("cupy", True)}


@pytest.mark.parametrize("package", OWNERS)
def test_a_dependency_is_known_to_its_owners_only(package):
    strangers = [
        str(found)
        for found in every_import()
        if found.module.split(".")[0] == package and unit_of(found.file) not in OWNERS[package]
    ]
    assert strangers == []


def is_of_an_op(file: Path) -> bool:
    """Imported when its op is named, and of no use without torch."""
    return unit_of(file) == "ops" or file.is_relative_to(PACKAGE / "measure" / "workloads")


def test_array_libraries_are_imported_inside_functions():
    early = [
        str(found)
        for found in every_import()
        if found.module.split(".")[0] in HEAVY and not found.deferred and not found.typing and not is_of_an_op(found.file)
    ]
    assert early == []


def test_nothing_is_pickled():
    banned = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "dbm"}
    assert [str(found) for found in every_import() if found.module.split(".")[0] in banned] == []


def environment_reads(file: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "os":
            names = [node.attr]
        else:
            continue
        if {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"} & set(names):
            found.append(f"{file.relative_to(PACKAGE.parent)}:{node.lineno}")
    return found


def test_only_config_touches_the_environment():
    readers = {file.name for file in modules() if environment_reads(file)}
    assert readers == {"config.py"}, [place for file in modules() for place in environment_reads(file)]
