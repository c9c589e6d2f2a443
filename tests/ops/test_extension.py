"""The built-in extension: built for every arch, an operator of torch, the bits of the kernel it shares its device code with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kserve import get_extension, get_kernel
from kserve.config import built_in_roots
from kserve.ops import extension
from tests.support.processes import kserve

pytestmark = pytest.mark.toolchain
needs_nvcc = pytest.mark.skipif(
    not json.loads(kserve("doctor", "toolchain", "--json").stdout)["pieces"], reason="this machine has no CUDA toolkit"
)


def test_its_device_code_is_the_kernels_and_has_no_header_of_torch():
    cuda, _ = built_in_roots()
    shared = (cuda / "include" / "kserve" / "norm_residual.cuh").read_text()
    assert "torch" not in shared
    for user in (cuda / "norm_residual" / "norm_residual.cu", cuda / "extension" / "norm_residual_launch.cuh"):
        assert "#include <kserve/norm_residual.cuh>" in user.read_text()


@needs_nvcc
def test_it_is_built_ahead_for_three_arches_and_registers_its_operator(own_place: Path):
    done = kserve("build", "--all", "--target", "sm_80", "--target", "sm_89", "--target", "sm_90", "--json")
    assert done.returncode == 0, done.stderr
    found = [one for one in json.loads(done.stdout)["kernels"] if one["name"] == extension.NAME]
    assert [one["target"] for one in found] == ["cuda:sm_80", "cuda:sm_89", "cuda:sm_90"]
    assert len({one["digest"] for one in found}) == 3
    assert get_extension(extension.NAME, target="sm_90") is None
    schema = torch.ops.kserve.norm_residual_128.default._schema
    assert [argument.name for argument in schema.arguments] == ["x", "residual", "gamma", "beta", "eps"]
    with pytest.raises(RuntimeError, match=r"CUDA|CPU"):
        torch.ops.kserve.norm_residual_128(
            *(torch.zeros(2, 128) for _ in range(2)), *(torch.zeros(128) for _ in range(2)), 1e-5
        )
    again = json.loads(kserve("build", extension.NAME, "--target", "sm_89", "--json").stdout)
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
