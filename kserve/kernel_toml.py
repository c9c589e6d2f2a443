"""Reads a kernel.toml into a KernelDef, checking every field.

Reading executes nothing. Client and daemon read the same bytes with this file: the client for the message, the daemon
because it trusts no client.
"""

from __future__ import annotations

import re
from typing import Any

from kserve.definition import Argument, Entry, KernelDef, Launch
from kserve.errors import InvalidDefinition, InvalidSpec, UnsupportedTarget, closest
from kserve.expression import Expression
from kserve.outline import read_toml, stays_inside
from kserve.spec import AXIS_TYPES, DTYPES, RESERVED, SCALARS, Axis, SpecValue, check_axis_name, is_plain_name
from kserve.target import parse_target

LANGUAGES = ("cuda", "triton")
FEATURES = ("none", "arch", "family")
_KINDS = ("pointer", *SCALARS, "struct", "tensor_map", "constexpr")
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_OPTIONS = {"cuda": ("flags",), "triton": ("num_warps", "num_stages", "maxnreg")}
# Options that would change what kserve itself decides, or read a file that is not declared.
_REFUSED_FLAG = re.compile(
    r"-{1,2}(I|include|isystem|pre-include|arch|gpu-arch|pch|use-pch|create-pch|no-cache|device-debug|G|lineinfo|generate-line"
    r"|time|fdevice-time|dlto|dlink).*"
)


def read_definition(content: bytes, *, origin: str) -> KernelDef:
    """Read a kernel.toml.

    Args:
        content: the file's bytes.
        origin:  what an error calls the file.
    Raises:
        InvalidDefinition: names file, field, value and what is allowed.
    """
    try:
        return _definition(_Table(read_toml(content), ""))
    except (InvalidDefinition, UnsupportedTarget) as error:
        raise InvalidDefinition(f"{origin}: {error.message}", facts=error.facts, hint=error.hint) from None


class _Table:
    """A TOML table that is read field by field: what is left over at the end is an error."""

    def __init__(self, content: dict[str, Any], path: str) -> None:
        self.content = dict(content)
        self.path = path

    def fail(self, field: str, value: object, allowed: str) -> InvalidDefinition:
        return InvalidDefinition(f"field {self.path}{field} cannot be {value!r}", facts={"allowed": allowed})

    def take(self, field: str, kind: type, allowed: str, default: Any = ...) -> Any:
        if field not in self.content:
            if default is ...:
                raise InvalidDefinition(f"field {self.path}{field} is missing", facts={"allowed": allowed})
            return default
        value = self.content.pop(field)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.fail(field, value, allowed)
        return value

    def choice(self, field: str, allowed: tuple[str, ...], default: Any = ...) -> str:
        value: str = self.take(field, str, ", ".join(allowed), default)
        if value not in allowed and value != default:
            raise self.fail(field, value, ", ".join(allowed))
        return value

    def number(self, field: str, allowed: str, default: int = 0) -> int:
        value: int = self.take(field, int, allowed, default)
        if value < 0:
            raise self.fail(field, value, allowed)
        return value

    def texts(self, field: str, default: Any = ...) -> tuple[str, ...]:
        values = self.take(field, list, "a list of texts", default)
        if not all(isinstance(value, str) for value in values):
            raise self.fail(field, values, "a list of texts")
        return tuple(values)

    def expression(self, field: str, value: object, names: set[str]) -> Expression:
        if isinstance(value, bool):
            value = int(value)
        if not isinstance(value, int | str):
            raise self.fail(field, value, "an integer or an expression")
        try:
            found = Expression(value)
        except InvalidDefinition as error:
            raise InvalidDefinition(f"field {self.path}{field}: {error.message}", facts=error.facts) from None
        unknown = sorted(found.names - names)
        if unknown:
            raise self.fail(field, value, "an expression over " + ", ".join(sorted(names)))
        return found

    def expressions(self, field: str, names: set[str], default: Any = ...) -> tuple[Expression, ...]:
        values = self.take(field, list, "a list of one to three expressions", default)
        if values != default and not 1 <= len(values) <= 3:
            raise self.fail(field, values, "a list of one to three expressions")
        return tuple(self.expression(field, value, names) for value in values)

    def table(self, field: str, default: Any = ...) -> _Table:
        return _Table(self.take(field, dict, "a table", default), f"{self.path}{field}.")

    def end(self, known: str) -> None:
        if self.content:
            unknown = sorted(self.content)
            raise InvalidDefinition(
                f"field {self.path}{unknown[0]} is not known: {closest(unknown[0], known.split())}",
                facts={"allowed": known.replace(" ", ", ")},
            )


