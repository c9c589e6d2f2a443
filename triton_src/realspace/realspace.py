"""RealSpace: coefficients on a circle -> values on a grid -> SiLU -> coefficients, forward and backward.

A thread holds whole rows: each coefficient is a vector over the block's rows, in registers, and a basis value is one scalar
for all of them. Grid points are visited one at a time, so the grid never exists. No matrix instruction: nothing is
rounded to less than float32. Offsets are 64 bits wide.
"""

import triton
import triton.language as tl


@triton.jit
def _rows_of_block(rows, N_ANG: tl.constexpr, BLOCK: tl.constexpr):
    """Where each row of this block starts, in elements, and whether it exists."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return row * N_ANG, row < rows


@triton.jit
def _load_rows(pointer, start, exists, N_ANG: tl.constexpr):
    """The N_ANG coefficients of each row, as float32."""
    found = ()
    for m in tl.static_range(N_ANG):
        found += (tl.load(pointer + start + m, mask=exists, other=0.0).to(tl.float32),)
    return found


@triton.jit
def _store_rows(pointer, start, exists, values, N_ANG: tl.constexpr):
    for m in tl.static_range(N_ANG):
        tl.store(pointer + start + m, values[m], mask=exists)


@triton.jit
def _zero_rows(N_ANG: tl.constexpr, BLOCK: tl.constexpr):
    zeros = ()
    for _ in tl.static_range(N_ANG):
        zeros += (tl.zeros((BLOCK,), tl.float32),)
    return zeros


@triton.jit
def _at_point(a, b, even, odd, STRIDE: tl.constexpr, N_ANG: tl.constexpr):
    """a . even + b . odd for one grid point; order m of a basis lies m * STRIDE elements on."""
    value = a[0] * tl.load(even) + b[0] * tl.load(odd)
    for m in tl.static_range(1, N_ANG):
        value += a[m] * tl.load(even + m * STRIDE)
        value += b[m] * tl.load(odd + m * STRIDE)
    return value


@triton.jit
def _add_point(totals, value, basis, STRIDE: tl.constexpr, N_ANG: tl.constexpr):
    """The totals of all orders with one grid point more."""
    grown = ()
    for m in tl.static_range(N_ANG):
        grown += (totals[m] + value * tl.load(basis + m * STRIDE),)
    return grown


@triton.jit
def _logistic(f):
    """1 / (1 + exp(-f)): 0 where exp(-f) overflows, so f times it is a signed zero and never NaN for a finite f."""
    return 1.0 / (1.0 + tl.exp(-f))


@triton.jit
def realspace_fwd(
    a_cos, a_sin, c, s, ca, sa, out_cos, out_sin, rows,
    N_ANG: tl.constexpr, N_GRID: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """c, s: [N_ANG, N_GRID]; ca, sa: [N_GRID, N_ANG]; all others [rows, N_ANG]."""
    tl.static_assert(N_GRID >= 2 * N_ANG - 1, "n_grid is below 2 * n_ang - 1: the grid cannot tell the orders apart")
    start, exists = _rows_of_block(rows, N_ANG, BLOCK)
    a = _load_rows(a_cos, start, exists, N_ANG)
    b = _load_rows(a_sin, start, exists, N_ANG)
    cosines = _zero_rows(N_ANG, BLOCK)
    sines = _zero_rows(N_ANG, BLOCK)
    for k in range(N_GRID):
        f = _at_point(a, b, c + k, s + k, N_GRID, N_ANG)
        h = f * _logistic(f)
        cosines = _add_point(cosines, h, ca + k * N_ANG, 1, N_ANG)
        sines = _add_point(sines, h, sa + k * N_ANG, 1, N_ANG)
    _store_rows(out_cos, start, exists, cosines, N_ANG)
    _store_rows(out_sin, start, exists, sines, N_ANG)


@triton.jit
def realspace_bwd(
    g_cos, g_sin, a_cos, a_sin, c, s, ca, sa, da_cos, da_sin, rows,
    N_ANG: tl.constexpr, N_GRID: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """c, s: [N_ANG, N_GRID]; ca, sa: [N_GRID, N_ANG]; all others [rows, N_ANG]."""
    tl.static_assert(N_GRID >= 2 * N_ANG - 1, "n_grid is below 2 * n_ang - 1: the grid cannot tell the orders apart")
    start, exists = _rows_of_block(rows, N_ANG, BLOCK)
    a = _load_rows(a_cos, start, exists, N_ANG)
    b = _load_rows(a_sin, start, exists, N_ANG)
    gc = _load_rows(g_cos, start, exists, N_ANG)
    gs = _load_rows(g_sin, start, exists, N_ANG)
    cosines = _zero_rows(N_ANG, BLOCK)
    sines = _zero_rows(N_ANG, BLOCK)
    for k in range(N_GRID):
        f = _at_point(a, b, c + k, s + k, N_GRID, N_ANG)
        dh = _at_point(gc, gs, ca + k * N_ANG, sa + k * N_ANG, 1, N_ANG)
        sigma = _logistic(f)
        df = dh * (sigma * (1.0 + f * (1.0 - sigma)))
        cosines = _add_point(cosines, df, c + k, N_GRID, N_ANG)
        sines = _add_point(sines, df, s + k, N_GRID, N_ANG)
    _store_rows(da_cos, start, exists, cosines, N_ANG)
    _store_rows(da_sin, start, exists, sines, N_ANG)
