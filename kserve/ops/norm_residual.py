"""norm_residual: LayerNorm of each row, an affine, and a residual, in one pass over memory."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from kserve.client import get_kernel
from kserve.client.launch import Kernel
from kserve.errors import InvalidSpec, LaunchError
from kserve.ops import check_device, check_dtype, check_shape, region
from kserve.ops.allocate import empty
from kserve.ops.backend import CUDA, Usual, backend, check_no_gradient, is_plain, serve
from kserve.ops.library import define
from kserve.ops.random import advance, random_state

WIDEST = 8192
_MOST_ROWS = 2**31 - 1
_KERNEL_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_DTYPES = (*_KERNEL_DTYPES, torch.float64)
_usual = Usual("norm_residual", "n H, n H, H, H")


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
        x:           [N, H] f32, bf16 or f16. Not contiguous, f64, on the CPU, or H above 8192: the reference serves it.
        residual:    [N, H], dtype and device of x, contiguous.
        gamma, beta: [H], f32 or dtype of x, contiguous; None stands for ones, zeros.
        dropout_p:   probability of a drop, 0..1; used only when training.
        training:    picks the kernel that draws random numbers, where dropout_p is above 0.
        eps:         added to the variance, so in units of x**2; 1e-37 to 1e37.
    Returns:  [N, H], dtype of x, a new contiguous tensor.
    Numerics: centred variance in f32; error vs f64 <= 5e-6 while |mean| <= std, <= 1e-5 to |mean| = 10 std. A constant
              row gives exactly beta + residual. A row with a NaN or an infinity gives NaN, that row only. A row whose sum
              of squares overflows f32 gives beta + residual; one whose sum does gives NaN. bf16, f16: computed in f32,
              rounded once. A kept element is exactly y / (1 - dropout_p) as f32 rounds it; dropout_p 1 gives the residual.
    Random:   keep depends on (seed, offset, n H + h) only: Philox, whatever the launch. Seed and offset are those of torch's
              generator of the device, which moves on by 4 ceil(N H / 4) numbers; a captured graph draws new ones at each
              replay. The reference draws from torch's dropout: another mask.
    Gradient: none of the kernels: refuses inputs that require one while gradients are recorded. The backends `pytorch` and
              `compiled` have it.
    Targets:  sm_80 and newer, else the reference. Sources: cuda_src/norm_residual/.
    Launch:   current stream, one kernel (with dropout a second one of one thread), no workspace, no synchronisation; none
              when N is 0. The first call with dropout, and the first after torch drew numbers itself, copies 16 bytes there.
    Traffic:  3 N H * itemsize + 8 H bytes.
    Raises:   InvalidSpec for an option; LaunchError for a tensor of the wrong shape, dtype, device or layout, or one that
              requires a gradient; with `strict` BuildError.
    """
    _check_options(dropout_p, eps=eps)
    if not torch.compiler.is_compiling() and not (training and dropout_p > 0.0):
        found = _usual.find(x, residual, gamma, beta)
        if found is not None:
            kernel, (_, n, hidden) = found
            return _launch_on(kernel, (x, residual, gamma, beta), (n, hidden), eps)
    _check_tensors(x, residual, gamma, beta)
    with region("norm_residual.fwd"):
        call = Call(x, residual, gamma, beta, dropout_p if training else 0.0, eps)
        if is_plain(x):
            return _run(*call)
        if backend() != CUDA:
            return _reference(*call)
        out: torch.Tensor = (_dropping_op if call.dropout_p > 0.0 else _op)(*call)
        return out


class Call(NamedTuple):
    """The arguments of one call; dropout_p is 0 outside training."""

    x: torch.Tensor
    residual: torch.Tensor
    gamma: torch.Tensor | None
    beta: torch.Tensor | None
    dropout_p: float
    eps: float


def reference(
    x: torch.Tensor,
    residual: torch.Tensor,
    gamma: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    *,
    dropout_p: float = 0.0,
    eps: float = 1e-5,
) -> torch.Tensor:
    """The same function in plain torch, for any layout: dtype of x, computed in f32 at least, rounded once.

    With dropout_p above 0 elements are dropped, by torch's own random numbers.
    """
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
    if dropout_p > 0.0:
        y = torch.nn.functional.dropout(y, dropout_p)
    return (y + residual.to(wide)).to(x.dtype).contiguous()


