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
from kserve.ops.graph_norm_bce import chunk_of

NAME = "kserve_operators"
_WIDTH = 128  # of the library that is built ahead
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


def edge_features(x: torch.Tensor, edge_index: torch.Tensor, edge_h: torch.Tensor) -> torch.Tensor:
    """Sum and distance of each edge's two nodes beside its own row: the kernel of `kserve.ops.edge_features` as an operator.

    out[e, 0:H]   = x[s] + x[d]          s = edge_index[0, e], d = edge_index[1, e]
    out[e, H:2H]  = |x[s] - x[d]|
    out[e, 2H:3H] = edge_h[e]

    Axes:     N nodes, E edges (var); H channels (const, 1 to 8192).
    Args:
        x, edge_h:  [N, H] and [E, H] f32, contiguous, on one CUDA device.
        edge_index: [2, E] int64, contiguous, there too, 0 to N - 1: not checked.
    Returns:  [E, 3H] f32, a new tensor: the bits that the kernel `fused_edge_features` gives.
    Numerics: every element rounded once.
    Random:   none.
    Gradient: none is registered.
    Targets:  sm_80 and newer. Sources: cuda_src/extension/, cuda_src/include/kserve/edge_features.cuh.
    Launch:   current stream, one kernel, no workspace, no synchronisation; none when E is 0.
    Traffic:  (min(N, 2 E) + 4 E) H * itemsize + 16 E bytes, when the caches hold the nodes.
    Raises:   as `norm_residual`.
    """
    return _operator("edge_features", int(x.shape[-1]))(x, edge_index, edge_h)


def graph_norm_bce(
    logits: torch.Tensor,
    target: torch.Tensor,
    edge_graph: torch.Tensor,
    *,
    n_graphs: int,
    pos_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Binary cross-entropy of each edge, averaged inside each graph, then over the graphs: the kernels as an operator.

    loss = mean over g of (mean over the edges e of graph g of bce(logits[e], target[e]))

    Axes:     E edges (var, from 1); G graphs (var, below 2**31).
    Args:
        logits, target: [E] f32, contiguous, on one CUDA device.
        edge_graph:     [E] int64, contiguous, there too, 0 to G - 1, sorted or not.
        n_graphs:       G, 1 to 2**31 - 1.
        pos_weight:     [] f32 there too, or None for 1.
    Returns:  [] f32, a new tensor: the bits of `kserve.ops.graph_norm_bce`.
    Numerics: as `kserve.ops.graph_norm_bce`.
    Random:   none.
    Gradient: none is registered.
    Targets:  sm_80 and newer. Sources: cuda_src/extension/, cuda_src/include/kserve/graph_norm_bce.cuh.
    Launch:   current stream, two kernels, or one up to 8,192 edges; one workspace; no synchronisation.
    Traffic:  16 E bytes.
    Raises:   as `norm_residual`.
    """
    return _operator("graph_norm_bce", _WIDTH)(logits, target, edge_graph, n_graphs, pos_weight, chunk_of(int(logits.shape[0])))


@cache
def _operator(name: str, hidden: int) -> torch._ops.OpOverloadPacket:
    """The operator for rows of that many channels, whose library is found or built when it is first wanted."""
    get_extension(NAME, hidden=hidden)
    return getattr(torch.ops.kserve, f"{name}_{hidden}")
