"""Durations and their ratios, with intervals that hold although the run itself decides when it has seen enough.

An arm is a callable that returns a duration in seconds: of a whole process, of a burst of calls, of anything that can be
repeated. Every round runs each arm once, so whatever drifts (clocks, temperature, neighbours) hits all of them.

Order.    The rows of a Williams square, each forward and then reversed: after 2 n rounds of n arms every arm has stood in every
          place, and right after every other arm, equally often. A run is `balanced` when it ends there.
Interval. Around the median of the rounds: t * 1.2533 * sd / sqrt(n), Student's t with n - 1 degrees of freedom; 1.2533 is
          sqrt(pi / 2), what a median's deviation is to a mean's. A ratio is paired: the same, over the logarithms of the
          rounds' own ratios.
Stopping. The run looks at its intervals after a balanced number of rounds, each look half as many again as the last, and ends
          when all are narrow. Looking often and stopping at a lucky moment would cover too little, so the allowed error is
          spent in parts: a look may be wrong with probability ERROR * (rounds since the last look) / (most rounds), and a
          run that time or rounds have ended has what is left. The parts sum to at most ERROR, so the interval reported
          covers with 1 - ERROR whichever look was the last (Bonferroni's inequality: it asks for no independence).
Dropping. Where many arms look for the best one, clear losers may leave early. That is judged after every round, each judgement
          with its part of a second ERROR, shared by the arms: the best arm is dropped with at most that probability.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

ERROR = 0.05
_MEDIAN_FACTOR = math.sqrt(math.pi / 2)
_LOOK_GROWTH = 1.5
Arm = Callable[[], float]


class ArmFailed(Exception):
    """An arm has no number, and why: it leaves the run, the others go on."""


class Interval(NamedTuple):
    """A median or a ratio and the range it lies in; infinitely wide when there is one value only."""

    value: float
    low: float
    high: float
    n: int

    @property
    def half_width(self) -> float:
        """Half the range over the value."""
        return (self.high - self.low) / (2 * self.value)

    def excludes(self, value: float) -> bool:
        return not self.low <= value <= self.high


class Rule(NamedTuple):
    """When a run ends.

    Fields:
        least, most:        rounds.
        median, ratio:      half-widths, relative, at which medians and ratios are narrow enough.
        soft_s, hard_s:     past the first it ends at the next balanced round; no round begins that would outlast the second.
        rounds:             exactly so many, whatever the intervals; time still ends it.
    """

    least: int = 4
    most: int = 128
    median: float = 0.02
    ratio: float = 0.005
    soft_s: float = 20.0
    hard_s: float = 300.0
    rounds: int | None = None


class Drop(NamedTuple):
    """When an arm leaves as a clear loser: the interval of its ratio to the best arm so far lies above 1 + margin.

    Fields:
        least: rounds before the first one may leave.
        keep:  arms that never leave, and that nothing is judged by; the baseline never leaves either.
    """

    margin: float = 0.05
    least: int = 4
    keep: frozenset[str] = frozenset()


class Measurement(NamedTuple):
    """What a run found.

    Fields:
        medians, ratios: of each arm, seconds; of each arm but the baseline, its duration over the baseline's.
        samples, failed: of each arm, seconds, one a round; of each arm without a number, why.
        stop:            converged | budget | max | fixed | failed (no arm was left).
        balanced, error: as above; the probability that an interval here misses.
        dropped:         of each arm that left as a loser, its duration over the best arm's of that moment; it has no median.
    """

    medians: dict[str, Interval]
    ratios: dict[str, Interval]
    samples: dict[str, list[float]]
    failed: dict[str, str]
    n_rounds: int
    stop: str
    balanced: bool
    error: float
    dropped: dict[str, Interval]


def measure(
    arms: Mapping[str, Arm],
    *,
    baseline: str | None = None,
    rule: Rule | None = None,
    drop: Drop | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Measurement:
    """Run the arms in interleaved rounds until the intervals are narrow or the rule ends it.

    Args:
        arms:     name -> arm; one that raises ArmFailed leaves the run, its samples with it.
        baseline: the arm that ratios are taken to; the first where none is named.
        drop:     when a clear loser leaves the run; None for never.
        clock:    seconds, for the budget alone.
    Raises: ValueError for no arms, an unknown baseline, or a duration that is not a positive number.
    """
    baseline = next(iter(arms), "") if baseline is None else baseline
    if baseline not in arms:
        raise ValueError(f"baseline {baseline!r} is not among the arms: {', '.join(arms)}")
    run, longest_s, began = _Run(arms, baseline, rule or Rule(), drop), 0.0, clock()
    while not run.stop:
        started = clock()
        run.round()
        longest_s = max(longest_s, clock() - started)
        run.judge(elapsed_s=clock() - began, next_s=longest_s)
    return run.found()


class _Run:
    """The state of one run."""

    def __init__(self, arms: Mapping[str, Arm], baseline: str, rule: Rule, drop: Drop | None) -> None:
        self._arms = dict(arms)
        self._baseline = baseline
        self._rule = rule
        self._drop = drop
        self._dropped: dict[str, Interval] = {}
        # Rounds at the last judgement of losers, and when the arms became fewer: the orders begin anew there.
        self._judged = self._since = 0
        self._samples: dict[str, list[float]] = {name: [] for name in arms}
        self._failed: dict[str, str] = {}
        self._n_rounds = self._last_look = 0
        self._error = ERROR  # what is left to spend; in the end, what the reported intervals have
        self.stop = ""

    def round(self) -> None:
        names = list(self._arms)
        for index in balanced_orders(len(names))[(self._n_rounds - self._since) % (2 * len(names))]:
            self._run_arm(names[index])
        self._n_rounds += 1

    def _run_arm(self, name: str) -> None:
        try:
            seconds = self._arms[name]()
        except ArmFailed as error:
            self._failed[name] = str(error)
            del self._arms[name], self._samples[name]
            return
        if not 0 < seconds < math.inf:
            raise ValueError(f"arm {name} returned {seconds!r}: a duration is a positive number of seconds")
        self._samples[name].append(seconds)

    def judge(self, *, elapsed_s: float, next_s: float) -> None:
        """Let losers go, and set `stop` when the run is over."""
        self._drop_losers()
        self.stop = self._end(elapsed_s, next_s)
        if self.stop or not self._is_look():
            return
        part = ERROR * (self._n_rounds - self._last_look) / self._rule.most
        if self._is_narrow(part):
            self.stop, self._error = "converged", part
        else:
            self._error, self._last_look = self._error - part, self._n_rounds

    def _drop_losers(self) -> None:
        drop = self._drop
        rivals = [name for name in self._arms if drop is not None and name not in drop.keep]
        if drop is None or self._n_rounds < max(drop.least, 2) or len(rivals) < 2:
            return
        best = min(rivals, key=lambda name: statistics.median(self._samples[name]))
        most = self._rule.most if self._rule.rounds is None else self._rule.rounds
        error = ERROR * (self._n_rounds - self._judged) / (most * (len(rivals) - 1))
        self._judged = self._n_rounds
        for name in rivals:
            ratio = ratio_interval(self._samples[name], self._samples[best], error=error)
            if name != self._baseline and ratio.low > 1 + drop.margin:
                self._dropped[name], self._since = ratio, self._n_rounds
                del self._arms[name]

    def _end(self, elapsed_s: float, next_s: float) -> str:
        """Why the run ends here whatever its intervals are; empty when it does not."""
        rule = self._rule
        if not self._arms:
            return "failed"
        if self._n_rounds >= (rule.most if rule.rounds is None else rule.rounds):
            return "max" if rule.rounds is None else "fixed"
        late = elapsed_s > rule.soft_s and self._is_balanced()
        return "budget" if late or elapsed_s + next_s > rule.hard_s else ""

    def _is_balanced(self) -> bool:
        return (self._n_rounds - self._since) % (2 * len(self._arms)) == 0

    def _is_look(self) -> bool:
        due = max(self._rule.least, self._last_look * _LOOK_GROWTH)
        return self._rule.rounds is None and self._n_rounds >= due and self._is_balanced()

    def _is_narrow(self, error: float) -> bool:
        medians, ratios = self._intervals(error)
        wide = [found for found in medians.values() if found.half_width > self._rule.median]
        return not wide and all(found.half_width <= self._rule.ratio for found in ratios.values())

    def _intervals(self, error: float) -> tuple[dict[str, Interval], dict[str, Interval]]:
        samples = {name: self._samples[name] for name in self._arms}
        medians = {name: median_interval(values, error=error) for name, values in samples.items()}
        base = samples.get(self._baseline, [])
        others = {name: values for name, values in samples.items() if base and name != self._baseline}
        return medians, {name: ratio_interval(values, base, error=error) for name, values in others.items()}

    def found(self) -> Measurement:
        balanced = bool(self._arms) and not self._failed and not self._dropped and self._is_balanced()
        medians, ratios = self._intervals(self._error)
        return Measurement(
            medians=medians,
            ratios=ratios,
            samples=self._samples,
            failed=self._failed,
            n_rounds=self._n_rounds,
            stop=self.stop,
            balanced=balanced,
            error=self._error,
            dropped=self._dropped,
        )


def balanced_orders(n: int) -> list[list[int]]:
    """The order of n arms in each of 2 n rounds, after which places and neighbours are balanced.

    Williams, Aust. J. Sci. Res. A 2 (1949) 149: the first row is 0, 1, n-1, 2, n-2, …, each further row adds one modulo n.
    For an odd n only the rows together with their reverses are balanced, hence 2 n.
    """
    first = [(place + 1) // 2 * (1 if place % 2 else -1) for place in range(n)]
    rows = [[(item + shift) % n for item in first] for shift in range(n)]
    return [order for row in rows for order in (row, row[::-1])]


def median_interval(values: Sequence[float], *, error: float = ERROR) -> Interval:
    """The median of the values and its interval, which misses with probability `error`. Raises: ValueError for none."""
    if not values:
        raise ValueError("no values: a median needs at least one")
    middle, n = statistics.median(values), len(values)
    if n == 1:
        return Interval(middle, -math.inf, math.inf, n)
    half = t_quantile(error, n - 1) * _MEDIAN_FACTOR * statistics.stdev(values) / math.sqrt(n)
    return Interval(middle, middle - half, middle + half, n)


def ratio_interval(values: Sequence[float], baseline: Sequence[float], *, error: float = ERROR) -> Interval:
    """The median of values[i] / baseline[i] over the rounds, and its interval. Raises: ValueError when they do not pair."""
    if len(values) != len(baseline):
        raise ValueError(f"{len(values)} values and {len(baseline)} of the baseline do not pair")
    logs = median_interval([math.log(ours / theirs) for ours, theirs in zip(values, baseline, strict=True)], error=error)
    return Interval(math.exp(logs.value), math.exp(logs.low), math.exp(logs.high), logs.n)


@lru_cache(maxsize=1024)
def t_quantile(error: float, degrees: int) -> float:
    """The t that |T| exceeds with probability `error`, for Student's T with that many degrees of freedom.

    By bisection of the finite sums in Abramowitz and Stegun, 26.7.3 and 26.7.4. Raises: ValueError for no such quantile.
    """
    if not 0 < error < 1 or degrees < 1:
        raise ValueError(f"no t for error {error!r} and {degrees!r} degrees of freedom")
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        low, high = (angle, high) if _t_within(angle, degrees) < 1 - error else (low, angle)
    return math.sqrt(degrees) * math.tan(low)


def _t_within(angle: float, degrees: int) -> float:
    """P(|T| <= t) for t = sqrt(degrees) * tan(angle)."""
    cosine, odd = math.cos(angle), degrees % 2
    term = cosine if odd else 1.0
    total = term if degrees > 1 else 0.0
    for k in range(2 + odd, degrees - 1, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    total *= math.sin(angle)
    return (angle + total) * 2 / math.pi if odd else total
