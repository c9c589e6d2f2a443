"""A sweep as a person reads it: a table, and a heat map where two knobs vary."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kserve.cli.show import table
from kserve.measure.sweep import Row

# Backgrounds of a terminal from the winner to twice its time, as 256-colour codes.
_COLOURS = (22, 28, 64, 100, 130, 124, 88)


def rows_table(rows: Sequence[Row], *, n_bytes: int | None) -> str:
    """The table of a sweep, in the order of its rows."""
    knobs = [*dict.fromkeys(name for row in rows for name in row.knobs)]
    head = [*knobs, "TIME", "RATIO", *(["GB/S"] if n_bytes else []), "REGISTERS", "SPILL", "SHARED", "STATE"]
    return table(head, [[*(str(row.knobs.get(name, "")) for name in knobs), *_cells(row, n_bytes)] for row in rows])


def _cells(row: Row, n_bytes: int | None) -> list[str]:
    time = ratio = speed = ""
    if row.us is not None and row.ratio is not None:
        time = f"{row.us[0]:.2f} us ± {50 * (row.us[2] - row.us[1]) / row.us[0]:.1f} %"
        ratio = f"{row.ratio[0]:.3f} ({row.ratio[1]:.3f} to {row.ratio[2]:.3f})"
        speed = f"{n_bytes / row.us[0] / 1e3:.0f}" if n_bytes else ""
    facts = [str(row.resources.get(name, "")) for name in ("registers", "spill_bytes", "shared_bytes")]
    word = "plateau" if row.is_on_plateau else row.state
    return [time, ratio, *([speed] if n_bytes else []), *facts, f"{word}: {row.reason}" if row.reason else word]


def heat_map(rows: Sequence[Row]) -> list[str]:
    """Lines of the ratios to the winner over the two knobs that vary; none when it is another number of them."""
    timed = [row for row in rows if row.ratio is not None]
    values = {name: sorted({row.knobs[name] for row in timed}) for name in (timed[0].knobs if timed else ())}
    varying = [name for name, found in values.items() if len(found) > 1]
    if len(varying) != 2:
        return []
    down, across = varying
    ratios = {(row.knobs[down], row.knobs[across]): row.ratio[0] for row in timed if row.ratio is not None}
    width = max(7, *(len(f"{across} {value}") for value in values[across])) + 1
    lines = [
        "",
        " " * len(f"{down} {values[down][-1]} ") + "".join(f"{across} {value}".rjust(width) for value in values[across]),
    ]
    for one in values[down]:
        cells = "".join(_cell(ratios.get((one, other)), width) for other in values[across])
        lines.append(f"{down} {one} ".ljust(len(f"{down} {values[down][-1]} ")) + cells)
    return lines


def _cell(ratio: float | None, width: int) -> str:
    text = ("" if ratio is None else f"{ratio:.3f}").rjust(width)
    if ratio is None or not sys.stdout.isatty():
        return text
    place = min(len(_COLOURS) - 1, int((ratio - 1.0) * len(_COLOURS)))
    return f"\x1b[48;5;{_COLOURS[max(place, 0)]};97m{text}\x1b[0m"
