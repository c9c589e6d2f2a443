"""realspace: a pointwise activation on the circle, between Fourier coefficients, with its gradient."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from kserve.client import get_kernel
from kserve.client.launch import Kernel
from kserve.errors import InvalidSpec, LaunchError
from kserve.ops import check_device, check_dtype, check_shape, region
from kserve.ops.allocate import empty
from kserve.ops.backend import CUDA, Usual, backend, is_plain, serve
from kserve.ops.circle import ACTIVATIONS, Bases, bases, checked_n_grid, default_n_grid, reference, reference_gradient
from kserve.ops.library import define

__all__ = ["Bases", "bases", "default_n_grid", "realspace", "reason_for_reference", "reference"]
MOST_ORDERS = 8
_KERNEL_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_DTYPES = (*_KERNEL_DTYPES, torch.float64)


class Form(NamedTuple):
    """Kernels that serve the op, and what they are made for."""

    forward: str
    backward: str
    dtypes: tuple[torch.dtype, ...]
    most_points: int
    any_basis: bool  # reads the bases from memory; else the standard ones are part of its code


# The first that is made for the input serves it.
FORMS = (
    Form("realspace_cuda_fwd", "realspace_cuda_bwd", tuple(_KERNEL_DTYPES), 32, any_basis=False),
    Form("realspace_fwd", "realspace_bwd", (torch.float32,), 256, any_basis=True),
)
_usual = Usual("realspace", "n f M, n f M")


def realspace(
    a_cos: torch.Tensor,
    a_sin: torch.Tensor,
    *,
    n_grid: int | None = None,
    activation: str = "silu",
    basis: Bases | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Take Fourier coefficients to values on a uniform grid, apply the activation, return to coefficients.

    f[k]       = sum_m a_cos[m] * C[m, k] + a_sin[m] * S[m, k]
    h[k]       = activation(f[k])                                  silu(f) = f / (1 + exp(-f))
    out_cos[m] = sum_k h[k] * Ca[k, m]
    out_sin[m] = sum_k h[k] * Sa[k, m]

    for each edge and feature; the bases are those of `bases`.

    Axes:     n_e edges, F features (var); n_ang = m_max + 1 orders, n_grid points (const).
    Args:
        a_cos, a_sin: [n_e, F, n_ang], both f32, bf16 or f16. Dense row-major is read in place, and so is order by order
                      (strides F, 1 and anything); any other layout is copied, each operand for itself. Mixed dtypes,
                      f64, the CPU, n_ang above 8 or n_grid above 256: the reference serves it.
        n_grid:       points of the grid, at least 2 * n_ang - 1; None stands for 4 * (n_ang - 1) + 1.
        activation:   silu, relu, tanh, gelu, identity; the kernels do silu, the reference the others.
        basis:        four tensors as from `bases`, constants, instead of the standard ones; n_grid is then theirs.
    Returns:  out_cos, out_sin: [n_e, F, n_ang], dtype of a_cos, new dense row-major tensors.
    Numerics: f32 without TF32; error vs f64 <= 5e-6 for unit-normal inputs, both directions; bf16, f16: computed in f32,
              rounded once. NaN stays in its row. With the standard bases out_sin[..., 0] and the gradient of
              a_sin[..., 0] are exactly 0, and up to 32 points a_sin[..., 0] has no influence, not even a NaN.
    Random:   none.
    Gradient: of a_cos and a_sin, once: one kernel that computes the grid again. A second derivative through the kernel is
              refused (create_graph=True); the reference has it.
    Targets:  sm_80 and newer, else the reference. Sources: cuda_src/realspace_cuda/ with the standard bases and up to 32
              points; triton_src/realspace/, f32 alone, with other bases or more points; it compiles for gfx942 too.
    Launch:   current stream, one kernel each way, no workspace, no synchronisation; none when n_e or F is 0. The Triton
              form copies an operand that is not row-major, and at the first call for a new (n_ang, n_grid, device) the bases.
    Traffic:  forward 4, backward 6 times n_e F n_ang * itemsize bytes, and twice the size of each operand that is copied.
    Raises:   InvalidSpec for an option; LaunchError for a tensor of the wrong shape, dtype or device; with `strict` BuildError.
    """
    is_standard = activation == "silu" and basis is None and (n_grid is None or type(n_grid) is int)
    if is_standard and not torch.compiler.is_compiling() and not (a_cos.is_neg() or a_sin.is_neg()):
        found = _usual.find(a_cos, a_sin, asked=n_grid)
        if found is not None:
            kernel, (_, *sizes) = found
            return _launch_on(kernel, a_cos, a_sin, sizes)
    n_grid = _check(a_cos, a_sin, n_grid, activation=activation, basis=basis)
    with region("realspace.fwd"):
        reason = reason_for_reference(a_cos, a_sin, n_grid, activation, basis=basis)
        options = _Options(n_grid, basis, activation)
        if reason is None and backend() == CUDA:
            records = torch.is_grad_enabled() and (a_cos.requires_grad or a_sin.requires_grad)
            return _pair(_RealSpace.apply(a_cos, a_sin, options)) if records else _forward(a_cos, a_sin, options)
        return options.serve(a_cos, a_sin, reason) if is_plain(a_cos) else options.reference(a_cos, a_sin)


