"""Tunings: their names, the buckets of sizes, and what is no tuning."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from kserve.errors import InvalidSpec
from kserve.key import sealed
from kserve.tuning import Device, Tuning, bucket_of, candidates, tuning_from_bytes, tuning_from_json, tuning_name

DEVICE = Device("GPU", 132, 50 << 20, "")
TUNING = Tuning(
    base="b" * 64,
    kernel="scale",
    spec={"size": 8, "dtype": "float32"},
    target="cuda:sm_90",
    device=DEVICE,
    sizes={"n": 1024},
    knobs={"BLOCK": 64},
    rows=[{"knobs": {"BLOCK": 64}, "state": "timed", "us": [1.0, 0.9, 1.1]}],
    toolchain="nvrtc 13.0",
    version="0.1.0",
    created_at=1.5,
)


@pytest.mark.parametrize(
    ("sizes", "bucket"),
    [
        ({"n": 1}, {"n": 1}),
        ({"n": 1023}, {"n": 1024}),
        ({"n": 1024}, {"n": 1024}),
        ({"n": 1025, "m": np.int64(3)}, {"m": 4, "n": 2048}),
        ({}, {}),
    ],
)
def test_a_bucket_ends_at_a_power_of_two(sizes, bucket):
    assert bucket_of(sizes) == bucket
    assert bucket_of(bucket) == bucket


@pytest.mark.parametrize(
    "sizes", [{"n": 0}, {"n": -1}, {"n": True}, {"n": 1.5}, {"n": "8"}, {"n": 1 << 63}, {1: 1}, [("n", 1)], 8]
)
def test_sizes_that_are_none_are_refused(sizes):
    with pytest.raises(InvalidSpec, match="sizes cannot be"):
        bucket_of(sizes)


def test_a_tuning_is_for_one_kind_of_device_and_one_bucket():
    others = [
        tuning_name("c" * 64, DEVICE, {"n": 1024}),
        tuning_name("b" * 64, DEVICE._replace(name="another"), {"n": 1024}),
        tuning_name("b" * 64, DEVICE._replace(sm_count=114), {"n": 1024}),
        tuning_name("b" * 64, DEVICE._replace(l2_bytes=1), {"n": 1024}),
        tuning_name("b" * 64, DEVICE._replace(mig="1g.5gb"), {"n": 1024}),
        tuning_name("b" * 64, DEVICE, {"n": 2048}),
        tuning_name("b" * 64, DEVICE, {}),
    ]
    assert len({TUNING.name, *others}) == len(others) + 1


def test_a_wish_looks_in_its_bucket_and_then_for_every_size():
    assert candidates(TUNING.base, DEVICE, {"n": 1024}) == [TUNING.name, TUNING._replace(sizes={}).name]
    assert candidates(TUNING.base, DEVICE, {}) == [TUNING._replace(sizes={}).name]
    assert candidates(TUNING.base, None, {"n": 1024}) == candidates("", DEVICE, {}) == []


def test_a_tuning_comes_back_as_it_was_written():
    assert tuning_from_bytes(TUNING.to_bytes()) == TUNING
    assert tuning_from_json(json.loads(json.dumps(TUNING.to_json()))) == TUNING


def test_a_damaged_tuning_is_none():
    content = TUNING.to_bytes()
    for position in range(0, len(content), 7):
        damaged = content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :]
        assert tuning_from_bytes(damaged) is None
    assert tuning_from_bytes(b"") is None


CHANGES: list[dict[str, Any]] = [
    {"device": {"name": "GPU"}},
    {"device": None},
    {"knobs": {}},
    {"knobs": {"BLOCK": "64"}},
    {"knobs": {"BLOCK": True}},
    {"knobs": {"block": 64}},
    {"knobs": [64]},
    {"sizes": {"n": 1.5}},
    {"sizes": {"a b": 8}},
    {"rows": [1]},
    {"rows": {}},
    {"base": 1},
    {"spec": []},
    {"created_at": "now"},
    {"more": 1},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_a_tuning_of_another_form_is_none(change):
    plain = {**TUNING.to_json(), **change}
    assert tuning_from_json(plain) is None
    assert tuning_from_bytes(sealed({**plain, "schema": 1})) is None


def test_a_tuning_of_another_schema_is_none():
    assert tuning_from_bytes(sealed({**TUNING.to_json(), "schema": 1})) == TUNING
    assert tuning_from_bytes(sealed({**TUNING.to_json(), "schema": 2})) is None
    assert tuning_from_bytes(sealed(TUNING.to_json())) is None
