"""edge_features: the detector graphs of a rotated surface code, batch 128, both directions of each edge.

`ordered` 1 lays the edges out graph by graph, as a batch has them; 0 draws both ends from the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kserve.measure.workloads import Example, Sizes, Workload
from kserve.ops.edge_features import edge_features, reference

SIZES = [
    {"n": 43_136, "e": 398_848, "hidden": 128, "ordered": 1},
    {"n": 43_136, "e": 398_848, "hidden": 128, "ordered": 0},
    {"n": 43_136, "e": 398_848, "hidden": 64, "ordered": 1},
    {"n": 43_136, "e": 398_848, "hidden": 256, "ordered": 1},
    {"n": 92_288, "e": 904_704, "hidden": 128, "ordered": 1},
    {"n": 15_488, "e": 128_512, "hidden": 128, "ordered": 1},
    {"n": 3_200, "e": 19_968, "hidden": 64, "ordered": 1},
    {"n": 337, "e": 3_116, "hidden": 128, "ordered": 1},
]
DIRECTIONS, DTYPES = ("fwd",), ("float32", "bfloat16", "float16")
_N_GRAPHS = 128


def workload(sizes: dict[str, int], *, direction: str, dtype: str) -> Workload:
    """The op forwards."""
    return Workload(
        op="edge_features",
        direction=direction,
        dtype=dtype,
        sizes=sizes,
        make=lambda device, seed: _inputs(sizes, dtype, device, seed),
        served=edge_features,
        plain=reference,
        exact=reference,
        # One rounding of each element: exact in f32 up to what float64 shows of it.
        tolerance={"float32": 5e-7, "bfloat16": 4e-2, "float16": 5e-3}[dtype],
        n_bytes=_n_bytes(sizes, dtype),
        n_flops=3 * sizes["e"] * sizes["hidden"],
    )


def _n_bytes(sizes: Sizes, dtype: str) -> int:
    n, e, hidden = sizes["n"], sizes["e"], sizes["hidden"]
    item_bytes: int = getattr(torch, dtype).itemsize
    return item_bytes * hidden * (min(n, 2 * e) + 4 * e) + 16 * e


def _inputs(sizes: Sizes, dtype: str, device: str, seed: int) -> tuple[Any, ...]:
    random = torch.Generator(device).manual_seed(seed)
    n, e, hidden = sizes["n"], sizes["e"], sizes["hidden"]
    x, edge_h = (torch.randn(count, hidden, generator=random, device=device).to(getattr(torch, dtype)) for count in (n, e))
    if not sizes["ordered"]:
        return x, torch.randint(n, (2, e), generator=random, device=device), edge_h
    # Edge number e belongs to graph e * G // E, and so do both of its ends.
    graphs = max(1, min(_N_GRAPHS, n // 2))
    own = torch.arange(e, device=device) * graphs // e
    inside = torch.randint(n // graphs, (2, e), generator=random, device=device)
    return x, (own * (n // graphs) + inside).contiguous(), edge_h


def _arguments(spec: Mapping[str, Any], sizes: Sizes, device: str, seed: int) -> tuple[Any, ...]:
    n_nodes, n_edges = sizes["n_nodes"], sizes["n_edges"]
    whole = {"n": n_nodes, "e": n_edges, "hidden": spec["hidden"], "ordered": sizes["ordered"]}
    x, edge_index, edge_h = _inputs(whole, spec.get("dtype", "float32"), device, seed)
    out = torch.full((n_edges, 3 * spec["hidden"]), torch.nan, dtype=x.dtype, device=device)
    return x, edge_index, edge_h, out, n_nodes, n_edges


KERNELS = {
    "fused_edge_features": Example(
        sizes={"n_nodes": 43_136, "n_edges": 398_848, "ordered": 1},
        arguments=_arguments,
        tolerance=0.0,
        n_bytes=lambda spec, sizes: _n_bytes(
            {"n": sizes["n_nodes"], "e": sizes["n_edges"], "hidden": spec["hidden"]}, spec.get("dtype", "float32")
        ),
    )
}
