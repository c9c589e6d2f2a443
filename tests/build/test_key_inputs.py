"""What a key is made of: each input, changed alone, changes it; what must not matter, changed alone, does not."""

from __future__ import annotations

from typing import Any

import pytest

from kserve.artifact import DECLARED, GENERIC
from kserve.build.plan import plan_builds
from kserve.kernel_toml import read_definition
from kserve.key import digest_of
from kserve.target import parse_target
from kserve.toolchain.base import Fingerprint
from tests.support.definitions import CUDA_TOML, TRITON_TOML

FINGERPRINT = Fingerprint("nvrtc", "13.0", "f" * 64, {"/lib/nvrtc.so": [1, 2, 3]}, "--fixed")
FILES = {"kernel.toml": digest_of(b"toml"), "kernel.cu": digest_of(b"source"), "include/a.cuh": digest_of(b"header")}
TRITON_FILES = {"kernel.toml": digest_of(b"toml"), "kernel.py": digest_of(b"source")}


def keys(toml: str = CUDA_TOML, edits: tuple[tuple[str, str], ...] = (), **changes: Any) -> list[str]:
    """The keys of both variants of a baseline with some inputs changed."""
    for old, new in edits:
        assert old in toml, old
        toml = toml.replace(old, new)
    triton = 'language = "triton"' in toml
    definition = read_definition(toml.encode(), origin="kernel.toml")
    inputs = {
        "spec": {},
        "target": parse_target("sm_90"),
        "fingerprint": FINGERPRINT,
        "files": TRITON_FILES if triton else FILES,
        **changes,
    }
    plans = plan_builds(definition, next(iter(definition.entries.values())), **inputs)
    assert [plan.variant for plan in plans] == [DECLARED, GENERIC][: len(plans)]
    return [plan.key for plan in plans]


MATTERS: dict[str, dict[str, Any]] = {
    "a value of the spec": {"spec": {"size": 9}},
    "the target": {"target": parse_target("sm_80")},
    "the target's suffix": {"target": parse_target("sm_90a")},
    "features that give the suffix": {"edits": (('cuda = "sm_80"', 'cuda = "sm_80"\nfeatures = "arch"'),)},
    "the compiler's name": {"fingerprint": FINGERPRINT._replace(name="nvcc")},
    "the compiler's version": {"fingerprint": FINGERPRINT._replace(version="13.1")},
    "the compiler's files": {"fingerprint": FINGERPRINT._replace(files="e" * 64)},
    "the options every compile gets": {"fingerprint": FINGERPRINT._replace(options="--other")},
    "a source": {"files": {**FILES, "kernel.cu": digest_of(b"other")}},
    "a header": {"files": {**FILES, "include/a.cuh": digest_of(b"other")}},
    "a header's name": {"files": {k.replace("a.cuh", "b.cuh"): v for k, v in FILES.items()}},
    "a header more": {"files": {**FILES, "include/b.cuh": digest_of(b"header")}},
    "a header less": {"files": {k: v for k, v in FILES.items() if "cuh" not in k}},
    "an option": {"edits": (("[target]", '[options]\nflags = ["--std=c++17"]\n[target]'),)},
    "the entry's name": {"edits": (('name = "scale"', 'name = "scale2"'),)},
    "the function": {"edits": (('"scale<{size}>"', '"other<{size}>"'),)},
    "the grid": {"edits": (("cdiv(n, 128)", "cdiv(n, 64)"),)},
    "the block": {"edits": (("block = [128]", "block = [64]"),)},
    "shared memory": {"edits": (("block = [128] }", "block = [128], shared_bytes = 4 }"),)},
    "an argument's name": {"edits": (('"factor"', '"other"'),)},
    "an argument's type": {"edits": (('"i32"', '"i64"'),)},
    "an argument's dtype": {
        "edits": (('name = "x", type = "pointer", dtype = "float32"', 'name = "x", type = "pointer", dtype = "int32"'),)
    },
    "whether it is written": {"edits": ((", mutated = true", ""),)},
    "whether it may be null": {"edits": (('name = "x", ', 'name = "x", nullable = true, '),)},
    "whether it must be contiguous": {"edits": (('name = "x", ', 'name = "x", contiguous = false, '),)},
    "the order of arguments": {
        "edits": (
            (
                '  { name = "n", type = "i32" },\n  { name = "factor", type = "f32" },',
                '  { name = "factor", type = "f32" },\n  { name = "n", type = "i32" },',
            ),
        )
    },
    "an axis more": {"edits": (("[target]", '[derived]\ntwice = "2 * size"\n[target]'),)},
}


@pytest.mark.parametrize("changes", MATTERS.values(), ids=MATTERS.keys())
def test_each_input_changes_both_keys(changes: dict[str, Any]):
    assert not set(keys(**changes)) & set(keys())


@pytest.mark.parametrize("edits", [(("num_warps = 4", "num_warps = 8"),)], ids=["num_warps"])
def test_a_triton_option_changes_the_key(edits):
    assert keys(TRITON_TOML, edits) != keys(TRITON_TOML)


def test_the_facts_of_an_argument_are_in_the_declared_key_only():
    with_facts, without = keys(), keys(edits=(("align = 16", "align = 32"),))
    assert with_facts[0] != without[0]
    assert with_facts[1] == without[1]


def test_a_kernel_without_facts_has_one_variant_with_the_generic_key():
    assert keys(edits=((", align = 16", ""),)) == [keys()[1]]


INDIFFERENT: dict[str, dict[str, Any]] = {
    "the order of files": {"files": dict(reversed(FILES.items()))},
    "the summary": {"edits": (("out = factor * x", "something else"),)},
    "comments and spaces of kernel.toml": {"edits": (("schema = 1", "# a comment\n\nschema = 1"),)},
    "the bytes of kernel.toml": {"files": {**FILES, "kernel.toml": digest_of(b"other")}},
    "a default that is spelled out": {"spec": {"size": 8}},
    "a value as text": {"spec": {"size": "8"}},
    "stamps of the compiler's files": {"fingerprint": FINGERPRINT._replace(stamps={"/elsewhere": [9, 9, 9]})},
    "allowed values that were not asked for": {"edits": (("max = 4096", "max = 8192"),)},
    "an older oldest arch": {"edits": (('cuda = "sm_80"', 'cuda = "sm_75"'),)},
}


@pytest.mark.parametrize("changes", INDIFFERENT.values(), ids=INDIFFERENT.keys())
def test_what_must_not_matter_does_not(changes: dict[str, Any]):
    assert keys(**changes) == keys()
