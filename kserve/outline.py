"""The outline of a kernel.toml: what a client needs of it to ask the service, in half the time of the whole."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from kserve.errors import InvalidDefinition
from kserve.knobs import CONSTRAINTS
from kserve.spec import INTEGER_BITS

FILE_NAME = "kernel.toml"
_LARGEST_BYTES = 64 << 10
# The time to read a dotted key grows with the square of its parts.
_MOST_DOTS = 1000
_DEEPEST = 8


class Outline(NamedTuple):
    """The names of the entries, the patterns of the files, the knobs. Nothing else is checked: the service does that.

    Fields:
        knobs: of each, its name and its further environment variable.
    """

    names: tuple[str, ...]
    sources: tuple[str, ...]
    headers: tuple[str, ...]
    shared_headers: tuple[str, ...]
    knobs: tuple[tuple[str, str], ...] = ()


@lru_cache(maxsize=256)
def read_outline(content: bytes, *, origin: str) -> Outline:
    """Read the outline.

    Args:
        origin: what an error calls the file.
    Raises:
        InvalidDefinition: not TOML, no list of named entries, a pattern that leads out of the folder.
    """
    try:
        plain = read_toml(content)
        patterns = [tuple(plain.get(field, ())) for field in ("sources", "headers", "shared_headers")]
        outside = [pattern for group in patterns for pattern in group if not stays_inside(pattern)]
        names = tuple(entry["name"] for entry in plain["entry"])
        knobs = tuple((name, knob.get("alias", "")) for name, knob in plain.get("knobs", {}).items() if name != CONSTRAINTS)
    except InvalidDefinition as error:
        raise InvalidDefinition(f"{origin}: {error.message}", facts=error.facts) from None
    except (KeyError, TypeError, AttributeError):
        facts = {"allowed": "lists of texts, and [[entry]] tables with a name"}
        raise InvalidDefinition(f"{origin}: its files or its entries are not listed", facts=facts) from None
    if outside:
        facts = {"allowed": "paths inside the kernel's folder, and globs"}
        raise InvalidDefinition(f"{origin}: pattern {outside[0]!r} leads out of the kernel's folder", facts=facts)
    sources, headers, shared_headers = patterns
    return Outline(names, sources, headers, shared_headers, knobs)


def read_toml(content: bytes) -> dict[str, Any]:
    """The decoded file, whose values can be printed. Raises: InvalidDefinition."""
    import tomllib

    if len(content) > _LARGEST_BYTES:
        raise InvalidDefinition(f"a file of {len(content)} bytes", facts={"allowed": f"at most {_LARGEST_BYTES} bytes"})
    if any(line.count(b".") > _MOST_DOTS for line in content.splitlines()):
        raise InvalidDefinition("a line is full of dots", facts={"allowed": f"at most {_MOST_DOTS} a line"})
    try:
        plain = tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:  # syntax, encoding, endless numbers, endless brackets
        raise InvalidDefinition(f"not TOML: {error}", facts={"allowed": "TOML 1.0 in UTF-8"}) from None
    _check_values(plain, "", _DEEPEST)
    return plain


def _check_values(value: object, field: str, depth: int) -> None:
    """Raises InvalidDefinition for what no field takes and nothing can print: endless nesting, endless numbers."""
    if depth == 0:
        raise InvalidDefinition(f"field {field} is nested too deep", facts={"allowed": f"{_DEEPEST} levels"})
    if isinstance(value, int) and value.bit_length() > INTEGER_BITS:
        raise InvalidDefinition(
            f"field {field} cannot be so large a number", facts={"allowed": f"{INTEGER_BITS} bits and a sign"}
        )
    if isinstance(value, dict):
        for name, content in value.items():
            _check_values(content, f"{field}.{name}" if field else name, depth - 1)
    if isinstance(value, list):
        for position, content in enumerate(value):
            _check_values(content, f"{field}[{position}]", depth - 1)


def stays_inside(pattern: str) -> bool:
    """Whether the glob can only match inside the folder it is applied to, and can be printed."""
    plain = pattern.isprintable() and "\\" not in pattern
    return bool(pattern) and plain and not pattern.startswith("/") and ".." not in pattern.split("/")
