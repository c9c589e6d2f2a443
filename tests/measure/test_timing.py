"""Timing by rounds: the order, the intervals, and what a run that stops by itself promises, on known distributions."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable

import pytest

from kserve.measure.timing import (
    ERROR,
    ArmFailed,
    Drop,
    Interval,
    Measurement,
    Rule,
    balanced_orders,
    measure,
    median_interval,
    ratio_interval,
    t_quantile,
)

ROUND_NOISE = 0.01


def noisy(rng: random.Random, *, seconds: float = 1e-3, noise: float = ROUND_NOISE) -> Callable[[], float]:
    return lambda: seconds * rng.lognormvariate(0.0, noise)


def simulate(seed: int, *, ratio: float, noise: float = ROUND_NOISE) -> Measurement:
    """Two arms whose durations are known, in no time at all."""
    rng = random.Random(seed)
    arms = {"base": noisy(rng, noise=noise), "other": noisy(rng, seconds=ratio * 1e-3, noise=noise)}
    return measure(arms, clock=lambda: 0.0)


def ticking(step_s: float) -> Callable[[], float]:
    """A clock that moves by `step_s` each time it is read."""
    ticks = itertools.count()
    return lambda: next(ticks) * step_s


def test_a_planted_difference_of_two_percent_is_found():
    runs = [simulate(seed, ratio=1.02) for seed in range(100)]
    found = [run for run in runs if run.ratios["other"].low > 1.0 and run.ratios["other"].half_width <= 0.005]
    assert len(found) >= 95
    assert Counter(run.stop for run in runs)["converged"] >= 95


def test_the_planted_difference_lies_in_its_interval():
    covered = [simulate(seed, ratio=1.02).ratios["other"].excludes(1.02) for seed in range(100, 200)]
    assert sum(covered) <= 8


@pytest.mark.parametrize("noise", [0.002, ROUND_NOISE])
def test_equal_arms_are_rarely_told_apart(noise):
    wrong = [seed for seed in range(400) if simulate(seed, ratio=1.0, noise=noise).ratios["other"].excludes(1.0)]
    assert len(wrong) <= 0.08 * 400


def test_equal_arms_that_share_an_outlier_now_and_then_are_rarely_told_apart():
    def arms(rng: random.Random) -> dict[str, Callable[[], float]]:
        def arm() -> float:
            return rng.lognormvariate(0.0, 0.01) * (1.3 if rng.random() < 0.05 else 1.0)

        return {"base": arm, "other": arm}

    runs = [measure(arms(random.Random(seed)), rule=Rule(most=32), clock=lambda: 0.0) for seed in range(400)]
    assert sum(run.ratios["other"].excludes(1.0) for run in runs) <= 0.08 * 400


def test_drift_that_hits_all_arms_leaves_the_ratio_alone():
    rng = random.Random(1)
    state = {"calls": 0}

    def arm(factor: float) -> Callable[[], float]:
        def run() -> float:
            state["calls"] += 1
            return factor * (1.0 + state["calls"] / 100) * rng.gauss(1.0, 0.001)

        return run

    found = measure({"base": arm(1.0), "other": arm(1.1)}, rule=Rule(rounds=32), clock=lambda: 0.0)
    assert found.ratios["other"].value == pytest.approx(1.1, rel=0.005)
    assert not found.ratios["other"].excludes(1.1)


@pytest.mark.parametrize("n", range(1, 10))
def test_places_and_neighbours_are_balanced_over_two_n_rounds(n):
    rows = balanced_orders(n)
    assert len(rows) == 2 * n and all(sorted(row) == list(range(n)) for row in rows)
    places = Counter(itertools.chain.from_iterable(enumerate(row) for row in rows))
    assert set(places.values()) == {2}
    neighbours = Counter(itertools.chain.from_iterable(itertools.pairwise(row) for row in rows))
    assert n == 1 or (len(neighbours) == n * (n - 1) and set(neighbours.values()) == {2})


def test_every_round_runs_every_arm_once():
    ran: list[str] = []

    def arm(name: str) -> Callable[[], float]:
        return lambda: ran.append(name) or 1.0

    found = measure({name: arm(name) for name in "abc"}, rule=Rule(rounds=6), clock=lambda: 0.0)
    rounds = list(zip(*[iter(ran)] * 3, strict=True))
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds)
    assert len(set(rounds)) == 6
    assert (found.stop, found.n_rounds, found.balanced, found.error) == ("fixed", 6, True, ERROR)
    assert found.samples == {"a": [1.0] * 6, "b": [1.0] * 6, "c": [1.0] * 6}


def test_calm_arms_stop_early_and_at_a_balanced_round():
    found = simulate(7, ratio=1.0, noise=0.0005)
    assert found.stop == "converged" and found.balanced and found.n_rounds < 20
    assert all(interval.half_width <= 0.02 for interval in found.medians.values())
    assert 0 < found.error < ERROR


def test_arms_too_noisy_for_the_target_stop_at_the_most_rounds():
    found = simulate(7, ratio=1.0, noise=0.2)
    assert (found.stop, found.n_rounds) == ("max", 128)
    assert found.ratios["other"].half_width > 0.005


def test_looks_and_the_end_together_spend_no_more_than_the_allowed_error():
    rng = random.Random(3)
    arms = {"base": noisy(rng, noise=0.3), "other": noisy(rng, noise=0.3)}
    found = measure(arms, rule=Rule(most=64), clock=lambda: 0.0)
    last_look = 48  # 4, 8, 12, 20, 32, 48
    assert found.error == pytest.approx(ERROR * (64 - last_look) / 64)


def test_a_run_that_time_ends_before_the_first_look_has_the_whole_error():
    rng = random.Random(3)
    found = measure({"a": noisy(rng), "b": noisy(rng)}, rule=Rule(hard_s=8.0), clock=ticking(1.0))
    assert found.stop == "budget" and found.n_rounds < 4 and not found.balanced
    assert found.error == ERROR


def test_after_the_soft_budget_a_run_ends_balanced():
    rng = random.Random(3)
    found = measure({"a": noisy(rng), "b": noisy(rng)}, rule=Rule(soft_s=16.0, hard_s=1e6), clock=ticking(1.0))
    assert found.stop == "budget" and found.balanced and found.n_rounds % 4 == 0


def test_a_round_that_would_outlast_the_hard_budget_is_not_begun():
    times = iter([0.0, 0.0, 40.0, 40.0, 40.0, 80.0, 80.0])  # begin, then start, end and now of two rounds of 40 s
    found = measure({"a": lambda: 40.0}, rule=Rule(rounds=9, hard_s=100.0), clock=lambda: next(times))
    assert (found.stop, found.n_rounds) == ("budget", 2)


def test_an_arm_that_fails_leaves_and_the_others_go_on():
    calls = {"n": 0}

    def flaky() -> float:
        calls["n"] += 1
        if calls["n"] == 3:
            raise ArmFailed("the result is wrong")
        return 1.0

    found = measure({"base": lambda: 1.0, "flaky": flaky, "third": lambda: 2.0}, rule=Rule(rounds=5), clock=lambda: 0.0)
    assert found.failed == {"flaky": "the result is wrong"}
    assert set(found.medians) == {"base", "third"} and set(found.ratios) == {"third"}
    assert len(found.samples["third"]) == 5 and not found.balanced


def test_without_its_baseline_a_run_has_medians_and_no_ratios():
    def broken() -> float:
        raise ArmFailed("no such compiler")

    found = measure({"base": broken, "other": lambda: 2.0}, rule=Rule(rounds=2), clock=lambda: 0.0)
    assert found.ratios == {} and found.medians["other"].value == 2.0


def test_a_run_without_arms_left_ends():
    def broken() -> float:
        raise ArmFailed("no such compiler")

    found = measure({"only": broken}, clock=lambda: 0.0)
    assert (found.stop, found.medians, found.balanced) == ("failed", {}, False)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_what_is_no_duration_is_refused(seconds):
    with pytest.raises(ValueError, match="arm only returned"):
        measure({"only": lambda: seconds}, clock=lambda: 0.0)


@pytest.mark.parametrize(("arms", "baseline"), [({}, None), ({"a": lambda: 1.0}, "b")])
def test_a_baseline_has_to_be_an_arm(arms, baseline):
    with pytest.raises(ValueError, match="is not among the arms"):
        measure(arms, baseline=baseline)


def test_one_value_is_known_to_no_precision():
    assert median_interval([3.0]) == Interval(3.0, -math.inf, math.inf, 1)
    assert ratio_interval([3.0], [2.0]) == Interval(pytest.approx(1.5), 0.0, math.inf, 1)


def test_an_interval_is_students_around_the_median():
    found = median_interval([1.0, 2.0, 3.0, 4.0, 10.0])
    half = 2.7764451 * math.sqrt(math.pi / 2) * math.sqrt(12.5) / math.sqrt(5)
    assert found == Interval(3.0, pytest.approx(3.0 - half), pytest.approx(3.0 + half), 5)


def test_values_that_do_not_pair_have_no_ratio():
    with pytest.raises(ValueError, match="do not pair"):
        ratio_interval([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="no values"):
        median_interval([])


@pytest.mark.parametrize(
    ("error", "degrees", "expected"),
    # from printed tables
    [
        (0.05, 1, 12.706205),
        (0.05, 2, 4.302653),
        (0.05, 3, 3.182446),
        (0.05, 7, 2.364624),
        (0.05, 30, 2.042272),
        (0.05, 1000, 1.962339),
        (0.01, 5, 4.032143),
        (0.001, 4, 8.610302),
    ],
)
def test_quantiles_of_students_t(error, degrees, expected):
    assert t_quantile(error, degrees) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("error", "degrees"), [(0.0, 5), (1.0, 5), (0.05, 0)])
def test_there_is_no_quantile_outside_its_range(error, degrees):
    with pytest.raises(ValueError, match="no t for"):
        t_quantile(error, degrees)


DROP, RULE = Drop(), Rule()


def race(seed: int, *ratios: float, drop: Drop | None = DROP, rule: Rule = RULE, noise: float = ROUND_NOISE) -> Measurement:
    """One arm of each duration, called by its place."""
    rng = random.Random(seed)
    arms = {str(place): noisy(rng, seconds=ratio * 1e-3, noise=noise) for place, ratio in enumerate(ratios)}
    return measure(arms, rule=rule, drop=drop, clock=lambda: 0.0)


def test_a_clear_loser_leaves_early_and_is_measured():
    found = race(1, 1.0, 1.5, 3.0, 1.01)
    assert set(found.dropped) == {"1", "2"} and set(found.medians) == {"0", "3"}
    assert len(found.samples["2"]) < len(found.samples["0"]) == found.n_rounds
    assert found.dropped["2"].value == pytest.approx(3.0, rel=0.05) and found.dropped["2"].low > 1.05
    assert found.stop == "converged" and not found.balanced


def test_nobody_leaves_without_a_rule_for_it_or_within_the_margin():
    assert race(1, 1.0, 3.0, drop=None).dropped == {}
    assert race(1, 1.0, 1.04).dropped == {}
    assert race(1, 1.0, 3.0, rule=Rule(rounds=3)).dropped == {}


def test_the_baseline_and_what_is_kept_never_leave_and_what_is_kept_judges_nobody():
    found = race(1, 2.0, 1.0, 3.0, 0.1, drop=Drop(keep=frozenset({"3"})))
    assert set(found.dropped) == {"2"}
    assert set(found.medians) == {"0", "1", "3"}


def test_the_best_arm_is_almost_never_dropped():
    """Ten arms as noisy as the margin is wide, one of them best: the error allowed is 5 %, the looks share it."""
    lost = [
        seed
        for seed in range(60)
        if "0"
        in race(seed, *([1.0] + [1.02] * 9), drop=Drop(margin=0.0, keep=frozenset()), rule=Rule(most=32), noise=0.03).dropped
    ]
    assert len(lost) <= 0.05 * 60


def test_after_a_loser_left_the_orders_begin_anew():
    order: list[str] = []

    def arm(name: str, seconds: float) -> Callable[[], float]:
        return lambda: order.append(name) or seconds

    found = measure(
        {"a": arm("a", 1.0), "b": arm("b", 1.0), "c": arm("c", 9.0)}, rule=Rule(rounds=12), drop=Drop(), clock=lambda: 0.0
    )
    assert set(found.dropped) == {"c"} and found.n_rounds == 12
    rest = order[3 * len(found.samples["c"]) :]
    rounds = list(zip(*[iter(rest)] * 2, strict=True))
    assert Counter(rounds)["a", "b"] == Counter(rounds)["b", "a"]
