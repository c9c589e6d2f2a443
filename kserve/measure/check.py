"""Whether an op is right on one workload: against float64, on fresh random inputs, with every fresh tensor full of NaN."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from kserve.measure.workloads import Workload


class Verdict(NamedTuple):
    """The largest error against float64, and the bar: absolute, or over the largest magnitude of the result."""

    error: float
    tolerance: float

    @property
    def is_right(self) -> bool:
        return self.error <= self.tolerance  # false for a NaN

    def __str__(self) -> str:
        return f"error against float64 {self.error:.3g}, allowed {self.tolerance:.3g}"


def check(workload: Workload, *, device: str, seed: int = 0) -> Verdict:
    """Run the op once and hold every result against float64."""
    arguments = workload.make(device, seed)
    with poisoned():
        actual = call(workload, workload.served, arguments, seed=seed)
        results = [result.clone() for result in actual()]
    exact = call(workload, workload.exact, tuple(_double(argument) for argument in arguments), seed=seed)()
    pairs = zip(results, exact, strict=True)
    return Verdict(
        max((_error(ours, right, relative=workload.relative) for ours, right in pairs), key=_nan_last), workload.tolerance
    )


def call(workload: Workload, function: Any, arguments: tuple[Any, ...], *, seed: int = 0) -> Any:
    """A call without arguments that gives a tuple of results: of the function, or backwards of its gradients alone.

    Backwards the forward runs now and its graph is kept. The incoming gradients are random and depend on the seed only.
    """
    import torch

    if workload.direction == "fwd":
        return lambda: _tuple(function(*arguments))
    leaves = [arguments[position].detach().requires_grad_() for position in workload.gradients]
    given = list(arguments)
    for position, leaf in zip(workload.gradients, leaves, strict=True):
        given[position] = leaf
    outputs = _tuple(function(*given))
    random = torch.Generator(outputs[0].device).manual_seed(seed)
    drawn = [torch.empty_like(out).copy_(_normal(out, random)) for out in outputs]  # laid out as a model would leave it
    return lambda: torch.autograd.grad(outputs, leaves, drawn, retain_graph=True)


def _normal(like: Any, random: Any) -> Any:
    """Of few digits, so the same for every dtype; the layout has no say either."""
    import torch

    return torch.randn(like.shape, generator=random, device=like.device, dtype=torch.bfloat16)


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Tensors that torch allocates without a value hold NaN, or the largest integer: what is not written shows."""
    import torch

    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode=before, warn_only=warns)


def _error(actual: Any, expected: Any, *, relative: bool) -> float:
    if actual.shape != expected.shape:
        return math.inf
    if not actual.numel():
        return 0.0
    error = float((actual.double() - expected.double()).abs().max())
    return error / max(float(expected.abs().max()), 1e-30) if relative else error


def _nan_last(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _double(argument: Any) -> Any:
    is_real = getattr(getattr(argument, "dtype", None), "is_floating_point", False)
    return argument.double() if is_real else argument


def _tuple(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)
