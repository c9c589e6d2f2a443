"""Tolerances, and the one way results are compared with a float64 reference."""

from __future__ import annotations

import torch

# Largest absolute error against float64, by op and size of the inputs. The numbers are the promises of docs/kernels.md.
NORM_RESIDUAL_F32 = 5e-6  # |mean| <= std
NORM_RESIDUAL_F32_MEAN_10 = 1e-5  # |mean| <= 10 std
REALSPACE_F32 = 5e-6  # unit-normal inputs, both directions
REALSPACE_F64 = 1e-11
# Largest error over the largest magnitude of the result.
RELATIVE = {
    ("norm_residual", torch.bfloat16): 1e-2,
    ("norm_residual", torch.float16): 2e-3,
    ("group_norm", torch.float32): 1e-4,
    ("group_norm", torch.bfloat16): 2e-2,
    ("group_norm", torch.float16): 3e-3,
    ("realspace", torch.bfloat16): 1e-2,
    ("realspace", torch.float16): 1e-3,
}


def largest_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest absolute difference, computed in float64; infinite where only one side is NaN."""
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    actual, expected = actual.detach().cpu().double(), expected.detach().cpu().double()
    if actual.numel() == 0:
        return 0.0
    both_nan = actual.isnan() & expected.isnan()
    difference = torch.where(both_nan | (actual == expected), 0.0, (actual - expected).abs())
    return float(difference.nan_to_num(nan=torch.inf).max())


def assert_within(actual: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    """Absolute: no element is further than `bound` from the reference."""
    error = largest_error(actual, expected)
    assert error <= bound, f"largest error {error:.3g}, allowed {bound:.3g}, shape {tuple(actual.shape)}"


def assert_within_relative(actual: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    """Relative to the largest magnitude of the reference."""
    assert_within(actual, expected, bound * float(expected.detach().abs().max()))