def reason_for_reference(x: torch.Tensor) -> str | None:
    """Why the kernel cannot serve x, or None when it can."""
    if x.device.type != "cuda":
        return f"x lies on {x.device}"
    if x.dtype not in _KERNEL_DTYPES:
        return f"x has dtype {x.dtype}"
    if not x.is_contiguous():
        return "x is not contiguous"
    if x.shape[1] > WIDEST:
        return f"a row has {x.shape[1]} elements: the kernel takes up to {WIDEST}"
    return None


def _run(*given: Any) -> torch.Tensor:
    call = Call(*given)
    if call.x.numel() == 0:
        return _shapes(call.x)
    reason = reason_for_reference(call.x)
    out: torch.Tensor = serve("norm_residual", call, kernel=_launch, reference=_reference, reason=reason)
    return out


def _reference(*given: Any) -> torch.Tensor:
    call = Call(*given)
    return reference(*call[:4], dropout_p=call.dropout_p, eps=call.eps)


def _shapes(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty(x.shape)


_ARGUMENTS = "(Tensor x, Tensor residual, Tensor? gamma, Tensor? beta, float dropout_p, float eps) -> Tensor"
_op = define("norm_residual" + _ARGUMENTS, run=_run, shapes=_shapes)
# Its own name: a compiler may not take two calls of it for one.
_dropping_op = define("norm_residual_dropout" + _ARGUMENTS, run=_run, shapes=_shapes, tags=(torch.Tag.nondeterministic_seeded,))


def _launch(*given: Any) -> torch.Tensor:
    call = Call(*given)
    x, dtype = call.x, _KERNEL_DTYPES[call.x.dtype]
    n, hidden = x.shape
    tensors = (x, call.residual, _affine(call.gamma, 1.0, x), _affine(call.beta, 0.0, x))
    if call.dropout_p == 0.0:
        kernel = get_kernel("fused_norm_residual", dtype=dtype, hidden=hidden, training=False)
        out = _launch_on(kernel, tensors, (n, hidden), call.eps)
        if tensors[2] is call.gamma and tensors[3] is call.beta:  # as the kernel reads them
            _usual.settle(tensors, kernel)
        return out
    out = torch.empty_like(x)
    kernel = get_kernel("fused_norm_residual_dropout", dtype=dtype, hidden=hidden)
    kernel(*tensors, out, random_state(x.device), n, call.eps, call.dropout_p)
    advance(x.device, -(-n * hidden // 4))
    return out


def _launch_on(kernel: Kernel, tensors: tuple[Any, ...], sizes: tuple[int, int], eps: float) -> torch.Tensor:
    n, hidden = sizes
    out = empty(sizes, (hidden, 1), tensors[0])
    kernel(*tensors, out, n, eps)
    return out


def _affine(given: torch.Tensor | None, value: float, x: torch.Tensor) -> torch.Tensor:
    if given is None:
        return _constant(x.shape[1], value, x.device)
    return given if given.dtype == torch.float32 else given.float()


@lru_cache(maxsize=64)
def _constant(hidden: int, value: float, device: torch.device) -> torch.Tensor:
    """The affine that was left out, made once: a call stays one kernel. It never leaves this module."""
    with torch.inference_mode(mode=False):
        return torch.full((hidden,), value, dtype=torch.float32, device=device)


def _check_options(dropout_p: float, *, eps: float) -> None:
    if not 0.0 <= dropout_p <= 1.0:
        raise InvalidSpec(f"norm_residual: dropout_p cannot be {dropout_p!r}", facts={"allowed": "0 to 1"})
    if not 1e-37 <= eps <= 1e37:  # positive and finite in float32 too
        raise InvalidSpec(f"norm_residual: eps cannot be {eps!r}", facts={"allowed": "1e-37 to 1e37"})


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
    check_no_gradient("norm_residual", x, *others.values())
