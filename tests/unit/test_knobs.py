"""Knobs: what a kernel.toml may say of them, the values of one build, and the variables that override them."""

from __future__ import annotations

from typing import Any

import pytest

from kserve.config import built_in_roots
from kserve.definition import KernelDef
from kserve.errors import InvalidDefinition, InvalidSpec
from kserve.kernel_toml import read_definition
from kserve.knobs import Override, check_override, overrides_in, variables_of
from kserve.outline import read_outline
from tests.support.definitions import CUDA_TOML, TRITON_TOML

KNOBS = """
[knobs]
BLOCK = { values = [64, 128, 256], default = "128 + 128 * (size > 8)" }
WARPS = { values = [2, 4], min = 1, max = 8, default = 4, alias = "THE_WARPS" }
constraints = ["BLOCK % 32 == 0", "WARPS * 64 <= BLOCK * size"]
[target]"""


def defined(knobs: str = KNOBS, *changes: tuple[str, str], toml: str = CUDA_TOML) -> KernelDef:
    text = toml.replace("[target]", knobs, 1)
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return read_definition(text.encode(), origin="kernel.toml")


def values(definition: KernelDef, spec: dict[str, Any] | None = None, **chosen: int) -> dict[str, int]:
    entry = definition.entries["scale"]
    return definition.knob_values(entry, definition.specialise(entry, spec or {}, chosen), chosen)


def test_a_knob_that_nobody_chooses_has_its_default_for_the_spec():
    assert values(defined()) == {"BLOCK": 128, "WARPS": 4}
    assert values(defined(), {"size": 9}) == {"BLOCK": 256, "WARPS": 4}
    assert values(defined(), {"size": 9}, BLOCK=64) == {"BLOCK": 64, "WARPS": 4}


def test_an_entry_may_have_defaults_of_its_own():
    definition = defined(KNOBS, ('summary = "out', 'knob_defaults = { BLOCK = "64 * (size == 8)" }\nsummary = "out'))
    assert values(definition) == {"BLOCK": 64, "WARPS": 4}
    with pytest.raises(InvalidSpec, match="BLOCK of scale cannot be 0"):
        values(definition, {"size": 9})


def test_a_range_admits_what_is_not_listed():
    assert values(defined(), WARPS=3)["WARPS"] == 3
    with pytest.raises(InvalidSpec) as refused:
        values(defined(), WARPS=9)
    assert refused.value.facts["allowed"] == "2, 4; any from 1 to 8"


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"BLOCK": 96}, "BLOCK of scale cannot be 96"),
        ({"BLOCK": True}, "BLOCK of scale cannot be True"),
        ({"BLOCKS": 64}, "no knob 'BLOCKS'"),
        ({"WARPS": 1 << 70}, "WARPS of scale cannot be"),
    ],
)
def test_a_value_that_is_not_allowed_is_named(chosen, message):
    with pytest.raises(InvalidSpec, match=message):
        values(defined(), **chosen)


def test_a_constraint_that_does_not_hold_is_named_with_the_values():
    with pytest.raises(InvalidSpec, match="BLOCK=64 WARPS=4") as refused:
        values(defined(), {"size": 1}, BLOCK=64)
    assert refused.value.facts["allowed"] == "WARPS * 64 <= BLOCK * size"


def test_derived_axes_options_and_launches_may_use_knobs():
    definition = defined(
        KNOBS.replace("[target]", '[derived]\ntile = "BLOCK * 2"\n[target]'),
        ("scale<{size}>", "scale<{size}, {BLOCK}>"),
        ('"cdiv(n, 128)"', '"cdiv(n, tile)"'),
        ("block = [128]", 'block = ["BLOCK"], shared_bytes = "WARPS * 128"'),
    )
    assert definition.specialise(definition.entries["scale"], {}, {"BLOCK": 64})["tile"] == 128


