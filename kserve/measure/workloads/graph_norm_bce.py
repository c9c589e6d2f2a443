"""graph_norm_bce: edges of a batch of decoding graphs, equal in size or a mixture, and one giant graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kserve.measure.workloads import Example, Sizes, Workload
from kserve.ops.graph_norm_bce import chunk_of, graph_norm_bce, reference, scratch_words

SIZES = [
    {"e": 398_848, "g": 128, "mixed": 0},
    {"e": 1 << 25, "g": 4_096, "mixed": 0},
    {"e": 1 << 25, "g": 1, "mixed": 0},
    {"e": 1 << 25, "g": 4_096, "mixed": 1},
    {"e": 209_408, "g": 128, "mixed": 1},
    {"e": 904_704, "g": 128, "mixed": 0},
    {"e": 19_968, "g": 128, "mixed": 0},
    {"e": 3_116, "g": 1, "mixed": 0},
]
DIRECTIONS, DTYPES = ("fwd",), ("float32",)


def workload(sizes: dict[str, int], *, direction: str, dtype: str) -> Workload:
    """The op forwards."""
    return Workload(
        op="graph_norm_bce",
        direction=direction,
        dtype=dtype,
        sizes=sizes,
        make=lambda device, seed: (*_edges(sizes, device, seed), sizes["g"]),
        served=graph_norm_bce,
        plain=reference,
        exact=reference,
        tolerance=2e-6,
        relative=True,
        n_bytes=16 * sizes["e"] + 4,
        n_flops=10 * sizes["e"],
    )


def _edges(sizes: Sizes, device: str, seed: int) -> tuple[Any, ...]:
    random = torch.Generator(device).manual_seed(seed)
    e, g = sizes["e"], sizes["g"]
    logits = 3.0 * torch.randn(e, generator=random, device=device)
    target = (torch.rand(e, generator=random, device=device) < 0.1).float()
    place = torch.arange(e, device=device)
    if not sizes["mixed"] or g < 2:
        return logits, target, place * g // e
    # The first graphs share a twentieth of the edges, or one giant has nearly all: as many small ones as there are others.
    small = g // 2 if g <= 1024 else g - 1
    edge_of_small = max(1, e // 20 // small)
    ids = torch.where(
        place < small * edge_of_small, place // edge_of_small, small + (place - small * edge_of_small) * (g - small) // e
    )
    return logits, target, ids.clamp(max=g - 1)


def _chunks(_spec: Mapping[str, Any], sizes: Sizes, device: str, seed: int) -> tuple[Any, ...]:
    e, g = sizes["n_edges"], sizes["n_graphs"]
    chunk = chunk_of(e)
    scratch = torch.full((scratch_words(e, g, chunk),), -1, device=device)
    return *_edges({"e": e, "g": g, "mixed": 0}, device, seed), None, scratch, e, g, chunk


KERNELS = {
    "graph_norm_bce_chunks": Example(
        sizes={"n_edges": 1 << 25, "n_graphs": 4_096},
        arguments=_chunks,
        tolerance=0.0,
        n_bytes=lambda _, sizes: 16 * sizes["n_edges"],
    )
}
