"""What a kernel.toml of language `torch-extension` says that others do not: options for two compilers and a linker."""

from __future__ import annotations

from kserve.definition import (
    BINDINGS,
    CODE,
    EXTENSION,
    FIELDS,
    OPTION_FIELDS,
    REFUSED_COMPILER_FLAG,
    ROOT,
    STABLE_ABI,
    Entry,
    Launch,
)
from kserve.expression import Expression
from kserve.outline import stays_inside
from kserve.toml_table import Table


def extension_entry(table: Table, name: str) -> Entry:
    """The entry: a name, which its module has too, and a line about it."""
    found = Entry(name, table.take("summary", str, "one line"), name, (), Launch(()))
    table.end(FIELDS["extension"])
    return found


def extension_options(table: Table) -> dict[str, tuple[str, ...] | Expression]:
    """The options, each as a list of texts; those that say nothing are left out, and so is the binding that is the default."""
    found: dict[str, tuple[str, ...]] = {field: _flags(table, field) for field in ("cflags", "cuda_cflags", "ldflags")}
    found["arches"] = table.texts("arches", [])
    for code in found["arches"]:
        if not CODE.fullmatch(code):
            raise table.fail(
                "arches", code, "sm_NN for binary code, compute_NN for PTX, with a or f after it where there is one"
            )
    abi = table.take("stable_abi", str, "a release of torch such as 2.11", None)
    if abi is not None and not STABLE_ABI.fullmatch(abi):
        raise table.fail("stable_abi", abi, "a release of torch such as 2.11")
    binding = table.choice("binding", BINDINGS, BINDINGS[0])
    table.end(OPTION_FIELDS[EXTENSION])
    found |= {"stable_abi": (abi,) if abi else (), "binding": () if binding == BINDINGS[0] else (binding,)}
    return {name: values for name, values in found.items() if values}


def _flags(table: Table, field: str) -> tuple[str, ...]:
    flags = table.texts(field, [])
    for flag in flags:
        inside = field == "ldflags" and ROOT.match(flag) and stays_inside(flag)
        if not flag.isprintable() or not (inside or (flag and not REFUSED_COMPILER_FLAG.match(flag))):
            raise table.fail(field, flag, "an option that reads or writes no file and names no target")
    return flags
