"""A TOML table that is read field by field, checking each: what is left over at the end is an error."""

from __future__ import annotations

from typing import Any

from kserve.errors import InvalidDefinition, closest
from kserve.expression import Expression


class Table:
    """A TOML table that is read field by field: what is left over at the end is an error."""

    def __init__(self, content: dict[str, Any], path: str) -> None:
        self.content = dict(content)
        self.path = path

    def fail(self, field: str, value: object, allowed: str) -> InvalidDefinition:
        return InvalidDefinition(f"field {self.path}{field} cannot be {value!r:.200}", facts={"allowed": allowed})

    def about(self, field: str, error: InvalidDefinition) -> InvalidDefinition:
        return InvalidDefinition(f"field {self.path}{field}: {error.message}", facts=error.facts)

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
            raise self.about(field, error) from None
        unknown = sorted(found.names - names)
        if unknown:
            raise self.fail(field, value, "an expression over " + ", ".join(sorted(names)))
        return found

    def expressions(self, field: str, names: set[str]) -> tuple[Expression, ...]:
        values = self.take(field, list, "a list of one to three expressions")
        if not 1 <= len(values) <= 3:
            raise self.fail(field, values, "a list of one to three expressions")
        return tuple(self.expression(field, value, names) for value in values)

    def table(self, field: str, default: Any = ...) -> Table:
        return Table(self.take(field, dict, "a table", default), f"{self.path}{field}.")

    def end(self, known: str) -> None:
        if self.content:
            unknown = sorted(self.content)
            raise InvalidDefinition(
                f"field {self.path}{unknown[0]} is not known: {closest(unknown[0], known.split())}",
                facts={"allowed": known.replace(" ", ", ")},
            )
