"""Valid inputs of the ops: a case states only what it cares about."""

from __future__ import annotations

from typing import NamedTuple

import torch


class NormInputs(NamedTuple):
    x: torch.Tensor
    residual: torch.Tensor
    gamma: torch.Tensor
    beta: torch.Tensor

    def double(self) -> NormInputs:
        return NormInputs(*(tensor.double() for tensor in self))

    def odd(self) -> NormInputs:
        return NormInputs(*(odd(tensor) for tensor in self))


def norm_inputs(
    n: int = 5,
    hidden: int = 128,
    *,
    mean: float = 0.0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> NormInputs:
    """Rows of unit deviation around `mean`; the affine near (1, 0); all drawn on the CPU, so equal on every device."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    drawn = (normal(n, hidden) + mean, normal(n, hidden), 1.0 + 0.1 * normal(hidden), 0.1 * normal(hidden))
    return NormInputs(*(tensor.to(dtype).to(device) for tensor in drawn))


def circle_inputs(
    shape: tuple[int, int, int] = (3, 43, 3),
    *,
    count: int = 2,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> list[torch.Tensor]:
    """`count` unit-normal coefficient tensors [n_e, F, n_ang]."""
    random = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(*shape, generator=random, dtype=torch.float64) for _ in range(count)]
    return [tensor.to(dtype).to(device) for tensor in drawn]


def odd(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, contiguous, starting one element into a buffer: aligned for one element and no more."""
    buffer = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    view = buffer[1:].view(tensor.shape)
    view.copy_(tensor)
    return view


def poisoned(like: torch.Tensor) -> torch.Tensor:
    """An output that shows every element a kernel forgot to write."""
    return torch.full_like(like, torch.nan)
