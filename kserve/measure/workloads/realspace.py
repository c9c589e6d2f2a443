"""realspace: SiLU on the circle, at the edges of a 512-atom diamond box (44,032 of them), forwards and backwards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kserve.measure.workloads import Example, Sizes, Workload
from kserve.ops.realspace import bases, default_n_grid, realspace, reference

# by_order 1: the operands lie order by order, as a linear layer that is batched over the orders leaves them.
SIZES = [
    {"n_e": 44_032, "f": 256, "n_ang": 3, "by_order": 0},
    {"n_e": 44_032, "f": 256, "n_ang": 3, "by_order": 1},
    {"n_e": 44_032, "f": 256, "n_ang": 4, "by_order": 0},
    {"n_e": 44_032, "f": 128, "n_ang": 8, "by_order": 0},
    {"n_e": 44_032, "f": 128, "n_ang": 3, "by_order": 0},
    {"n_e": 5_504, "f": 256, "n_ang": 3, "by_order": 0},
    {"n_e": 200, "f": 48, "n_ang": 3, "by_order": 0},
]
DIRECTIONS, DTYPES = ("fwd", "bwd"), ("float32", "bfloat16", "float16")
_RELATIVE = {"bfloat16": 1e-2, "float16": 1e-3}
_TENSORS = {"fwd": 4, "bwd": 6}  # read and written: the coefficients, their results, and backwards the gradients


def workload(sizes: dict[str, int], *, direction: str, dtype: str) -> Workload:
    """The op, either direction."""
    rows, n_ang = sizes["n_e"] * sizes["f"], sizes["n_ang"]
    return Workload(
        op="realspace",
        direction=direction,
        dtype=dtype,
        sizes=sizes,
        make=lambda device, seed: _inputs(sizes, dtype, device, seed),
        served=realspace,
        plain=_Plain(n_ang),
        exact=reference,
        tolerance=_RELATIVE.get(dtype, 5e-6),
        relative=dtype in _RELATIVE,
        n_bytes=getattr(torch, dtype).itemsize * _TENSORS[direction] * rows * n_ang,
        n_flops=_n_flops(rows, n_ang, direction),
        gradients=(0, 1),
    )


def _n_flops(rows: int, n_ang: int, direction: str) -> int:
    per_point = 8 * n_ang + 5 if direction == "fwd" else 12 * n_ang + 8
    return rows * default_n_grid(n_ang) * per_point


def _inputs(sizes: Sizes, dtype: str, device: str, seed: int) -> tuple[Any, ...]:
    shape = (sizes["n_e"], sizes["f"], sizes["n_ang"])
    drawn = (tensor.to(getattr(torch, dtype)) for tensor in _operands(shape, 2, device, seed))
    if not sizes["by_order"]:
        return tuple(drawn)
    return tuple(tensor.permute(2, 0, 1).contiguous().permute(1, 2, 0) for tensor in drawn)


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
        h = torch.nn.functional.silu(a_cos.to(c.dtype) @ c + a_sin.to(s.dtype) @ s)
        return (h @ ca).to(a_cos.dtype), (h @ sa).to(a_cos.dtype)


def _arguments(direction: str, *, standard: bool) -> Any:
    """Of the kernels that read the bases, or of those that have the standard ones."""
    name = _size_name(standard=standard)

    def make(spec: Mapping[str, Any], sizes: Sizes, device: str, seed: int) -> tuple[Any, ...]:
        n_ang, dtype = spec["n_ang"], getattr(torch, spec.get("dtype", "float32"))
        drawn = _operands((sizes[name], n_ang), _TENSORS[direction] - 2, device, seed)
        operands = [tensor.to(dtype) for tensor in drawn]
        results = [torch.full_like(operands[0], torch.nan) for _ in range(2)]
        if standard:
            return (*operands, *results, sizes[name], *(0 for _ in operands))
        return (*operands, *bases(n_ang, spec.get("n_grid") or None, device=device), *results, sizes[name])

    return make


def _size_name(*, standard: bool) -> str:
    return "n_rows" if standard else "rows"


def _n_bytes(n_tensors: int, name: str) -> Any:
    return lambda spec, sizes: getattr(torch, spec.get("dtype", "float32")).itemsize * n_tensors * sizes[name] * spec["n_ang"]


KERNELS = {
    f"{name}_{direction}": Example(
        sizes={_size_name(standard=standard): 44_032 * 256},
        arguments=_arguments(direction, standard=standard),
        tolerance=1e-5,
        n_bytes=_n_bytes(n_tensors, _size_name(standard=standard)),
    )
    for direction, n_tensors in _TENSORS.items()
    for name, standard in (("realspace", False), ("realspace_cuda", True))
}
