"""Readers of what comes from outside, over generated input: the documented errors come out, and what passes can be used."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kserve import protocol
from kserve.artifact import Contract, Manifest, Param, manifest_from_bytes, manifest_from_json
from kserve.errors import CompileFailed, CorruptArtifact, KserveError, ServiceError
from kserve.key import canonical_json, differences, digest_of
from kserve.protocol import Pending, Resolved, read_result
from kserve.store.base import checked
from tests.support.mutations import JSON_VALUES, damaged, mutated

KEY = "5e" * 32
MANIFEST = Manifest(
    key=KEY,
    digest="ab" * 32,
    size_bytes=7,
    name="scale",
    language="cuda",
    target="cuda:sm_90",
    spec={"size": 8, "fast": True, "dtype": "float32"},
    variant="declared",
    contract=Contract(
        symbol="_Z5scale",
        format="cubin",
        params=(Param("x", "pointer", "float32", 0, 8, mutated=True, align=16), Param("n", "i64", "", 8, 8, divisible_by=4)),
        constants={"size": 8, "fast": True, "dtype": "float32"},
        grid=("cdiv(n, 128)",),
        block=("128",),
        scratch_bytes=(128, 0),
        minimum_driver=13000,
    ),
    resources={"registers": 12, "shared_bytes": 0},
    components={"language": "cuda", "spec.size": "8"},
    attachments={"ptx": "cd" * 32},
    closed_world=False,
    seconds=0.25,
    created_at=1700000000.5,
    reason="first build",
).to_json()
MANIFEST = json.loads(json.dumps(MANIFEST))
RESULTS = [
    {"variants": [{"manifest": MANIFEST, "origin": "disk", "seconds": 0.5}]},
    {"pending": {"build": "b1", "seconds": 3.5, "n_ahead": 2}},
    {"error": CompileFailed("m", facts={"compiler": "text"}, hint="h").to_wire()},
]


def signed(plain: dict[str, Any]) -> bytes:
    """A manifest that matches its own hash, whatever it says."""
    return canonical_json({**plain, "self_sha256": digest_of(canonical_json(plain).encode())}).encode()


def use(manifest: Manifest) -> None:
    """What the service, the store and the command line do with a manifest."""
    assert manifest_from_bytes(manifest.to_bytes(), key=manifest.key) == manifest
    for digest in (manifest.digest, *manifest.attachments.values()):
        checked(f"payload/{digest}")
    differences(manifest.components, {})
    sum([manifest.size_bytes, manifest.created_at, manifest.seconds, *manifest.resources.values()])
    contract = manifest.contract
    " ".join([*contract.grid, *contract.block, contract.shared_bytes, contract.symbol, contract.format, manifest.reason])
    for param in contract.params:
        sum([param.offset, param.size_bytes, param.align, param.divisible_by])
        " ".join([param.name, param.kind, param.dtype])
    hash((manifest.name, manifest.variant, manifest.target, manifest.language))
    assert {type(value) for value in (*manifest.spec.values(), *contract.constants.values())} <= {bool, int, str}


@given(st.binary(max_size=200) | damaged(signed(MANIFEST)))
def test_bytes_are_a_manifest_or_corrupt(content: bytes):
    try:
        manifest = manifest_from_bytes(content, key=KEY)
    except CorruptArtifact:
        return
    assert content == signed(MANIFEST)
    use(manifest)


@given(mutated(MANIFEST))
def test_a_manifest_that_matches_its_hash_is_sound_or_corrupt(plain: dict[str, Any]):
    try:
        content = signed(plain)
    except ValueError:  # what JSON has no form for
        return
    with contextlib.suppress(CorruptArtifact):
        use(manifest_from_bytes(content, key=KEY))


ILL_TYPED = {
    "a digest that leads elsewhere": {"digest": "../../lock"},
    "an attachment that leads elsewhere": {"attachments": {"ptx": "../../lock"}},
    "a digest that is a number": {"digest": 5},
    "a size that is a text": {"size_bytes": "7"},
    "a flag that is a number": {"closed_world": 0},
    "a time that is a text": {"created_at": "now"},
    "a list for the components": {"components": ["language"]},
    "a component that is a number": {"components": {"language": 5}},
    "a resource that is a text": {"resources": {"registers": "12"}},
    "a spec with a list": {"spec": {"size": [8]}},
    "a reason that is none": {"reason": None},
    "a grid that is a text": {"contract": {**MANIFEST["contract"], "grid": "12"}},
    "a block with a number": {"contract": {**MANIFEST["contract"], "block": [128]}},
    "scratch that is a text": {"contract": {**MANIFEST["contract"], "scratch_bytes": ["128"]}},
    "constants in a list": {"contract": {**MANIFEST["contract"], "constants": []}},
    "a constant that is a list": {"contract": {**MANIFEST["contract"], "constants": {"size": [8]}}},
    "an offset that is a text": {
        "contract": {**MANIFEST["contract"], "params": [{**MANIFEST["contract"]["params"][0], "offset": "0"}]}
    },
}


@pytest.mark.parametrize("change", ILL_TYPED.values(), ids=ILL_TYPED.keys())
def test_a_manifest_of_other_types_is_corrupt(change: dict[str, Any]):
    with pytest.raises(CorruptArtifact):
        manifest_from_bytes(signed({**MANIFEST, **change}), key=KEY)
    with pytest.raises(CorruptArtifact):
        manifest_from_json({**MANIFEST, **change})


@given(st.sampled_from(RESULTS).flatmap(mutated) | JSON_VALUES)
def test_a_result_is_read_or_a_service_error(plain: Any):
    try:
        found = read_result(plain)
    except (ServiceError, CorruptArtifact):
        return
    if isinstance(found, Pending):
        assert (type(found.build), type(found.seconds), type(found.n_ahead)) == (str, float, int)
    elif isinstance(found, KserveError):
        json.dumps(found.to_wire())
        assert str(found)
    else:
        for variant in found:
            assert isinstance(variant, Resolved)
            assert variant.origin in protocol.ORIGINS
            assert isinstance(variant.seconds, float)
            use(variant.manifest)


@pytest.mark.parametrize(
    "plain",
    [
        None,
        [],
        {},
        {"variants": None},
        {"variants": [None]},
        {"variants": [{**RESULTS[0]["variants"][0], "origin": "elsewhere"}]},
        {"variants": [{**RESULTS[0]["variants"][0], "seconds": None}]},
        {"pending": None},
        {"pending": {"build": "b1"}},
        {"pending": {"build": "b1", "seconds": "soon", "n_ahead": 0}},
        {"pending": {"build": "b1", "seconds": 1, "n_ahead": 0, "later": 1}},
    ],
    ids=range(11),
)
def test_a_result_of_another_form_is_a_service_error(plain: Any):
    with pytest.raises(ServiceError):
        read_result(plain)