def test_a_constexpr_may_have_a_knobs_name_when_it_is_that_knob():
    knobs = "[knobs]\nBLOCK = { values = [64], default = 64 }\n[target]"
    defined(knobs, ('value = "block"', 'value = "BLOCK"'), toml=TRITON_TOML)
    with pytest.raises(InvalidDefinition, match="arguments"):
        defined(knobs, toml=TRITON_TOML)


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("BLOCK =", "block =", "knobs.block"),
        ("BLOCK =", "size =", "knobs.size"),
        ("values = [64, 128, 256]", "values = []", "knobs.BLOCK.values"),
        ("values = [64, 128, 256]", "values = [64, 64]", "knobs.BLOCK.values"),
        ("values = [64, 128, 256]", "values = [true]", "knobs.BLOCK.values"),
        ("values = [64, 128, 256]", "values = [-64]", "knobs.BLOCK.values"),
        ("values = [2, 4]", "values = [2, 16]", "knobs.WARPS.values"),
        ("default = 4", "default = 9", "knobs.WARPS.default"),
        ("default = 4", 'default = "WARPS"', "knobs.WARPS.default"),
        ("default = 4", 'default = "n"', "knobs.WARPS.default"),
        ("min = 1, max = 8", "min = 9, max = 8", "knobs.WARPS.max"),
        ("min = 1, max = 8", "min = -1", "knobs.WARPS.min"),
        ("min = 1, max = 8", 'min = "1"', "knobs.WARPS.min"),
        ('"THE_WARPS"', '"KSERVE_STORE"', "knobs.WARPS.alias"),
        ('"THE_WARPS"', '"warps"', "knobs.WARPS.alias"),
        ("default = 4,", "default = 4, step = 2,", "knobs.WARPS.step"),
        ('"BLOCK % 32 == 0"', '"n > 0"', "knobs.constraints"),
        ('"BLOCK % 32 == 0"', "[1]", "knobs.constraints"),
        ('summary = "out', 'knob_defaults = { OTHER = 1 }\nsummary = "out', "entry[0].knob_defaults.OTHER"),
        ('summary = "out', 'knob_defaults = { WARPS = 9 }\nsummary = "out', "entry[0].knob_defaults.WARPS"),
    ],
)
def test_a_wrong_field_is_named(old, new, field):
    with pytest.raises(InvalidDefinition) as refused:
        defined(KNOBS, (old, new))
    assert f"field {field} " in refused.value.message
    assert refused.value.facts["allowed"]


def test_the_outline_has_what_a_client_needs():
    text = CUDA_TOML.replace("[target]", KNOBS, 1).encode()
    assert read_outline(text, origin="kernel.toml").knobs == (("BLOCK", ""), ("WARPS", "THE_WARPS"))


def test_the_entrys_variable_is_stronger_than_the_folders_and_both_than_an_alias():
    variables = variables_of("realspace_fwd", "real-space", {"BLOCK": "RS_BLOCK", "WARPS": ""})
    assert variables == {
        "BLOCK": ["KSERVE_REALSPACE_FWD_BLOCK", "KSERVE_REAL_SPACE_BLOCK", "RS_BLOCK"],
        "WARPS": ["KSERVE_REALSPACE_FWD_WARPS", "KSERVE_REAL_SPACE_WARPS"],
    }
    environment = {"RS_BLOCK": "64", "KSERVE_REAL_SPACE_BLOCK": "128", "KSERVE_REALSPACE_FWD_BLOCK": ""}
    assert overrides_in(variables, environment) == {"BLOCK": Override("KSERVE_REAL_SPACE_BLOCK", "128")}
    assert overrides_in(variables, {"PATH": "/bin"}) == {}


@pytest.mark.parametrize("text", ["x", "-64", "64.0", "0x40", "1e2", " 64", "9" * 30, "96", ""])
def test_a_text_that_is_no_value_of_the_knob_is_refused_by_its_variable(text):
    knob = defined().entries["scale"].knobs["BLOCK"]
    with pytest.raises(InvalidSpec, match="THE_BLOCK cannot be") as refused:
        check_override(knob, Override("THE_BLOCK", text))
    assert refused.value.facts["allowed"] == "64, 128, 256"
    check_override(knob, Override("THE_BLOCK", "64"))


@pytest.mark.parametrize("n_ang", range(1, 9))
def test_realspace_has_its_knobs_and_the_defaults_it_always_had(n_ang):
    text = next(path.read_bytes() for root in built_in_roots() for path in root.glob("realspace/kernel.toml"))
    definition = read_definition(text, origin="kernel.toml")
    defaults = {"realspace_fwd": 256 + 256 * (n_ang <= 4), "realspace_bwd": 128 + 128 * (n_ang <= 5)}
    for name, block in defaults.items():
        entry = definition.entries[name]
        assert definition.knob_values(entry, {"n_ang": n_ang}, {}) == {"BLOCK": block, "WARPS": 4}
        assert {knob.name: knob.alias for knob in entry.knobs.values()} == {
            "BLOCK": "ECENET_RS_BLOCK",
            "WARPS": "ECENET_RS_WARPS",
        }
