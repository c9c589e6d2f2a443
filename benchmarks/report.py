"""Makes the tables and plots of docs/performance.md from files in benchmarks/results.

    python benchmarks/report.py --coldstart benchmarks/results/coldstart-nvidia-h200.json
    python benchmarks/report.py --ops benchmarks/results/ops-nvidia-h200.json

Plots go to docs/images. A table replaces what stands between `<!-- table NAME -->` and `<!-- end -->` in the page.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot

ROOT = Path(__file__).resolve().parent.parent
PAGE, IMAGES = ROOT / "docs" / "performance.md", ROOT / "docs" / "images"
OURS, THEIRS = "#1f77b4", "#b0b0b0"
DOTS_PER_INCH = 110


def main() -> int:
    """Write what the given files hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--coldstart", type=Path, metavar="JSON", help="written by benchmarks/coldstart.py")
    parser.add_argument("--ops", type=Path, metavar="JSON", help="written by benchmarks/run.py")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--images", type=Path, default=IMAGES)
    arguments = parser.parse_args()
    if arguments.coldstart is None and arguments.ops is None:
        parser.error("nothing to report: give --coldstart or --ops")
    arguments.images.mkdir(parents=True, exist_ok=True)
    if arguments.coldstart is not None:
        coldstart_bars(json.loads(arguments.coldstart.read_text()), arguments.images / "coldstart.png")
    if arguments.ops is not None:
        found = json.loads(arguments.ops.read_text())
        for op in dict.fromkeys(row["op"] for row in found["rows"]):
            roofline(found, op, arguments.images / f"roofline-{op}.png")
        replace_table(arguments.page, "ops", ops_table(found))
    return 0


def coldstart_bars(found: dict[str, Any], path: Path) -> None:
    """Time to the first result of each arm, on a log axis; an arm with one round has no interval."""
    rows = [row for row in found["rows"] if row["metric"] == "first" and row["unit"] == "ms" and "further" not in row["arm"]]
    rows.sort(key=lambda row: row["found"][0], reverse=True)
    figure, axes = pyplot.subplots(figsize=(8, 0.32 * len(rows) + 1.2))
    values = [row["found"][0] for row in rows]
    colours = [OURS if row["arm"].startswith("kserve") else THEIRS for row in rows]
    axes.barh([row["arm"].replace(":", "  ") for row in rows], values, color=colours)
    for position, row in enumerate(rows):
        value, low, high = row["found"][:3]
        if high != "":
            axes.plot([max(low, value / 10), high], [position, position], color="black", linewidth=1)
        axes.annotate(
            f" {value:,.0f}" if value >= 100 else f" {value:.3g}",
            (max(value, high or value), position),
            va="center",
            fontsize=8,
        )
    axes.set(xscale="log", xlim=(min(values) / 3, max(values) * 6))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.set_xlabel(f"milliseconds to the first result, torch imported, {found['gpu']}")
    axes.margins(y=0.01)
    save(figure, path)


def roofline(found: dict[str, Any], op: str, path: Path) -> None:
    """Each arm at its intensity and its rate, under the two ceilings of the same run."""
    rows = [row for row in found["rows"] if row["op"] == op]
    copy, matmul = found["ceilings"]["copy_gb_s"], found["ceilings"]["matmul_tflop_s"]
    figure, axes = pyplot.subplots(figsize=(6.4, 4.4))
    at = [row["tflop_s"] / row["gb_s"] * 1e3 for row in rows]  # operations a byte
    span = [min(at) / 3, 10 * max(at)]  # around the op: the knee is far to the right of one that moves memory
    line = sorted({*span, *([knee] if (knee := 1e3 * matmul / copy) < span[1] else [])})
    ceiling = f"copy {copy:.0f} GB/s, matrix product {matmul:.0f} TFLOP/s"
    axes.plot(line, [min(matmul, copy * x / 1e3) for x in line], color="black", linewidth=1, label=ceiling)
    for arm, colour, marker in (
        ("kserve", OURS, "o"),
        ("compile", "#d62728", "s"),
        ("eager", THEIRS, "^"),
        ("vendor", "#2ca02c", "d"),
    ):
        chosen = [(x, row["tflop_s"]) for x, row in zip(at, rows, strict=True) if row["arm"] == arm]
        if chosen:
            axes.scatter(*zip(*chosen, strict=True), color=colour, marker=marker, label=arm, s=22, zorder=3)
    axes.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="TFLOP/s", title=f"{op}, {found['device']}")
    axes.legend(fontsize=8, loc="lower right")
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=DOTS_PER_INCH, metadata={"Software": None})
    pyplot.close(figure)


def ops_table(found: dict[str, Any]) -> str:
    """One row for each op, direction and shape: our time, its share of the copy, and how much longer the others take."""
    copy = found["ceilings"]["copy_gb_s"]
    lines = [
        f"{found['device']}, {found['versions']}, {found['date']}; copy of 1 GiB in the same run: {copy:.0f} GB/s.",
        "",
        "| op | dtype | shape | µs | share of copy | eager / ours | `torch.compile` / ours | vendor / ours |",
        "|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *op_lines(found["rows"]), *refused_lines(found["refused"])])


def op_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    arms: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        arms.setdefault((row["op"], row["direction"], row["dtype"], row["shape"]), {})[row["arm"]] = row
    for (op, direction, dtype, shape), found in arms.items():
        ours = found["kserve"]
        half = (ours["high_us"] - ours["low_us"]) / 2 / ours["time_us"]
        ratios = [f"{found[arm]['ratio']:.2f}" if arm in found else "" for arm in ("eager", "compile", "vendor")]
        cells = [
            f"{op} {direction}",
            dtype,
            shape,
            f"{ours['time_us']:.1f} ± {half:.1%}",
            f"{ours['share_of_copy']:.2f}",
            *ratios,
        ]
        yield "| " + " | ".join(cells) + " |"


def refused_lines(refused: list[dict[str, str]]) -> Iterator[str]:
    failures = [one for one in refused if not one["reason"].startswith("no library")]
    if failures:
        yield ""
    for one in failures:
        yield f"No number: {one['op']} {one['direction']} {one['shape']} {one['arm']}: {one['reason'].splitlines()[0]}"


def replace_table(page: Path, name: str, table: str) -> None:
    """Put the table between its two marks. SystemExit when the page has none."""
    text = page.read_text()
    marked = re.compile(rf"(<!-- table {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    if not marked.search(text):
        raise SystemExit(f"{page} has no place for the table: <!-- table {name} --> and <!-- end -->")
    page.write_text(marked.sub(lambda match: f"{match[1]}{table}\n{match[2]}", text, count=1))


if __name__ == "__main__":
    sys.exit(main())
