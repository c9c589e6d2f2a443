"""graph_norm_bce: the front door on the CPU, the device code on the host and under the compiler, the kernels on a GPU."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from kserve.errors import InvalidSpec, LaunchError
from kserve.ops.graph_norm_bce import chunk_of, graph_norm_bce, reason_for_reference, reference, scratch_words
from tests.support.built_in import device_code
from tests.support.host_cuda import host_kernel
from tests.support.processes import python

CHUNKS = [1024, 4096, 16384]  # the last holds them all: one kernel does
DETERMINISTIC, ATOMIC = 2e-6, 1e-5  # relative errors against float64
# Edges of each graph: the ends of chunks, warps and accesses, none at all, one giant among small ones.
SHAPES = {
    "one edge": [1],
    "test": [3, 5, 7],
    "not a multiple": [129],
    "giant": [9000],
    "giant among small": [1, 5000, 2, 2, 4096, 1, 900],
    "one each": [1] * 300,
    "at the chunks": [4096, 4096],
    "at the warps": [512] * 9 + [128] * 3,
    "empty between": [3, 0, 0, 4, 0],
    "few each": [1 + i % 7 for i in range(1500)],
    "random": [int(n) for n in torch.randint(0, 200, (60,), generator=torch.Generator().manual_seed(1))],
}


class Edges(NamedTuple):
    logits: torch.Tensor
    target: torch.Tensor
    edge_graph: torch.Tensor
    n_graphs: int


def edges(sizes: list[int], *, soft: bool = False, shuffled: bool = False, device: str = "cpu", seed: int = 0) -> Edges:
    random = torch.Generator().manual_seed(seed)
    ids = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    if shuffled:
        ids = ids[torch.randperm(len(ids), generator=random)]
    logits, drawn = 3 * torch.randn(len(ids), generator=random), torch.rand(len(ids), generator=random)
    target = drawn if soft else (drawn < 0.3).float()
    return Edges(*(tensor.to(device) for tensor in (logits, target, ids)), len(sizes))


def exact(given: Edges, pos_weight: float | None = None) -> torch.Tensor:
    weight = None if pos_weight is None else torch.tensor([pos_weight], dtype=torch.float64, device=given.logits.device)
    return reference(given.logits.double(), given.target.double(), *given[2:], pos_weight=weight)


def on_host(given: Edges, pos_weight: float | None = None, *, chunk: int = 4096, facts: bool = True, seed: int = 0):
    """By the kernels that a chunk of that many edges makes the op take: one where it holds them all."""
    e, g = given.logits.numel(), given.n_graphs
    weight = None if pos_weight is None else torch.tensor([pos_weight])
    scratch = torch.full((scratch_words(e, g, chunk),), -(2**62) + 12345)
    out = torch.full((1,), torch.nan)
    if e <= chunk:
        host_kernel("graph_norm_bce_few", facts=facts)(*given[:3], weight, scratch, out, e, g, seed=seed)
    else:
        host_kernel("graph_norm_bce_chunks", facts=facts)(*given[:3], weight, scratch, e, g, chunk, seed=seed)
        mean = host_kernel("graph_norm_bce_mean", facts=facts)
        mean(*given[:3], weight, scratch, out, e, g, -(-e // chunk), seed=seed)
    return out[0]


def atomic_on_host(given: Edges, pos_weight: float | None = None, *, seed: int = 0) -> torch.Tensor:
    sums, out = torch.zeros(given.n_graphs), torch.full((1,), torch.nan)
    counts = torch.zeros(given.n_graphs, dtype=torch.int32)
    weight = None if pos_weight is None else torch.tensor([pos_weight])
    e, g = given.logits.numel(), given.n_graphs
    host_kernel("graph_norm_bce_atomic")(*given[:3], weight, sums, counts, e, g, seed=seed)
    host_kernel("graph_norm_bce_atomic_mean")(sums, counts, out, g, seed=seed)
    return out[0]


def assert_close(found: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    assert abs(float(found) - float(expected)) <= bound * abs(float(expected)), (float(found), float(expected))


# The reference and the front door, on the CPU


GOLDEN = Edges(torch.tensor([0.0, 2, -2, 1, -3]), torch.tensor([1.0, 1, 0, 0, 1]), torch.tensor([0, 0, 0, 1, 1]), 2)


@pytest.mark.parametrize(
    ("n_graphs", "pos_weight", "expected"), [(2, None, 1.2482961269), (2, 3.0, 3.0459481999), (3, None, 0.8321974179)]
)
def test_golden_example(n_graphs, pos_weight, expected):
    given = GOLDEN._replace(n_graphs=n_graphs)
    assert float(exact(given, pos_weight)) == pytest.approx(expected, abs=1e-10)
    weight = None if pos_weight is None else torch.tensor(pos_weight)
    assert float(graph_norm_bce(*given, pos_weight=weight)) == pytest.approx(expected, rel=2e-6)
    assert float(on_host(given, pos_weight)) == pytest.approx(expected, rel=2e-6)


def test_one_graph_is_the_mean_loss_of_torch():
    given = edges([100], soft=True)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(given.logits, given.target, pos_weight=torch.tensor([2.5]))
    assert_close(graph_norm_bce(*given, pos_weight=torch.tensor([2.5])), expected, 1e-6)


@pytest.mark.parametrize("soft", [True, False])
def test_the_gradient_is_that_of_the_reference(soft):
    given = edges([3, 0, 40, 7], soft=soft)
    weight = torch.tensor([1.7])
    logits = given.logits.clone().requires_grad_()
    graph_norm_bce(logits, *given[1:], pos_weight=weight).backward()
    wide = given.logits.double().requires_grad_()
    reference(wide, given.target.double(), *given[2:], pos_weight=weight.double()).backward()
    assert (logits.grad - wide.grad).abs().max() <= 1e-7


def test_a_second_gradient_is_refused():
    given = edges([3, 4])
    logits = given.logits.clone().requires_grad_()
    (slope,) = torch.autograd.grad(graph_norm_bce(logits, *given[1:]), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="grad"):
        slope.sum().backward()


def test_no_edges_give_zero():
    given = Edges(torch.empty(0), torch.empty(0), torch.empty(0, dtype=torch.int64), 3)
    assert float(graph_norm_bce(*given)) == 0.0
    assert graph_norm_bce(*given).shape == ()


@pytest.mark.parametrize("n_graphs", [0, -1, 2**31, 1.0, True])
def test_a_number_of_graphs_that_makes_no_mean_is_refused(n_graphs):
    with pytest.raises(InvalidSpec, match="n_graphs"):
        graph_norm_bce(*GOLDEN[:3], n_graphs)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"logits": torch.zeros(5, 1)}, "logits"),
        ({"logits": torch.zeros(5, dtype=torch.int64)}, "logits"),
        ({"target": torch.zeros(4)}, "target"),
        ({"target": torch.zeros(5, dtype=torch.float64)}, "target"),
        ({"target": torch.zeros(5, 2)[:, 0]}, "target"),
        ({"edge_graph": torch.zeros(5, dtype=torch.int32)}, "edge_graph"),
        ({"edge_graph": torch.zeros(5, dtype=torch.int64, device="meta")}, "edge_graph"),
        ({"target": torch.zeros(5, requires_grad=True)}, "gradient"),
    ],
)
def test_a_wrong_tensor_is_named(changes, name):
    with pytest.raises(LaunchError, match=name):
        graph_norm_bce(*GOLDEN._replace(**changes))


@pytest.mark.parametrize("weight", [torch.ones(2), torch.ones(1, dtype=torch.float64), torch.ones(1, device="meta")])
def test_a_wrong_weight_is_named(weight):
    with pytest.raises(LaunchError, match="pos_weight"):
        graph_norm_bce(*GOLDEN, pos_weight=weight)


def test_the_op_is_traced_as_one_with_its_gradient():
    given = edges([3, 5, 7])
    traced = torch.compile(lambda z: graph_norm_bce(z, *given[1:]), fullgraph=True, backend="aot_eager")
    slopes = []
    for function in (traced, lambda z: graph_norm_bce(z, *given[1:])):
        logits = given.logits.clone().requires_grad_()
        function(logits).backward()
        slopes.append(logits.grad)
    assert torch.equal(*slopes)


# The device code, on the host


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("name", SHAPES)
def test_device_code_against_float64(name, chunk):
    given = edges(SHAPES[name], soft=True)
    assert_close(on_host(given, 2.5, chunk=chunk), exact(given, 2.5), DETERMINISTIC)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("name", ["giant among small", "at the warps", "random"])
def test_the_order_of_threads_and_blocks_changes_no_bit(name, chunk):
    given = edges(SHAPES[name])
    assert len({float(on_host(given, chunk=chunk, seed=seed)) for seed in range(3)}) == 1


def test_more_records_than_threads_join_them():
    given = edges([700] * 1700 + [1] * 30 + [30_000])
    assert given.logits.numel() > 1024 * 1024
    assert_close(on_host(given, chunk=1024), exact(given), DETERMINISTIC)


def test_a_loss_is_exact_however_small():
    """Each edge a graph of its own, so that no sum hides it: over the logits whose loss is a normal number."""
    logits = torch.cat([torch.linspace(-87, 87, 200_001), torch.logspace(-30, 1, 3000), -torch.logspace(-30, 1, 3000)])
    n, sums = len(logits), torch.zeros(len(logits))
    given = logits, torch.ones(n), torch.arange(n), None
    host_kernel("graph_norm_bce_atomic")(*given, sums, torch.zeros(n, dtype=torch.int32), n, n)
    wide = logits.double()
    expected = (-wide).clamp(min=0) + torch.log1p(torch.exp(-wide.abs()))
    assert ((sums - expected) / expected).abs().max() <= 4e-7


@pytest.mark.parametrize("chunk", CHUNKS)
def test_edges_in_no_order_are_found_out_and_right_bit_for_bit(chunk):
    given = edges([3, 5000, 7, 100], soft=True, shuffled=True)
    found = [on_host(given, 0.5, chunk=chunk, seed=seed) for seed in range(3)]
    assert_close(found[0], exact(given, 0.5), DETERMINISTIC)
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("place", [1, 127, 128, 511, 512, 1023, 1024, 4095, 4096, 5000])
@pytest.mark.parametrize("chunk", [1024, 8192])
def test_one_edge_out_of_order_is_found_wherever_it_is(place, chunk):
    given = edges([6000, 5])
    given.edge_graph[place - 1] = 1
    assert_close(on_host(given, chunk=chunk), exact(given), DETERMINISTIC)


def test_an_id_that_comes_again_inside_a_warp_is_counted_once():
    given = Edges(torch.randn(96), torch.zeros(96), torch.tensor([0, 1, 0] * 32), 2)
    assert_close(atomic_on_host(given), exact(given), ATOMIC)
    assert_close(on_host(given), exact(given), DETERMINISTIC)


@pytest.mark.parametrize("name", SHAPES)
def test_atomic_device_code_against_float64(name):
    given = edges(SHAPES[name], shuffled=len(SHAPES[name]) > 3)
    assert_close(atomic_on_host(given, 1.5, seed=3), exact(given, 1.5), ATOMIC)


@pytest.mark.parametrize("value", [1e4, -1e4])
def test_large_logits_overflow_nowhere(value):
    given = edges([40, 60], soft=True)
    given.logits[::2] = value
    assert_close(on_host(given), exact(given), DETERMINISTIC)


@pytest.mark.parametrize("chunk", [1024, 8192])
def test_nan_stays_nan_and_an_infinite_loss_is_infinite(chunk):
    given = edges([5000, 3])
    given.logits[77] = torch.nan
    assert on_host(given, chunk=chunk).isnan() and atomic_on_host(given).isnan()
    given.logits[77], given.target[77] = torch.inf, 0.0
    assert on_host(given, chunk=chunk) == torch.inf
    given.edge_graph[0] = 1
    assert on_host(given, chunk=chunk).isnan(), "in no order it has no sign"


@pytest.mark.parametrize("chunk", [1024, 8192])
@pytest.mark.parametrize(("place", "graph"), [(0, -1), (4999, 2), (5002, 2**40), (2500, 2), (2500, 2**40)])
def test_an_id_outside_gives_nan_and_touches_nothing(place, graph, chunk):
    given = edges([5000, 3])
    given.edge_graph[place] = graph
    assert on_host(given, chunk=chunk).isnan()
    assert atomic_on_host(given).isfinite(), "left out"


@pytest.mark.parametrize("chunk", [1024, 8192])
def test_unaligned_inputs_take_the_generic_variant(chunk):
    given = edges([5000, 3])
    assert_close(on_host(given, chunk=chunk, facts=False), exact(given), DETERMINISTIC)


@pytest.mark.parametrize("n_edges", [1, 8192, 8193, 398_848, 1 << 21, (1 << 21) + 1, 1 << 25, 1 << 33])
def test_chunks_are_whole_tiles_and_few(n_edges):
    chunk = chunk_of(n_edges)
    assert chunk % 1024 == 0 and (n_edges <= chunk) == (n_edges <= 8192)
    assert -(-n_edges // chunk) <= 2048 or chunk == 16384


# The device code, under the compiler


@pytest.mark.toolchain
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("part", ["chunks", "mean", "few", "atomic", "atomic_mean"])
def test_no_spills(arch, part, tmp_path):
    code = device_code(f"graph_norm_bce_{part}", tmp_path, arch=arch)
    assert (code.resources["spill_bytes"], code.resources["stack_bytes"]) == (0, 0)
    if part in ("chunks", "few"):
        assert code.mix["global_loads_128"] == 2 * 4, "four of a tile, logits, target and twice ids, before the loop and in it"


# The kernels, on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_kernels_against_float64(gpu, name, shuffled, deterministic):
    given = edges(SHAPES[name], soft=True, shuffled=shuffled, device="cuda")
    assert reason_for_reference(given.logits) is None
    weight = torch.tensor([2.5], device="cuda")
    found = graph_norm_bce(*given, pos_weight=weight, deterministic=deterministic)
    assert_close(found, exact(given, 2.5), DETERMINISTIC if deterministic else ATOMIC)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [[3116] * 128, [156] * 64 + [3116] * 64, [2**20], [8192] * 4096, [1] * 50_000])
def test_kernels_on_the_benchmarks_shapes(gpu, sizes):
    given = edges(sizes, device="cuda")
    assert_close(graph_norm_bce(*given), exact(given), DETERMINISTIC)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [[5000, 3], [50_000, 3]])
def test_kernels_read_what_is_not_aligned(gpu, sizes):
    given = edges(sizes, device="cuda")
    shifted = Edges(*(torch.cat([tensor[:1], tensor])[1:] for tensor in given[:3]), 2)
    assert shifted.logits.data_ptr() % 16
    assert_close(graph_norm_bce(*shifted), exact(given), DETERMINISTIC)


ONCE = """
import torch
from kserve.ops import graph_norm_bce
random = torch.Generator().manual_seed(5)
ids = torch.randint(128, (398_848,), generator=random).sort().values
z, t = torch.randn(398_848, generator=random), torch.rand(398_848, generator=random)
print(graph_norm_bce(z.cuda(), t.cuda(), ids.cuda(), 128).view(torch.int32).item())
"""


@pytest.mark.gpu
def test_two_processes_get_the_same_bits(gpu):
    assert len({python(ONCE).stdout for _ in range(2)}) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [[300, 5000, 2], [300, 50_000, 2]])
def test_kernels_in_a_graph(gpu, sizes):
    given = edges(sizes, device="cuda")
    expected = graph_norm_bce(*given)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        out = graph_norm_bce(*given)
    for _ in range(2):
        out.fill_(torch.nan)
        captured.replay()
        assert torch.equal(out, expected)


@pytest.mark.gpu
def test_kernels_under_a_compiler_with_their_gradient(gpu):
    given = edges([300, 5000, 2], device="cuda")
    traced = torch.compile(lambda z: graph_norm_bce(z, *given[1:]), fullgraph=True)
    logits = given.logits.clone().requires_grad_()
    traced(logits).backward()
    wide = given.logits.double().requires_grad_()
    reference(wide, given.target.double(), *given[2:]).backward()
    assert (logits.grad - wide.grad).abs().max() <= 1e-7
