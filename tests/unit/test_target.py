"""Targets: reading, printing, features, and which device runs what."""

from __future__ import annotations

import pytest

from kserve.errors import UnsupportedTarget
from kserve.target import Target, parse_target, target_of_capability


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("cuda:sm_90a", "cuda:sm_90a"),
        ("cuda:sm_90", "cuda:sm_90"),
        ("sm_90", "cuda:sm_90"),
        ("sm_75", "cuda:sm_75"),
        ("sm_100f", "cuda:sm_100f"),
        ("sm_120", "cuda:sm_120"),
        ("hip:gfx942", "hip:gfx942"),
        ("gfx942", "hip:gfx942"),
        ("gfx90a", "hip:gfx90a"),
        ("gfx1100", "hip:gfx1100"),
    ],
)
def test_a_target_is_read_and_printed_with_its_backend(text, printed):
    target = parse_target(text)
    assert str(target) == printed
    assert parse_target(printed) == target


@pytest.mark.parametrize(
    "text",
    [
        "",
        "sm_9",
        "sm_90b",
        "sm_90aa",
        "SM_90",
        "90",
        "sm90",
        "compute_90",
        "hip:sm_90",
        "cuda:gfx942",
        "rocm:gfx942",
        ":sm_90",
        "cuda:",
        "cuda:cuda:sm_90",
        " sm_90",
        "sm_90\n",
        "gfx",
        "gfx942:xnack+",
        "gfx94G",
        None,
        90,
    ],
)
def test_anything_else_is_refused_with_what_is_allowed(text):
    with pytest.raises(UnsupportedTarget) as caught:
        parse_target(text)
    assert "sm_NN" in caught.value.facts["allowed"]


@pytest.mark.parametrize("text", ["sm_090", "sm_\uff19\uff10", "sm_\u0669\u0660"])
def test_one_arch_has_one_spelling(text):
    with pytest.raises(UnsupportedTarget):
        parse_target(text)


@pytest.mark.parametrize("text", ["sm_80a", "sm_89a", "sm_80f", "sm_90f"])
def test_a_suffix_no_compiler_knows_is_refused(text):
    with pytest.raises(UnsupportedTarget):
        parse_target(text)


@pytest.mark.parametrize(
    ("text", "capability", "suffix"), [("sm_80", 80, ""), ("sm_90a", 90, "a"), ("sm_103f", 103, "f"), ("sm_120a", 120, "a")]
)
def test_capability_and_suffix(text, capability, suffix):
    target = parse_target(text)
    assert (target.capability, target.suffix) == (capability, suffix)


def test_a_hip_target_has_no_capability():
    target = parse_target("gfx942")
    assert target.suffix == ""
    with pytest.raises(UnsupportedTarget):
        _ = target.capability


@pytest.mark.parametrize(
    ("text", "features", "exact"),
    [
        ("sm_90", "none", "sm_90"),
        ("sm_90", "arch", "sm_90a"),
        ("sm_100", "arch", "sm_100a"),
        ("sm_100", "family", "sm_100f"),
        ("sm_120", "family", "sm_120f"),
        ("sm_89", "arch", "sm_89"),
        ("sm_80", "family", "sm_80"),
        ("sm_100a", "family", "sm_100a"),
        ("sm_100f", "arch", "sm_100f"),
        ("sm_100f", "none", "sm_100f"),
        ("gfx942", "arch", "gfx942"),
    ],
)
def test_features_name_the_suffix_unless_the_caller_did(text, features, exact):
    assert parse_target(text).with_features(features) == parse_target(exact)


def test_family_features_name_no_arch_that_does_not_exist():
    assert Target("cuda", "sm_90").with_features("family").arch != "sm_90f"


@pytest.mark.parametrize(
    ("text", "capability", "runs"),
    [
        ("sm_90", 90, True),
        ("sm_80", 86, True),
        ("sm_80", 89, True),
        ("sm_86", 80, False),
        ("sm_80", 90, False),
        ("sm_90", 80, False),
        ("sm_90a", 90, True),
        ("sm_100a", 103, False),
        ("sm_100f", 103, True),
        ("sm_103f", 100, False),
        ("sm_100", 103, True),
        ("sm_100f", 120, False),
        ("sm_100", 110, False),
        ("gfx942", 90, False),
    ],
)
def test_a_binary_runs_on_its_major_version_and_newer_minor_ones(text, capability, runs):
    assert parse_target(text).runs_on(capability) is runs


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("sm_75", 64 << 10),
        ("sm_80", 163 << 10),
        ("sm_86", 99 << 10),
        ("sm_90a", 227 << 10),
        ("sm_100f", 227 << 10),
        ("sm_120", 99 << 10),
        ("sm_999", None),
        ("gfx942", 64 << 10),
    ],
)
def test_shared_memory_of_a_block(text, limit):
    assert parse_target(text).shared_bytes_limit == limit


@pytest.mark.parametrize(("major", "minor", "text"), [(8, 0, "sm_80"), (9, 0, "sm_90"), (10, 3, "sm_103"), (12, 1, "sm_121")])
def test_a_device_names_its_target(major, minor, text):
    target = target_of_capability(major, minor)
    assert target == parse_target(text)
    assert target.capability == 10 * major + minor
