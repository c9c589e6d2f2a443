"""The spec of a kernel: its axes, the values they take, and one canonical form of what a caller asked for."""

from __future__ import annotations

import keyword
import operator
import re
from collections.abc import Hashable, Mapping
from functools import lru_cache
from typing import NamedTuple

from kserve.errors import InvalidDefinition, InvalidSpec, closest

SpecValue = bool | int | str
Spec = dict[str, SpecValue]
# Of an axis and of what an expression gives, beside the sign: what an i64 argument holds.
INTEGER_BITS = 63


class Dtype(NamedTuple):
    """One element type, under torch's name."""

    size_bytes: int
    cuda: str  # spelling in CUDA C++
    triton: str  # spelling in a Triton signature
    packing: str  # struct format character; empty where Python has none
    typestr: str  # of __cuda_array_interface__


DTYPES = {
    "bool": Dtype(1, "bool", "i1", "?", "|b1"),
    "int8": Dtype(1, "signed char", "i8", "b", "|i1"),
    "int16": Dtype(2, "short", "i16", "h", "<i2"),
    "int32": Dtype(4, "int", "i32", "i", "<i4"),
    "int64": Dtype(8, "long long", "i64", "q", "<i8"),
    "uint8": Dtype(1, "unsigned char", "u8", "B", "|u1"),
    "uint16": Dtype(2, "unsigned short", "u16", "H", "<u2"),
    "uint32": Dtype(4, "unsigned int", "u32", "I", "<u4"),
    "uint64": Dtype(8, "unsigned long long", "u64", "Q", "<u8"),
    "float16": Dtype(2, "__half", "fp16", "e", "<f2"),
    "bfloat16": Dtype(2, "__nv_bfloat16", "bf16", "", ""),
    "float32": Dtype(4, "float", "fp32", "f", "<f4"),
    "float64": Dtype(8, "double", "fp64", "d", "<f8"),
}

# What a scalar argument is called in kernel.toml, and the dtype it has.
SCALARS = {
    "bool": "bool",
    "i8": "int8",
    "i16": "int16",
    "i32": "int32",
    "i64": "int64",
    "u8": "uint8",
    "u16": "uint16",
    "u32": "uint32",
    "u64": "uint64",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
}

RESERVED = frozenset({"name", "target", "facts", "sizes", "timeout_s", "debug", "stream", "grid", "args"})
# What expressions and generated launch code call: a name like these would hide it.
_FUNCTIONS = frozenset({"min", "max", "cdiv", "next_pow2", "int", "float", "bool", "bytes", "len"})
REFUSED_NAMES = frozenset({*keyword.kwlist, *RESERVED, *_FUNCTIONS})
AXIS_TYPES = ("dtype", "int", "bool", "enum", "string")
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
# A string reaches a compiler's command line or a C++ name: no white space, quotes or shell characters.
STRING = re.compile(r"[A-Za-z0-9_.:+-]{1,64}")


class Axis(NamedTuple):
    """One axis of a spec.

    Fields:
        kind:     one of AXIS_TYPES.
        values:   the allowed values; empty when a range or any value is allowed.
        low/high: the allowed range of an int axis, both ends included.
        default:  the value when the caller names none; None when the axis is required.
    """

    name: str
    kind: str
    values: tuple[SpecValue, ...] = ()
    low: int | None = None
    high: int | None = None
    default: SpecValue | None = None

    @property
    def allowed(self) -> str:
        if self.values:
            return ", ".join(_shown(value) for value in self.values)
        if self.kind == "int":
            low = "…" if self.low is None else str(self.low)
            return f"an integer, {low} to {'…' if self.high is None else self.high}"
        return {"dtype": ", ".join(DTYPES), "bool": "true, false"}.get(self.kind, f"text of {STRING.pattern}")

    def normalise(self, value: object) -> SpecValue:
        """The value in its one form: a torch dtype by name, a NumPy integer as int.

        Raises: InvalidSpec, naming the axis, the value and what is allowed.
        """
        plain = _plain(self.kind, value)
        if plain is None or not self._admits(plain):
            raise InvalidSpec(f"axis {self.name} cannot be {value!r}", facts={"allowed": self.allowed})
        return plain

    def _admits(self, value: SpecValue) -> bool:
        if self.values:
            return value in self.values
        if self.kind == "int":
            low = self.low is None or int(value) >= self.low
            return low and (self.high is None or int(value) <= self.high)
        return True


def _shown(value: SpecValue) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _plain(kind: str, value: object) -> SpecValue | None:
    """`value` as the plain Python value of that kind, or None when it is not one."""
    if kind == "dtype":
        name = str(value).removeprefix("torch.")
        return name if name in DTYPES else None
    if kind == "bool":
        return _boolean(value)
    if kind == "int":
        return _integer(value)
    return value if isinstance(value, str) and STRING.fullmatch(value) else None


def _boolean(value: object) -> bool | None:
    if isinstance(value, str):  # from a command line
        return {"true": True, "false": False, "1": True, "0": False}.get(value.lower())
    return bool(value) if is_bool(value) else None


def is_bool(value: object) -> bool:
    """Whether the value is a bool, Python's or NumPy's."""
    return isinstance(value, bool) or (str(getattr(value, "dtype", "")) == "bool" and getattr(value, "shape", None) == ())


def _integer(value: object) -> int | None:
    if is_bool(value):
        return None
    if isinstance(value, str):  # from a command line
        return int(value) if re.fullmatch(r"-?[0-9]{1,18}", value) else None
    try:
        found = operator.index(value)  # type: ignore[arg-type]  # anything else raises TypeError
    except TypeError:
        return None
    return found if found.bit_length() <= INTEGER_BITS else None


def normalise_spec(kernel: str, axes: Mapping[str, Axis], wanted: Mapping[str, object]) -> Spec:
    """Every axis with its value: the caller's, normalised, or the default; in the axes' own order.

    Raises: InvalidSpec for an axis that does not exist, a value that is not allowed, a required axis left out.
    """
    for name in wanted:
        if name not in axes:
            raise InvalidSpec(f"{kernel} has no axis {name!r}: {closest(name, list(axes))}")
    spec: Spec = {}
    for name, axis in axes.items():
        if name in wanted:
            spec[name] = axis.normalise(wanted[name])
        elif axis.default is not None:
            spec[name] = axis.default
        else:
            raise InvalidSpec(
                f"{kernel} needs a value for axis {name}",
                facts={"allowed": axis.allowed},
                hint=f"pass {name}=…, on the command line --set {name}=…",
            )
    return spec


def is_same_value(value: SpecValue, wished: object) -> bool:
    """Whether a caller's value for an axis stands for this one: a torch dtype for its name, a NumPy integer for an int."""
    kind = "bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "dtype" if value in DTYPES else "string"
    return _plain(kind, wished) == value


@lru_cache(maxsize=1024)
def is_plain_name(name: Hashable) -> bool:
    """Whether the text can name an axis or an argument: launch code is generated with these names in it."""
    return isinstance(name, str) and bool(NAME.fullmatch(name)) and name not in REFUSED_NAMES


def check_axis_name(name: str) -> None:
    """Raises InvalidDefinition for a name that is reserved or no plain identifier."""
    if not is_plain_name(name) or name in DTYPES:  # a pointer's dtype is a dtype's name or an axis's
        allowed = "letters, digits and underscores, a letter first; no Python keyword; none of " + ", ".join(
            sorted({*RESERVED, *_FUNCTIONS, *DTYPES})
        )
        raise InvalidDefinition(f"axis cannot be called {name!r}", facts={"allowed": allowed})
