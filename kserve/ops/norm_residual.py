"""norm_residual: LayerNorm of each row, an affine, and a residual, in one pass over memory."""

from __future__ import annotations

from functools import lru_cache

import torch

from kserve.client import get_kernel
from kserve.errors import InvalidSpec, LaunchError, UnsupportedTarget
from kserve.ops import check_device, check_dtype, check_shape, region

WIDEST = 8192
_MOST_ROWS = 2**31 - 1
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def norm_residual(
    x: torch.Tensor,
    residual: torch.Tensor,
    gamma: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    *,
    dropout_p: float = 0.0,
    training: bool = False,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Normalise each row of x, apply the affine, drop, add the residual.

    y[n, h]   = (x[n, h] - mean(x[n, :])) / sqrt(var(x[n, :]) + eps) * gamma[h] + beta[h]
    out[n, h] = keep[n, h] * y[n, h] / (1 - dropout_p) + residual[n, h]

    The variance is the biased one, over h. Without training, or with dropout_p 0, keep / (1 - dropout_p) is 1.

    Axes:     N rows (var, below 2**31); H channels (const).
    Args:
        x:           [N, H] f32. Not contiguous, another float dtype, on the CPU, or H above 8192: the reference serves it.
        residual:    [N, H], dtype and device of x, contiguous.
        gamma, beta: [H], f32 or dtype of x, contiguous; None stands for ones, zeros.
        dropout_p:   probability of a drop, 0..1; used only when training.
        training:    picks the variant that draws random numbers. Not built yet: refused with dropout_p above 0.
        eps:         added to the variance, so in units of x**2; 1e-37 to 1e37.
    Returns:  [N, H], dtype of x, a new contiguous tensor.
    Numerics: centred variance in f32; error vs f64 <= 5e-6 while |mean| <= std, <= 1e-5 to |mean| = 10 std. A constant
              row gives exactly beta + residual. A row with a NaN or an infinity gives NaN, that row only. A row whose sum
              of squares overflows f32 gives beta + residual; one whose sum does gives NaN.
    Random:   none.
    Gradient: none; refuses inputs that require one while gradients are recorded.
    Targets:  sm_80 and newer, else the reference. Sources: cuda_src/norm_residual/.
    Launch:   current stream, one kernel, no workspace, no synchronisation; none when N is 0.
    Traffic:  3 N H * itemsize + 8 H bytes.
    Raises:   InvalidSpec for an option; LaunchError for a tensor of the wrong shape, dtype, device or layout, or one that
              requires a gradient; BuildError.
    """
    _check_options(dropout_p, training=training, eps=eps)
    _check_tensors(x, residual, gamma, beta)
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    with region("norm_residual.fwd"):
        if reason_for_reference(x) is None:
            try:
                return _launch(x, residual, gamma, beta, eps=eps)
            except UnsupportedTarget:
                pass
        return reference(x, residual, gamma, beta, eps=eps)


def reference(
    x: torch.Tensor,
    residual: torch.Tensor,
    gamma: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
) -> torch.Tensor:
    """The same function in plain torch, for any layout: dtype of x, computed in f32 at least, rounded once."""
    wide = torch.promote_types(x.dtype, torch.float32)
    rows = x.to(wide)
    centred = rows - rows.mean(dim=1, keepdim=True)
    # The rounded mean is off by an ulp or so: a constant row is centred to exactly zero only by the second step.
    centred = centred - centred.mean(dim=1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(dim=1, keepdim=True) + eps)
    if gamma is not None:
        y = y * gamma.to(wide)
    if beta is not None:
        y = y + beta.to(wide)
    return (y + residual.to(wide)).to(x.dtype).contiguous()


def reason_for_reference(x: torch.Tensor) -> str | None:
    """Why the kernel cannot serve x, or None when it can."""
    if x.device.type != "cuda":
        return f"x lies on {x.device}"
    if x.dtype != torch.float32:
        return f"x has dtype {x.dtype}: the kernel takes float32"
    if not x.is_contiguous():
        return "x is not contiguous"
    if x.shape[1] > WIDEST:
        return f"a row has {x.shape[1]} elements: the kernel takes up to {WIDEST}"
    return None


def _launch(
    x: torch.Tensor, residual: torch.Tensor, gamma: torch.Tensor | None, beta: torch.Tensor | None, *, eps: float
) -> torch.Tensor:
    n, hidden = x.shape
    kernel = get_kernel("fused_norm_residual", dtype="float32", hidden=hidden, training=False)
    if gamma is None:
        gamma = _constant(hidden, 1.0, x.device)
    if beta is None:
        beta = _constant(hidden, 0.0, x.device)
    out = torch.empty_like(x)
    kernel(x, residual, gamma, beta, out, n, eps)
    return out


@lru_cache(maxsize=64)
def _constant(hidden: int, value: float, device: torch.device) -> torch.Tensor:
    """The affine that was left out, made once: a call stays one kernel. It never leaves this module."""
    with torch.inference_mode(mode=False):
        return torch.full((hidden,), value, dtype=torch.float32, device=device)


def _check_options(dropout_p: float, *, training: bool, eps: float) -> None:
    if not 0.0 <= dropout_p <= 1.0:
        raise InvalidSpec(f"norm_residual: dropout_p cannot be {dropout_p!r}", facts={"allowed": "0 to 1"})
    if not 1e-37 <= eps <= 1e37:  # positive and finite in float32 too
        raise InvalidSpec(f"norm_residual: eps cannot be {eps!r}", facts={"allowed": "1e-37 to 1e37"})
    if training and dropout_p > 0.0:
        raise InvalidSpec(
            f"norm_residual: training with dropout_p={dropout_p!r} is not built yet",
            facts={"allowed": "training=False, or dropout_p=0"},
        )


def _check_tensors(x: torch.Tensor, residual: torch.Tensor, gamma: torch.Tensor | None, beta: torch.Tensor | None) -> None:
    check_dtype("x", x, _DTYPES)
    if x.dim() != 2 or x.shape[1] == 0 or x.shape[0] > _MOST_ROWS:
        raise LaunchError(f"x has shape {list(x.shape)}", facts={"allowed": "[N, H], N below 2**31, H from 1"})
    check_dtype("residual", residual, (x.dtype,))
    others = {"residual": residual}
    for name, vector in (("gamma", gamma), ("beta", beta)):
        if vector is not None:
            check_dtype(name, vector, (x.dtype,) if x.dtype == torch.float32 else (torch.float32, x.dtype))
            others[name] = vector
    for name, tensor in others.items():
        check_shape(name, tensor, x.shape if name == "residual" else x.shape[1:])
        check_device(name, tensor, x.device)
        if not tensor.is_contiguous():
            raise LaunchError(f"{name} is not contiguous: strides {list(tensor.stride())}")
    if torch.is_grad_enabled() and (x.requires_grad or any(tensor.requires_grad for tensor in others.values())):
        raise LaunchError(
            "norm_residual has no gradient, and an input requires one",
            hint="call it under torch.no_grad(), or use kserve.ops.norm_residual.reference, which torch differentiates",
        )
