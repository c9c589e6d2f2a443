"""edge_features: for each edge the sum and distance of its two nodes beside its own embedding, in one pass over memory."""

from __future__ import annotations

import torch

from kserve.client import get_kernel
from kserve.client.launch import Kernel
from kserve.errors import LaunchError
from kserve.ops import check_device, check_dtype, check_shape, region
from kserve.ops.allocate import empty
from kserve.ops.backend import CUDA, Usual, backend, check_no_gradient, is_plain, serve
from kserve.ops.library import define

WIDEST = 16384
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_KERNEL_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_usual = Usual("edge_features", "n H, 2 e, e H")


def edge_features(x: torch.Tensor, edge_index: torch.Tensor, edge_h: torch.Tensor) -> torch.Tensor:
    """The symmetric input of an edge's MLP.

    out[e, 0:H]   = x[s] + x[d]          s = edge_index[0, e], d = edge_index[1, e]
    out[e, H:2H]  = |x[s] - x[d]|
    out[e, 2H:3H] = edge_h[e]

    Axes:     N nodes, E edges (var); H channels (const).
    Args:
        x:          [N, H] f32, bf16 or f16. Not contiguous, on the CPU, or H above 16384: the reference serves it.
        edge_index: [2, E] int64, contiguous, 0 to N - 1: not checked on a GPU, where another index reads what is not ours.
                    Any order; edges of one graph next to each other are fastest.
        edge_h:     [E, H], dtype and device of x. Not contiguous: the reference.
    Returns:  [E, 3H], dtype of x, a new contiguous tensor.
    Numerics: every element rounded once: bit for bit what torch gives.
    Random:   none.
    Gradient: none of the kernel: refuses inputs that require one. The backends `pytorch` and `compiled` have it.
    Targets:  sm_80 and newer, else the reference. Sources: cuda_src/edge_features/.
    Launch:   current stream, one kernel, no workspace, no synchronisation; none when E is 0.
    Traffic:  (min(N, 2 E) + 4 E) H * itemsize + 16 E bytes, when the caches hold the nodes.
    Raises:   LaunchError for a tensor of the wrong shape, dtype, device or layout, or one that requires a gradient; with
              `strict` BuildError.
    """
    if not torch.compiler.is_compiling():
        found = _usual.find(x, edge_index, edge_h)
        if found is not None:
            kernel, (_, n_nodes, hidden, n_edges) = found
            return _launch_on(kernel, x, edge_index, edge_h, sizes=(n_nodes, n_edges, hidden))
    _check(x, edge_index, edge_h)
    with region("edge_features.fwd"):
        if is_plain(x):
            return _run(x, edge_index, edge_h)
        # What is traced sees the op as one, or torch's own operations where these are to serve.
        return _op(x, edge_index, edge_h) if backend() == CUDA else reference(x, edge_index, edge_h)


def reference(x: torch.Tensor, edge_index: torch.Tensor, edge_h: torch.Tensor) -> torch.Tensor:
    """The same function in plain torch, for any layout and derivative."""
    sources, targets = x[edge_index[0]], x[edge_index[1]]
    return torch.cat([sources + targets, (sources - targets).abs(), edge_h], dim=1)


def reason_for_reference(x: torch.Tensor, edge_h: torch.Tensor) -> str | None:
    """Why the kernel cannot serve these, or None when it can."""
    if x.device.type != "cuda":
        return f"x lies on {x.device}"
    if x.dtype not in _KERNEL_DTYPES:
        return f"x has dtype {x.dtype}"
    if not x.is_contiguous() or not edge_h.is_contiguous():
        return "x or edge_h is not contiguous"
    if x.shape[1] > WIDEST:
        return f"a row has {x.shape[1]} elements: the kernel takes up to {WIDEST}"
    return None


def _run(x: torch.Tensor, edge_index: torch.Tensor, edge_h: torch.Tensor) -> torch.Tensor:
    if edge_h.shape[0] == 0:
        return _shapes(x, edge_index, edge_h)
    reason = reason_for_reference(x, edge_h)
    out: torch.Tensor = serve("edge_features", (x, edge_index, edge_h), kernel=_launch, reference=reference, reason=reason)
    return out


def _shapes(x: torch.Tensor, edge_index: torch.Tensor, edge_h: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
    return x.new_empty((edge_h.shape[0], 3 * x.shape[1]))


_op = define("edge_features(Tensor x, Tensor edge_index, Tensor edge_h) -> Tensor", run=_run, shapes=_shapes)


def _launch(x: torch.Tensor, edge_index: torch.Tensor, edge_h: torch.Tensor) -> torch.Tensor:
    (n_nodes, hidden), n_edges = x.shape, edge_h.shape[0]
    kernel = get_kernel("fused_edge_features", dtype=_KERNEL_DTYPES[x.dtype], hidden=hidden)
    out = _launch_on(kernel, x, edge_index, edge_h, sizes=(n_nodes, n_edges, hidden))
    _usual.settle((x, edge_index, edge_h), kernel)
    return out


def _launch_on(kernel: Kernel, *tensors: torch.Tensor, sizes: tuple[int, int, int]) -> torch.Tensor:
    n_nodes, n_edges, hidden = sizes
    out = empty((n_edges, 3 * hidden), (3 * hidden, 1), tensors[0])
    kernel(*tensors, out, n_nodes, n_edges)
    return out


def _check(x: torch.Tensor, edge_index: torch.Tensor, edge_h: torch.Tensor) -> None:
    check_dtype("x", x, (*_DTYPES, torch.float64))
    if x.dim() != 2 or x.shape[1] == 0:
        raise LaunchError(f"x has shape {list(x.shape)}", facts={"allowed": "[N, H], H from 1"})
    check_dtype("edge_index", edge_index, (torch.int64,))
    if edge_index.dim() != 2 or edge_index.shape[0] != 2 or not edge_index.is_contiguous():
        found = f"shape {list(edge_index.shape)}, strides {list(edge_index.stride())}"
        raise LaunchError(f"edge_index has {found}", facts={"allowed": "[2, E], contiguous"})
    if x.shape[0] == 0 and edge_index.shape[1] > 0:
        raise LaunchError(f"edge_index names {edge_index.shape[1]} edges, and x has no node")
    check_dtype("edge_h", edge_h, (x.dtype,))
    check_shape("edge_h", edge_h, (edge_index.shape[1], x.shape[1]))
    for name, tensor in (("edge_index", edge_index), ("edge_h", edge_h)):
        check_device(name, tensor, x.device)
    check_no_gradient("edge_features", x, edge_h)
