"""The build key: equal components share one, different components never do."""

from __future__ import annotations

import itertools

import pytest

from kserve import key
from kserve.key import build_key, canonical_json, digest_of

BASELINE = {"language": "cuda", "target": "cuda:sm_90", "spec.size": "8", "source.a.cu": "d" * 64}


def test_a_key_is_64_hex_digits():
    assert len(build_key(BASELINE)) == 64
    assert set(build_key(BASELINE)) <= set("0123456789abcdef")


def test_the_key_of_a_known_set_of_components_never_changes():
    # A change here makes every stored entry of every user a miss: raise KEY_SCHEMA instead.
    assert key.KEY_SCHEMA == 1
    assert build_key({"a": "1", "b": "é"}) == "2e8689672f5470cbf35544b2218ca55bc43abe065a14d215a660620d3abafdec"


def test_the_order_of_components_plays_no_part():
    keys = {build_key(dict(items)) for items in itertools.permutations(BASELINE.items())}
    assert len(keys) == 1


@pytest.mark.parametrize("label", BASELINE)
def test_a_key_differs_on_every_component(label):
    others = [
        {**BASELINE, label: BASELINE[label] + "x"},
        {**BASELINE, label: ""},
        {name: text for name, text in BASELINE.items() if name != label},
        {(name + "x" if name == label else name): text for name, text in BASELINE.items()},
    ]
    assert len({build_key(components) for components in (BASELINE, *others)}) == 5


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": "b"}, {"ab": ""}),
        ({"a": "b"}, {"": "ab"}),
        ({"a": "1", "b": "2"}, {"a": "1b2"}),
        ({"a": "1", "b": "2"}, {"a": "2", "b": "1"}),
        ({"a": "11:b"}, {"a1": "1:b"}),
        ({"a": "1:b1:c"}, {"a": "", "b": "c"}),
        ({}, {"": ""}),
        ({"a": "é"}, {"a": "e\u0301"}),
        ({"a": "1"}, {"a": "1\n"}),
    ],
)
def test_components_that_look_alike_when_joined_differ(one, other):
    assert build_key(one) != build_key(other)


def test_the_schema_number_is_part_of_the_key(monkeypatch):
    before = build_key(BASELINE)
    monkeypatch.setattr(key, "KEY_SCHEMA", key.KEY_SCHEMA + 1)
    assert build_key(BASELINE) != before


def test_a_digest_is_sha256():
    assert digest_of(b"") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"b": 1, "a": [True, None, "x"]}, '{"a":[true,null,"x"],"b":1}'),
        ("é", '"\\u00e9"'),
        (8, "8"),
        ("8", '"8"'),
        (True, "true"),
        (0.1, "0.1"),
    ],
)
def test_canonical_json_has_one_spelling(value, text):
    assert canonical_json(value) == text


@pytest.mark.parametrize("value", [float("nan"), float("inf"), b"x", {1, 2}])
def test_what_has_no_one_spelling_is_refused(value):
    with pytest.raises((ValueError, TypeError)):
        canonical_json(value)
