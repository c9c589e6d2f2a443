"""What the text of a setting may be. Each reader gives the value, or raises ValueError, KeyError, OSError or RuntimeError."""

from __future__ import annotations

import os
from pathlib import Path


def flag(text: str) -> bool:
    """Yes or no."""
    words = {
        "1": True,
        "true": True,
        "yes": True,
        "on": True,
        "0": False,
        "false": False,
        "no": False,
        "off": False,
    }
    return words[text.lower()]


def paths(text: str) -> tuple[Path, ...]:
    """Paths, separated by colons."""
    return tuple(path(part) for part in text.split(os.pathsep) if part)


def stores(text: str) -> tuple[Path | None, ...]:
    """The writable store, then the read-only ones below it; None where the first is left to the default."""
    if not text:
        raise ValueError
    first, *layers = text.split(os.pathsep)
    return (path(first) if first else None, *map(path, filter(None, layers)))


def path(text: str) -> Path:
    """One path, made absolute; `~` is the home."""
    if not text:
        raise ValueError
    return Path(text).expanduser().resolve()


def uids(text: str) -> tuple[int, ...]:
    """User ids, separated by commas or spaces."""
    return tuple(int(part) for part in text.replace(",", " ").split())


def positive(text: str) -> float:
    """A finite number above 0."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise ValueError
    return number


def count(text: str) -> int:
    """A whole number from 1."""
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def level(text: str) -> str:
    """A log level."""
    if text.lower() not in ("debug", "info", "warning", "error"):
        raise ValueError
    return text.lower()


def launcher(text: str) -> str:
    """What launches."""
    if text.lower() not in ("auto", "python", "compiled"):
        raise ValueError
    return text.lower()


def backend(text: str) -> str:
    """What serves an op."""
    if text.lower() not in ("pytorch", "compiled", "cuda"):
        raise ValueError
    return text.lower()
