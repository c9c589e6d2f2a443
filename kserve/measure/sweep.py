"""Tries the configurations of one kernel: compiles all of them, checks and times those that are new, keeps the evidence.

How they are built, loaded and timed comes in from outside (`Build`, `Load`, `Bench`); `kserve tune` fills in the service and
the device. What was timed before, and has the same bytes, is not timed again: new configurations run beside the stored winner.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from kserve.artifact import Artifact
from kserve.client.arguments import read
from kserve.client.launch import facts_hold
from kserve.client.resolve import Answer
from kserve.definition import Entry, KernelDef
from kserve.errors import DoesNotFit, KserveError, LaunchError, RequestError
from kserve.measure.configurations import Configurations, label_of, reason_after, reason_before
from kserve.measure.outputs import Outputs
from kserve.measure.timing import Arm, Drop, Interval, Measurement, Rule, measure, ratio_interval
from kserve.spec import Spec
from kserve.target import Target

Build = Callable[[Sequence[Mapping[str, int]]], list[Answer | KserveError]]
Load = Callable[[Answer], Callable[..., object]]
COPY = "copy"
# Ratios matter more than durations here, and a plateau of a percent is one.
RULE = Rule(median=0.02, ratio=0.01)


class Subject(NamedTuple):
    """What is tuned: an entry, its full spec and exact target, the configurations."""

    definition: KernelDef
    entry: Entry
    spec: Spec
    target: Target
    configurations: Configurations


class Row(NamedTuple):
    """One configuration and what became of it.

    Fields:
        state:     timed; loser (left early); wrong (another result than the default's); pruned (cannot fit); failed; compiled
                   (there was nothing to time it with).
        reason:    of the last four; none else.
        us, ratio: median and its bounds, microseconds (of a loser the least and the most); over the winner's duration, paired,
                   with its bounds. None without timing.
        at:        when it was timed, seconds since 1970.
    """

    knobs: dict[str, int]
    state: str
    reason: str = ""
    us: list[float] | None = None
    ratio: list[float] | None = None
    resources: Mapping[str, int] = {}
    digest: str = ""
    at: float = 0.0

    @property
    def label(self) -> str:
        return label_of(self.knobs)

    @property
    def is_on_plateau(self) -> bool:
        """Whether it is as good as the winner, for all that was measured."""
        return self.state == "timed" and self.ratio is not None and self.ratio[1] <= 1.0


class Prepared(Protocol):
    """What an instrument makes of calls (`measure.device.Prepared`)."""

    @property
    def arms(self) -> dict[str, Arm]: ...
    @property
    def failed(self) -> dict[str, str]: ...


class Bench(NamedTuple):
    """The launch to be timed, and what times it.

    Fields:
        arguments: of a launch, in order; `written` are those among them that it writes.
        tolerance: between two right results, over the largest magnitude; None for the dtype's own.
        copy:      a call that copies so many bytes: the ceiling. None for no ceiling.
    """

    prepare: Callable[[Mapping[str, Callable[[], object]]], Prepared]
    arguments: tuple[Any, ...]
    written: tuple[Any, ...]
    tolerance: float | None = None
    copy: tuple[Callable[[], object], int] | None = None


class Swept(NamedTuple):
    """The rows, the winner first; how many were timed now, why that ended, the speed of the copy where there was one."""

    rows: list[Row]
    n_timed: int = 0
    stop: str = ""
    copy_gb_s: float | None = None

    @property
    def winner(self) -> Row | None:
        return self.rows[0] if self.rows and self.rows[0].state == "timed" else None


def compile_all(subject: Subject, build: Build) -> tuple[list[Row], dict[str, Answer]]:
    """Build what may fit, all at once. The rows in their order, and what was built by label."""
    rows: dict[str, Row] = {}
    for knobs in subject.configurations.all:
        reason = reason_before(subject.definition, subject.entry, spec=subject.spec, knobs=knobs, target=subject.target)
        rows[label_of(knobs)] = Row(knobs, "pruned" if reason else "compiled", reason)
    asked = [row.knobs for row in rows.values() if row.state == "compiled"]
    built: dict[str, Answer] = {}
    for knobs, answer in zip(asked, build(asked), strict=True):
        if isinstance(answer, KserveError):
            state = "pruned" if isinstance(answer, DoesNotFit) else "failed"
            rows[label_of(knobs)] = Row(knobs, state, answer.message)
            continue
        manifest = answer.artifacts[0].manifest
        reason = reason_after(manifest)
        rows[label_of(knobs)] = Row(
            knobs, "pruned" if reason else "compiled", reason, resources=manifest.resources, digest=manifest.digest
        )
        built[label_of(knobs)] = answer
    return list(rows.values()), built


def carry_over(rows: Sequence[Row], evidence: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The rows, each as it was found before where the bytes are still the same."""
    known = {}
    for plain in evidence:
        try:
            row = Row(**plain)
            known[row.label] = row
        except TypeError:  # of another release
            continue
    found = []
    for row in rows:
        before = known.get(row.label)
        is_same = before is not None and row.state == "compiled" and before.digest == row.digest and before.state != "compiled"
        found.append(before if before is not None and is_same else row)
    return found


def time_new(rows: Sequence[Row], built: Mapping[str, Answer], bench: Bench, load: Load, *, rule: Rule = RULE) -> Swept:
    """Check and time the rows that are only compiled, beside the winner among those that were timed before.

    Raises: LaunchError when a launch breaks the device: nothing after it can be measured.
    """
    new = [row.label for row in rows if row.state == "compiled"]
    champion = next((row.label for row in ranked(rows) if row.state == "timed"), None)
    if not new:
        return Swept(ranked(rows))
    reference = next(row.label for row in rows if row.label in built)  # the default, where that was built
    calls: dict[str, Callable[[], object]] = {}
    states: dict[str, tuple[str, str]] = {}
    for label in dict.fromkeys([reference, *new, *([champion] if champion else [])]):
        try:
            calls[label] = functools.partial(load(built[label]), *bench.arguments)
        except KserveError as error:
            states[label] = ("failed", error.message)
    outputs = Outputs(bench.written, tolerance=bench.tolerance)
    states |= {label: ("wrong", why) for label, why in _wrong(outputs, calls, reference).items()}
    runners = {label: call for label, call in calls.items() if label in {*new, champion} and label not in states}
    found, failed = _measured(runners, bench, outputs, baseline=champion, rule=rule)
    states |= {label: ("failed", why) for label, why in failed.items()}
    rows = [
        row._replace(state=states[row.label][0], reason=states[row.label][1]) if row.label in states else row for row in rows
    ]
    if found is None:
        return Swept(ranked(rows), 0, "failed")
    rows = _judged(rows, found, new=set(new), champion=champion)
    copied = found.medians.get(COPY)
    speed = bench.copy[1] / copied.value / 1e9 if bench.copy and copied else None
    return Swept(ranked(rows), len(runners) - (champion in runners), found.stop, speed)


def _wrong(outputs: Outputs, calls: Mapping[str, Callable[[], object]], reference: str) -> dict[str, str]:
    try:
        return outputs.wrong(calls, reference)
    except RuntimeError as error:  # what torch raises when a kernel has read or written where it may not
        raise LaunchError(
            f"a launch has broken the device: {str(error).splitlines()[0]}", hint="leave configurations out with --knob"
        ) from None


def _measured(
    calls: Mapping[str, Callable[[], object]], bench: Bench, outputs: Outputs, *, baseline: str | None, rule: Rule
) -> tuple[Measurement | None, dict[str, str]]:
    """The run, None where nothing could be run; and why arms are missing from it."""
    ceiling = {COPY: bench.copy[0]} if bench.copy else {}
    prepared = bench.prepare({**calls, **ceiling})
    arms = {name: _restoring(arm, outputs) for name, arm in prepared.arms.items()}
    failed = {name: why for name, why in prepared.failed.items() if name != COPY}
    if not set(arms) - {COPY}:
        return None, failed
    first = baseline if baseline in arms else next(name for name in arms if name != COPY)
    found = measure(arms, baseline=first, rule=rule, drop=Drop(keep=frozenset({COPY})))
    return found, {**failed, **{name: why for name, why in found.failed.items() if name != COPY}}


def _restoring(arm: Arm, outputs: Outputs) -> Arm:
    """The arm, each of its blocks over the arguments as they were."""

    def run() -> float:
        outputs.restore()
        return arm()

    return run


def _judged(rows: Sequence[Row], found: Measurement, *, new: set[str], champion: str | None) -> list[Row]:
    """The rows with what the run found. A ratio from before is to the champion: it is carried over to a new winner."""
    now = time.time()
    medians = {label: interval for label, interval in found.medians.items() if label != COPY}
    best = min(medians, key=lambda label: medians[label].value)

    def ratio_to_best(label: str) -> Interval:
        return ratio_interval(found.samples[label], found.samples[best], error=found.error)

    judged = []
    for row in rows:
        if row.label in medians and (row.label in new or row.label == champion):
            us = [1e6 * bound for bound in _bounds(medians[row.label])]
            judged.append(row._replace(state="timed", us=us, ratio=_bounds(ratio_to_best(row.label)), at=now))
        elif row.label in found.dropped:
            median = sorted(found.samples[row.label])[len(found.samples[row.label]) // 2]
            us = [1e6 * median, 1e6 * min(found.samples[row.label]), 1e6 * max(found.samples[row.label])]
            judged.append(row._replace(state="loser", us=us, ratio=_bounds(found.dropped[row.label]), at=now))
        elif row.ratio is not None and champion in medians and champion != best:
            moved = _bounds(ratio_to_best(champion))
            judged.append(row._replace(ratio=[ours * theirs for ours, theirs in zip(row.ratio, moved, strict=True)]))
        else:
            judged.append(row)
    return judged


def _bounds(interval: Interval) -> list[float]:
    """Value, low and high; finite, as JSON has numbers."""
    return [interval.value, max(interval.low, 0.0), min(interval.high, 1e30)]


def ranked(rows: Sequence[Row]) -> list[Row]:
    """The rows: those timed by their ratio, then losers, then what was not timed in the order it came."""
    order = {"timed": 0, "loser": 1}
    return sorted(rows, key=lambda row: (order.get(row.state, 2), row.ratio[0] if row.ratio else 0.0))


def floor_us(swept: Swept, n_bytes: int | None) -> float | None:
    """What of the winner's duration is not its bytes at the speed of a copy."""
    if swept.winner is None or swept.winner.us is None or n_bytes is None or not swept.copy_gb_s:
        return None
    return swept.winner.us[0] - n_bytes / swept.copy_gb_s / 1e3


def check_facts(artifact: Artifact, arguments: Sequence[Any]) -> None:
    """Raises RequestError for arguments that the declared facts do not hold for: the other variant is not built."""
    manifest = artifact.manifest
    params = [param for param in manifest.contract.params if param.kind != "scratch"]
    if len(params) != len(arguments):
        raise RequestError(f"{manifest.name} takes {len(params)} arguments, its inputs are {len(arguments)}")
    for param, argument in zip(params, arguments, strict=True):
        value = read(manifest.name, param, argument).value
        if not facts_hold([param], {param.name: value}):
            fact = f"a multiple of {param.align or param.divisible_by}"
            raise RequestError(f"{manifest.name} is tuned for {param.name} as {fact}, not for {value!r}")


def written_of(artifact: Artifact, arguments: Sequence[Any]) -> tuple[Any, ...]:
    """Those of a launch's arguments that its kernel writes."""
    params = [param for param in artifact.manifest.contract.params if param.kind != "scratch"]
    return tuple(argument for param, argument in zip(params, arguments, strict=True) if param.mutated and argument is not None)
