"""graph_norm_bce: binary cross-entropy of each edge, averaged inside each graph, then over the graphs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kserve.client import get_kernel, get_kernels
from kserve.client.launch import Kernel
from kserve.errors import InvalidSpec, LaunchError
from kserve.ops import check_device, check_dtype, check_shape, region
from kserve.ops.allocate import empty
from kserve.ops.backend import CUDA, Usual, backend, is_plain, serve
from kserve.ops.library import define

_FEW_EDGES = 8192  # up to here one block is done before a second kernel would begin
# Edges of a chunk: few, so that every multiprocessor has some; but one block joins the records of all chunks, and more than
# 2,048 would keep it busy, until a chunk is so long that reading it takes far longer than that.
_SMALLEST_CHUNK, _LARGEST_CHUNK, _MOST_RECORDS = 1024, 16384, 2048
_usual = Usual("graph_norm_bce", "e, e, e")


def graph_norm_bce(
    logits: torch.Tensor,
    target: torch.Tensor,
    edge_graph: torch.Tensor,
    n_graphs: int,
    *,
    pos_weight: torch.Tensor | None = None,
    deterministic: bool = True,
) -> torch.Tensor:
    """The mean over graphs of the mean loss of each graph's edges.

    l[e]   = (1 - t) z + (1 + (pos_weight - 1) t) (max(-z, 0) + log(1 + exp(-|z|)))     z = logits[e], t = target[e]
    result = mean over g of (sum of l[e] with edge_graph[e] = g) / max(number of these, 1)

    Every graph counts, also one without edges, which adds 0.

    Axes:     E edges, G graphs (var).
    Args:
        logits:        [E] f32. On the CPU, another float dtype or not contiguous: the reference serves it.
        target:        [E] f32 in [0, 1], soft labels too; contiguous.
        edge_graph:    [E] int64 in [0, G), contiguous. Sorted is fast; any other order is found out on the device and right.
        n_graphs:      G, from 1.
        pos_weight:    one f32, on the device of logits; read there. None stands for 1.
        deterministic: False picks atomic additions: the last bits may differ from call to call. No faster when sorted.
    Returns:  a scalar f32 tensor on the device of logits; 0 when E is 0. An id outside [0, G): NaN (atomic: left out).
    Numerics: losses in f32, joined in f64; relative error vs f64 <= 2e-6 (atomic: 1e-5) while no loss is above 1e9. The same
              bits every time, in every process, when deterministic. A NaN or infinite loss gives NaN or infinity; infinite
              losses of edges in no order give NaN.
    Random:   none.
    Gradient: of logits, once, in plain torch: ((1 - t) - w sigmoid(-z)) / (G max(n_g, 1)), w = 1 + (pos_weight - 1) t.
    Targets:  sm_80 and newer, else the reference. Sources: cuda_src/graph_norm_bce/.
    Launch:   current stream, two kernels, or one up to 8,192 edges; a workspace of 40 bytes for each 1,024 to 16,384 edges
              and 16 for each graph; no synchronisation; none when E is 0. Atomic: two kernels, after two fills.
    Traffic:  16 E bytes.
    Raises:   InvalidSpec for n_graphs; LaunchError for a tensor of the wrong shape, dtype, device or layout, or a target or
              pos_weight that requires a gradient; with `strict` BuildError.
    """
    if not torch.compiler.is_compiling() and deterministic and pos_weight is None and _is_count(n_graphs):
        found = _usual.find(logits, target, edge_graph, asked=logits.numel() <= _FEW_EDGES)
        if found is not None:
            kernels, (_, n_edges) = found
            return _launch_on(kernels, (logits, target, edge_graph, None), n_edges, n_graphs)
    call = Call(logits, target, edge_graph, n_graphs, pos_weight, deterministic)
    _check(call)
    with region("graph_norm_bce.fwd"):
        if backend() == CUDA:
            is_recorded = torch.is_grad_enabled() and logits.requires_grad
            loss: torch.Tensor = _Loss.apply(*call) if is_recorded else _forward(*call)
            return loss
        return _run(*call) if is_plain(logits) else _reference(*call)


class Call(NamedTuple):
    """The arguments of one call."""

    logits: torch.Tensor
    target: torch.Tensor
    edge_graph: torch.Tensor
    n_graphs: int
    pos_weight: torch.Tensor | None
    deterministic: bool


def reference(
    logits: torch.Tensor,
    target: torch.Tensor,
    edge_graph: torch.Tensor,
    n_graphs: int,
    *,
    pos_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same function in plain torch, for any layout and derivative: dtype of logits, computed in f32 at least."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    z, t = logits.to(wide), target.to(wide)
    weight = _weight(t, pos_weight)
    losses = (1.0 - t) * z + weight * ((-z).clamp(min=0.0) + torch.log1p(torch.exp(-z.abs())))
    sums = torch.zeros(n_graphs, dtype=wide, device=z.device).index_add(0, edge_graph, losses)
    means = sums / _counts(edge_graph, n_graphs, wide)
    return means.mean().to(logits.dtype)


def _reference(*given: Any) -> torch.Tensor:
    call = Call(*given)
    return reference(*call[:4], pos_weight=call.pos_weight)


def _weight(t: torch.Tensor, pos_weight: torch.Tensor | None) -> torch.Tensor:
    return torch.ones_like(t) if pos_weight is None else 1.0 + (pos_weight.to(t.dtype).reshape(()) - 1.0) * t


def _counts(edge_graph: torch.Tensor, n_graphs: int, dtype: torch.dtype) -> torch.Tensor:
    ones = torch.ones_like(edge_graph, dtype=dtype)
    return torch.zeros(n_graphs, dtype=dtype, device=edge_graph.device).index_add(0, edge_graph, ones).clamp(min=1.0)


def reason_for_reference(logits: torch.Tensor) -> str | None:
    """Why the kernels cannot serve these, or None when they can."""
    if logits.device.type != "cuda":
        return f"logits lie on {logits.device}"
    if logits.dtype != torch.float32:
        return f"logits have dtype {logits.dtype}: the kernel takes float32"
    if not logits.is_contiguous():
        return "logits are not contiguous"
    return None


class _Loss(torch.autograd.Function):  # type: ignore[misc]
    """The kernels forwards, plain torch backwards."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> torch.Tensor:
        call = Call(*given)
        ctx.save_for_backward(call.logits, call.target, call.edge_graph, call.pos_weight)
        ctx.n_graphs = call.n_graphs
        return _forward(*given)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, incoming: torch.Tensor) -> tuple[Any, ...]:
        logits, target, edge_graph, pos_weight = ctx.saved_tensors
        with region("graph_norm_bce.bwd"):
            share = incoming / (ctx.n_graphs * _counts(edge_graph, ctx.n_graphs, logits.dtype))
            slope = (1.0 - target) - _weight(target, pos_weight) * torch.sigmoid(-logits)
        return slope * share[edge_graph], None, None, None, None, None


