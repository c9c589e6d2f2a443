"""Why a key has to be built."""

from __future__ import annotations

import pytest

from kserve.artifact import Contract, Manifest
from kserve.key import differences
from kserve.store.reasons import FIRST, Reasons

BASE = {
    "toolchain.name": "triton",
    "toolchain.version": "3.6.0",
    "toolchain.files": "a" * 64,
    "source.scan.cuh": "1",
    "source.kernel.cu": "2",
    "spec.hidden": "64",
    "option.num_warps": "4",
    "target": "cuda:sm_90a",
}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, []),
        ({"source.scan.cuh": "9"}, ["header scan.cuh changed"]),
        ({"source.kernel.cu": "9"}, ["source kernel.cu changed"]),
        ({"source.more.cuh": "9"}, ["header more.cuh added"]),
        ({"source.scan.cuh": None}, ["header scan.cuh removed"]),
        ({"toolchain.version": "3.8.0"}, ["triton 3.6.0 -> 3.8.0"]),
        ({"toolchain.files": "b" * 64}, ["files of triton changed"]),
        ({"spec.hidden": "128"}, ["hidden 64 -> 128"]),
        ({"option.num_warps": "8"}, ["num_warps 4 -> 8"]),
        ({"target": "cuda:sm_80"}, ["target cuda:sm_90a -> cuda:sm_80"]),
        ({"spec.hidden": "128", "source.scan.cuh": "9"}, ["header scan.cuh changed", "hidden 64 -> 128"]),
    ],
    ids=range(11),
)
def test_a_difference_is_said_in_words(changes, said):
    changed = {label: text for label, text in {**BASE, **changes}.items() if text is not None}
    assert differences(BASE, changed) == said


def learnt(**known: dict[str, str]) -> Reasons:
    reasons = Reasons()
    for key, components in known.items():
        contract = Contract("k", "cubin", (), {}, ("1",), ("1",))
        facts = (key, "d", 1, "scale", "cuda", "cuda:sm_90", {}, "declared", contract, {}, components, {})
        reasons.learn(Manifest(*facts, closed_world=False, seconds=0.1, created_at=1.0))
    return reasons


def test_the_first_of_a_kernel_is_the_first():
    assert learnt().of("a", "scale", "declared", BASE) == FIRST
    assert learnt(a=BASE).of("b", "other", "declared", BASE) == FIRST
    assert learnt(a=BASE).of("b", "scale", "generic", BASE) == FIRST


def test_a_key_is_compared_with_the_nearest():
    far = {**BASE, "spec.hidden": "1", "target": "cuda:sm_80"}
    near = {**BASE, "source.scan.cuh": "0"}
    assert learnt(far=far, near=near).of("new", "scale", "declared", BASE) == "header scan.cuh changed"


def test_a_lost_entry_says_so_once():
    reasons = learnt(a=BASE)
    reasons.lose("a", "quarantined: digest mismatch")
    assert reasons.of("a", "scale", "declared", BASE) == "quarantined: digest mismatch"
    assert reasons.of("a", "scale", "declared", BASE) == FIRST
