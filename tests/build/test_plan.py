"""What a build is before a compiler runs: keys, jobs, contracts."""

from __future__ import annotations

from typing import Any

import pytest

from kserve.artifact import DEBUGS, DECLARED, GENERIC
from kserve.build.plan import Debug, Plan, contract_of, job_of, plan_builds
from kserve.errors import CompileFailed, InvalidDefinition, InvalidSpec, UnsupportedTarget
from kserve.kernel_toml import read_definition
from kserve.key import build_key
from kserve.target import parse_target
from kserve.toolchain.base import Built, Fingerprint
from tests.support.definitions import CUDA_TOML, TRITON_TOML

COMPILER = Fingerprint("nvrtc", "13.0", "f" * 64, {"/opt/libnvrtc.so": [1, 2, 3]})
FILES = {"kernel.toml": "0" * 64, "kernel.cu": "1" * 64, "a.cuh": "2" * 64}
BUILT = Built(
    format="cubin",
    symbol="_Z5scale",
    params=[(0, 8), (8, 8), (16, 4), (20, 4)],
    kinds=[],
    resources={"registers": 10, "shared_bytes": 0},
    attachments={},
)


def plans(toml: str = CUDA_TOML, **changes: Any) -> list[Plan]:
    """The builds of the baseline, with what a case changes."""
    definition = read_definition(toml.encode(), origin="kernel.toml")
    (entry,) = definition.entries.values()
    wanted = {"spec": {}, "target": "cuda:sm_90", "fingerprint": COMPILER, "files": FILES, **changes}
    wanted["target"] = parse_target(wanted["target"])
    return plan_builds(definition, entry, **wanted)


def toml(old: str, new: str, of: str = CUDA_TOML) -> str:
    assert old in of
    return of.replace(old, new, 1)


def test_a_kernel_with_facts_has_two_builds_and_one_without_has_one():
    declared, generic = plans()
    assert (declared.variant, generic.variant) == (DECLARED, GENERIC)
    assert [argument.align for argument in declared.job.arguments] == [16, 16, 0, 0]
    assert [argument.align for argument in generic.job.arguments] == [4, 4, 0, 0]
    assert declared.key != generic.key
    assert len(plans(CUDA_TOML.replace(", align = 16", ""))) == 1


OPTIONS = '[options]\nflags = ["-DB=1", "-DA=2"]\n[[entry]]'


@pytest.mark.parametrize("definition", [CUDA_TOML, toml("[[entry]]", OPTIONS), TRITON_TOML])
def test_a_job_can_be_read_back_from_the_components_of_its_key(definition: str):
    files = {**FILES, "kernel.py": "4" * 64}
    for plan in plans(definition, files=files):
        assert job_of(plan.components) == (plan.job, plan.files)


def test_the_keys_of_everyday_builds_stay_what_they_were():
    """A store outlives the release that filled it: when this fails on purpose, `key.KEY_SCHEMA` is raised and so are these."""
    triton = plans(TRITON_TOML, files={"kernel.toml": "0" * 64, "kernel.py": "1" * 64})
    assert [plan.key for plan in plans() + triton] == [
        "612fd3f5d510328983670c4c04b992c9165bad4e3359aa55c0b92cb21cad0b5f",
        "2a3b9b3790d2620de67ce9f796143a1500896549f23b7026026b1fb7527cbddd",
        "d75d453239b06ac3a55baa5dd73237f37db7b39925736005600c738410d25bd4",
        "345494df5ef227d2a66cbb3b5ce10371066ec479032e3aec508103f39fa20312",
    ]


def test_every_debug_variant_has_a_key_of_its_own_in_every_place():
    made = [plans(debug=debug) for debug in (None, *(Debug(kind, place) for kind in DEBUGS for place in ("/a", "/b")))]
    assert len({plan.key for one in made for plan in one}) == 2 * (1 + 2 * len(DEBUGS))
    for plan in plans(debug=Debug("device", "/a")):
        assert job_of(plan.components) == (plan.job, plan.files)
        assert plan.job.debug == plan.components["debug"] == "device"