def _definition(table: _Table) -> KernelDef:
    if table.take("schema", int, "1") != 1:
        raise InvalidDefinition("field schema is not 1", facts={"allowed": "1"})
    language = table.choice("language", LANGUAGES)
    axes = _axes(table.table("spec", {}))
    derived: dict[str, Expression] = {}
    for name, value in table.table("derived", {}).content.items():
        check_axis_name(name)
        if name in axes:
            raise table.fail(f"derived.{name}", value, "a name that no axis has")
        derived[name] = table.expression(f"derived.{name}", value, set(axes) | set(derived))
    names = set(axes) | set(derived)
    minimum_cuda, features, hip = _targets(table.table("target"), language)
    entries = {}
    for position, content in enumerate(table.take("entry", list, "one or more [[entry]] tables")):
        if not isinstance(content, dict):
            raise table.fail("entry", content, "one or more [[entry]] tables")
        entry = _entry(_Table(content, f"entry[{position}]."), language, axes, names)
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
    )
    if not found.sources or not entries:
        raise table.fail("sources" if not found.sources else "entry", [], "at least one")
    table.end("schema language sources headers shared_headers spec derived options target entry")
    return found


def _relative(table: _Table, field: str, default: Any = ...) -> tuple[str, ...]:
    """Globs that stay inside the folder."""
    patterns = table.texts(field, default)
    for pattern in patterns:
        if not stays_inside(pattern):
            raise table.fail(field, pattern, "a path inside the kernel's folder, or a glob")
    return patterns


def _axes(table: _Table) -> dict[str, Axis]:
    axes = {}
    for name, content in table.content.items():
        check_axis_name(name)
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
    table.end("type min max values default" if kind == "int" else "type values default")
    return axis


def _of_axis(table: _Table, field: str, value: object, axis: Axis) -> SpecValue:
    try:
        return axis.normalise(value)
    except InvalidSpec as error:
        raise table.fail(field, value, error.facts["allowed"]) from None


def _targets(table: _Table, language: str) -> tuple[int | None, str, tuple[str, ...]]:
    cuda = table.take("cuda", str, "the oldest arch, such as sm_80", "")
    features = table.choice("features", FEATURES, "none")
    hip = table.texts("hip", [])
    for arch in hip:
        if parse_target(arch).backend != "hip" or language != "triton":
            raise table.fail("hip", arch, "gfx arches, and only for language triton")
    oldest = parse_target(cuda) if cuda else None
    if oldest and (oldest.backend != "cuda" or oldest.suffix):
        raise table.fail("cuda", cuda, "sm_NN without a suffix")
    table.end("cuda features hip")
    if oldest is None and not hip:
        raise table.fail("cuda", cuda, "the oldest arch, such as sm_80")
    return (oldest.capability if oldest else None), features, hip


def _options(table: _Table, language: str, names: set[str]) -> dict[str, tuple[str, ...] | Expression]:
    found: dict[str, tuple[str, ...] | Expression] = {}
    for name in _OPTIONS[language]:
        if name not in table.content:
            continue
        if name == "flags":
            flags = found[name] = table.texts("flags")
            for flag in flags:
                if not flag.startswith("-") or _REFUSED_FLAG.fullmatch(flag):
                    raise table.fail("flags", flag, "a compiler option that reads no file and names no target")
        else:
            found[name] = table.expression(name, table.content.pop(name), names)
    table.end(" ".join(_OPTIONS[language]))
    return found


