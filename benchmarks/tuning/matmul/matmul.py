"""c = a @ b: each program makes one tile of c. Tiles are visited in groups of GROUP_M rows, which share columns of b in L2."""

import triton
import triton.language as tl


@triton.jit
def matmul(
    a, b, c, m, n, k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """a: [m, k], b: [k, n], c: [m, n], all row-major."""
    program = tl.program_id(0)
    tiles_n = tl.cdiv(n, BLOCK_N)
    group = program // (GROUP_M * tiles_n)
    first = group * GROUP_M
    rows = min(tl.cdiv(m, BLOCK_M) - first, GROUP_M)
    within = program % (GROUP_M * tiles_n)
    at_m = (first + within % rows) * BLOCK_M + tl.arange(0, BLOCK_M)
    at_n = (within // rows) * BLOCK_N + tl.arange(0, BLOCK_N)
    at_k = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(tl.cdiv(k, BLOCK_K)):
        left = k - step * BLOCK_K
        tile_a = tl.load(a + at_m[:, None] * k + at_k[None, :], mask=(at_m[:, None] < m) & (at_k[None, :] < left), other=0.0)
        tile_b = tl.load(b + at_k[:, None] * n + at_n[None, :], mask=(at_k[:, None] < left) & (at_n[None, :] < n), other=0.0)
        total = tl.dot(tile_a, tile_b, total)
        a += BLOCK_K
        b += BLOCK_K * n
    tl.store(c + at_m[:, None] * n + at_n[None, :], total.to(tl.float16), mask=(at_m[:, None] < m) & (at_n[None, :] < n))
