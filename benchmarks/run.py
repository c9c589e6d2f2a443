"""Times the built-in ops on their benchmark shapes, next to plain torch, torch.compile and a vendor's kernel.

    python benchmarks/run.py                                       every op, every shape, both directions where there are two
    python benchmarks/run.py --op realspace --shape n_e=44032,f=256,n_ang=3,by_order=0 --direction bwd --baseline eager

An op whose result is wrong in this run has no number, and the exit status is 1. Shares are of ceilings measured in this run:
a device copy of 1 GiB and a bf16 matrix product. Without a GPU the references run on the host: that shows the harness only.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import kserve
from kserve.errors import KserveError
from kserve.measure import workloads
from kserve.measure.ceilings import Ceilings, measure_ceilings
from kserve.measure.check import call, check
from kserve.measure.device import Instrument, Prepared, instrument_for
from kserve.measure.timing import Interval, Measurement, Rule, measure
from kserve.measure.workloads import Workload

OURS = "kserve"
BASELINES = ("eager", "compile", "vendor")
RESULTS = Path(__file__).resolve().parent / "results"


class Row(NamedTuple):
    """One arm of one workload. Bounds are of a 95 % interval; `ratio` is this arm's time over kserve's, paired by round."""

    op: str
    direction: str
    shape: str
    dtype: str
    arm: str
    time_us: float
    low_us: float
    high_us: float
    ratio: float
    ratio_low: float
    ratio_high: float
    gb_s: float
    tflop_s: float
    share_of_copy: float
    share_of_matmul: float
    first_ms: float
    error: float
    n_rounds: int
    stop: str
    width: int
    overhead: float


class Refused(NamedTuple):
    """What has no number, and why."""

    op: str
    direction: str
    shape: str
    dtype: str
    arm: str
    reason: str


def main() -> int:
    """Measure, print a table, write CSV and JSON; 1 when an op was wrong."""
    arguments = parse()
    device = "cuda" if torch.cuda.is_available() and not arguments.no_gpu else "cpu"
    instrument = instrument_for(device, flush=arguments.flush)
    try:
        wanted = [*every_workload(arguments)]
    except KserveError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    if not wanted:
        print("nothing to run: no op named has that direction and dtype", file=sys.stderr)
        return 2
    ceilings = measure_ceilings(instrument, device)
    print(f"copy {ceilings.copy_gb_s:.0f} GB/s, matrix product {ceilings.matmul_tflop_s:.1f} TFLOP/s", flush=True)
    rows: list[Row] = []
    refused: list[Refused] = []
    name = machine(device)["device"].replace(" ", "-").lower()
    stem = arguments.out / f"ops-{name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
    for workload in wanted:
        baselines = arguments.baseline if with_baselines(workload, arguments.baselines_on) else []
        measured, without = run(
            workload, arguments, baselines=baselines, instrument=instrument, device=device, ceilings=ceilings
        )
        rows += measured
        refused += without
        print("\n".join(lines(measured, without)), flush=True)
        write(
            stem, device=device, ceilings=ceilings, rows=rows, refused=refused
        )  # each time: a run that is stopped loses nothing
    return 1 if any(one.arm == OURS for one in refused) else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", action="append", metavar="NAME", help=f"one of {', '.join(workloads.ops())}; all of them")
    parser.add_argument("--shape", action="append", metavar="NAME=N,…", help="sizes to run instead of the op's own; repeatable")
    parser.add_argument("--direction", action="append", choices=("fwd", "bwd"), help="both where the op has both")
    parser.add_argument("--dtype", action="append", metavar="DTYPE", help="or `first`, the one each op is judged by; all")
    parser.add_argument("--baseline", default="eager,compile,vendor", help="any of eager, compile, vendor, or none")
    parser.add_argument("--baselines-on", type=int, metavar="N", help="only on the first N shapes of an op; on all of them")
    parser.add_argument("--flush", action="store_true", help="empty the last-level cache before each call")
    parser.add_argument("--budget-s", type=float, default=20.0, help="soft limit for one workload")
    parser.add_argument("--rounds", type=int, help="exactly so many, whatever the intervals")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-gpu", action="store_true", help="run on the host although there is a GPU")
    parser.add_argument("--out", type=Path, default=RESULTS)
    found = parser.parse_args()
    found.baseline = [] if found.baseline == "none" else found.baseline.split(",")
    if unknown := set(found.baseline) - set(BASELINES):
        parser.error(f"--baseline cannot be {', '.join(sorted(unknown))}: allowed are {', '.join(BASELINES)}, none")
    return found


def every_workload(arguments: argparse.Namespace) -> Iterator[Workload]:
    """What was asked for; of the forms an op has, those that were named. Raises InvalidSpec for what an op does not have."""
    for op in arguments.op or workloads.ops():
        for sizes in map(parsed_sizes, arguments.shape) if arguments.shape else workloads.sizes_of(op):
            for direction, dtype in workloads.forms_of(op):
                first = ["first"] if dtype == workloads.forms_of(op)[0][1] else []
                if direction in (arguments.direction or [direction]) and {dtype, *first} & {*(arguments.dtype or [dtype])}:
                    yield workloads.workload(op, sizes, direction=direction, dtype=dtype)


def with_baselines(workload: Workload, most: int | None) -> bool:
    """Whether it is among the shapes the op is judged by, which come first."""
    return most is None or workload.sizes in [dict(sizes) for sizes in workloads.sizes_of(workload.op)[:most]]


def parsed_sizes(text: str) -> dict[str, int]:
    pairs = [part.split("=") for part in text.split(",")]
    if not all(len(pair) == 2 and pair[1].isdigit() for pair in pairs):
        raise SystemExit(f"--shape cannot be {text!r}: it is NAME=N,NAME=N")
    return {name: int(value) for name, value in pairs}


def run(
    workload: Workload,
    arguments: argparse.Namespace,
    *,
    baselines: list[str],
    instrument: Instrument,
    device: str,
    ceilings: Ceilings,
) -> tuple[list[Row], list[Refused]]:
    """Check, then time; no number for an op that is wrong."""
    identity = (workload.op, workload.direction, workload.shape, workload.dtype)
    verdict = check(workload, device=device, seed=arguments.seed)
    if not verdict.is_right:
        return [], [Refused(*identity, OURS, str(verdict))]
    with instrument.active():
        inputs = workload.make(device, arguments.seed + 1)
        functions, absent = arms_of(workload, baselines)
        calls = {}
        for name, function in functions.items():
            try:
                calls[name] = call(workload, function, inputs)
            except Exception as error:  # a baseline may fail in any way: the others go on  # noqa: BLE001
                absent[name] = f"{type(error).__name__}: {error}"
    prepared = instrument.prepare(calls)
    refused = [Refused(*identity, name, reason) for name, reason in {**absent, **prepared.failed}.items()]
    if OURS not in prepared.arms:
        return [], refused
    rule = Rule(soft_s=arguments.budget_s, rounds=arguments.rounds)
    found = measure(prepared.arms, baseline=OURS, rule=rule)
    rows = [row(workload, name, found, prepared=prepared, ceilings=ceilings) for name in found.medians]
    return [one._replace(error=verdict.error if one.arm == OURS else float("nan")) for one in rows], refused


def arms_of(workload: Workload, baselines: list[str]) -> tuple[dict[str, Callable[..., Any]], dict[str, str]]:
    """The functions that are timed, and why a baseline is none."""
    torch._dynamo.reset()
    offered = {"eager": workload.plain, "compile": torch.compile(workload.plain), "vendor": workload.vendor}
    functions = {OURS: workload.served} | {name: offered[name] for name in baselines if offered[name] is not None}
    return functions, {name: "no library has this op" for name in baselines if offered[name] is None}


def row(workload: Workload, name: str, found: Measurement, *, prepared: Prepared, ceilings: Ceilings) -> Row:
    median, one = found.medians[name], Interval(1.0, 1.0, 1.0, found.n_rounds)
    ratio = found.ratios.get(name, one)
    gb_s, tflop_s = workload.n_bytes / median.value / 1e9, workload.n_flops / median.value / 1e12
    return Row(
        *(workload.op, workload.direction, workload.shape, workload.dtype, name),
        *(round(1e6 * value, 4) for value in median[:3]),
        *(round(value, 5) for value in ratio[:3]),
        gb_s=round(gb_s, 2),
        tflop_s=round(tflop_s, 4),
        share_of_copy=round(gb_s / ceilings.copy_gb_s, 4),
        share_of_matmul=round(tflop_s / ceilings.matmul_tflop_s, 5),
        first_ms=round(1e3 * prepared.first_s[name], 3),
        error=float("nan"),
        n_rounds=found.n_rounds,
        stop=found.stop,
        width=prepared.width,
        overhead=round(prepared.overhead, 4),
    )


def lines(rows: list[Row], refused: list[Refused]) -> Iterator[str]:
    """What a person reads while it runs."""
    for one in rows:
        half = (one.high_us - one.low_us) / 2 / one.time_us
        yield (
            f"{one.op} {one.direction} {one.dtype} {one.shape}  {one.arm:8} {one.time_us:10.2f} us ±{half:.1%}  "
            f"x{one.ratio:<7.3g} {one.gb_s:8.0f} GB/s  {one.share_of_copy:.3f} of copy  "
            f"{one.tflop_s:7.2f} TFLOP/s  {one.stop} {one.n_rounds}"
        )
    for without in refused:
        reason = without.reason.strip().splitlines()[0]
        yield f"{without.op} {without.direction} {without.dtype} {without.shape}  {without.arm:8} no number: {reason}"


def write(stem: Path, *, device: str, ceilings: Ceilings, rows: list[Row], refused: list[Refused]) -> None:
    """The rows as .csv, everything as .json."""
    facts = machine(device)
    stem.parent.mkdir(parents=True, exist_ok=True)
    with stem.with_suffix(".csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow((*Row._fields, *facts))
        table.writerows((*one, *facts.values()) for one in rows)
    found = {**facts, "ceilings": ceilings._asdict(), "rows": [one._asdict() for one in rows]}
    plain = json.dumps({**found, "refused": [one._asdict() for one in refused]}, indent=1)
    stem.with_suffix(".json").write_text(plain.replace("NaN", "null") + "\n")


def machine(device: str) -> dict[str, str]:
    versions = f"kserve {kserve.__version__}; torch {torch.__version__}; Python {sys.version.split()[0]}"
    name = "cpu" if device == "cpu" else torch.cuda.get_device_name()
    return {"device": name, "versions": versions, "date": time.strftime("%Y-%m-%d")}


if __name__ == "__main__":
    sys.exit(main())
