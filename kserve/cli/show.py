"""How the commands print: columns, fields, one place that writes to standard output."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any


def say(text: str) -> None:
    """Print to standard output: the one place that does."""
    print(text)


def table(head: list[str], rows: list[list[str]]) -> str:
    """Left-aligned columns, as wide as their widest cell."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in [head, *rows]
    )


def fields(values: Mapping[str, str]) -> str:
    """One `name  value` a line."""
    width = max(map(len, values), default=0)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in values.items())


def spec_text(spec: dict[str, Any]) -> str:
    """An artifact's spec, as --set takes it."""
    return " ".join(f"{axis}={str(value).lower() if isinstance(value, bool) else value}" for axis, value in spec.items())


def ago(then: float) -> str:
    """How long that is past, roughly."""
    seconds = max(0.0, time.time() - then)
    for limit, divisor, unit in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / divisor:.0f} {unit} ago"
    return f"{seconds / 86400:.0f} days ago"