DIFFERS = {
    "a source's bytes": {"files": {**FILES, "kernel.cu": "3" * 64}},
    "a header's bytes": {"files": {**FILES, "a.cuh": "3" * 64}},
    "a header's name": {"files": {"kernel.toml": "0" * 64, "kernel.cu": "1" * 64, "b.cuh": "2" * 64}},
    "a further file": {"files": {**FILES, "c.cuh": "3" * 64}},
    "an axis": {"spec": {"size": 9}},
    "the target": {"target": "cuda:sm_80"},
    "the target's suffix": {"target": "cuda:sm_90a"},
    "the compiler": {"fingerprint": COMPILER._replace(name="nvcc")},
    "its version": {"fingerprint": COMPILER._replace(version="13.1")},
    "its files": {"fingerprint": COMPILER._replace(files="e" * 64)},
    "the options every compile gets": {"fingerprint": COMPILER._replace(options="--other")},
    "a derived axis": {"toml": toml("[target]", '[derived]\ntwice = "2 * size"\n[target]')},
    "the order of arguments": {
        "toml": toml(
            '  { name = "n", type = "i32" },\n  { name = "factor", type = "f32" },',
            '  { name = "factor", type = "f32" },\n  { name = "n", type = "i32" },',
        )
    },
    "the entry": {"toml": toml('name = "scale"', 'name = "other"')},
    "the function": {"toml": toml('"scale<{size}>"', '"scale<{size}, {size}>"')},
    "a flag": {"toml": toml("[[entry]]", '[options]\nflags = ["--std=c++17"]\n[[entry]]')},
    "the grid": {"toml": toml("cdiv(n, 128)", "cdiv(n, 64)")},
    "the block": {"toml": toml("block = [128]", "block = [64]")},
    "shared memory": {"toml": toml("block = [128]", "block = [128], shared_bytes = 1024")},
    "a dtype": {"toml": toml('"float32"', '"float64"')},
    "an argument's name": {"toml": toml('"factor"', '"scale"')},
    "an argument's kind": {"toml": toml('"i32"', '"u32"')},
    "an argument's fact": {"toml": toml('"i32"', '"i32", divisible_by = 4')},
    "mutated": {"toml": toml(", mutated = true", "")},
    "nullable": {"toml": toml("mutated = true", "mutated = true, nullable = true")},
    "contiguous": {"toml": toml("mutated = true", "mutated = true, contiguous = false")},
}
FLAGS = toml("[[entry]]", '[options]\nflags = ["-DA", "-DB"]\n[[entry]]')


@pytest.mark.parametrize("changes", DIFFERS.values(), ids=DIFFERS.keys())
def test_key_differs_on(changes: dict[str, Any]):
    changed = plans(**changes)[0]
    assert changed.key != plans()[0].key
    assert build_key(changed.components) == changed.key


def test_key_differs_on_the_order_of_flags():
    assert plans(FLAGS)[0].key != plans(FLAGS.replace('"-DA", "-DB"', '"-DB", "-DA"'))[0].key


def test_facts_are_in_the_declared_key_only():
    stricter = plans(toml("align = 16", "align = 32"))
    assert stricter[0].key != plans()[0].key
    assert stricter[1].key == plans()[1].key
    assert plans(CUDA_TOML.replace(", align = 16", ""))[0].key == plans()[1].key


@pytest.mark.parametrize("align", [2, 4])
def test_an_alignment_that_always_holds_is_no_fact(align: int):
    """One build, and a contract that another definition of the same key would have, too."""
    (plan,) = plans(CUDA_TOML.replace("align = 16", f"align = {align}"))
    (bare,) = plans(CUDA_TOML.replace(", align = 16", ""))
    assert (plan.key, plan.variant) == (bare.key, DECLARED)
    assert contract_of(plan, BUILT) == contract_of(bare, BUILT)


@pytest.mark.parametrize("block", ["[2048]", "[0]", "[32, 64]", '["size * 256"]'])
def test_a_block_that_no_device_launches_is_a_failed_build(block: str):
    plan = plans(toml("block = [128]", f"block = {block}"))[0]
    with pytest.raises(CompileFailed) as caught:
        contract_of(plan, BUILT)
    assert "1024" in caught.value.facts["allowed"]


SAME = {
    "an empty list of flags": {"toml": toml("[[entry]]", "[options]\nflags = []\n[[entry]]")},
    "the order of files": {"files": dict(reversed(FILES.items()))},
    "the default, named": {"spec": {"size": 8}},
    "a number as text": {"spec": {"size": "8"}},
    "the target's short name": {"target": "sm_90"},
    "where the compiler lies": {"fingerprint": COMPILER._replace(stamps={"/elsewhere": [9, 9, 9]})},
    "comments in kernel.toml": {"toml": "# a note\n" + CUDA_TOML, "files": {**FILES, "kernel.toml": "9" * 64}},
    "the summary": {"toml": toml("out = factor * x", "the same")},
    "the oldest arch": {"toml": toml('cuda = "sm_80"', 'cuda = "sm_75"')},
}


@pytest.mark.parametrize("changes", SAME.values(), ids=SAME.keys())
def test_key_is_the_same_for(changes: dict[str, Any]):
    assert [plan.key for plan in plans(**changes)] == [plan.key for plan in plans()]


