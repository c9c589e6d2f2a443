"""Cold start: what a fresh process pays until its first kernel has run, by every way to get one, in one go.

    python benchmarks/coldstart.py --out DIR            on a GPU, about eight minutes
    python benchmarks/coldstart.py --no-gpu --quick     anywhere: the road up to the bytes, nothing is launched

Every figure is taken inside a fresh process, arms in turn in a balanced order, medians with 95 % intervals. `first` runs from
before the import of the library to the result of the first launch, synchronised, in a process that has imported torch and made
a context; `first_with_torch` adds both of these, `start_to_first` the interpreter too, `process` is the whole process, checks
included. `second` and `further` are other kernels, each alone; `batch` is as many again in one get_kernels. Each result is held
against float64 on the CPU, and bytes from kserve against those its store was filled with: a wrong one has no number.

Arms (`--arms` takes names, groups and patterns, separated by commas; a leading ! leaves out what was named before it):
    first   kserve-direct, -locked, -daemon, -autostarted, -built, -embedded; triton, cupy, cuda-core -warm and -cold;
            extension-warm (torch.utils.cpp_extension), hugging-face (`kernels`), driver (the floor)
    slow    *-cold-further, extension-cold, kserve-built-further: by themselves; they also fill the caches of warm arms
    crowd   crowd-1-…, crowd-8-…, crowd-16-…: processes let go at once, each with its context; the wall from there
    launch, agree
Cold arms have empty directories, a HOME of their own, and the vendors' hidden caches off.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import functools
import math
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cold import report
from cold.arms import (
    CUPY,
    FILLED_BY,
    FIRST,
    SLOW,
    TRITON,
    Arm,
    alone,
    built,
    crowds,
    direct,
    run_arm,
    through_daemon,
    write_extension,
)
from cold.places import REPOSITORY, Options, Places, Unavailable, start_child
from cold.workloads import MOST_FURTHER, Norm, RealSpace

from kserve.measure.timing import ArmFailed, Rule, measure

PROCESSES = ("launch", "agree")
# What the last two processes take, with their start.
TAIL_S = {"launch": 45.0, "agree": 15.0}
SHARE_OF_FIRST = 0.6


class Run:
    """One run: its places, what was found, and the time that is left."""

    def __init__(self, places: Places, chosen: list[Arm], *, budget_s: float, rounds: int | None) -> None:
        self.places = places
        self.chosen = chosen
        self.rounds = rounds
        self.records: dict[str, report.Record] = {}
        self.facts: dict[str, Any] = {"gpu": "none", "versions": {}, "stops": {}}
        self.absent: dict[str, str] = {}
        self.failed: dict[str, str] = {}
        self._until = time.perf_counter() + budget_s

    @property
    def left_s(self) -> float:
        return self._until - time.perf_counter()

    def fill_store(self, kernels: list[str]) -> None:
        """Build what any arm asks for, and let each kind of client ask once, so that the store can answer without a daemon."""
        places, environment = self.places, self.places.filled_store
        places.up(environment)
        told = {"further": places.options.n_further, "torch": int(places.options.torch)}
        found = start_child(places, environment, arm="prime", kernel=",".join(kernels), **told)
        primed = found.report(10 * places.options.timeout_s)
        self._note(primed)
        self.facts["prime"] = primed["seconds"]
        places.options = places.options._replace(
            target=primed["facts"]["target"].rstrip("af")
        )  # sm_90a is sm_90 to other tools
        for arm in FIRST:
            crowded = any(arm.first == other.first and other.n for other in self.chosen)
            if arm.setting is direct and (crowded or arm in self.chosen):
                with contextlib.suppress(ArmFailed):  # its own turn will say why
                    alone(places, arm, environment, {})
        places.down(environment)
        if any(arm.setting is through_daemon for arm in self.chosen):
            served = places.served_store
            places.copy_of_store(places.root / "served")
            places.up(served)

    def fill_caches(self) -> None:
        """Run the cold arms whose caches other arms find warm."""
        write_extension(self.places)
        for name in dict.fromkeys(arm.needs for arm in self.chosen if arm.needs):
            arm = FILLED_BY[name]
            self._slow(arm)
            reason = self.absent.get(arm.id) or self.failed.get(arm.id)
            if reason:
                for other in [other for other in self.chosen if other.needs == name]:
                    self.absent[other.id] = f"its cache could not be filled: {reason}"
                    self.chosen.remove(other)

    def slow(self) -> None:
        """The slow arms that were not needed for others, once each."""
        for arm in self.chosen:
            if arm.group == "slow" and arm.id not in {*self.records, *self.absent, *self.failed}:
                self._slow(arm)

    def _slow(self, arm: Arm) -> None:
        try:
            self._turn(arm)
        except ArmFailed:
            self.records.pop(arm.id, None)

    def take_turns(self, group: str, *, share: float) -> None:
        """The arms of a group in interleaved rounds, for that share of the time left."""
        arms = [arm for arm in self.chosen if arm.group == group]
        if not arms:
            return
        self.places.n_cold = max(1, sum(arm.setting is built for arm in arms))
        rule = Rule(rounds=self.rounds, soft_s=math.inf, hard_s=max(0.0, self.left_s * share))
        found = measure({arm.id: functools.partial(self._turn, arm) for arm in arms}, rule=rule)
        for arm in arms:
            if arm.id in found.samples:
                self.records[arm.id] = self.records[arm.id]._replace(error=found.error)
            else:
                self.records.pop(arm.id, None)
        self.facts["stops"][group] = {"stop": found.stop, "n_rounds": found.n_rounds, "balanced": found.balanced}

    def _turn(self, arm: Arm) -> float:
        """One turn of an arm; the figure that its group is timed by."""
        began = time.perf_counter()
        try:
            found = run_arm(self.places, arm)
        except Unavailable as reason:
            self.absent[arm.id] = str(reason)
            raise
        except ArmFailed as reason:
            self.failed[arm.id] = str(reason)
            raise
        self._note(found)
        self.records.setdefault(arm.id, report.Record(arm, [])).reports.append(found)
        seconds: dict[str, float] = found["seconds"]
        timed = seconds["wall" if arm.n else "first"]
        print(f"{arm.id:<42} {timed * 1e3:10.2f} ms   {time.perf_counter() - began:5.1f} s", file=sys.stderr, flush=True)
        return timed

    def process(self, name: str) -> list[report.Row]:
        """Launch times or agreement: one process, its own statistics."""
        more = {variable: str(self.places.root / f"cache-{cache}") for variable, cache in (TRITON, CUPY)}
        try:
            child = start_child(self.places, self.places.filled_store | more, arm=name, kernel="")
            facts = child.report(self.places.options.timeout_s)["facts"]
        except Unavailable as reason:
            self.absent[name] = str(reason)
            return []
        except ArmFailed as reason:
            self.failed[name] = str(reason)
            return []
        self.facts[name] = facts
        return report.launch_rows(facts) if name == "launch" else []

    def _note(self, found: dict[str, Any]) -> None:
        self.facts["versions"].update(found["facts"].get("versions", {}))
        self.facts["gpu"] = found["facts"].get("gpu", self.facts["gpu"])


def parse(words: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", default="*", help="names, groups and patterns, separated by commas")
    parser.add_argument("--budget-s", type=float, default=450.0, help="about how long the run takes (450)")
    parser.add_argument("--rounds", type=int, help="exactly so many rounds, if the budget lasts")
    parser.add_argument("--further", type=int, default=MOST_FURTHER, help=f"further kernels, at most {MOST_FURTHER}")
    parser.add_argument("--no-gpu", action="store_true", help="launch nothing; build for cuda:sm_90")
    parser.add_argument("--quick", action="store_true", help="one round, one further kernel, crowds of 1 and 2, without torch")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "benchmarks" / "results")
    return parser.parse_args(words)


def choose(patterns: str, sizes: tuple[int, ...]) -> tuple[list[Arm], list[str]]:
    """The arms and the single processes that the patterns name. Raises: SystemExit for one that names nothing."""
    arms = [*FIRST, *SLOW, *crowds(sizes)]
    names = {arm.id: (arm.id, arm.name, arm.group) for arm in arms} | {name: (name,) for name in PROCESSES}
    chosen: set[str] = set()
    for pattern in (pattern.strip() for pattern in patterns.split(",")):
        found = {name for name, aliases in names.items() if fnmatch.filter(aliases, pattern.removeprefix("!"))}
        if not found:
            raise SystemExit(f"--arms: nothing is called {pattern!r}; there are {', '.join(names)}")
        chosen = chosen - found if pattern.startswith("!") else chosen | found
    return [arm for arm in arms if arm.id in chosen], [name for name in PROCESSES if name in chosen]


def main(words: list[str] | None = None) -> int:
    """Run, write, print; 1 when an arm failed."""
    arguments = parse(words)
    quick = arguments.quick
    arms, processes = choose(arguments.arms, (1, 2) if quick else (1, 8, 16))
    options = Options(
        gpu=not arguments.no_gpu,
        torch=not (quick and arguments.no_gpu),
        target="cuda:sm_90",
        n_further=min(1, arguments.further) if quick else arguments.further,
        timeout_s=120.0,
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended before its time"))  # what was found until then is kept
    root = Path(tempfile.mkdtemp(prefix="kc-"))
    places = Places(root, options)
    run = Run(places, arms, budget_s=arguments.budget_s, rounds=1 if quick else arguments.rounds)
    rows: list[report.Row] = []
    try:
        rows = everything(run, processes)
    finally:
        finish(run, rows, arguments.out)
        places.close()
        shutil.rmtree(root, ignore_errors=True)
    return 1 if run.failed else 0


def finish(run: Run, rows: list[report.Row], out: Path) -> None:
    """Write and print whatever there is."""
    rows = [*report.rows_of(run.records), *rows]
    found = {**run.facts, "date": time.strftime("%Y-%m-%d"), "failed": run.failed, "absent": run.absent}
    samples = {name: record.reports for name, record in run.records.items()}
    stem = report.write(out, rows, {**found, "command": _said(sys.argv[1:]), "samples": samples})
    options = run.places.options
    bars = options.gpu and options.n_further == MOST_FURTHER  # one of them is about a batch of 50
    print(report.summary(rows, {**run.absent, **run.failed}, bars=bars))
    for group, how in run.facts["stops"].items():
        print(f"{group}: {how['n_rounds']} rounds, {how['stop']}, {'balanced' if how['balanced'] else 'not balanced'}")
    print(f"\n{stem}.csv and .json", flush=True)


def everything(run: Run, processes: list[str]) -> list[report.Row]:
    """All parts of a run, in order; rows of the single processes, the others are in `run`."""
    tail_s = sum(TAIL_S[name] for name in processes)
    # Launches and agreement are of both kernels.
    run.fill_store([*dict.fromkeys([Norm.name, RealSpace.name] if processes else [arm.first for arm in run.chosen])])
    run.fill_caches()
    run.slow()
    crowded = any(arm.group == "crowd" for arm in run.chosen)
    timed = max(0.0, 1 - tail_s / max(run.left_s, tail_s + 1))
    run.take_turns("first", share=timed * (SHARE_OF_FIRST if crowded else 1))
    run.take_turns("crowd", share=max(0.0, 1 - tail_s / max(run.left_s, tail_s + 1)))
    return [row for name in processes for row in run.process(name)]


def _said(words: list[str]) -> list[str]:
    """The command line without the place of the results, which is this machine's."""
    return [word for position, word in enumerate(words) if word != "--out" and words[position - 1 : position] != ["--out"]]


if __name__ == "__main__":
    sys.exit(main())