def _entry(table: _Table, language: str, axes: dict[str, Axis], names: set[str]) -> Entry:
    name = table.take("name", str, f"a name of {_NAME.pattern}")
    if not _NAME.fullmatch(name):
        raise table.fail("name", name, f"a name of {_NAME.pattern}")
    arguments = []
    for position, content in enumerate(table.take("arguments", list, "a list of argument tables")):
        if not isinstance(content, dict):
            raise table.fail(f"arguments[{position}]", content, "a table: { name = …, type = … }")
        arguments.append(_argument(_Table(content, f"{table.path}arguments[{position}]."), language, axes, names))
        # Facts reach a source as macros with upper-case names: two arguments must differ in more than case.
        if arguments[-1].name in names or arguments[-1].name.upper() in [a.name.upper() for a in arguments[:-1]]:
            raise table.fail(f"arguments[{position}].name", arguments[-1].name, "a name that no axis or argument has")
    scalars = {a.name for a in arguments if a.kind == "constexpr" or SCALARS.get(a.kind, "float")[0] in "iu"}
    launch = _launch(table.table("launch"), language, names | scalars)
    function = table.take("function", str, "a function name; {axis} stands for a value of the spec")
    for placeholder in re.findall(r"\{(.*?)\}", function):
        if placeholder not in names or language != "cuda":
            raise table.fail("function", function, "{axis} of " + (", ".join(sorted(names)) or "no axis"))
    found = Entry(name, table.take("summary", str, "one line"), function, tuple(arguments), launch)
    table.end("name summary function arguments launch")
    return found


def _argument(table: _Table, language: str, axes: dict[str, Axis], names: set[str]) -> Argument:
    name = table.take("name", str, "an identifier")
    if not is_plain_name(name):
        raise table.fail("name", name, "an identifier that begins with a letter, no keyword, none of " + ", ".join(RESERVED))
    kind = table.choice("type", _KINDS)
    reader = {"pointer": _pointer, "struct": _struct, "constexpr": _constexpr}.get(kind, _scalar)
    found = reader(table, Argument(name, kind), axes, names)
    if language == "cuda" and kind == "constexpr":
        raise table.fail("type", kind, "a type other than constexpr: CUDA takes template arguments in `function`")
    if language == "triton" and kind in ("struct", "tensor_map"):
        raise table.fail("type", kind, "a type other than " + kind + " in language triton")
    if language == "triton" and (found.align % 16 or found.divisible_by % 16):
        raise table.fail("align" if found.align % 16 else "divisible_by", found.align or found.divisible_by, "multiples of 16")
    return found


def _pointer(table: _Table, bare: Argument, axes: dict[str, Axis], names: set[str]) -> Argument:  # noqa: ARG001
    dtypes = [axis.name for axis in axes.values() if axis.kind == "dtype"]
    found = bare._replace(
        dtype=table.choice("dtype", (*dtypes, *DTYPES)),
        mutated=table.take("mutated", bool, "true, false", default=False),
        nullable=table.take("nullable", bool, "true, false", default=False),
        contiguous=table.take("contiguous", bool, "true, false", default=True),
        align=table.number("align", "0, or a power of two from 2 to 256"),
    )
    if found.align and (found.align.bit_count() != 1 or not 2 <= found.align <= 256):
        raise table.fail("align", found.align, "0, or a power of two from 2 to 256")
    table.end("name type dtype mutated nullable contiguous align")
    return found


def _scalar(table: _Table, bare: Argument, axes: dict[str, Axis], names: set[str]) -> Argument:  # noqa: ARG001
    if SCALARS.get(bare.kind, "")[:1] not in ("i", "u"):
        table.end("name type")
        return bare
    found = bare._replace(divisible_by=table.number("divisible_by", "0, or a whole number from 2"))
    if found.divisible_by == 1:
        raise table.fail("divisible_by", 1, "0, or a whole number from 2")
    table.end("name type divisible_by")
    return found


def _struct(table: _Table, bare: Argument, axes: dict[str, Axis], names: set[str]) -> Argument:  # noqa: ARG001
    size = table.number("size_bytes", "1 to 4096", 0)
    if not 1 <= size <= 4096:
        raise table.fail("size_bytes", size, "1 to 4096")
    table.end("name type size_bytes")
    return bare._replace(size_bytes=size)


def _constexpr(table: _Table, bare: Argument, axes: dict[str, Axis], names: set[str]) -> Argument:  # noqa: ARG001
    value = table.expression("value", table.content.pop("value", None), names)
    table.end("name type value")
    return bare._replace(value=value)


def _launch(table: _Table, language: str, names: set[str]) -> Launch:
    grid = table.expressions("grid", names)
    if language == "triton":
        table.end("grid")
        return Launch(grid)
    block = table.expressions("block", names)
    shared = table.content.pop("shared_bytes", None)
    table.end("grid block shared_bytes")
    return Launch(grid, block, None if shared is None else table.expression("shared_bytes", shared, names))
