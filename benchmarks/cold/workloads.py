"""The kernels that every arm runs: their arguments on a device, and what the results have to be.

Imports nothing: a child of the cold-start benchmark loads it before the clock starts.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

ROWS, N_ANG, N_GRID, EPS = 337, 3, 9, 1e-5
# Further kernels are variants of one: this many can be told apart, alone and then in a batch.
MOST_FURTHER = 50
BAR = 5e-6  # largest error against float64, from docs/kernels.md


class Norm:
    """fused_norm_residual, rows of `hidden` channels."""

    name = "fused_norm_residual"
    sizes = {"n": ROWS}  # noqa: RUF012 - what the launch expressions read

    def __init__(self, hidden: int = 128) -> None:
        self.hidden = hidden
        self.spec: dict[str, int] = {"hidden": hidden}
        self.arguments: list[Any] = []

    @property
    def outputs(self) -> list[Any]:
        return self.arguments[4:5]

    def place(self, torch: Any, device: str) -> None:
        x, residual = torch.randn(2, ROWS, self.hidden, device=device)
        gamma, beta = torch.randn(2, self.hidden, device=device)
        self.arguments = [x, residual, gamma, beta, torch.full_like(x, float("nan")), ROWS, EPS]

    def error(self, torch: Any) -> float:
        """Largest error against float64 on the CPU; NaN where the kernel wrote nothing."""
        x, residual, gamma, beta, out = (tensor.double().cpu() for tensor in self.arguments[:5])
        expected = torch.nn.functional.layer_norm(x, [self.hidden], gamma, beta, EPS) + residual
        return float((out - expected).abs().max())


class RealSpace:
    """realspace_fwd on a grid of `n_grid` points; 0 stands for the default grid."""

    name = "realspace_fwd"
    sizes = {"rows": ROWS * 8}  # noqa: RUF012
    n_operands = 2

    def __init__(self, n_grid: int = 0) -> None:
        self.points = n_grid or N_GRID
        self.spec: dict[str, int] = {"n_grid": n_grid} if n_grid else {}
        self.arguments: list[Any] = []

    @property
    def outputs(self) -> list[Any]:
        return self.arguments[-3:-1]

    def place(self, torch: Any, device: str) -> None:
        rows = self.sizes["rows"]
        operands = [torch.randn(rows, N_ANG, device=device) for _ in range(self.n_operands)]
        angles = torch.arange(self.points).double() * torch.arange(N_ANG)[:, None] * (2 * torch.pi / self.points)
        weight = torch.full((N_ANG,), 2 / self.points, dtype=torch.float64)
        weight[0] = 1 / self.points
        c, s = angles.cos(), angles.sin()
        bases = [basis.float().contiguous().to(device) for basis in (c, s, c.T * weight, s.T * weight)]
        outputs = [torch.full_like(operands[0], float("nan")) for _ in range(2)]
        self.arguments = [*operands, *bases, *outputs, rows]

    def error(self, torch: Any) -> float:
        """Largest error against float64 on the CPU; NaN where the kernel wrote nothing."""
        tensors = [tensor.double().cpu() for tensor in self.arguments[:-1]]
        outputs = tensors[-2:]
        pairs = zip(outputs, self.expected(torch, *tensors), strict=True)
        # torch's max, not Python's: it does not lose a NaN.
        return float(torch.stack([(out - right).abs().max() for out, right in pairs]).max())

    def expected(self, torch: Any, a_cos: Any, a_sin: Any, c: Any, s: Any, ca: Any, sa: Any, *_: Any) -> tuple[Any, Any]:
        h = torch.nn.functional.silu(a_cos @ c + a_sin @ s)
        return h @ ca, h @ sa


class RealSpaceGradient(RealSpace):
    """realspace_bwd: two incoming gradients before the coefficients."""

    name = "realspace_bwd"
    n_operands = 4

    def expected(self, torch: Any, g_cos: Any, g_sin: Any, a_cos: Any, a_sin: Any, *rest: Any) -> tuple[Any, Any]:  # type: ignore[override]
        c, s, ca, sa = rest[:4]
        f = a_cos @ c + a_sin @ s
        sigma = torch.sigmoid(f)
        df = (g_cos @ ca.T + g_sin @ sa.T) * sigma * (1 + f * (1 - sigma))
        return df @ c.T, df @ s.T


class Wishes:
    """What one process asks for, beginning with one of the two kernels.

    Attributes: first, second (another function; for arms that know one source, another instance of it), singles and batch
    (variants of the first, all different).
    """

    def __init__(self, kernel: str, *, n_further: int, one_source: bool = False) -> None:
        if not 0 <= n_further <= MOST_FURTHER:
            raise SystemExit(f"--further cannot be {n_further}: 0 to {MOST_FURTHER} variants can be told apart")
        variants: list[Any]
        if kernel == Norm.name:
            self.first: Any = Norm()
            self.second: Any = Norm(64) if one_source else RealSpace()
            variants = [Norm(132 + 4 * i) for i in range(2 * MOST_FURTHER)]
        else:
            self.first = RealSpace()
            self.second = RealSpaceGradient()
            variants = [RealSpace(10 + i) for i in range(2 * MOST_FURTHER)]
        self.singles = variants[:n_further]
        self.batch = variants[MOST_FURTHER : MOST_FURTHER + n_further]

    def all(self) -> list[Any]:
        return [self.first, self.second, *self.singles, *self.batch]


def every_wish(kernels: list[str], *, n_further: int) -> list[Any]:
    """What any arm that begins with one of the kernels may ask for."""
    found = [wish for kernel in kernels for wish in Wishes(kernel, n_further=n_further).all()]
    found += [Wishes(kernel, n_further=0, one_source=True).second for kernel in kernels]
    return list({variant(wish.name, wish.spec): wish for wish in found}.values())


def variant(name: str, spec: Any) -> str:
    """One text for a kernel and its spec: the name under which facts about its binary are kept."""
    return " ".join([name, *(f"{axis}={value}" for axis, value in sorted(spec.items()))])
