"""realspace: SiLU on the circle, at the edges of a 512-atom diamond box (44,032 of them), forwards and backwards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kserve.measure.workloads import Example, Sizes, Workload
from kserve.ops.realspace import bases, default_n_grid, realspace, reference

SIZES = [
    {"n_e": 44_032, "f": 256, "n_ang": 3},
    {"n_e": 44_032, "f": 256, "n_ang": 4},
    {"n_e": 44_032, "f": 128, "n_ang": 8},
    {"n_e": 44_032, "f": 128, "n_ang": 3},
    {"n_e": 5_504, "f": 256, "n_ang": 3},
    {"n_e": 200, "f": 48, "n_ang": 3},
]
DIRECTIONS, DTYPES = ("fwd", "bwd"), ("float32",)
_TENSORS = {"fwd": 4, "bwd": 6}  # read and written: the coefficients, their results, and backwards the gradients


def workload(sizes: dict[str, int], *, direction: str, dtype: str) -> Workload:
    """The op, either direction."""
    rows, n_ang = sizes["n_e"] * sizes["f"], sizes["n_ang"]
    return Workload(
        op="realspace",
        direction=direction,
        dtype=dtype,
        sizes=sizes,
        make=lambda device, seed: _operands(tuple(sizes.values()), 2, device, seed),
        served=realspace,
        plain=_Plain(n_ang),
        exact=reference,
        tolerance=5e-6,
        n_bytes=4 * _TENSORS[direction] * rows * n_ang,
        n_flops=_n_flops(rows, n_ang, direction),
        gradients=(0, 1),
    )


def _n_flops(rows: int, n_ang: int, direction: str) -> int:
    per_point = 8 * n_ang + 5 if direction == "fwd" else 12 * n_ang + 8
    return rows * default_n_grid(n_ang) * per_point


def _operands(shape: tuple[int, ...], count: int, device: str, seed: int) -> tuple[Any, ...]:
    random = torch.Generator(device).manual_seed(seed)
    return tuple(torch.randn(shape, generator=random, device=device) for _ in range(count))


class _Plain:
    """As one writes it: products with the four bases, which are made once."""

    def __init__(self, n_ang: int) -> None:
        self._n_ang = n_ang
        self._bases: dict[torch.device, Any] = {}

    def __call__(self, a_cos: torch.Tensor, a_sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if a_cos.device not in self._bases:
            self._bases[a_cos.device] = bases(self._n_ang, device=a_cos.device)
        c, s, ca, sa = self._bases[a_cos.device]
        h = torch.nn.functional.silu(a_cos @ c + a_sin @ s)
        return h @ ca, h @ sa


def _arguments(direction: str) -> Any:
    def make(spec: Mapping[str, Any], sizes: Sizes, device: str, seed: int) -> tuple[Any, ...]:
        n_ang = spec["n_ang"]
        operands = _operands((sizes["rows"], n_ang), _TENSORS[direction] - 2, device, seed)
        constants = bases(n_ang, spec.get("n_grid") or None, device=device)
        results = (torch.full_like(operands[0], torch.nan) for _ in range(2))
        return (*operands, *constants, *results, sizes["rows"])

    return make


KERNELS = {
    f"realspace_{direction}": Example(
        sizes={"rows": 44_032 * 256},
        arguments=_arguments(direction),
        tolerance=1e-5,
        n_bytes=lambda spec, sizes, n=n_tensors: 4 * n * sizes["rows"] * spec["n_ang"],  # type: ignore[misc]
    )
    for direction, n_tensors in _TENSORS.items()
}
