"""edge_features: the front door on the CPU, the device code on the host and under the compiler, the kernel on a GPU."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from kserve.errors import LaunchError
from kserve.ops import set_backend
from kserve.ops.edge_features import edge_features, reason_for_reference, reference
from tests.support.built_in import device_code
from tests.support.host_cuda import host_kernel
from tests.support.inputs import odd, poisoned

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class Graph(NamedTuple):
    x: torch.Tensor
    edge_index: torch.Tensor
    edge_h: torch.Tensor


def graph(n: int = 11, e: int = 77, hidden: int = 16, *, dtype=torch.float32, device: str = "cpu", seed: int = 0) -> Graph:
    random = torch.Generator().manual_seed(seed)
    x, edge_h = (torch.randn(count, hidden, generator=random).to(dtype) for count in (n, e))
    return Graph(*(t.to(device) for t in (x, torch.randint(n, (2, e), generator=random), edge_h)))


def on_host(inputs: Graph, *, facts: bool = True, seed: int = 0, **knobs: int) -> torch.Tensor:
    hidden, e = inputs.x.shape[1], inputs.edge_h.shape[0]
    kernel = host_kernel("fused_edge_features", facts=facts, dtype=NAMES[inputs.x.dtype], hidden=hidden, **knobs)
    out = poisoned(inputs.x.new_empty(e, 3 * hidden))
    kernel(*inputs, out, inputs.x.shape[0], e, seed=seed)
    return out


# The reference and the front door, on the CPU


def test_golden_example():
    x = torch.tensor([[1.0, 2], [3, -1], [0, 5]])
    edge_h = torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6], [0.7, 0.8]])
    found = edge_features(x, torch.tensor([[0, 1, 2, 2], [1, 0, 2, 0]]), edge_h)
    expected = [[4, 1, 2, 3], [4, 1, 2, 3], [0, 10, 0, 0], [1, 7, 1, 3]]
    assert torch.equal(found, torch.cat([torch.tensor(expected, dtype=torch.float32), edge_h], dim=1))


def test_reversing_an_edge_changes_the_first_two_thirds_not_at_all():
    inputs = graph()
    turned = edge_features(inputs.x, inputs.edge_index.flip(0).contiguous(), inputs.edge_h)
    assert torch.equal(edge_features(*inputs), turned)


def test_a_self_loop_gives_twice_the_node_and_zeros():
    inputs = graph(4, 4)
    found = edge_features(inputs.x, torch.arange(4).repeat(2, 1), inputs.edge_h)
    assert torch.equal(found[:, :16], 2 * inputs.x)
    assert torch.equal(found[:, 16:32], torch.zeros(4, 16))


@pytest.mark.parametrize("n", [0, 5])
def test_no_edges_give_an_empty_result(n):
    assert edge_features(*graph(max(n, 1), 0))[:0].shape == (0, 48)
    assert edge_features(torch.empty(n, 8), torch.empty(2, 0, dtype=torch.int64), torch.empty(0, 8)).shape == (0, 24)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"x": torch.ones(3)}, "x"),
        ({"x": torch.ones(3, 16, dtype=torch.int64)}, "x"),
        ({"x": torch.empty(0, 16)}, "edge_index"),
        ({"edge_index": torch.zeros(2, 77, dtype=torch.int32)}, "edge_index"),
        ({"edge_index": torch.zeros(77, 2, dtype=torch.int64)}, "edge_index"),
        ({"edge_index": torch.zeros(77, 2, dtype=torch.int64).t()}, "edge_index"),
        ({"edge_h": torch.ones(76, 16)}, "edge_h"),
        ({"edge_h": torch.ones(77, 16, dtype=torch.float16)}, "edge_h"),
        ({"edge_h": torch.ones(77, 16, device="meta")}, "edge_h"),
    ],
)
def test_a_wrong_tensor_is_named(changes, name):
    with pytest.raises(LaunchError, match=name):
        edge_features(*graph()._replace(**changes))


def test_a_gradient_is_refused_unless_torch_serves():
    inputs = graph()
    inputs.x.requires_grad_()
    with pytest.raises(LaunchError, match="no gradient"):
        edge_features(*inputs)
    before = set_backend("pytorch")
    try:
        edge_features(*inputs).sum().backward()
    finally:
        set_backend(before)
    assert inputs.x.grad.abs().sum() > 0


def test_strided_inputs_go_to_the_reference():
    inputs = graph()
    strided = inputs._replace(x=inputs.x.t().contiguous().t())
    assert torch.equal(edge_features(*strided), edge_features(*inputs))


def test_the_op_is_traced_as_one():
    inputs = graph()
    traced = torch.compile(edge_features, fullgraph=True, backend="aot_eager")
    assert torch.equal(traced(*inputs), edge_features(*inputs))


# The device code, on the host


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("hidden", "facts"), [(128, True), (64, True), (7, True), (300, True), (16, False), (129, False)])
def test_device_code_is_exact(dtype, hidden, facts):
    inputs = graph(hidden=hidden, dtype=dtype)
    assert torch.equal(on_host(inputs, facts=facts), reference(*inputs))


@pytest.mark.parametrize(
    ("ahead", "threads", "hidden"), [(1, 128, 16), (4, 256, 16), (4, 1024, 1), (2, 512, 300), (4, 128, 64)]
)
@pytest.mark.parametrize("e", [1, 2, 33, 77, 600])
def test_every_edge_is_written_whatever_the_knobs(e, ahead, threads, hidden):
    inputs = graph(e=e, hidden=hidden)
    assert torch.equal(on_host(inputs, AHEAD=ahead, THREADS=threads, seed=e), reference(*inputs))


def test_device_code_passes_on_nan_and_infinity():
    inputs = graph(3, 3)
    inputs.x[0, 0], inputs.x[1, 1], inputs.x[2, 1] = torch.nan, torch.inf, torch.inf
    assert torch.equal(on_host(inputs).nan_to_num(7.0), reference(*inputs).nan_to_num(7.0))


# The device code, under the compiler


@pytest.mark.toolchain
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize(("dtype", "hidden"), [("float32", 128), ("bfloat16", 64), ("float32", 7)])
def test_no_spills_and_wide_accesses(arch, dtype, hidden, tmp_path):
    code = device_code("fused_edge_features", tmp_path, arch=arch, dtype=dtype, hidden=hidden)
    assert (code.resources["spill_bytes"], code.resources["stack_bytes"]) == (0, 0)
    if arch in ("sm_80", "sm_90"):
        assert code.resources["registers"] <= 32, "eight blocks of 256 threads on a multiprocessor"
    wide = {name for name in code.mix if name.startswith(("global_loads_", "global_stores_"))}
    # Indices are eight bytes each.
    assert wide == ({"global_loads_64", "global_loads_128", "global_stores_128"} if hidden % 8 == 0 else wide)
    assert hidden % 8 == 0 or "global_stores_128" not in wide


# The kernel, on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("n", "e", "hidden"), [(10, 20, 16), (10, 20, 7), (2, 1, 32), (20, 50, 256), (337, 3116, 128), (50, 700, 2000)]
)
def test_kernel_is_exact(gpu, dtype, n, e, hidden):
    inputs = graph(n, e, hidden, dtype=dtype, device="cuda")
    assert reason_for_reference(inputs.x, inputs.edge_h) is None
    assert torch.equal(edge_features(*inputs), reference(*inputs))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["x", "edge_h"])
def test_a_misaligned_view_takes_the_generic_variant(gpu, name):
    inputs = graph(50, 300, 128, device="cuda")
    view = inputs._replace(**{name: odd(getattr(inputs, name))})
    assert getattr(view, name).data_ptr() % 16
    assert torch.equal(edge_features(*view), reference(*inputs))


@pytest.mark.gpu
@pytest.mark.parametrize("is_ordered", [True, False])
def test_kernel_on_the_benchmarks_shape(gpu, is_ordered):
    inputs = graph(43_136, 398_848, 128, device="cuda")
    if is_ordered:
        inputs = inputs._replace(edge_index=inputs.edge_index.sort(dim=1).values.contiguous())
    assert torch.equal(edge_features(*inputs), reference(*inputs))


@pytest.mark.gpu
def test_kernel_in_a_graph_and_on_another_stream(gpu):
    inputs = graph(337, 3116, 128, device="cuda")
    expected = edge_features(*inputs)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        out = edge_features(*inputs)
    out.fill_(torch.nan)
    captured.replay()
    assert torch.equal(out, expected)
    with torch.cuda.stream(torch.cuda.Stream()):
        assert torch.equal(edge_features(*inputs), expected)


@pytest.mark.gpu
def test_kernel_is_traced_as_one(gpu):
    inputs = graph(337, 3116, 128, device="cuda")
    traced = torch.compile(lambda *given: edge_features(*given) * 2.0, fullgraph=True)
    assert torch.equal(traced(*inputs), 2.0 * reference(*inputs))


@pytest.mark.gpu
@pytest.mark.slow
def test_kernel_beyond_two_to_the_31_elements(gpu):
    if torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("needs 40 GiB of device memory")
    hidden, e = 1024, 2**31 // 3072 + 5
    inputs = graph(100, 64, hidden, device="cuda")
    index = torch.zeros(2, e, dtype=torch.int64, device="cuda")
    index[:, -64:] = inputs.edge_index
    edge_h = torch.zeros(e, hidden, device="cuda")
    edge_h[-64:] = inputs.edge_h
    assert torch.equal(edge_features(inputs.x, index, edge_h)[-64:], reference(*inputs))
