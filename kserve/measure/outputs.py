"""The arguments that a launch writes: their contents are kept, put back, and held against those of another build's launch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# Largest difference of two right results over the largest magnitude, where nobody states one: sums in another order.
_TOLERANCES = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3}


class Outputs:
    """What one set of launch arguments has in the places that are written.

    Args:
        written:   tensors, or arrays that torch reads in place; their contents now are the ones every launch begins with.
        tolerance: largest difference of two right results over the largest magnitude; None for the dtype's own.
    """

    def __init__(self, written: Sequence[Any], *, tolerance: float | None = None) -> None:
        import torch

        self._tensors = [one if isinstance(one, torch.Tensor) else torch.as_tensor(one) for one in written]
        self._saved = [tensor.clone() for tensor in self._tensors]
        self._tolerance = tolerance

    def restore(self) -> None:
        """Put the contents back."""
        for tensor, saved in zip(self._tensors, self._saved, strict=True):
            tensor.copy_(saved)

    def wrong(self, calls: Mapping[str, Callable[[], object]], reference: str) -> dict[str, str]:
        """The calls whose results are not those of the call `reference`, and how far off they are.

        Where the reference reads nothing of what it writes, the others begin with NaN there: what they do not write shows.
        """
        expected = self._after(calls[reference])
        poisoned = self._after(calls[reference], poisoned=True)
        is_pure = not self._difference(poisoned, expected)
        found = {}
        for name, call in calls.items():
            said = "" if name == reference else self._difference(self._after(call, poisoned=is_pure), expected)
            if said:
                found[name] = said
        self.restore()
        return found

    def _after(self, call: Callable[[], object], *, poisoned: bool = False) -> list[Any]:
        import torch

        self.restore()
        for tensor in self._tensors if poisoned else ():
            tensor.fill_(
                math.nan
                if tensor.is_floating_point()
                else torch.iinfo(tensor.dtype).max
                if tensor.dtype != torch.bool
                else True
            )
        call()
        return [tensor.clone() for tensor in self._tensors]

    def _difference(self, actual: list[Any], expected: list[Any]) -> str:
        """How the results differ; empty where they agree."""
        for ours, theirs in zip(actual, expected, strict=True):
            if not ours.numel():
                continue
            allowed = (
                _TOLERANCES.get(str(theirs.dtype).removeprefix("torch."), 0.0) if self._tolerance is None else self._tolerance
            )
            most = float((ours.double() - theirs.double()).abs().max()) / max(float(theirs.double().abs().max()), 1e-30)
            if not most <= allowed:  # true for a NaN
                return f"differs by {most:.3g} of the largest value, {allowed:.3g} is allowed"
        return ""
