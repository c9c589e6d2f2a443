"""group_norm with ReLU: the volumes of a 3-D U-Net, 64 channels at 128 or 256 voxels an edge, halved and doubled by level."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kserve.measure.workloads import Example, Sizes, Workload
from kserve.ops.group_norm import group_norm
from kserve.ops.group_norm_kernels import Norm, partition, reference

GROUPS, EPS = 8, 1e-5
SIZES = [
    {"n": 1, "c": 64, "edge": 128},
    {"n": 1, "c": 128, "edge": 64},
    {"n": 1, "c": 256, "edge": 32},
    {"n": 1, "c": 512, "edge": 16},
    {"n": 1, "c": 1024, "edge": 8},
    {"n": 2, "c": 64, "edge": 128},
    {"n": 1, "c": 64, "edge": 256},
]
DIRECTIONS, DTYPES = ("fwd", "bwd"), ("bfloat16", "float16", "float32")
_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 3e-3}
# By design: the input twice and the result once; backwards gradient and input twice, the result once.
_PASSES = {"fwd": 3, "bwd": 5}
_FLOPS = {"fwd": 12, "bwd": 20}


def workload(sizes: dict[str, int], *, direction: str, dtype: str) -> Workload:
    """The op, either direction."""
    elements = sizes["n"] * sizes["c"] * sizes["edge"] ** 3
    return Workload(
        op="group_norm",
        direction=direction,
        dtype=dtype,
        sizes=sizes,
        make=lambda device, seed: _inputs((sizes["n"], sizes["c"], *3 * [sizes["edge"]]), dtype, device, seed),
        served=lambda *tensors: group_norm(tensors[0], GROUPS, *tensors[1:], eps=EPS, activation="relu"),
        plain=_plain,
        exact=_exact,
        tolerance=_TOLERANCE[dtype],
        relative=True,
        n_bytes=_PASSES[direction] * elements * getattr(torch, dtype).itemsize,
        n_flops=_FLOPS[direction] * elements,
        gradients=(0, 1, 2),
    )


def _inputs(shape: Sequence[int], dtype: str, device: str, seed: int) -> tuple[Any, ...]:
    random = torch.Generator(device).manual_seed(seed)
    batches, channels, *volume = shape

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random, device=device, dtype=torch.bfloat16)

    # Of few digits in every dtype: so close to zero before the ReLU that its side depends on rounding, hardly any comes.
    x = normal(batches, *volume, channels).permute(0, 4, 1, 2, 3)
    weight, bias = 1.0 + 0.1 * normal(channels), 0.1 * normal(channels)
    return tuple(tensor.to(getattr(torch, dtype)) for tensor in (x, weight, bias))


def _plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.relu(torch.nn.functional.group_norm(x, GROUPS, weight, bias, EPS))


def _exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return reference(x, weight, bias, Norm(GROUPS, EPS, relu=True, out_dtype=x.dtype))


class _Launch:
    """The tensors of one launch, by the names of the kernels' arguments; what it writes holds NaN."""

    def __init__(self, spec: Mapping[str, Any], sizes: Sizes, device: str, seed: int) -> None:
        dtype, out_dtype, affine_dtype = (getattr(torch, spec[name]) for name in ("dtype", "out_dtype", "affine_dtype"))
        spatial, channels, groups = sizes["spatial"], spec["channels"], spec["groups"]
        volume = (1, channels, spatial, 1, 1)
        self.x = _inputs(volume, spec["dtype"], device, seed)[0]
        self.grad_out = _inputs(volume, spec["out_dtype"], device, seed + 1)[0]
        self.weight, self.bias = (tensor.to(affine_dtype) for tensor in _inputs(volume, spec["dtype"], device, seed)[1:])
        self.out, self.grad_x = torch.full_like(self.x, torch.nan, dtype=out_dtype), torch.full_like(self.x, torch.nan)
        self.parts = partition(1, spatial, channels, num_groups=groups, itemsize=dtype.itemsize)
        self.mean, self.rstd = torch.zeros(1, groups, device=device), torch.ones(1, groups, device=device)
        # Every block has the same count, mean 0 and variance 1.
        moments = torch.tensor([1.0, 0.0, 1.0], device=device) * (spatial * channels / groups / self.parts.splits)
        self.partial = moments.repeat_interleave(self.parts.splits * groups)
        self.by_group = torch.zeros(self.parts.splits * groups * 2, device=device)
        self.by_channel = torch.zeros(self.parts.splits * channels * 2, device=device)

    def arguments(self, names: str, *more: Any) -> tuple[Any, ...]:
        """The tensors of those names; those after a slash are written."""
        read, written = (part.split() for part in names.split("/"))
        fresh = (torch.full_like(getattr(self, name), torch.nan) for name in written)
        return (*(getattr(self, name) for name in read), *fresh, *self.parts, *more)


def _example(names: str, passes: int, *more: Any) -> Example:
    return Example(
        sizes={"spatial": 128**3},
        arguments=lambda spec, sizes, device, seed: _Launch(spec, sizes, device, seed).arguments(names, *more),
        tolerance=1e-5,  # threads of a block decide the order of a sum
        n_bytes=lambda spec, sizes: passes * spec["channels"] * sizes["spatial"] * getattr(torch, spec["dtype"]).itemsize,
    )


KERNELS = {
    "group_norm_stats": _example("x / partial", 1),
    "group_norm_apply": _example("x weight bias partial / out mean rstd", 2, EPS),
    "group_norm_bwd_sums": _example("grad_out x weight bias mean rstd / by_group by_channel", 2),
    "group_norm_bwd_apply": _example("grad_out x weight bias mean rstd by_group by_channel / grad_x weight bias", 3),
}
