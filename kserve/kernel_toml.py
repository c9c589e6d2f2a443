"""Reads a kernel.toml into a KernelDef, checking every field.

Reading executes nothing. Client and daemon read the same bytes with this file: the client for the message, the daemon
because it trusts no client.
"""

from __future__ import annotations

import contextlib
import re
from typing import Any

from kserve.definition import (
    ALIGNS,
    ARGUMENT_FIELDS,
    AXIS_FIELDS,
    ENTRY_NAME,
    EXTENSION,
    FEATURES,
    FIELDS,
    LACKING,
    LANGUAGES,
    LARGEST_STRUCT_BYTES,
    LAUNCH_FIELDS,
    MODULE_NAME,
    OPTION_FIELDS,
    REFUSED_FLAG,
    TRITON_FACT,
    Argument,
    Entry,
    KernelDef,
    Launch,
)
from kserve.errors import InvalidDefinition, InvalidSpec, UnsupportedTarget
from kserve.expression import Expression
from kserve.extension_toml import extension_entry, extension_options
from kserve.knobs import Knob, read_defaults, read_knobs
from kserve.outline import read_toml, stays_inside
from kserve.spec import AXIS_TYPES, DTYPES, RESERVED, SCALARS, Axis, SpecValue, check_axis_name, is_plain_name
from kserve.target import Target, parse_target
from kserve.toml_table import Table as _Table


def read_definition(content: bytes, *, origin: str) -> KernelDef:
    """Read a kernel.toml.

    Args:
        content: the file's bytes.
        origin:  what an error calls the file.
    Raises: InvalidDefinition naming file, field, value and what is allowed.
    """
    try:
        return _definition(_Table(read_toml(content), ""))
    except InvalidDefinition as error:
        raise InvalidDefinition(f"{origin}: {error.message}", facts=error.facts) from None


def _definition(table: _Table) -> KernelDef:
    if (schema := table.take("schema", int, "1")) != 1:
        raise table.fail("schema", schema, "1")
    language = table.choice("language", LANGUAGES)
    axes = _axes(table.table("spec", {}))
    knobs, constraints = read_knobs(_knobs(table, language), set(axes))
    names, derived = {*axes, *knobs}, dict[str, Expression]()
    for name, value in table.table("derived", {}).content.items():
        _check_axis_name(table, f"derived.{name}", name)
        if name in names:
            raise table.fail(f"derived.{name}", value, "a name that no axis or knob has")
        derived[name] = table.expression(f"derived.{name}", value, names)
        names.add(name)
    minimum_cuda, features, hip = _targets(table.table("target", {} if language == EXTENSION else ...), language)
    entries = {}
    for position, content in enumerate(table.take("entry", list, "one or more [[entry]] tables")):
        if not isinstance(content, dict):
            raise table.fail("entry", content, "one or more [[entry]] tables")
        entry = _entry(_Table(content, f"entry[{position}]."), language, axes, names, knobs=knobs)
        if entry.name in entries:
            raise table.fail(f"entry[{position}].name", entry.name, "a name no other entry has")
        entries[entry.name] = entry
    found = KernelDef(
        language=language,
        sources=_relative(table, "sources"),
        headers=_relative(table, "headers", []),
        shared_headers=_relative(table, "shared_headers", []),
        axes=axes,
        derived=derived,
        options=_options(table.table("options", {}), language, names),
        features=features,
        minimum_cuda=minimum_cuda,
        hip=hip,
        entries=entries,
        constraints=constraints,
    )
    if not found.sources or not entries:
        raise table.fail("sources" if not found.sources else "entry", [], "at least one")
    table.end(FIELDS["definition"])
    return found


def _knobs(table: _Table, language: str) -> _Table:
    stated = table.take("knobs", dict, "a table", {})
    if language == EXTENSION and stated:
        raise table.fail("knobs", stated, "nothing: an extension has none")
    return _Table(stated, "knobs.")


def _relative(table: _Table, field: str, default: Any = ...) -> tuple[str, ...]:
    """Globs that stay inside the folder."""
    patterns = table.texts(field, default)
    for pattern in patterns:
        if not stays_inside(pattern):
            raise table.fail(field, pattern, "a path inside the kernel's folder, or a glob")
    return patterns


def _check_axis_name(table: _Table, field: str, name: str) -> None:
    try:
        check_axis_name(name)
    except InvalidDefinition as error:
        raise table.about(field, error) from None


