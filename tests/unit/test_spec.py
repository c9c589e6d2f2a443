"""Axes: one form for each value, and what is refused."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from kserve.errors import InvalidDefinition, InvalidSpec
from kserve.spec import DTYPES, RESERVED, SCALARS, Axis, check_axis_name, is_plain_name, normalise_spec


class TorchDtype:
    """Prints as torch.float32 does."""

    def __str__(self):
        return "torch.float32"


DTYPE = Axis("dtype", "dtype", values=("float32", "bfloat16"))
SIZE = Axis("size", "int", low=1, high=8192)
FLAG = Axis("flag", "bool")
MODE = Axis("mode", "enum", values=("fast", "exact"))
TEXT = Axis("text", "string")


@pytest.mark.parametrize(
    ("axis", "value", "plain"),
    [
        (DTYPE, "float32", "float32"),
        (DTYPE, "torch.bfloat16", "bfloat16"),
        (DTYPE, TorchDtype(), "float32"),
        (DTYPE, np.dtype("float32"), "float32"),
        (SIZE, 128, 128),
        (SIZE, 1, 1),
        (SIZE, 8192, 8192),
        (SIZE, "128", 128),
        (SIZE, np.int64(128), 128),
        (SIZE, np.uint8(200), 200),
        (Axis("n", "int"), -5, -5),
        (Axis("n", "int"), "-5", -5),
        (Axis("n", "int"), 2**63 - 1, 2**63 - 1),
        (Axis("n", "int", values=(2, 4)), 4, 4),
        (FLAG, True, True),
        (FLAG, False, False),
        (FLAG, "true", True),
        (FLAG, "False", False),
        (FLAG, "1", True),
        (FLAG, "0", False),
        (FLAG, np.bool_(True), True),
        (MODE, "fast", "fast"),
        (TEXT, "a.B_0:+-", "a.B_0:+-"),
        (TEXT, "x" * 64, "x" * 64),
    ],
)
def test_a_value_has_one_form(axis, value, plain):
    found = axis.normalise(value)
    assert found == plain
    assert type(found) is type(plain)


@pytest.mark.parametrize(
    ("axis", "value"),
    [
        (DTYPE, "float64"),
        (DTYPE, "Float32"),
        (DTYPE, np.float32),
        (DTYPE, None),
        (DTYPE, 32),
        (SIZE, 0),
        (SIZE, 8193),
        (SIZE, -1),
        (SIZE, True),
        (SIZE, 128.0),
        (SIZE, np.float32(128)),
        (SIZE, "128.0"),
        (SIZE, "0x80"),
        (SIZE, " 128"),
        (SIZE, ""),
        (SIZE, "9" * 19),
        (SIZE, "\uff11\uff12"),
        (Axis("n", "int"), 2**63),
        (Axis("n", "int"), -(2**63) - 1),
        (SIZE, None),
        (SIZE, [128]),
        (SIZE, np.bool_(True)),
        (Axis("n", "int", values=(2, 4)), 3),
        (FLAG, 1),
        (FLAG, "yes"),
        (FLAG, None),
        (Axis("flag", "bool", values=(False,)), True),
        (MODE, "slow"),
        (MODE, "fast "),
        (MODE, 1),
        (TEXT, ""),
        (TEXT, "x" * 65),
        (TEXT, "a b"),
        (TEXT, "a;b"),
        (TEXT, "a\n"),
        (TEXT, "$(id)"),
        (TEXT, "'"),
        (TEXT, "é"),
        (TEXT, 5),
    ],
)
def test_a_value_that_does_not_fit_is_refused_with_what_is_allowed(axis, value):
    with pytest.raises(InvalidSpec) as caught:
        axis.normalise(value)
    assert axis.name in caught.value.message
    assert repr(value) in caught.value.message
    assert caught.value.facts["allowed"] == axis.allowed


@pytest.mark.parametrize("value", [np.zeros(3), np.array([1])], ids=["array", "one element"])
def test_an_array_is_refused_and_not_passed_to_int(value):
    with pytest.raises(InvalidSpec):
        SIZE.normalise(value)


@pytest.mark.parametrize(
    ("axis", "parts"),
    [
        (DTYPE, ["float32", "bfloat16"]),
        (SIZE, ["1", "8192"]),
        (FLAG, ["true", "false"]),
        (MODE, ["fast", "exact"]),
        (Axis("d", "dtype"), list(DTYPES)),
        (Axis("b", "bool", values=(False,)), ["false"]),
    ],
)
def test_what_is_allowed_names_every_value_or_both_ends(axis, parts):
    assert all(part in axis.allowed for part in parts)


AXES = {axis.name: axis for axis in (DTYPE._replace(default="float32"), SIZE, FLAG._replace(default=False))}


def test_a_spec_holds_every_axis_in_the_axes_order():
    assert list(normalise_spec("k", AXES, {"flag": True, "size": 4}).items()) == [
        ("dtype", "float32"),
        ("size", 4),
        ("flag", True),
    ]


@pytest.mark.parametrize("wanted", [{"size": 4}, {"size": "4"}, {"size": np.int32(4), "dtype": "torch.float32"}])
def test_equal_wishes_have_equal_specs(wanted):
    assert normalise_spec("k", AXES, wanted) == {"dtype": "float32", "size": 4, "flag": False}


def test_a_default_that_is_false_counts_as_a_default():
    assert normalise_spec("k", {"flag": FLAG._replace(default=False)}, {}) == {"flag": False}


def test_an_axis_that_does_not_exist_is_named_with_the_nearest_one():
    with pytest.raises(InvalidSpec) as caught:
        normalise_spec("k", AXES, {"sise": 4})
    assert all(word in caught.value.message for word in ("k", "sise", "size"))


def test_a_required_axis_left_out_is_named_with_what_it_takes():
    with pytest.raises(InvalidSpec) as caught:
        normalise_spec("k", AXES, {})
    assert "size" in caught.value.message
    assert caught.value.facts == {"allowed": SIZE.allowed}


@pytest.mark.parametrize("name", ["a", "A1_b", "n" * 64, "type", "match"])
def test_a_plain_identifier_can_name_an_axis(name):
    assert is_plain_name(name)
    check_axis_name(name)


@pytest.mark.parametrize(
    "name", ["", "_a", "1a", "a-b", "a b", "a.b", "é", "n" * 65, "if", "None", "lambda", "a\n", *sorted(RESERVED)]
)
def test_a_reserved_or_unusual_name_is_refused(name):
    assert not is_plain_name(name)
    with pytest.raises(InvalidDefinition) as caught:
        check_axis_name(name)
    assert repr(name) in caught.value.message


@pytest.mark.parametrize("name", ["min", "max", "cdiv", "next_pow2"])
def test_a_name_that_would_hide_a_function_of_expressions_is_refused(name):
    assert not is_plain_name(name)


@pytest.mark.parametrize("name", DTYPES)
def test_an_axis_cannot_be_called_like_a_dtype(name):
    with pytest.raises(InvalidDefinition):
        check_axis_name(name)


@pytest.mark.parametrize("value", [None, 5, b"a"])
def test_only_text_is_a_name(value):
    assert not is_plain_name(value)


@pytest.mark.parametrize("name", DTYPES)
def test_the_table_of_dtypes_agrees_with_the_platform(name):
    dtype = DTYPES[name]
    if dtype.packing:
        assert struct.calcsize("<" + dtype.packing) == dtype.size_bytes
        assert np.dtype(name).str == dtype.typestr
        assert np.dtype(name).itemsize == dtype.size_bytes
    else:
        assert name == "bfloat16"


def test_every_scalar_kind_can_be_packed():
    assert all(DTYPES[dtype].packing for dtype in SCALARS.values())


@pytest.mark.parametrize(("kind", "size_bytes"), [("bool", 1), ("i8", 1), ("u16", 2), ("i32", 4), ("f16", 2), ("f64", 8)])
def test_a_scalar_kind_says_its_width(kind, size_bytes):
    assert DTYPES[SCALARS[kind]].size_bytes == size_bytes
