"""How the commands print: columns, fields, one place that writes to standard output."""

from __future__ import annotations

from collections.abc import Mapping


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
