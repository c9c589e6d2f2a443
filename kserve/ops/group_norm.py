"""group_norm: GroupNorm of channels-last volumes with its affine and ReLU, forward and backward, and `FastGroupNorm`."""

from __future__ import annotations

from typing import Any

import torch

from kserve.errors import InvalidSpec
from kserve.ops import region
from kserve.ops.group_norm_kernels import (
    KERNEL_DTYPES,
    Norm,
    Parameter,
    differentiable,
    reason_for_reference,
    reference,
    traced,
)
from kserve.ops.ladder import Call, Ladder
from kserve.ops.sharding import sharded

__all__ = ["STOCK", "FastGroupNorm", "Norm", "group_norm", "is_supported", "ladder", "reason_for_reference", "reference"]
STOCK = "stock"
ladder = Ladder("group_norm")


def group_norm(
    input: torch.Tensor,  # noqa: A002 - torch's own name
    num_groups: int,
    weight: Parameter = None,
    bias: Parameter = None,
    *,
    eps: float = 1e-5,
    activation: str | None = None,
    out_dtype: torch.dtype | str | None = STOCK,
) -> torch.Tensor:
    """Normalise the channels of each group over all voxels, apply the affine and the activation.

    xhat = (x - mean) / sqrt(var + eps)     mean and biased variance over the S C/G elements of a batch's group
    p    = xhat * weight[c] + bias[c]
    out  = p, or with "relu" 0 where p <= 0, else p

    Axes:     N batches, S = D H W voxels (var); C channels, G groups (const).
    Args:
        input:        [N, C, D, H, W] f32, bf16 or f16, channels-last. Another layout, rank or dtype, the CPU, an input without
                      elements, more than 4096 channels or 512 accesses of a voxel: the reference serves it. A DTensor is
                      normalised shard by shard, each by its own statistics, and keeps its placements; sharded over the
                      channels, or of partial sums, it is left to torch.
        num_groups:   G, divides C.
        weight, bias: [C], each f32 or dtype of input; None stands for ones, zeros.
        eps:          added to the variance, > 0.
        activation:   None or "relu".
        out_dtype:    "stock": f32 where CUDA's autocast is on, as torch has it, else the input's; None: the input's; or
                      f32, bf16, f16.
    Returns:  [N, C, D, H, W], channels-last, a new tensor. Another out_dtype is the f32 result rounded once, bit for bit.
    Numerics: computed in f32 from corrected sums; relative to the largest result <= 1e-4, bf16 2e-2, f16 3e-3, also with
              |mean| at 1e4 std as good as torch in f32. A NaN passes the activation. A zero keeps no sign. The same bits every
              time and in every process, for one binary.
    Random:   none.
    Gradient: of input, weight, bias, once, by two launches; a second derivative is refused (create_graph=True). Of one
              element in its group: exactly 0.
    Targets:  sm_80 and newer, else the reference. Sources: cuda_src/group_norm/.
    Launch:   current stream, two kernels each way, no synchronisation. Workspace: forward 12 G, backward 8 (G + C) bytes for
              each of N * splits blocks, at most max(264, N) of them.
    Traffic:  forward 3, backward 5 times N S C * itemsize bytes; less where the caches hold the input between the launches.
    Raises:   InvalidSpec for an option; torch's own errors for tensors it refuses; with `strict` BuildError.
    """
    norm = Norm(_checked(num_groups), float(eps), _is_relu(activation), _out_dtype(input, out_dtype))
    return _called(input, weight, bias, norm, module=None)


class FastGroupNorm(torch.nn.GroupNorm):  # type: ignore[misc]
    """torch.nn.GroupNorm, served by `group_norm`: same parameters, same state. Further arguments as there."""

    ladder = ladder

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,  # noqa: FBT001, FBT002 - torch's own signature
        *,
        activation: str | None = None,
        out_dtype: torch.dtype | str | None = STOCK,
        **factory: Any,
    ) -> None:
        super().__init__(num_groups, num_channels, eps, affine, **factory)
        self.activation, self.out_dtype = activation, out_dtype
        _is_relu(activation)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's own name
        """The normalised input."""
        norm = Norm(self.num_groups, self.eps, _is_relu(self.activation), _out_dtype(input, self.out_dtype))
        return _called(input, self.weight, self.bias, norm, module=self)

    def extra_repr(self) -> str:
        """As torch prints it, with what is added."""
        return f"{super().extra_repr()}, activation={self.activation!r}, out_dtype={self.out_dtype!r}"


def is_supported(
    input: torch.Tensor,  # noqa: A002
    num_groups: int,
    weight: Parameter = None,
    bias: Parameter = None,
    *,
    activation: str | None = None,
) -> bool:
    """Whether the kernels are made for this call. Costs nothing, changes nothing, compiles nothing."""
    shard = sharded(input, weight, bias)
    given = (input, weight, bias) if shard is None else shard.local
    return activation in (None, "relu") and reason_for_reference(given[0], num_groups, *given[1:]) is None


def _called(
    input: torch.Tensor,  # noqa: A002
    weight: Parameter,
    bias: Parameter,
    norm: Norm,
    *,
    module: torch.nn.Module | None,
) -> torch.Tensor:
    shard = sharded(input, weight, bias)
    if shard is not None:
        return shard.whole(_called(*shard.local, norm, module=module))

    def unsupported() -> str | None:
        return reason_for_reference(input, norm.num_groups, weight, bias)

    with region("group_norm.fwd"):
        if torch.compiler.is_compiling():
            # What a compiler sees is one node where the kernels are made for it; their failure is then this node's own.
            serves = reference if ladder.is_closed() or unsupported() else traced
            return serves(input, weight, bias, norm)
        out: torch.Tensor = ladder.call(Call((input, weight, bias, norm), differentiable, reference, unsupported, module))
        return out


def _checked(num_groups: int) -> int:
    if isinstance(num_groups, bool) or not isinstance(num_groups, int) or num_groups < 1:
        raise InvalidSpec(f"group_norm: num_groups cannot be {num_groups!r}", facts={"allowed": "an integer from 1"})
    return num_groups


def _is_relu(activation: str | None) -> bool:
    if activation not in (None, "relu"):
        raise InvalidSpec(f"group_norm: activation cannot be {activation!r}", facts={"allowed": "None, relu"})
    return activation == "relu"


def _out_dtype(input: torch.Tensor, wanted: torch.dtype | str | None) -> torch.dtype:  # noqa: A002
    dtype: torch.dtype = input.dtype
    if wanted == STOCK:
        # torch's rule: of the CPU's autocast group_norm is no part.
        casts = input.device.type == "cuda" and torch.is_autocast_enabled("cuda") and dtype in KERNEL_DTYPES
        return torch.float32 if casts else dtype
    if wanted is None:
        return dtype
    if wanted not in KERNEL_DTYPES:
        allowed = f"{STOCK!r}, None, float32, bfloat16, float16"
        raise InvalidSpec(f"group_norm: out_dtype cannot be {wanted!r}", facts={"allowed": allowed})
    return wanted