def _axes(table: _Table) -> dict[str, Axis]:
    axes = {}
    for name, content in table.content.items():
        _check_axis_name(table, name, name)
        if not isinstance(content, dict):
            raise table.fail(name, content, "a table: { type = …, values = …, default = … }")
        axes[name] = _axis(name, _Table(content, f"spec.{name}."))
    return axes


def _axis(name: str, table: _Table) -> Axis:
    kind = table.choice("type", AXIS_TYPES)
    low = table.take("min", int, "an integer", None) if kind == "int" else None
    high = table.take("max", int, "an integer", None) if kind == "int" else None
    if low is not None and high is not None and low > high:
        raise table.fail("max", high, f"an integer from min = {low}")
    bare = Axis(name, kind, low=low, high=high)
    values = tuple(_of_axis(table, "values", value, bare) for value in table.take("values", list, "a list", []))
    if kind == "enum" and not values:
        raise table.fail("values", [], "at least one value")
    axis = bare._replace(values=values)
    if "default" in table.content:
        axis = axis._replace(default=_of_axis(table, "default", table.content.pop("default"), axis))
    table.end(AXIS_FIELDS[kind])
    return axis


def _of_axis(table: _Table, field: str, value: object, axis: Axis) -> SpecValue:
    if axis.kind in ("int", "bool") and isinstance(value, str):  # a number as text is for a command line
        raise table.fail(field, value, axis.allowed)
    try:
        return axis.normalise(value)
    except InvalidSpec as error:
        raise table.fail(field, value, error.facts["allowed"]) from None


def _targets(table: _Table, language: str) -> tuple[int | None, str, tuple[str, ...]]:
    cuda = table.take("cuda", str, "the oldest arch, such as sm_80", None)
    features = table.choice("features", FEATURES, "none")
    hip = table.texts("hip", [])
    if hip and language != "triton":
        raise table.fail("hip", list(hip), "nothing: only language triton builds for it")
    if cuda is None and not hip and language != EXTENSION:
        raise table.fail("cuda", cuda, "the oldest arch, such as sm_80")
    table.end(FIELDS["target"])
    oldest = None if cuda is None else _arch(table, "cuda", cuda, "sm_NN without a suffix")
    archs = tuple(_arch(table, "hip", arch, "gfx arches").arch for arch in hip)
    return (oldest.capability if oldest else None), features, archs


def _arch(table: _Table, backend: str, text: str, allowed: str) -> Target:
    with contextlib.suppress(UnsupportedTarget):
        found = parse_target(text)
        if found.backend == backend and not found.suffix:
            return found
    raise table.fail(backend, text, allowed)


def _options(table: _Table, language: str, names: set[str]) -> dict[str, tuple[str, ...] | Expression]:
    if language == EXTENSION:
        return extension_options(table)
    found: dict[str, tuple[str, ...] | Expression] = {}
    for name in OPTION_FIELDS[language].split():
        if name not in table.content:
            continue
        if name == "flags":
            flags = table.texts("flags")
            for flag in flags:
                if not flag.startswith("-") or not flag.isprintable() or REFUSED_FLAG.match(flag):
                    raise table.fail("flags", flag, "a compiler option that reads no file and names no target")
            found |= {name: flags} if flags else {}  # none is the same build as none mentioned
        else:
            found[name] = table.expression(name, table.content.pop(name), names)
    table.end(OPTION_FIELDS[language])
    return found


