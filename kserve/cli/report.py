"""`kserve report` and `kserve why-cold`: what kernels cost the processes that use them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from typing import Any

from kserve.cli.show import say, table
from kserve.client.report import ops_lines, reports_of, shown
from kserve.config import load_settings
from kserve.errors import RequestError


def every(arguments: argparse.Namespace) -> int:
    """One line a living process, then what its ops were served by."""
    found = reports_of(load_settings())
    rows = [
        [
            str(plain["pid"]),
            plain["program"],
            f"{1e3 * sum(plain['seconds'].values()):.1f} ms",
            ", ".join(f"{count} {origin}" for origin, count in sorted(plain["origins"].items())),
            str(plain["missed_after_warm"]),
        ]
        for plain in found
    ]
    text = "\n".join([table(["PID", "PROGRAM", "LOST", "KERNELS", "MISSED WARM"], rows), *lines_of(found)])
    say(json.dumps(found, indent=2) if arguments.json else text)
    return 0


def lines_of(processes: Iterable[Mapping[str, Any]]) -> list[str]:
    """One line for each op of each process."""
    return [f"ops of {plain['pid']} {plain['program']}: {line}" for plain in processes for line in ops_lines(plain)]


def one(arguments: argparse.Namespace) -> int:
    """Everything about one process."""
    found = {plain["pid"]: plain for plain in reports_of(load_settings())}
    if arguments.pid not in found:
        known = ", ".join(map(str, found)) or "none"
        raise RequestError(f"process {arguments.pid} has left no report on this store", facts={"processes": known})
    plain = found[arguments.pid]
    say(json.dumps(plain, indent=2) if arguments.json else shown(plain))
    return 0