def _forward(*given: Any) -> torch.Tensor:
    found: torch.Tensor = (_run if is_plain(given[0]) else _op)(*given)
    return found


def _run(*given: Any) -> torch.Tensor:
    call = Call(*given)
    if call.logits.shape[0] == 0:
        return call.logits.new_zeros(())
    kernel = _launch if call.deterministic else _launch_atomic
    reason = reason_for_reference(call.logits)
    out: torch.Tensor = serve("graph_norm_bce", call, kernel=kernel, reference=_reference, reason=reason)
    return out


def _shapes(logits: torch.Tensor, *_: Any) -> torch.Tensor:
    return logits.new_empty(())


_op = define(
    "graph_norm_bce(Tensor logits, Tensor target, Tensor edge_graph, int n_graphs, Tensor? pos_weight, bool deterministic)"
    " -> Tensor",
    run=_run,
    shapes=_shapes,
)


def _launch(*given: Any) -> torch.Tensor:
    call = Call(*given)
    is_few = call.logits.numel() <= _FEW_EDGES
    names = ("graph_norm_bce_few",) if is_few else ("graph_norm_bce_chunks", "graph_norm_bce_mean")
    kernels = tuple(get_kernels([(name, {}) for name in names]))  # built at the same time
    out = _launch_on(kernels, (*call[:3], call.pos_weight), call.logits.numel(), call.n_graphs)
    _usual.settle(call[:3], kernels, asked=is_few)
    return out


