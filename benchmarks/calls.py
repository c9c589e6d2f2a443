"""What the ops cost the host: one call on small inputs, and from an empty store to the first results of a graph decoder's ops.

    python benchmarks/calls.py                       on a GPU, about two minutes
    python benchmarks/calls.py --no-gpu --rounds 1   anywhere: references on the host, builds that nobody launches

Calls are timed in bursts of 100 between synchronisations, under torch.no_grad(), by each launcher in a process of its own,
beside torch.add of the op's first input. First results are those of edge_features, norm_residual and graph_norm_bce together: a
fresh process with torch imported and a context made, timed from before the import of kserve until all three are synchronised.
Each round has a new daemon over an empty store, as `kserve up` leaves it (`up`) and with its compilers loaded by a build for
another target (`loaded`); then a second process finds the kernels on disk. Results are held against float64 before they count.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import machine

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cold.bursts import YARDSTICK, roads
from cold.places import HIDDEN_CACHES_OFF, Options, Places, start_child

from kserve.measure.timing import ArmFailed, Measurement, Rule, measure, median_interval

# Microseconds of a call, with the compiled launcher and without; only ops that launch once, but for the last.
BARS_US = {
    **{op: {"compiled": 12.0, "python": 15.0} for op in ("edge_features", "norm_residual", "realspace")},
    "graph_norm_bce": {"compiled": 20.0, "python": 20.0},
}
FIRST_BAR_S = 1.0
PARTS = ("calls", "first")


class Run:
    """One run: its places and what was found."""

    def __init__(self, places: Places, *, rounds: int) -> None:
        self.places, self.rounds = places, rounds
        self.device = ""
        self.found: dict[str, Any] = {"failed": {}}

    def calls(self) -> None:
        """Host time of a call, a process for each launcher over one store."""
        environment = self.places.kserve(self.places.fresh())
        self.places.up(environment)
        rows = self.found["calls"] = []
        for road in roads():
            try:
                found = self._child(environment | {"KSERVE_LAUNCHER": road}, "op-calls")
            except ArmFailed as reason:
                self.found["failed"][f"calls, {road}"] = str(reason)
                continue
            facts = found["facts"]
            self.found["torch"] = facts["torch"]
            medians = {name: [round(1e6 * value, 3) for value in one[:3]] for name, one in facts["medians"].items()}
            for op in (name for name in medians if not name.startswith(YARDSTICK)):
                row = {"op": op, "launcher": road, "us": medians[op], "torch_add_us": medians[YARDSTICK + op]}
                bar = BARS_US.get(op, {}).get(road)
                rows.append({**row, "bar_us": bar, "n_rounds": facts["n_rounds"], "stop": facts["stop"]})
                print(_line(rows[-1]), flush=True)

    def first(self) -> None:
        """From an empty store, arms in turn."""
        reports: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {"up": [], "loaded": []}
        arms = {name: functools.partial(self._from_nothing, name, taken) for name, taken in reports.items()}
        found = measure(arms, rule=Rule(rounds=self.rounds, soft_s=math.inf, hard_s=math.inf))
        self.found["failed"] |= {f"first results, {name}": reason for name, reason in found.failed.items()}
        self.found["first_results"] = {name: _summed(found, name, reports[name]) for name in found.medians}
        for name, one in self.found["first_results"].items():
            first, again = (_seconds(one[key]) for key in ("first_s", "second_process_s"))
            print(f"first results, {name}: {first}, bar {FIRST_BAR_S:g}; in a second process {again}", flush=True)

    def _from_nothing(self, name: str, taken: list[tuple[dict[str, Any], dict[str, Any]]]) -> float:
        with STATES[name](self.places) as environment:
            taken.append((self._child(environment, "first-results"), self._child(environment, "first-results")))
        return float(taken[-1][0]["seconds"]["first"])

    def _child(self, environment: dict[str, str], arm: str) -> dict[str, Any]:
        found = start_child(self.places, environment, arm=arm, kernel="").report(self.places.options.timeout_s)
        if self.places.options.gpu:
            self.device = found["facts"]["gpu"]
        return found


@contextlib.contextmanager
def up(places: Places) -> Iterator[dict[str, str]]:
    """A new daemon over an empty store, as `kserve up` leaves it."""
    environment = places.kserve(places.fresh(), **HIDDEN_CACHES_OFF)
    places.up(environment)
    with _ended(places, environment):
        yield environment


@contextlib.contextmanager
def loaded(places: Places) -> Iterator[dict[str, str]]:
    """The same, its compilers loaded."""
    environment = places.cold_daemon()
    with _ended(places, environment):
        yield environment


STATES: dict[str, Callable[[Places], contextlib.AbstractContextManager[dict[str, str]]]] = {"up": up, "loaded": loaded}


@contextlib.contextmanager
def _ended(places: Places, environment: dict[str, str]) -> Iterator[None]:
    try:
        yield
    finally:
        places.down(environment)
        shutil.rmtree(Path(environment["KSERVE_STORE"]).parent, ignore_errors=True)


def _summed(found: Measurement, name: str, reports: list[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    """Intervals of an arm; what the first processes built and the second ones found; each round's seconds by part."""
    second = median_interval([again["seconds"]["first"] for _, again in reports], error=found.error)
    return {
        "first_s": _plain(found.medians[name]),
        "second_process_s": _plain(second),
        "bar_s": FIRST_BAR_S,
        "origins": [[first["facts"]["origins"], again["facts"]["origins"]] for first, again in reports],
        "parts_s": [[first["seconds"], again["seconds"]] for first, again in reports],
        "stop": found.stop,
    }


def _plain(interval: Any) -> list[float | None]:
    """Value, low, high; one round has no bounds, and JSON no infinity."""
    return [round(value, 4) if math.isfinite(value) else None for value in interval[:3]]


def _seconds(interval: list[float | None]) -> str:
    value, low, high = interval
    return f"{value:.3f} s" if low is None or high is None else f"{value:.3f} s ({low:.3f} to {high:.3f})"


def _line(row: dict[str, Any]) -> str:
    (us, low, high), add, bar = row["us"], row["torch_add_us"][0], row["bar_us"]
    judged = "" if bar is None else f", bar {bar:g}"
    return f"{row['op']:<28} {row['launcher']:<9} {us:7.2f} us ({low:.2f} to {high:.2f}){judged}; torch.add {add:.2f} us"


def parse(words: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=PARTS, help="both")
    parser.add_argument("--rounds", type=int, default=5, help="of first results (5)")
    parser.add_argument("--no-gpu", action="store_true", help="launch nothing; build for cuda:sm_90")
    parser.add_argument("--out", type=Path, default=machine.RESULTS)
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    """Measure, print, write after each part; 1 when something failed."""
    arguments = parse(words)
    root = Path(tempfile.mkdtemp(prefix="kc-"))
    options = Options(gpu=not arguments.no_gpu, torch=not arguments.no_gpu, target="cuda:sm_90", n_further=0, timeout_s=180.0)
    places = Places(root, options)
    run = Run(places, rounds=arguments.rounds)
    try:
        for part in arguments.part or PARTS:
            getattr(run, part)()
            path = machine.write("calls", run.found, device=run.device, out=arguments.out)
    finally:
        places.close()
        shutil.rmtree(root, ignore_errors=True)
    for name, reason in run.found["failed"].items():
        print(f"no number: {name}: {reason}", file=sys.stderr)
    print(path)
    return 1 if run.found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
