"""What a run found, as rows, a table, and two files."""

from __future__ import annotations

import csv
import json
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

from cold.arms import Arm
from cold.workloads import Norm, RealSpace

from kserve.measure.timing import ERROR, Interval, median_interval, ratio_interval

N, R = Norm.name, RealSpace.name
FIELDS = ("arm", "metric", "median", "low", "high", "n", "unit", "road", "gpu", "versions", "date")
# Everything else is milliseconds.
UNITS = {"memo": ("us", 1e6), "launch": ("us", 1e6), "over_driver": ("us", 1e6)}
# What is set against what; a pair that took turns in one run has an interval.
RATIOS: list[tuple[str, str, tuple[str, ...]]] = [
    (f"triton-warm:{R}", f"kserve-direct:{R}", ("first", "start_to_first", "second", "further")),
    (f"triton-warm:{R}", f"kserve-daemon:{R}", ("first", "second", "further")),
    (f"triton-cold:{R}", f"kserve-built:{R}", ("first", "second")),
    (f"cupy-warm:{N}", f"kserve-direct:{N}", ("first", "second", "further")),
    (f"cuda-core-warm:{N}", f"kserve-direct:{N}", ("first", "second", "further")),
    (f"extension-warm:{N}", f"kserve-direct:{N}", ("first",)),
    (f"hugging-face:{N}", f"kserve-direct:{N}", ("first",)),
    (f"extension-cold:{N}", f"kserve-built:{N}", ("first",)),
    (f"kserve-direct:{R}", f"driver:{R}", ("first", "second", "further")),
    (f"kserve-direct:{N}", f"driver:{N}", ("first", "further")),
    *(
        (f"crowd-{n}-kserve-{state}:{R}", f"crowd-1-kserve-{state}:{R}", ("wall",))
        for state in ("built", "direct")
        for n in (2, 8, 16)
    ),
    (f"crowd-16-triton-cold:{R}", f"crowd-16-kserve-built:{R}", ("wall",)),
    (f"crowd-16-triton-warm:{R}", f"crowd-16-kserve-direct:{R}", ("wall",)),
]


class Bar(NamedTuple):
    """What a figure has to reach, in the unit of its row."""

    what: str
    arm: str
    metric: str
    limit: float
    at_least: bool = False


BARS = [
    Bar("first kernel from disk, import included, ms", f"kserve-direct:{R}", "first", 25.0),
    Bar("a further kernel, ms", f"kserve-direct:{R}", "further", 1.0),
    Bar("a batch of 50, ms", f"kserve-direct:{R}", "batch", 25.0),
    Bar("the same again, us", f"kserve-direct:{R}", "memo", 2.0),
    Bar("first: Triton's warm cache / kserve", f"triton-warm:{R} / kserve-direct:{R}", "first", 20.0, at_least=True),
    Bar("further: Triton's warm cache / kserve", f"triton-warm:{R} / kserve-direct:{R}", "further", 3.0, at_least=True),
    Bar("16 processes cold / one", f"crowd-16-kserve-built:{R} / crowd-1-kserve-built:{R}", "wall", 1.1),
    Bar("launch: Python road / Triton", f"launch:kserve {R}, python / launch:triton {R}", "launch", 0.70),
    Bar("launch: Python road - driver, us", f"launch:kserve {R}, python", "over_driver", 3.5),
    Bar("launch: compiled / Triton", f"launch:kserve {R}, compiled / launch:triton {R}", "launch", 0.65),
    Bar("launch: compiled - driver, us", f"launch:kserve {R}, compiled", "over_driver", 1.5),
]
COLUMNS = ("first", "first_with_torch", "start_to_first", "second", "further", "batch", "wall", "process")


class Row(NamedTuple):
    """One figure of one arm, or of one arm over another."""

    arm: str
    metric: str
    found: Interval
    unit: str
    road: str = ""


class Record(NamedTuple):
    """What one arm reported in each of its turns, and the error its intervals are given."""

    arm: Arm
    reports: list[dict[str, Any]]
    error: float = ERROR

    def values(self, metric: str) -> list[float]:
        return [report["seconds"][metric] for report in self.reports if metric in report["seconds"]]

    @property
    def road(self) -> str:
        """Every road and origin that was seen, so that a surprise shows."""
        facts = [report["facts"] for report in self.reports]
        roads = [fact["road"] for fact in facts if "road" in fact]
        origins = [origin for fact in facts for origin in fact.get("origins", {})]
        return ", ".join(dict.fromkeys([*roads, *sorted(origins)]))


def rows_of(records: dict[str, Record]) -> list[Row]:
    """Medians of every figure of every arm, then the ratios."""
    rows = []
    for name, record in records.items():
        metrics = dict.fromkeys(metric for report in record.reports for metric in report["seconds"])
        for metric in metrics:
            unit, factor = UNITS.get(metric, ("ms", 1e3))
            found = median_interval(record.values(metric), error=record.error)
            rows.append(Row(name, metric, _scaled(found, factor), unit, record.road))
    for ours, theirs, metrics in RATIOS:
        if ours in records and theirs in records:
            rows += _ratios(records[ours], records[theirs], metrics)
    return rows