def reason_for_reference(
    a_cos: torch.Tensor, a_sin: torch.Tensor, n_grid: int, activation: str = "silu", *, basis: Bases | None = None
) -> str | None:
    """Why no kernel can serve these inputs, or None when one can."""
    if a_cos.device.type != "cuda":
        return f"a_cos lies on {a_cos.device}"
    if activation != "silu":
        return f"activation is {activation}: the kernels have silu"
    if a_cos.dtype != a_sin.dtype or a_cos.dtype not in _KERNEL_DTYPES:
        return f"dtypes are {a_cos.dtype} and {a_sin.dtype}: the kernels take two of a kind, float32, bfloat16 or float16"
    if a_cos.shape[2] > MOST_ORDERS:
        return f"n_ang is {a_cos.shape[2]}: the kernels take up to {MOST_ORDERS}"
    if a_cos.numel() == 0:
        return "there are no rows"
    if form_for(a_cos.dtype, n_grid, has_basis=basis is not None) is None:
        which = "the standard bases" if basis is None else "bases of the caller"
        return f"no kernel takes {a_cos.dtype} with n_grid {n_grid} and {which}"
    return None


def form_for(dtype: torch.dtype, n_grid: int, *, has_basis: bool) -> Form | None:
    """The kernels that serve such inputs; None where none are made for them."""
    for form in FORMS:
        if dtype in form.dtypes and n_grid <= form.most_points and (form.any_basis or not has_basis):
            return form
    return None


