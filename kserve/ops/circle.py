"""The circle in plain torch: the bases, and `realspace` and its gradient made of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kserve.errors import InvalidSpec

ACTIVATIONS = {
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
    c, s, ca, sa = _wide_bases(a_cos, a_sin, n_grid, basis)
    h = ACTIVATIONS[activation](_values(a_cos, a_sin, c, s))
    return _coefficients(h, ca).to(a_cos.dtype), _coefficients(h, sa).to(a_cos.dtype)


def reference_gradient(
    operands: Sequence[torch.Tensor], *, n_grid: int | None = None, basis: Bases | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of silu's coefficients by the formula, where torch records nothing that it could differentiate.

    Args:
        operands: g_cos, g_sin, a_cos, a_sin.
    """
    g_cos, g_sin, a_cos, a_sin = operands
    c, s, ca, sa = _wide_bases(a_cos, a_sin, n_grid, basis)
    f, dh = _values(a_cos, a_sin, c, s), _values(g_cos, g_sin, ca.T, sa.T)
    sigma = torch.sigmoid(f)
    df = dh * sigma * (1.0 + f * (1.0 - sigma))
    return _coefficients(df, c.T).to(a_cos.dtype), _coefficients(df, s.T).to(a_cos.dtype)


def _wide_bases(a_cos: torch.Tensor, a_sin: torch.Tensor, n_grid: int | None, basis: Bases | None) -> Bases:
    wide = torch.promote_types(torch.promote_types(a_cos.dtype, a_sin.dtype), torch.float32)
    if basis is None:
        return bases(a_cos.shape[2], n_grid, dtype=wide, device=a_cos.device)
    return Bases(*(tensor.detach().to(wide) for tensor in basis))


def _values(a: torch.Tensor, b: torch.Tensor, even: torch.Tensor, odd: torch.Tensor) -> torch.Tensor:
    """On the grid, [n_e, F, n_grid], by bases [n_ang, n_grid] and in their dtype."""
    a, b = a.to(even.dtype), b.to(even.dtype)
    found = a[..., :1] * even[0] + b[..., :1] * odd[0]
    for m in range(1, a.shape[-1]):
        found = found + a[..., m : m + 1] * even[m] + b[..., m : m + 1] * odd[m]
    return found


def _coefficients(h: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """[n_e, F, n_ang] of values on the grid, by a basis [n_grid, n_ang]."""
    return torch.stack([(h * basis[:, m]).sum(dim=-1) for m in range(basis.shape[1])], dim=-1)


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
    n_grid = checked_n_grid(n_ang, n_grid)
    # Tensors that autograd may keep, whatever the caller's mode. By position: a tracer knows no other way.
    with torch.inference_mode(False):  # noqa: FBT003
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


def checked_n_grid(n_ang: int, n_grid: int | None) -> int:
    """The number of points. Raises: InvalidSpec below 2 * n_ang - 1."""
    if n_grid is None:
        return default_n_grid(n_ang)
    if isinstance(n_grid, bool) or not isinstance(n_grid, int) or n_grid < 2 * n_ang - 1:
        raise InvalidSpec(
            f"realspace: n_grid cannot be {n_grid!r} for n_ang={n_ang}",
            facts={"allowed": f"None, or an integer from 2 * n_ang - 1 = {2 * n_ang - 1}"},
        )
    return n_grid
