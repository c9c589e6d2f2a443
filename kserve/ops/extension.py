"""The CUDA kernels as operators of torch, `torch.ops.kserve.*`: one library on the stable ABI, sharing their device code.

    from kserve.ops import extension

    if extension.AVAILABLE:
        y = extension.norm_residual(x, residual, gamma, beta)

An operator is for code that wants torch's dispatcher around a kernel; `kserve.ops` launches the same kernels without it.
"""

from __future__ import annotations

from functools import cache

import torch

from kserve.client.extension import get_extension
from kserve.errors import KserveError

NAME = "kserve_operators"
AVAILABLE: bool


def __getattr__(name: str) -> object:
    if name == "AVAILABLE":
        return reason_unavailable() is None
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@cache
def reason_unavailable() -> str | None:
    """Why the library is not here: there is no device, or it can neither be found nor built. None when it is loaded."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    try:
        get_extension(NAME)
    except KserveError as error:
        return error.message
    return None


def norm_residual(
    x: torch.Tensor, residual: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor, *, eps: float = 1e-5
) -> torch.Tensor:
    """Normalise each row of x, apply the affine, add the residual: the kernel of `kserve.ops.norm_residual` as an operator.

    out[n, h] = (x[n, h] - mean(x[n, :])) / sqrt(var(x[n, :]) + eps) * gamma[h] + beta[h] + residual[n, h]

    The variance is the biased one, over h.

    Axes:     N rows (var, below 2**31); H channels (const, 1 to 8192).
    Args:
        x, residual: [N, H] f32, contiguous, on one CUDA device.
        gamma, beta: [H] f32, contiguous, on the same device.
        eps:         added to the variance, so in units of x**2; > 0.
    Returns:  [N, H] f32, a new tensor: the bits that the kernel `fused_norm_residual` gives.
    Numerics: as `kserve.ops.norm_residual`.
    Random:   none.
    Gradient: none is registered.
    Targets:  sm_80 and newer. Sources: cuda_src/extension/, cuda_src/include/kserve/norm_residual.cuh.
    Launch:   current stream, one kernel, no workspace, no synchronisation; none when N is 0.
    Traffic:  3 N H * itemsize + 8 H bytes.
    Raises:   InvalidSpec, UnsupportedTarget, BuildError, LoadError; RuntimeError for a tensor that does not fit.
    """
    return _operator("norm_residual", int(x.shape[-1]))(x, residual, gamma, beta, eps)


@cache
def _operator(name: str, hidden: int) -> torch._ops.OpOverloadPacket:
    """The operator for rows of that many channels, whose library is found or built when it is first wanted."""
    get_extension(NAME, hidden=hidden)
    return getattr(torch.ops.kserve, f"{name}_{hidden}")