class _Options(NamedTuple):
    """What a call is for besides its operands, and the ways to serve it."""

    n_grid: int
    basis: Bases | None = None
    activation: str = "silu"

    def serve(self, a_cos: torch.Tensor, a_sin: torch.Tensor, reason: str | None) -> tuple[torch.Tensor, torch.Tensor]:
        operands = (a_cos, a_sin)
        return _pair(serve("realspace", operands, kernel=self.launch, reference=self.reference, reason=reason))

    def reference(self, a_cos: torch.Tensor, a_sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return reference(a_cos, a_sin, n_grid=self.n_grid, activation=self.activation, basis=self.basis)

    def gradient(self, *operands: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return reference_gradient(operands, n_grid=self.n_grid, basis=self.basis)

    def launch(self, *operands: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _launch(operands, self.basis, self.n_grid)


class _RealSpace(torch.autograd.Function):  # type: ignore[misc]
    """Forward and backward by kernel. Nothing but the operands is kept: the backward computes the grid again."""

    @staticmethod
    def forward(ctx: Any, a_cos: torch.Tensor, a_sin: torch.Tensor, options: _Options) -> tuple[torch.Tensor, torch.Tensor]:
        if is_plain(a_cos):  # a copy that the kernel would make is then made once for both ways
            a_cos, a_sin = _readable(a_cos), _readable(a_sin)
        ctx.save_for_backward(a_cos, a_sin)
        ctx.options = options
        return _forward(a_cos, a_sin, options)

    @staticmethod
    def backward(ctx: Any, g_cos: torch.Tensor, g_sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        if torch.is_grad_enabled():
            raise InvalidSpec(
                "realspace has no second derivative, and create_graph=True asks for one",
                hint="for force losses use kserve.ops.realspace.reference, which torch differentiates twice",
            )
        operands = (g_cos, g_sin, *ctx.saved_tensors)
        with region("realspace.bwd"):
            run = _run_backward if is_plain(g_cos) else _backward_op
            da_cos, da_sin = run(*operands, basis=list(ctx.options.basis or ()), n_grid=ctx.options.n_grid)
        return da_cos, da_sin, None


def _pair(found: Any) -> tuple[torch.Tensor, torch.Tensor]:
    cosines, sines = found
    return cosines, sines


def _forward(a_cos: torch.Tensor, a_sin: torch.Tensor, options: _Options) -> tuple[torch.Tensor, torch.Tensor]:
    if is_plain(a_cos):
        return options.serve(a_cos, a_sin, None)
    return _pair(_op(a_cos, a_sin, basis=list(options.basis or ()), n_grid=options.n_grid))


def _run(
    a_cos: torch.Tensor, a_sin: torch.Tensor, *, basis: list[torch.Tensor], n_grid: int
) -> tuple[torch.Tensor, torch.Tensor]:
    options = _Options(n_grid, Bases(*basis) if basis else None)
    return options.serve(a_cos, a_sin, reason_for_reference(a_cos, a_sin, n_grid, basis=options.basis))


def _run_backward(*operands: torch.Tensor, basis: list[torch.Tensor], n_grid: int) -> tuple[torch.Tensor, torch.Tensor]:
    options = _Options(n_grid, Bases(*basis) if basis else None)
    reason = reason_for_reference(operands[2], operands[3], n_grid, basis=options.basis)
    kernel, plain = options.launch, options.gradient
    return _pair(serve("realspace_backward", operands, kernel=kernel, reference=plain, reason=reason))


def _shapes(*operands: torch.Tensor, basis: list[torch.Tensor], n_grid: int) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ARG001
    first = operands[-2]  # a_cos
    return first.new_empty(first.shape), first.new_empty(first.shape)


_OPTIONS = ", Tensor a_cos, Tensor a_sin, *, Tensor[] basis, int n_grid) -> (Tensor, Tensor)"
_op = define("realspace(" + _OPTIONS.removeprefix(", "), run=_run, shapes=_shapes)
_backward_op = define("realspace_backward(Tensor g_cos, Tensor g_sin" + _OPTIONS, run=_run_backward, shapes=_shapes)


def _launch(operands: tuple[torch.Tensor, ...], basis: Bases | None, n_grid: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients first, where there are any, then the coefficients."""
    n_e, n_features, n_ang = operands[-1].shape
    form = form_for(operands[-1].dtype, n_grid, has_basis=basis is not None) or FORMS[-1]
    # 0 stands for the default grid: one spec, so one build, for a caller who names it and one who does not.
    grid = 0 if n_grid == default_n_grid(n_ang) else n_grid
    name = form.forward if len(operands) == 2 else form.backward
    kernel = get_kernel(name, dtype=_KERNEL_DTYPES[operands[-1].dtype], n_ang=n_ang, n_grid=grid)
    if len(operands) == 2 and not form.any_basis:
        for asked in (n_grid, *(() if grid else (None,))):  # as a caller may write it
            _usual.settle(operands, kernel, asked=asked)
    results = _results(operands[-1])
    if form.any_basis:
        constants = _standard_bases(n_ang, n_grid, operands[-1].device) if basis is None else basis
        kernel(*(_dense(operand) for operand in operands), *constants, *results, n_e * n_features)
    else:
        readable = [_readable(operand) for operand in operands]
        kernel(*readable, *results, n_e * n_features, *(_order_stride(operand) for operand in readable))
    return results


def _launch_on(kernel: Kernel, a_cos: torch.Tensor, a_sin: torch.Tensor, sizes: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Forwards, both operands row by row."""
    n_e, n_features, n_ang = sizes
    strides = (n_features * n_ang, n_ang, 1)
    results = empty((n_e, n_features, n_ang), strides, a_cos), empty((n_e, n_features, n_ang), strides, a_cos)
    kernel(a_cos, a_sin, *results, n_e * n_features, 0, 0)
    return results


def _results(like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return like.new_empty(like.shape), like.new_empty(like.shape)


def _order_stride(tensor: torch.Tensor) -> int | None:
    """From one order of a row to the next where all rows of an order are neighbours; 0 for dense rows; None: neither."""
    if tensor.is_contiguous():
        return 0
    is_by_order = tensor.stride(2) > 0 and tensor.select(2, 0).is_contiguous()
    return tensor.stride(2) if is_by_order else None


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself where a kernel can read it row by row or order by order, else a dense copy."""
    return tensor if not tensor.is_neg() and _order_stride(tensor) is not None else _dense(tensor)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as dense rows of n_ang coefficients: itself when it is that already, else a copy."""
    return tensor.contiguous().resolve_neg()


@lru_cache(maxsize=64)
def _standard_bases(n_ang: int, n_grid: int, device: torch.device) -> Bases:
    """The f32 bases on a device, made once: they never leave this module, so nobody can have changed them."""
    return bases(n_ang, n_grid, dtype=torch.float32, device=device)


def _check(a_cos: torch.Tensor, a_sin: torch.Tensor, n_grid: int | None, *, activation: str, basis: Bases | None) -> int:
    """The number of grid points. Raises InvalidSpec, LaunchError."""
    if activation not in ACTIVATIONS:
        raise InvalidSpec(f"realspace: activation cannot be {activation!r}", facts={"allowed": ", ".join(ACTIVATIONS)})
    check_dtype("a_cos", a_cos, _DTYPES)
    check_dtype("a_sin", a_sin, _DTYPES)
    if a_cos.dim() != 3 or a_cos.shape[2] == 0:
        raise LaunchError(f"a_cos has shape {list(a_cos.shape)}", facts={"allowed": "[n_e, F, n_ang], n_ang from 1"})
    check_shape("a_sin", a_sin, a_cos.shape)
    check_device("a_sin", a_sin, a_cos.device)
    n_ang = a_cos.shape[2]
    if basis is None:
        return checked_n_grid(n_ang, n_grid)
    points = checked_n_grid(n_ang, basis[0].shape[-1])
    if n_grid not in (None, points):
        raise InvalidSpec(f"realspace: n_grid cannot be {n_grid!r}", facts={"allowed": f"None, or {points} as in basis"})
    for position, (name, tensor) in enumerate(zip(Bases._fields, basis, strict=True)):
        check_shape(name, tensor, (n_ang, points) if position < 2 else (points, n_ang))
        check_device(name, tensor, a_cos.device)
        check_dtype(name, tensor, (torch.float32,) if a_cos.dtype != torch.float64 else (torch.float32, torch.float64))
        if not tensor.is_contiguous():
            raise LaunchError(f"{name} is not contiguous: strides {list(tensor.stride())}")
    return points