def _ratios(ours: Record, theirs: Record, metrics: tuple[str, ...]) -> list[Row]:
    rows, name = [], f"{ours.arm.id} / {theirs.arm.id}"
    for metric in metrics:
        above, below = ours.values(metric), theirs.values(metric)
        if not above or not below:
            continue
        if ours.arm.group == theirs.arm.group and len(above) == len(below):
            found = ratio_interval(above, below, error=ours.error)
        else:  # they did not take turns
            ratio = median_interval(above).value / median_interval(below).value
            found = Interval(ratio, 0.0, math.inf, min(len(above), len(below)))
        rows.append(Row(name, metric, found, "ratio"))
    return rows


def launch_rows(facts: dict[str, Any]) -> list[Row]:
    """The rows of the launch process: microseconds, ratios to Triton's launcher, differences to the driver's call."""
    rows = []
    for name, found in facts["medians"].items():
        rows.append(Row(f"launch:{name}", "launch", _scaled(Interval(*found), 1e6), "us"))
    for name, found in facts["over_driver"].items():
        rows.append(Row(f"launch:{name}", "over_driver", _scaled(Interval(*found), 1e6), "us"))
    for name, found in facts["ratios"].items():
        rows.append(Row(f"launch:{name} / launch:triton realspace_fwd", "launch", Interval(*found), "ratio"))
    return rows


def _scaled(found: Interval, factor: float) -> Interval:
    return Interval(found.value * factor, found.low * factor, found.high * factor, found.n)


def summary(rows: list[Row], reasons: dict[str, str], *, bars: bool) -> str:
    """The table a person reads: arms, ratios, launches, bars, and what has no number."""
    figures = {(row.arm, row.metric): row for row in rows}
    arms = list(dict.fromkeys(row.arm for row in rows if row.metric in ("process", "wall") and row.unit != "ratio"))
    head = ["milliseconds", *COLUMNS, "road, origins"]
    body = [[arm, *(_with_width(figures.get((arm, column))) for column in COLUMNS), _road(figures, arm)] for arm in arms]
    lines = _aligned([head, *body])
    others = [row for row in rows if row.arm not in arms or row.metric == "memo"]
    lines += ["", *_aligned([[row.arm, row.metric, _figure(row), row.unit, _range(row)] for row in others])]
    if bars:
        lines += ["", *_aligned([_verdict(figures, bar) for bar in BARS])]
    return "\n".join([*lines, "", *(f"no number: {name}: {reason}" for name, reason in reasons.items())])


def _road(figures: dict[tuple[str, str], Row], arm: str) -> str:
    return next(row.road for (name, _), row in figures.items() if name == arm)


def _figure(row: Row | None) -> str:
    return "" if row is None else f"{row.found.value:.3g}" if row.found.value < 100 else f"{row.found.value:.0f}"


def _with_width(row: Row | None) -> str:
    if row is None or not math.isfinite(row.found.high):
        return _figure(row)
    return f"{_figure(row)} ±{row.found.half_width:.0%}"


def _range(row: Row) -> str:
    known = math.isfinite(row.found.high)
    return f"{row.found.low:.3g} to {row.found.high:.3g}, n {row.found.n}" if known else f"no interval, n {row.found.n}"


def _verdict(figures: dict[tuple[str, str], Row], bar: Bar) -> list[str]:
    row, sign = figures.get((bar.arm, bar.metric)), ">=" if bar.at_least else "<="
    if row is None:
        return ["bar", bar.what, f"{sign} {bar.limit:g}", "not measured"]
    met = row.found.value >= bar.limit if bar.at_least else row.found.value <= bar.limit
    return ["bar", bar.what, f"{sign} {bar.limit:g}", f"{_figure(row)} {'met' if met else 'MISSED'}"]


def _aligned(table: list[list[str]]) -> list[str]:
    if not table:
        return []
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]


def write(folder: Path, rows: list[Row], found: dict[str, Any]) -> Path:
    """`coldstart-<gpu>-<date>.csv` with the rows and .json with everything; the stem of both."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"coldstart-{found['gpu'].replace(' ', '-').lower()}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
    versions = "; ".join(f"{name} {version}" for name, version in found["versions"].items())
    with stem.with_suffix(".csv").open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(FIELDS)
        for row in rows:
            figures = [_plain(value) for value in row.found[:3]]
            lines.writerow(
                [row.arm, row.metric, *figures, row.found.n, row.unit, row.road, found["gpu"], versions, found["date"]]
            )
    plain = [row._asdict() | {"found": [*map(_plain, row.found[:3]), row.found.n]} for row in rows]
    stem.with_suffix(".json").write_text(json.dumps({**found, "rows": plain}, indent=1) + "\n")
    return stem


def _plain(value: float) -> float | str:
    """Six digits; empty for a bound that is not known."""
    return float(f"{value:.6g}") if math.isfinite(value) else ""