def _entry(table: _Table, language: str, axes: dict[str, Axis], names: set[str], *, knobs: dict[str, Knob]) -> Entry:
    pattern = MODULE_NAME if language == EXTENSION else ENTRY_NAME
    name = table.take("name", str, f"a name of {pattern.pattern}")
    if not pattern.fullmatch(name):
        raise table.fail("name", name, f"a name of {pattern.pattern}")
    if language == EXTENSION:
        return extension_entry(table, name)
    arguments: list[Argument] = []
    macros: set[str] = set()
    for position, content in enumerate(table.take("arguments", list, "a list of argument tables")):
        if not isinstance(content, dict):
            raise table.fail(f"arguments[{position}]", content, "a table: { name = …, type = … }")
        arguments.append(_argument(_Table(content, f"{table.path}arguments[{position}]."), language, axes, names))
        # Facts reach a source as macros with upper-case names: two arguments must differ in more than case.
        new, value = arguments[-1].name, arguments[-1].value
        is_taken = new in names and (value is None or value.text != new)  # a constexpr may be an axis or a knob under its name
        if is_taken or new.upper() in macros:
            raise table.fail(f"arguments[{position}].name", new, "a name that no axis, knob or argument has")
        macros.add(new.upper())
    scalars = {a.name for a in arguments if a.kind == "constexpr" or SCALARS.get(a.kind, "float")[0] in "iu"}
    launch = _launch(table.table("launch"), language, names | scalars)
    function = table.take("function", str, "a function name; {axis} stands for a value of the spec")
    for placeholder in re.findall(r"\{([^{}]*)\}", function):
        if placeholder not in names or language != "cuda":
            raise table.fail("function", function, "{axis} of " + (", ".join(sorted(names)) or "no axis"))
    own = read_defaults(table, knobs, set(axes))
    found = Entry(name, table.take("summary", str, "one line"), function, tuple(arguments), launch, own)
    table.end(FIELDS["entry"])
    return found


def _argument(table: _Table, language: str, axes: dict[str, Axis], names: set[str]) -> Argument:
    name = table.take("name", str, "an identifier")
    if not is_plain_name(name):
        raise table.fail("name", name, "an identifier that begins with a letter, no keyword, none of " + ", ".join(RESERVED))
    kind = table.choice("type", tuple(ARGUMENT_FIELDS))
    if kind in LACKING[language]:
        raise table.fail("type", kind, ", ".join(other for other in ARGUMENT_FIELDS if other not in LACKING[language]))
    reader = {"pointer": _pointer, "struct": _struct, "constexpr": _constexpr}.get(kind, _scalar)
    found = reader(table, Argument(name, kind), axes, names)
    table.end(ARGUMENT_FIELDS[kind])
    for field, fact in (("align", found.align), ("divisible_by", found.divisible_by)):
        if language == "triton" and fact % TRITON_FACT:
            raise table.fail(field, fact, f"multiples of {TRITON_FACT}")
    return found


def _pointer(table: _Table, bare: Argument, axes: dict[str, Axis], names: set[str]) -> Argument:  # noqa: ARG001
    dtypes = [axis.name for axis in axes.values() if axis.kind == "dtype"]
    allowed = "0, or a power of two from 2 to 256"
    align = table.number("align", allowed)
    if align not in ALIGNS:
        raise table.fail("align", align, allowed)
    return bare._replace(
        dtype=table.choice("dtype", (*dtypes, *DTYPES)),
        mutated=table.take("mutated", bool, "true, false", default=False),
        nullable=table.take("nullable", bool, "true, false", default=False),
        contiguous=table.take("contiguous", bool, "true, false", default=True),
        align=align,
    )


def _scalar(table: _Table, bare: Argument, axes: dict[str, Axis], names: set[str]) -> Argument:  # noqa: ARG001
    if "divisible_by" not in ARGUMENT_FIELDS[bare.kind].split():
        return bare
    divisor = table.number("divisible_by", "0, or a whole number from 2")
    if divisor == 1:
        raise table.fail("divisible_by", 1, "0, or a whole number from 2")
    return bare._replace(divisible_by=divisor)


def _struct(table: _Table, bare: Argument, axes: dict[str, Axis], names: set[str]) -> Argument:  # noqa: ARG001
    allowed = f"1 to {LARGEST_STRUCT_BYTES}"
    size = table.take("size_bytes", int, allowed)
    if not 1 <= size <= LARGEST_STRUCT_BYTES:
        raise table.fail("size_bytes", size, allowed)
    return bare._replace(size_bytes=size)


def _constexpr(table: _Table, bare: Argument, axes: dict[str, Axis], names: set[str]) -> Argument:  # noqa: ARG001
    value = table.take("value", object, "an integer, or an expression over the spec")
    return bare._replace(value=table.expression("value", value, names))


def _launch(table: _Table, language: str, names: set[str]) -> Launch:
    grid = table.expressions("grid", names)
    if language == "triton":
        table.end(LAUNCH_FIELDS[language])
        return Launch(grid)
    block = table.expressions("block", names)
    shared = table.take("shared_bytes", object, "an integer, or an expression", None)
    table.end(LAUNCH_FIELDS[language])
    return Launch(grid, block, None if shared is None else table.expression("shared_bytes", shared, names))