def _launch_on(kernels: tuple[Kernel, ...], edges: tuple[Any, ...], n_edges: int, n_graphs: int) -> torch.Tensor:
    chunk = chunk_of(n_edges)
    scratch = empty((scratch_words(n_edges, n_graphs, chunk),), (1,), edges[0], torch.int64)
    out = empty((), (), edges[0])
    if len(kernels) == 1:
        kernels[0](*edges, scratch, out, n_edges, n_graphs)
    else:
        kernels[0](*edges, scratch, n_edges, n_graphs, chunk)
        kernels[1](*edges, scratch, out, n_edges, n_graphs, -(-n_edges // chunk))
    return out


def chunk_of(n_edges: int) -> int:
    """Edges of one chunk: at least n_edges where one block takes all."""
    if n_edges <= _FEW_EDGES:
        return _FEW_EDGES
    even = -(-n_edges // (_MOST_RECORDS * _SMALLEST_CHUNK)) * _SMALLEST_CHUNK
    return min(even, _LARGEST_CHUNK)


def scratch_words(n_edges: int, n_graphs: int, chunk: int) -> int:
    """Words of 8 bytes that the deterministic kernels need: records of the chunks, then what unsorted edges are summed in."""
    records = 0 if n_edges <= chunk else 5 * -(-n_edges // chunk)
    return records + 2 * n_graphs + 2


def _launch_atomic(*given: Any) -> torch.Tensor:
    call = Call(*given)
    n_edges, n_graphs = call.logits.shape[0], call.n_graphs
    sums, out = call.logits.new_zeros(n_graphs), call.logits.new_empty(())
    counts = torch.zeros(n_graphs, dtype=torch.int32, device=sums.device)
    edges = (call.logits, call.target, call.edge_graph, call.pos_weight)
    get_kernel("graph_norm_bce_atomic")(*edges, sums, counts, n_edges, n_graphs)
    get_kernel("graph_norm_bce_atomic_mean")(sums, counts, out, n_graphs)
    return out


def _is_count(n_graphs: object) -> bool:
    return isinstance(n_graphs, int) and not isinstance(n_graphs, bool) and 1 <= n_graphs < 2**31


def _check(call: Call) -> None:
    logits, n_graphs = call.logits, call.n_graphs
    if not _is_count(n_graphs):
        raise InvalidSpec(f"graph_norm_bce: n_graphs cannot be {n_graphs!r}", facts={"allowed": "1 to 2**31 - 1"})
    check_dtype("logits", logits, (torch.float32, torch.float64, torch.bfloat16, torch.float16))
    if logits.dim() != 1:
        raise LaunchError(f"logits has shape {list(logits.shape)}", facts={"allowed": "[E]"})
    for name, tensor, dtype in (("target", call.target, logits.dtype), ("edge_graph", call.edge_graph, torch.int64)):
        check_dtype(name, tensor, (dtype,))
        check_shape(name, tensor, logits.shape)
        check_device(name, tensor, logits.device)
        if not tensor.is_contiguous():
            raise LaunchError(f"{name} is not contiguous: strides {list(tensor.stride())}")
    _check_weight(call)


def _check_weight(call: Call) -> None:
    weight = call.pos_weight
    if weight is not None:
        check_dtype("pos_weight", weight, (call.logits.dtype,))
        check_device("pos_weight", weight, call.logits.device)
        if weight.numel() != 1:
            raise LaunchError(f"pos_weight has shape {list(weight.shape)}", facts={"allowed": "one element"})
    if torch.is_grad_enabled() and (call.target.requires_grad or (weight is not None and weight.requires_grad)):
        raise LaunchError(
            "graph_norm_bce has a gradient of logits alone, and target or pos_weight requires one",
            hint="use kserve.ops.graph_norm_bce.reference, which torch differentiates",
        )
