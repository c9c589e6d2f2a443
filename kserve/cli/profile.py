"""`kserve profile`: where a step of a model spends its time."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from kserve.cli.show import say, table
from kserve.errors import RequestError
from kserve.measure import profile
from kserve.measure.device import default_device

_COLUMNS = ["NAME", "CALLS", "SELF MS", "% OF TOTAL", "SELF MB"]


def add_command(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument(
        "file", type=Path, help="Python file with `profiled(device)`, such as benchmarks/models/realspace_step.py"
    )
    parser.add_argument("--device", help="torch device; cuda where there is one")
    parser.add_argument("--torch_profile", action="store_true", help="run the totals under torch's profiler too: three tables")
    parser.add_argument("--profile_rows", type=int, default=profile.N_ROWS, metavar="N", help="rows of each table")
    parser.add_argument("--n_timed", type=int, default=profile.N_TIMED, metavar="N", help="timed calls of each section")


def run(arguments: argparse.Namespace) -> int:
    """Time the sections, profile the totals, print both."""
    if min(arguments.profile_rows, arguments.n_timed) < 1:
        raise RequestError("--profile_rows and --n_timed cannot be below 1")
    device = arguments.device or default_device()
    subject = profile.load_profiled(arguments.file, device=device)
    lines = profile.time_sections(subject, device=device, n_timed=arguments.n_timed)
    tables = profile.torch_tables(subject, device=device, n_rows=arguments.profile_rows) if arguments.torch_profile else []
    found = profile.report(subject, device=device, lines=lines, tables=tables)
    say(json.dumps(found, indent=2) if arguments.json else _shown(found, lines, tables))
    return 0


def _shown(found: dict[str, object], lines: list[profile.Line], tables: list[profile.Table]) -> str:
    rows = [[line.label, f"{line.time_ms:.3f}"] for line in lines]
    parts = [f"{found['name']} on {found['device']}", table(["SECTION", "MS A CALL"], rows)]
    for one in tables:
        body = [
            [
                row.name[:70],
                str(row.calls),
                f"{row.self_ms:.3f}",
                "" if row.is_region else f"{row.percent:.1f}",
                f"{row.self_mb:.2f}",
            ]
            for row in one.rows
        ]
        parts += ["", one.title, table(_COLUMNS, body)]
    return "\n".join(parts)
