"""realspace: a pointwise activation on the circle, between Fourier coefficients, with its gradient."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from kserve.client import get_kernel
from kserve.errors import InvalidSpec, LaunchError, UnsupportedTarget
from kserve.ops import check_device, check_dtype, check_shape, region

MOST_ORDERS = 8
MOST_POINTS = 256
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "relu": torch.relu,
    "tanh": torch.tanh,
    "gelu": torch.nn.functional.gelu,
    "identity": torch.Tensor.clone,
}


class Bases(NamedTuple):
    """Synthesis and analysis between m = 0..n_ang-1 and the angles 2 pi k / n_grid, k = 0..n_grid-1."""

    c: torch.Tensor  # [n_ang, n_grid], cos(m theta_k)
    s: torch.Tensor  # [n_ang, n_grid], sin(m theta_k)
    ca: torch.Tensor  # [n_grid, n_ang], w_m cos(m theta_k), w_0 = 1 / n_grid, else 2 / n_grid
    sa: torch.Tensor  # [n_grid, n_ang], w_m sin(m theta_k)


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
        a_cos, a_sin: [n_e, F, n_ang] f32. Dense row-major is read in place, any other layout is copied, each operand for
                      itself. Another float dtype, the CPU, n_ang above 8 or n_grid above 256: the reference serves it.
        n_grid:       points of the grid, at least 2 * n_ang - 1; None stands for 4 * (n_ang - 1) + 1.
        activation:   silu, relu, tanh, gelu, identity; the kernel does silu, the reference the others.
        basis:        four tensors as from `bases`, constants, instead of the ones made and kept here for f32; n_grid is
                      then theirs.
    Returns:  out_cos, out_sin: [n_e, F, n_ang], dtype of a_cos, new dense row-major tensors.
    Numerics: f32 without TF32; error vs f64 <= 5e-6 for unit-normal inputs, both directions. NaN stays in its row. With
              the standard bases out_sin[..., 0] and the gradient of a_sin[..., 0] are exactly 0.
    Random:   none.
    Gradient: of a_cos and a_sin, once: one kernel that computes the grid again. A second derivative through the kernel is
              refused (create_graph=True); the reference has it.
    Targets:  sm_80 and newer, else the reference; gfx942 compiles. Sources: triton_src/realspace/.
    Launch:   current stream, one kernel each way, no workspace, no synchronisation except the first call for a new
              (n_ang, n_grid, device), which copies the bases there; none when n_e or F is 0.
    Traffic:  forward 4, backward 6 times n_e F n_ang * itemsize bytes, and twice the size of each operand that is copied.
    Raises:   InvalidSpec for an option; LaunchError for a tensor of the wrong shape, dtype or device; BuildError.
    """
    n_grid = _check(a_cos, a_sin, n_grid, activation=activation, basis=basis)
    with region("realspace.fwd"):
        if reason_for_reference(a_cos, a_sin, n_grid, activation) is None:
            constants = _standard_bases(a_cos.shape[2], n_grid, a_cos.device) if basis is None else basis
            try:
                served: tuple[torch.Tensor, torch.Tensor] = _RealSpace.apply(a_cos, a_sin, constants)
                return served
            except UnsupportedTarget:
                pass
        return reference(a_cos, a_sin, n_grid=n_grid, activation=activation, basis=basis)


