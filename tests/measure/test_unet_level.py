"""A level of a 3-D U-Net, channels-last: what its check of copies sees, and on a GPU that there is nothing to see."""

from __future__ import annotations

import sys

import pytest
import torch

from kserve.measure import profile
from kserve.ops.group_norm import FastGroupNorm
from tests.support.processes import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "benchmarks" / "models"))

import unet_level


def a_volume() -> torch.Tensor:
    return torch.randn(1, 6, 6, 6, 16).permute(0, 4, 1, 2, 3)


def test_a_norm_alone_copies_nothing_and_a_change_of_layout_is_seen():
    norm, x = FastGroupNorm(8, 16, activation="relu"), a_volume()
    assert unet_level.layout_copies(lambda: norm(x), device="cpu") == []
    (copy,) = unet_level.layout_copies(lambda: norm(x.contiguous()), device="cpu")
    assert "aten::copy_" in copy and "[1, 16, 6, 6, 6]" in copy


class Contiguous(torch.nn.Module):
    """A norm that leaves the layout."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.contiguous()


def test_what_leaves_the_layout_is_named():
    whole = unet_level.step("cpu", fused=True)
    whole.level.second_norm = Contiguous()
    found = unet_level.strays(whole)
    assert any(line.startswith("output of second_norm: shape [1, 16, 6, 6, 6]") for line in found)
    assert any(line.startswith("output of the level") for line in found)


def test_both_forms_are_the_same_function():
    ours, theirs = (unet_level.step("cpu", fused=fused) for fused in (True, False))
    torch.testing.assert_close(ours.forward(), theirs.forward())
    for one, other in zip(ours.joint(), theirs.joint(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_it_can_be_profiled():
    subject = profile.load_profiled(REPOSITORY / "benchmarks/models/unet_level.py", device="cpu")
    labels = [line.label for line in profile.time_sections(subject, device="cpu", n_warm_ups=0, n_timed=1)]
    assert labels == ["conv 0", "norm + relu 0", "conv 1", "norm + relu 1", "norm + relu (unfused ref)", *labels[-2:]]


@pytest.mark.gpu
def test_no_layout_is_copied_on_a_gpu_and_torchs_norm_copies(gpu):
    assert [*unet_level.findings("cuda")] == []
    theirs = unet_level.step("cuda", fused=False)
    assert unet_level.layout_copies(theirs.joint, device="cuda"), "the check would see nothing"
