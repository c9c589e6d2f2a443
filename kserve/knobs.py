"""Knobs: what a tuning may choose about a kernel. Read from kernel.toml, and settled to the values of one build.

A knob has a value in every build: the caller's, that of an environment variable, a tuning's, or its default.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from kserve.errors import InvalidDefinition, InvalidSpec, closest
from kserve.expression import Expression
from kserve.spec import INTEGER_BITS

if TYPE_CHECKING:
    from typing import Protocol

    class Fields(Protocol):
        """A table of kernel.toml as its reader hands it out, field by field."""

        content: dict[str, Any]

        def take(self, field: str, kind: type, allowed: str, default: Any = ...) -> Any: ...
        def table(self, field: str, default: Any = ...) -> Fields: ...
        def expression(self, field: str, value: object, names: set[str]) -> Expression: ...
        def fail(self, field: str, value: object, allowed: str) -> InvalidDefinition: ...
        def end(self, known: str) -> None: ...


Values = Mapping[str, int]
# Upper case: the name is the end of an environment variable, and never that of a field.
KNOB_NAME = re.compile(r"[A-Z][A-Z0-9_]{0,63}")
KNOB_ALIAS = re.compile(r"(?!KSERVE_)[A-Z][A-Z0-9_]{2,63}")
KNOB_FIELDS = "values min max default alias"
CONSTRAINTS = "constraints"
_NUMBER = re.compile(r"[0-9]{1,18}")


class Knob(NamedTuple):
    """One knob.

    Fields:
        values:    what `kserve tune` tries; all that is allowed, where there is no range.
        default:   an expression over the axes.
        low, high: where either is stated, every number between them is allowed too.
        alias:     a further environment variable that overrides it; empty for none.
    """

    name: str
    values: tuple[int, ...]
    default: Expression
    low: int | None = None
    high: int | None = None
    alias: str = ""

    @property
    def allowed(self) -> str:
        listed = ", ".join(map(str, self.values))
        if self.low is None and self.high is None:
            return listed
        return f"{listed}; any from {self.low or 0}" + ("" if self.high is None else f" to {self.high}")

    def admits(self, value: object) -> bool:
        if not isinstance(value, int) or isinstance(value, bool) or value.bit_length() > INTEGER_BITS:
            return False
        if value in self.values:
            return True
        is_ranged = self.low is not None or self.high is not None
        return is_ranged and (self.low or 0) <= value and (self.high is None or value <= self.high)


def settle(
    kernel: str,
    knobs: Mapping[str, Knob],
    constraints: tuple[Expression, ...],
    *,
    spec: Mapping[str, object],
    chosen: Values,
) -> dict[str, int]:
    """Every knob with its value: the chosen one, or the default.

    Raises: InvalidSpec for a knob that does not exist, a value that is not allowed, a constraint that does not hold.
    """
    for name in chosen:
        if name not in knobs:
            raise InvalidSpec(f"{kernel} has no knob {name!r}: {closest(name, [*knobs])}")
    try:
        values = {name: chosen[name] if name in chosen else knob.default.evaluate(spec) for name, knob in knobs.items()}
        for name, knob in knobs.items():
            if not knob.admits(values[name]):
                raise InvalidSpec(f"knob {name} of {kernel} cannot be {values[name]!r}", facts={"allowed": knob.allowed})
        broken = [one.text for one in constraints if not one.evaluate({**spec, **values})]
    except InvalidDefinition as error:
        raise InvalidSpec(f"knobs of {kernel}: {error.message}") from None
    if broken:
        raise InvalidSpec(f"{kernel} cannot have {shown(values)}", facts={"allowed": " and ".join(broken)})
    return values


def shown(values: Values) -> str:
    """`BLOCK=128 WARPS=4`."""
    return " ".join(f"{name}={value}" for name, value in values.items())


def variables_of(entry: str, folder: str, aliases: Mapping[str, str]) -> dict[str, list[str]]:
    """The environment variables that override each knob, the strongest first.

    Args:
        folder:  the name of the kernel's folder: one variable for all entries in it.
        aliases: knob -> a further variable, or nothing.
    """
    prefixes = [re.sub(r"[^A-Z0-9]", "_", name.upper()) for name in dict.fromkeys((entry, folder))]
    return {
        knob: [*(f"KSERVE_{prefix}_{knob}" for prefix in prefixes), *([alias] if alias else [])]
        for knob, alias in aliases.items()
    }


class Override(NamedTuple):
    """A knob that an environment variable sets: which one, and its text."""

    variable: str
    text: str

    @property
    def value(self) -> int | None:
        """None for a text that is no number."""
        return int(self.text) if _NUMBER.fullmatch(self.text) else None


def overrides_in(variables: Mapping[str, list[str]], environment: Mapping[str, str]) -> dict[str, Override]:
    """The knobs that the environment sets, each by its strongest variable."""
    found = {}
    for knob, names in variables.items():
        first = next((name for name in names if environment.get(name)), None)
        if first is not None:
            found[knob] = Override(first, environment[first])
    return found


def check_override(knob: Knob, override: Override) -> None:
    """Raises InvalidSpec naming the variable, what it says and what is allowed."""
    if not knob.admits(override.value):
        raise InvalidSpec(f"{override.variable} cannot be {override.text!r:.200}", facts={"allowed": knob.allowed})


def read_knobs(table: Fields, axes: set[str]) -> tuple[dict[str, Knob], tuple[Expression, ...]]:
    """The table `knobs`: each knob, and what must hold between them. Raises: InvalidDefinition."""
    constraints = table.take(CONSTRAINTS, list, "a list of expressions", [])
    knobs = {}
    for name in list(table.content):
        if not KNOB_NAME.fullmatch(name) or name in axes:
            raise table.fail(name, table.content[name], f"a name of {KNOB_NAME.pattern} that no axis has, or {CONSTRAINTS}")
        knobs[name] = _knob(name, table.table(name), axes)
    return knobs, tuple(table.expression(CONSTRAINTS, one, {*axes, *knobs}) for one in constraints)


def read_defaults(table: Fields, knobs: Mapping[str, Knob], axes: set[str]) -> dict[str, Knob]:
    """The knobs of one entry: the folder's, with the entry's own `knob_defaults`. Raises: InvalidDefinition."""
    own = table.table("knob_defaults", {})
    found = dict(knobs)
    for name, value in own.content.items():
        if name not in knobs:
            raise own.fail(name, value, ", ".join(knobs) or "nothing: there are no knobs")
        found[name] = knobs[name]._replace(default=_default(own, name, value, axes, knob=knobs[name]))
    return found


def _knob(name: str, table: Fields, axes: set[str]) -> Knob:
    allowed = "whole numbers from 0, each once"
    values = table.take("values", list, allowed)
    low, high = (table.take(bound, int, "a whole number from 0", None) for bound in ("min", "max"))
    bare = Knob(name, (), Expression(0), low, high)
    if any(bound is not None and bound < 0 for bound in (low, high)) or (low or 0) > (low or 0 if high is None else high):
        raise table.fail(
            "max" if high is not None else "min", high if high is not None else low, "a range of whole numbers from 0"
        )
    is_bounded = low is not None or high is not None
    for value in values:
        is_whole = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        if not is_whole or values.count(value) > 1 or (is_bounded and not bare.admits(value)):
            raise table.fail("values", value, allowed + (" within min and max" if is_bounded else ""))
    if not values:
        raise table.fail("values", values, "at least one")
    knob = bare._replace(values=tuple(values))
    default = _default(table, "default", table.take("default", object, "an expression over the axes"), axes, knob=knob)
    alias = table.take("alias", str, KNOB_ALIAS.pattern, "")
    if alias and not KNOB_ALIAS.fullmatch(alias):
        raise table.fail("alias", alias, f"an environment variable: {KNOB_ALIAS.pattern}")
    table.end(KNOB_FIELDS)
    return knob._replace(default=default, alias=alias)


def _default(table: Fields, field: str, value: object, axes: set[str], *, knob: Knob) -> Expression:
    found = table.expression(field, value, axes)
    if not found.names and not knob.admits(found.evaluate({})):
        raise table.fail(field, value, knob.allowed)
    return found
