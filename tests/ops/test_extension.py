"""The built-in extension: built for every arch, an operator of torch, the bits of the kernel it shares its device code with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kserve import get_extension, get_kernel
from kserve.config import built_in_roots
from kserve.ops import extension, graph_norm_bce
from kserve.ops.edge_features import reference
from tests.support.processes import kserve

pytestmark = pytest.mark.toolchain
needs_nvcc = pytest.mark.skipif(
    not json.loads(kserve("doctor", "toolchain", "--json").stdout)["pieces"], reason="this machine has no CUDA toolkit"
)


@pytest.mark.parametrize("kernel", ["norm_residual", "edge_features", "graph_norm_bce"])
def test_its_device_code_is_the_kernels_and_has_no_header_of_torch(kernel: str):
    cuda, _ = built_in_roots()
    assert "torch" not in (cuda / "include" / "kserve" / f"{kernel}.cuh").read_text()
    for user in (cuda / kernel / f"{kernel}.cu", cuda / "extension" / "launch.cuh"):
        assert f"#include <kserve/{kernel}.cuh>" in user.read_text()


@needs_nvcc
def test_it_is_built_ahead_with_all_others_and_registers_its_operators(own_place: Path):
    done = kserve("build", "--all", "--target", "sm_90", "--json")
    assert done.returncode == 0, done.stderr
    found = {one["name"]: one["target"] for one in json.loads(done.stdout)["kernels"]}
    assert found[extension.NAME] == "cuda:sm_90"
    assert {"fused_norm_residual", "realspace_fwd"} < found.keys()
    assert get_extension(extension.NAME, target="sm_90") is None
    schemas = [getattr(torch.ops.kserve, f"{name}_128").default._schema for name in ("norm_residual", "edge_features")]
    assert [argument.name for argument in schemas[0].arguments] == ["x", "residual", "gamma", "beta", "eps"]
    assert str(schemas[1]).endswith("-> Tensor")
    with pytest.raises(RuntimeError, match=r"CUDA|CPU"):
        torch.ops.kserve.norm_residual_128(
            *(torch.zeros(2, 128) for _ in range(2)), *(torch.zeros(128) for _ in range(2)), 1e-5
        )
    again = json.loads(kserve("build", extension.NAME, "--target", "sm_90", "--json").stdout)
    assert again["origin"] == "disk"


def test_without_a_device_it_says_so():
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert extension.AVAILABLE is False
    assert extension.reason_unavailable() == "there is no CUDA device"


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [128, 129, 1000])
@pytest.mark.parametrize("n", [0, 1, 127, 4096])
def test_it_gives_the_bits_of_the_kernel(gpu: torch.device, n: int, hidden: int):
    assert extension.AVAILABLE, extension.reason_unavailable()
    generator = torch.Generator(device=gpu).manual_seed(hidden + n)
    x, residual = (torch.randn(n, hidden, device=gpu, generator=generator) for _ in range(2))
    gamma, beta = (torch.randn(hidden, device=gpu, generator=generator) for _ in range(2))
    expected = torch.full_like(x, float("nan"))
    if n:
        get_kernel("fused_norm_residual", hidden=hidden)(x, residual, gamma, beta, expected, n, 1e-5)
    found = extension.norm_residual(x, residual, gamma, beta)
    assert torch.equal(found, expected)


@pytest.mark.gpu
def test_an_address_that_is_not_aligned_is_served_too(gpu: torch.device):
    flat = torch.randn(128 * 3 + 1, device=gpu)
    x, residual = flat[1:].view(3, 128), torch.randn(3, 128, device=gpu)
    gamma, beta = torch.randn(128, device=gpu), torch.randn(128, device=gpu)
    expected = torch.full_like(residual, float("nan"))
    get_kernel("fused_norm_residual", hidden=128)(x, residual, gamma, beta, expected, 3, 1e-5)
    assert torch.equal(extension.norm_residual(x, residual, gamma, beta), expected)


@pytest.mark.gpu
def test_a_tensor_that_does_not_fit_is_refused(gpu: torch.device):
    x, affine = torch.randn(4, 128, device=gpu), torch.randn(128, device=gpu)
    for wrong in (x.double(), x[:, :64], x.t().contiguous().t(), x.cpu()):
        with pytest.raises(RuntimeError):
            extension.norm_residual(x, wrong, affine, affine)


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [128, 129])
@pytest.mark.parametrize("n_edges", [0, 1, 129, 5000])
def test_edge_features_are_those_of_the_op(gpu: torch.device, n_edges: int, hidden: int):
    generator = torch.Generator(device=gpu).manual_seed(n_edges)
    x = torch.randn(77, hidden, device=gpu, generator=generator)
    edge_h = torch.randn(n_edges, hidden, device=gpu, generator=generator)
    edge_index = torch.randint(77, (2, n_edges), device=gpu, generator=generator)
    found = extension.edge_features(x, edge_index, edge_h)
    assert torch.equal(found, reference(x, edge_index, edge_h))


@pytest.mark.gpu
@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize("n_edges", [1, 1000, 1 << 21])
def test_the_loss_has_the_bits_of_the_ops(gpu: torch.device, n_edges: int, is_sorted: bool):
    generator = torch.Generator(device=gpu).manual_seed(n_edges)
    logits = torch.randn(n_edges, device=gpu, generator=generator)
    target = torch.randint(2, (n_edges,), device=gpu, generator=generator).float()
    edge_graph = torch.randint(50, (n_edges,), device=gpu, generator=generator)
    edge_graph = edge_graph.sort().values if is_sorted else edge_graph
    weight = torch.tensor(3.0, device=gpu)
    for given in (None, weight):
        expected = graph_norm_bce(logits, target, edge_graph, n_graphs=50, pos_weight=given)
        found = extension.graph_norm_bce(logits, target, edge_graph, n_graphs=50, pos_weight=given)
        assert torch.equal(found, expected)
