"""Manifests: what comes back is what went in, and nothing damaged, foreign or hostile comes back at all."""

from __future__ import annotations

import json

import pytest

from kserve.artifact import Contract, Manifest, Param, manifest_from_bytes, manifest_from_json
from kserve.errors import CorruptArtifact
from kserve.key import canonical_json, digest_of

KEY = "5e" * 32


def contract(**overrides) -> Contract:
    params = (
        Param("x", "pointer", "float32", 0, 8, mutated=True, nullable=True, contiguous=False, align=16),
        Param("n", "i64", "", 8, 8, divisible_by=4),
    )
    valid = Contract(
        "_Z5scale", "cubin", params, {"size": 8, "flag": True, "dtype": "float32"}, ("cdiv(n, 128)", "2"), ("128",)
    )
    return valid._replace(**{"scratch_bytes": (128, 0), "minimum_driver": 13000, **overrides})


def manifest(**overrides) -> Manifest:
    valid = Manifest(
        key=KEY,
        digest=digest_of(b"payload"),
        size_bytes=7,
        name="scale",
        language="cuda",
        target="cuda:sm_90",
        spec={"size": 8, "flag": True, "dtype": "float32"},
        variant="declared",
        contract=contract(),
        resources={"registers": 12, "shared_bytes": 0},
        components={"language": "cuda", "spec.size": "8"},
        attachments={"ptx": digest_of(b"ptx")},
        closed_world=False,
        seconds=0.25,
        created_at=1700000000.5,
    )
    return valid._replace(**overrides)


def signed(plain: dict) -> bytes:
    """Bytes that match their own hash, whatever they say."""
    return canonical_json({**plain, "self_sha256": digest_of(canonical_json(plain).encode())}).encode()


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"contract": contract(params=(), constants={}, scratch_bytes=())},
        {"contract": contract(shared_bytes="4 * size", block=("16", "8", "2"))},
        {"spec": {}, "components": {}, "attachments": {}, "resources": {}},
        {"name": "größe"},
    ],
)
def test_a_manifest_survives_its_bytes(overrides):
    sent = manifest(**overrides)
    came = manifest_from_bytes(sent.to_bytes(), key=KEY)
    assert came == sent
    assert isinstance(came.contract, Contract)
    assert all(isinstance(param, Param) for param in came.contract.params)


def test_a_manifest_survives_json():
    sent = manifest()
    assert manifest_from_json(json.loads(json.dumps(sent.to_json()))) == sent


def test_equal_manifests_have_equal_bytes():
    backwards = manifest(spec=dict(reversed(manifest().spec.items())))
    assert backwards.to_bytes() == manifest().to_bytes()


def test_every_flipped_bit_is_noticed():
    sound = manifest().to_bytes()
    for position in range(len(sound)):
        damaged = bytearray(sound)
        damaged[position] ^= 1 << position % 8
        with pytest.raises(CorruptArtifact):
            manifest_from_bytes(bytes(damaged), key=KEY)


def test_every_truncation_is_noticed():
    sound = manifest().to_bytes()
    for length in range(len(sound)):
        with pytest.raises(CorruptArtifact):
            manifest_from_bytes(sound[:length], key=KEY)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"5",
        b"[]",
        b'"text"',
        b"{}",
        b'{"self_sha256": null}',
        b'{"self_sha256": "x", "seconds": NaN}',
        b'{"self_sha256": "x", "seconds": 1e999}',
        b"[" * 100_000,
        b'{"self_sha256": "x", "a": ' + b"9" * 5000 + b"}",
        b"\xff\xfe{}",
    ],
    ids=range(12),
)
def test_what_was_never_a_manifest_is_corrupt(content):
    with pytest.raises(CorruptArtifact):
        manifest_from_bytes(content, key=KEY)


def test_a_manifest_under_another_key_is_corrupt():
    with pytest.raises(CorruptArtifact):
        manifest_from_bytes(manifest().to_bytes(), key="00" * 32)


def test_a_manifest_of_another_schema_is_corrupt():
    with pytest.raises(CorruptArtifact):
        manifest_from_bytes(signed({**manifest().to_json(), "schema": 2}), key=KEY)


@pytest.mark.parametrize("field", [*(f for f in Manifest._fields if f not in Manifest._field_defaults), "schema"])
def test_a_missing_field_is_corrupt(field):
    plain = manifest().to_json()
    del plain[field]
    with pytest.raises(CorruptArtifact):
        manifest_from_bytes(signed(plain), key=KEY)


@pytest.mark.parametrize("field", ["symbol", "format", "params", "constants", "grid", "block", "scratch_bytes"])
def test_a_missing_field_of_the_contract_is_corrupt(field):
    plain = manifest().to_json()
    del plain["contract"][field]
    with pytest.raises(CorruptArtifact):
        manifest_from_bytes(signed(plain), key=KEY)


@pytest.mark.parametrize(
    "change",
    [
        {"later": 1},
        {"contract": None},
        {"contract": []},
        {"contract": {**manifest().to_json()["contract"], "later": 1}},
        {"contract": {**manifest().to_json()["contract"], "params": [{"name": "x"}]}},
        {"contract": {**manifest().to_json()["contract"], "params": ["x"]}},
        {"contract": {**manifest().to_json()["contract"], "params": 5}},
        {"contract": {**manifest().to_json()["contract"], "grid": 5}},
        {"contract": {**manifest().to_json()["contract"], "constants": ["a b"]}},
    ],
    ids=range(9),
)
def test_an_unknown_or_ill_shaped_field_is_corrupt(change):
    with pytest.raises(CorruptArtifact):
        manifest_from_bytes(signed({**manifest().to_json(), **change}), key=KEY)


@pytest.mark.parametrize("name", ["", "a b", "x=1", "__import__('os')", "x\n", "if", "_x", "stream"])
def test_a_name_that_is_no_identifier_never_reaches_generated_code(name):
    params = (Param(name, "i32", "", 0, 4),)
    for hostile in (contract(params=params), contract(constants={name: 1})):
        with pytest.raises(CorruptArtifact):
            manifest_from_bytes(manifest(contract=hostile).to_bytes(), key=KEY)


@pytest.mark.parametrize("plain", [[], "text", None, 5])
def test_an_answer_that_is_no_object_is_corrupt(plain):
    with pytest.raises(CorruptArtifact):
        manifest_from_json(plain)