@pytest.mark.parametrize(
    ("axis", "value", "spelled"),
    [
        ('{ type = "bool" }', True, "true"),
        ('{ type = "dtype" }', "bfloat16", "__nv_bfloat16"),
        ('{ type = "int" }', -3, "-3"),
        ('{ type = "enum", values = ["Relu"] }', "Relu", "Relu"),
    ],
)
def test_a_name_expression_is_spelled_as_cpp(axis: str, value: object, spelled: str):
    text = CUDA_TOML.replace('{ type = "int", min = 1, max = 4096, default = 8 }', axis)
    assert plans(text, spec={"size": value})[0].job.function == f"scale<{spelled}>"


@pytest.mark.parametrize(
    ("toml", "asked", "exact"),
    [
        (CUDA_TOML, "sm_90", "cuda:sm_90"),
        (toml('cuda = "sm_80"', 'cuda = "sm_80"\nfeatures = "arch"'), "sm_90", "cuda:sm_90a"),
        (toml('cuda = "sm_80"', 'cuda = "sm_80"\nfeatures = "arch"'), "sm_80", "cuda:sm_80"),
        (toml('cuda = "sm_80"', 'cuda = "sm_80"\nfeatures = "family"'), "sm_100", "cuda:sm_100f"),
        (TRITON_TOML, "sm_90", "cuda:sm_90a"),
        (TRITON_TOML, "gfx942", "hip:gfx942"),
    ],
)
def test_the_target_is_exact(toml: str, asked: str, exact: str):
    files = {"kernel.cu": "1" * 64, "kernel.py": "1" * 64}
    (plan, *_) = plans(toml, target=asked, files=files)
    assert (str(plan.target), plan.job.target) == (exact, exact)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"spec": {"size": 0}}, InvalidSpec),
        ({"spec": {"width": 1}}, InvalidSpec),
        ({"target": "sm_75"}, UnsupportedTarget),
        ({"target": "gfx942"}, UnsupportedTarget),
        ({"files": {"kernel.toml": "0" * 64}}, InvalidDefinition),
    ],
)
def test_what_cannot_be_built_is_refused(changes: dict[str, Any], error: type[Exception]):
    with pytest.raises(error):
        plans(**changes)


def test_contract_has_the_binarys_own_places():
    contract = contract_of(plans()[0], BUILT)
    assert [(param.name, param.offset, param.size_bytes) for param in contract.params] == [
        ("x", 0, 8),
        ("out", 8, 8),
        ("n", 16, 4),
        ("factor", 20, 4),
    ]
    assert [param.mutated for param in contract.params] == [False, True, False, False]
    assert [param.align for param in contract.params] == [16, 16, 0, 0]
    assert contract.constants == {"size": 8}
    assert (contract.grid, contract.block, contract.shared_bytes) == (("cdiv(n, 128)",), ("128",), "0")


def test_contract_without_a_parameter_table_is_laid_out_naturally():
    text = toml('{ name = "x", type = "pointer", dtype = "float32", align = 16 }', '{ name = "x", type = "i8" }')
    contract = contract_of(plans(text)[0], BUILT._replace(params=None))
    assert [(param.offset, param.size_bytes) for param in contract.params] == [(0, 1), (8, 8), (16, 4), (20, 4)]


def test_contract_ends_with_the_compilers_scratch_pointers():
    built = BUILT._replace(params=[*BUILT.params, (24, 8), (32, 8)], scratch_bytes=(256, 0))
    contract = contract_of(plans()[0], built)
    assert [(param.kind, param.offset) for param in contract.params[-2:]] == [("scratch", 24), ("scratch", 32)]
    assert contract.scratch_bytes == (256, 0)


@pytest.mark.parametrize(
    ("target", "static", "dynamic", "limit"),
    [
        ("sm_90", 0, "227 * 1024 + 1", 227 << 10),
        ("sm_90", 1, "227 * 1024", 227 << 10),
        ("sm_80", 0, "size * 32768", 163 << 10),
        ("sm_120", 0, "100 * 1024", 99 << 10),
    ],
)
def test_shared_memory_over_the_limit_names_both_numbers(target: str, static: int, dynamic: str, limit: int):
    text = toml("block = [128]", f'block = [128], shared_bytes = "{dynamic}"')
    built = BUILT._replace(resources={"registers": 1, "shared_bytes": static})
    need = static + eval(dynamic, {"size": 8})
    with pytest.raises(CompileFailed, match=rf"\b{need}\b.*\b{limit}\b"):
        contract_of(plans(text, target=target)[0], built)


@pytest.mark.parametrize("dynamic", ["227 * 1024", "n * 1024"])
def test_shared_memory_within_the_limit_or_known_at_launch_only_passes(dynamic: str):
    text = toml("block = [128]", f'block = [128], shared_bytes = "{dynamic}"')
    assert contract_of(plans(text)[0], BUILT).shared_bytes == dynamic