def reference(
    a_cos: torch.Tensor,
    a_sin: torch.Tensor,
    *,
    n_grid: int | None = None,
    activation: str = "silu",
    basis: Bases | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same function in plain torch, for any layout and derivative: dtype of a_cos, computed in f32 at least.

    Products are summed order by order, not by a matrix product: no setting can make torch round them to TF32.
    """
    wide = torch.promote_types(torch.promote_types(a_cos.dtype, a_sin.dtype), torch.float32)
    n_ang = a_cos.shape[2]
    if basis is None:
        basis = bases(n_ang, n_grid, dtype=wide, device=a_cos.device)
    c, s, ca, sa = (tensor.detach().to(wide) for tensor in basis)
    a, b = a_cos.to(wide), a_sin.to(wide)
    f = a[..., :1] * c[0] + b[..., :1] * s[0]  # [n_e, F, n_grid]
    for m in range(1, n_ang):
        f = f + a[..., m : m + 1] * c[m] + b[..., m : m + 1] * s[m]
    h = _ACTIVATIONS[activation](f)
    out_cos = torch.stack([(h * ca[:, m]).sum(dim=-1) for m in range(n_ang)], dim=-1)
    out_sin = torch.stack([(h * sa[:, m]).sum(dim=-1) for m in range(n_ang)], dim=-1)
    return out_cos.to(a_cos.dtype), out_sin.to(a_cos.dtype)


def bases(
    n_ang: int,
    n_grid: int | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Bases:
    """The four bases, computed in float64 and rounded once; new tensors at each call.

    Raises: InvalidSpec for n_grid below 2 * n_ang - 1.
    """
    n_grid = _checked_n_grid(n_ang, n_grid)
    with torch.inference_mode(mode=False):  # tensors that autograd may keep, whatever the caller's mode
        m = torch.arange(n_ang, dtype=torch.float64)[:, None]
        k = torch.arange(n_grid, dtype=torch.float64)[None, :]
        # m * k is reduced modulo n_grid first: a smaller angle has a more exact sine.
        theta = torch.remainder(m * k, n_grid) * (2.0 * torch.pi / n_grid)
        weight = torch.full((1, n_ang), 2.0 / n_grid, dtype=torch.float64)
        weight[0, 0] = 1.0 / n_grid
        c, s = theta.cos(), theta.sin()
        exact = Bases(c, s, c.T * weight, s.T * weight)
        return Bases(*(tensor.to(dtype).contiguous().to(device) for tensor in exact))


def default_n_grid(n_ang: int) -> int:
    return 4 * (n_ang - 1) + 1


def reason_for_reference(a_cos: torch.Tensor, a_sin: torch.Tensor, n_grid: int, activation: str) -> str | None:
    """Why the kernel cannot serve these inputs, or None when it can."""
    if a_cos.device.type != "cuda":
        return f"a_cos lies on {a_cos.device}"
    if activation != "silu":
        return f"activation is {activation}: the kernel has silu"
    if a_cos.dtype != torch.float32 or a_sin.dtype != torch.float32:
        return f"dtypes are {a_cos.dtype} and {a_sin.dtype}: the kernel takes float32"
    if a_cos.shape[2] > MOST_ORDERS or n_grid > MOST_POINTS:
        return f"n_ang {a_cos.shape[2]}, n_grid {n_grid}: the kernel takes up to {MOST_ORDERS} and {MOST_POINTS}"
    if a_cos.numel() == 0:
        return "there are no rows"
    return None


class _RealSpace(torch.autograd.Function):  # type: ignore[misc]
    """Forward and backward by kernel. Nothing but the operands is kept: the backward computes the grid again."""

    @staticmethod
    def forward(ctx: Any, a_cos: torch.Tensor, a_sin: torch.Tensor, basis: Bases) -> tuple[torch.Tensor, torch.Tensor]:
        a_cos, a_sin = _dense(a_cos), _dense(a_sin)
        ctx.save_for_backward(a_cos, a_sin)
        ctx.basis = basis
        return _launch("realspace_fwd", (a_cos, a_sin), basis)

    @staticmethod
    def backward(ctx: Any, g_cos: torch.Tensor, g_sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        if torch.is_grad_enabled():
            raise InvalidSpec(
                "realspace has no second derivative, and create_graph=True asks for one",
                hint="for force losses use kserve.ops.realspace.reference, which torch differentiates twice",
            )
        a_cos, a_sin = ctx.saved_tensors
        with region("realspace.bwd"):
            da_cos, da_sin = _launch("realspace_bwd", (_dense(g_cos), _dense(g_sin), a_cos, a_sin), ctx.basis)
        return da_cos, da_sin, None


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as dense rows of n_ang coefficients: itself when it is that already, else a copy."""
    return tensor.contiguous().resolve_neg()


def _launch(name: str, operands: tuple[torch.Tensor, ...], basis: Bases) -> tuple[torch.Tensor, torch.Tensor]:
    first = operands[0]
    n_ang, n_grid = basis[0].shape
    # 0 stands for the default grid: one spec, so one build, for a caller who names it and one who does not.
    grid = 0 if n_grid == default_n_grid(n_ang) else n_grid
    kernel = get_kernel(name, dtype="float32", n_ang=n_ang, n_grid=grid)
    cosines, sines = torch.empty_like(first), torch.empty_like(first)
    kernel(*operands, *basis, cosines, sines, first.shape[0] * first.shape[1])
    return cosines, sines


@lru_cache(maxsize=64)
def _standard_bases(n_ang: int, n_grid: int, device: torch.device) -> Bases:
    """The f32 bases on a device, made once: they never leave this module, so nobody can have changed them."""
    return bases(n_ang, n_grid, dtype=torch.float32, device=device)


def _check(a_cos: torch.Tensor, a_sin: torch.Tensor, n_grid: int | None, *, activation: str, basis: Bases | None) -> int:
    """The number of grid points. Raises InvalidSpec, LaunchError."""
    if activation not in _ACTIVATIONS:
        raise InvalidSpec(f"realspace: activation cannot be {activation!r}", facts={"allowed": ", ".join(_ACTIVATIONS)})
    check_dtype("a_cos", a_cos, _DTYPES)
    check_dtype("a_sin", a_sin, _DTYPES)
    if a_cos.dim() != 3 or a_cos.shape[2] == 0:
        raise LaunchError(f"a_cos has shape {list(a_cos.shape)}", facts={"allowed": "[n_e, F, n_ang], n_ang from 1"})
    check_shape("a_sin", a_sin, a_cos.shape)
    check_device("a_sin", a_sin, a_cos.device)
    n_ang = a_cos.shape[2]
    if basis is None:
        return _checked_n_grid(n_ang, n_grid)
    points = _checked_n_grid(n_ang, basis[0].shape[-1])
    if n_grid not in (None, points):
        raise InvalidSpec(f"realspace: n_grid cannot be {n_grid!r}", facts={"allowed": f"None, or {points} as in basis"})
    for position, (name, tensor) in enumerate(zip(Bases._fields, basis, strict=True)):
        check_shape(name, tensor, (n_ang, points) if position < 2 else (points, n_ang))
        check_device(name, tensor, a_cos.device)
        check_dtype(name, tensor, (torch.float32,) if a_cos.dtype != torch.float64 else (torch.float32, torch.float64))
        if not tensor.is_contiguous():
            raise LaunchError(f"{name} is not contiguous: strides {list(tensor.stride())}")
    return points


def _checked_n_grid(n_ang: int, n_grid: int | None) -> int:
    if n_grid is None:
        return default_n_grid(n_ang)
    if isinstance(n_grid, bool) or not isinstance(n_grid, int) or n_grid < 2 * n_ang - 1:
        raise InvalidSpec(
            f"realspace: n_grid cannot be {n_grid!r} for n_ang={n_ang}",
            facts={"allowed": f"None, or an integer from 2 * n_ang - 1 = {2 * n_ang - 1}"},
        )
    return n_grid
