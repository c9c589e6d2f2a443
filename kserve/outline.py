"""The outline of a kernel.toml: what a client needs of it to ask the service, in half the time of the whole."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from kserve.errors import InvalidDefinition

FILE_NAME = "kernel.toml"


class Outline(NamedTuple):
    """The names of the entries and the patterns of the files. Nothing else is checked: the service does that."""

    names: tuple[str, ...]
    sources: tuple[str, ...]
    headers: tuple[str, ...]
    shared_headers: tuple[str, ...]


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
    except InvalidDefinition as error:
        raise InvalidDefinition(f"{origin}: {error.message}") from None
    except (KeyError, TypeError, AttributeError):
        raise InvalidDefinition(f"{origin}: it lists no sources, or no entries with names") from None
    if outside:
        raise InvalidDefinition(f"{origin}: pattern {outside[0]!r} leads out of the kernel's folder")
    return Outline(names, *patterns)


def read_toml(content: bytes) -> dict[str, Any]:
    """The decoded file. Raises: InvalidDefinition."""
    import tomllib

    try:
        return tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:  # syntax, encoding, endless numbers, endless brackets
        raise InvalidDefinition(f"not TOML: {error}") from None


def stays_inside(pattern: str) -> bool:
    """Whether the glob can only match inside the folder it is applied to."""
    return bool(pattern) and not pattern.startswith("/") and ".." not in pattern.split("/") and "\\" not in pattern
