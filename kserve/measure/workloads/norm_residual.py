"""norm_residual: rows of the decoder's node and edge embeddings. Shapes: a rotated surface code, distance 7, batch 128.

`training` 1 draws a dropout mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kserve.measure.workloads import Example, Sizes, Workload
from kserve.ops.norm_residual import norm_residual, reference

EPS, DROPOUT_P = 1e-5, 0.1
SIZES = [
    {"n": 398_848, "hidden": 128, "training": 0},
    {"n": 398_848, "hidden": 64, "training": 0},
    {"n": 398_848, "hidden": 256, "training": 0},
    {"n": 398_848, "hidden": 128, "training": 1},
    {"n": 43_136, "hidden": 128, "training": 0},
    {"n": 3_200, "hidden": 64, "training": 0},
    {"n": 337, "hidden": 128, "training": 0},
]
DIRECTIONS, DTYPES = ("fwd",), ("float32",)


def workload(sizes: dict[str, int], *, direction: str, dtype: str) -> Workload:
    """The op forwards."""
    n, hidden = sizes["n"], sizes["hidden"]
    forms = _Dropping() if sizes["training"] else _Plain()
    return Workload(
        op="norm_residual",
        direction=direction,
        dtype=dtype,
        sizes=sizes,
        make=lambda device, seed: forms.make(n, hidden, device, seed),
        served=forms.served,
        plain=forms.plain,
        exact=forms.exact,
        tolerance=5e-6,
        n_bytes=_n_bytes(n, hidden),
        n_flops=8 * n * hidden,
    )


def _inputs(n: int, hidden: int, device: str, seed: int) -> tuple[Any, ...]:
    random = torch.Generator(device).manual_seed(seed)
    x, residual = (torch.randn(n, hidden, generator=random, device=device) for _ in range(2))
    gamma, beta = (torch.randn(hidden, generator=random, device=device) for _ in range(2))
    return x, residual, 1.0 + 0.1 * gamma, 0.1 * beta


class _Plain:
    """Inference."""

    served, exact = staticmethod(norm_residual), staticmethod(reference)

    def make(self, n: int, hidden: int, device: str, seed: int) -> tuple[Any, ...]:
        return _inputs(n, hidden, device, seed)

    @staticmethod
    def plain(x: torch.Tensor, residual: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, (x.shape[1],), gamma, beta, EPS) + residual


class _Dropping:
    """Training. The mask of the exact result is the op's own, drawn again on rows that show nothing else."""

    seed = 0

    def make(self, n: int, hidden: int, device: str, seed: int) -> tuple[Any, ...]:
        self.seed = seed
        torch.manual_seed(seed)
        return _inputs(n, hidden, device, seed)

    @staticmethod
    def served(*tensors: torch.Tensor) -> torch.Tensor:
        return norm_residual(*tensors, dropout_p=DROPOUT_P, training=True)

    @staticmethod
    def plain(x: torch.Tensor, residual: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
        normal = torch.nn.functional.layer_norm(x, (x.shape[1],), gamma, beta, EPS)
        return torch.nn.functional.dropout(normal, DROPOUT_P) + residual

    def exact(self, x: torch.Tensor, residual: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(self.seed)
        zeros = torch.zeros_like(x, dtype=torch.float32)
        kept = self.served(zeros, zeros, zeros[0], torch.ones_like(zeros[0])) != 0.0
        return reference(x, torch.zeros_like(x), gamma, beta) * kept / (1.0 - DROPOUT_P) + residual


def _n_bytes(n: int, hidden: int) -> int:
    return 4 * (3 * n * hidden + 2 * hidden)


def _arguments(spec: Mapping[str, Any], sizes: Sizes, device: str, seed: int) -> tuple[Any, ...]:
    inputs = _inputs(sizes["n"], spec["hidden"], device, seed)
    return (*inputs, torch.full_like(inputs[0], torch.nan), sizes["n"], EPS)


KERNELS = {
    "fused_norm_residual": Example(
        sizes={"n": 398_848},
        arguments=_arguments,
        tolerance=1e-6,
        n_bytes=lambda spec, sizes: _n_bytes(sizes["n"], spec["hidden"]),
    )
}
