"""Requests and answers: what is sent is plain JSON, what comes is read back whole."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kserve import protocol
from kserve.artifact import Contract, Manifest, Param
from kserve.errors import CompileFailed, CorruptArtifact, ProtocolMismatch, ServiceError
from kserve.protocol import Pending, Resolved, check_protocol, kernel_request, read_result, resolve_request


class TorchDtype:
    """Prints as torch.float32 does."""

    def __str__(self):
        return "torch.float32"


def manifest(variant: str = "declared") -> Manifest:
    contract = Contract("scale", "cubin", (Param("n", "i32", "", 0, 4),), {}, ("n",), ("128",))
    facts = ("ab" * 32, "cd" * 32, 7, "scale", "cuda", "cuda:sm_90", {"size": 8}, variant, contract)
    return Manifest(*facts, {"registers": 12}, {"language": "cuda"}, {}, closed_world=False, seconds=0.5, created_at=1.0)


def variant(**overrides) -> dict:
    return {"manifest": manifest(overrides.pop("variant", "declared")).to_json(), "origin": "disk", "seconds": 0.5, **overrides}


def over_the_wire(plain):
    return json.loads(json.dumps(plain))


@pytest.mark.parametrize(
    ("value", "sent"),
    [
        (8, 8),
        (True, True),
        ("float32", "float32"),
        (TorchDtype(), "torch.float32"),
        (np.int64(8), "8"),
        (np.dtype("float32"), "float32"),
    ],
)
def test_a_spec_is_sent_as_plain_values(value, sent):
    request = kernel_request("k", files={}, spec={"axis": value}, target="sm_90", environment={})
    found = over_the_wire(request)["spec"]["axis"]
    assert found == sent
    assert type(found) is type(sent)


def test_a_request_carries_what_it_was_made_of():
    kernel = kernel_request("k", files={"kernel.toml": "d"}, spec={"n": 1}, target="sm_90", environment={"python": "/p"})
    found = over_the_wire(resolve_request([kernel], client="c", version="1.2.3", wait_s=2.0))
    assert found == {
        "protocol": protocol.PROTOCOL,
        "version": "1.2.3",
        "client": "c",
        "wait_s": 2.0,
        "kernels": [
            {
                "name": "k",
                "files": {"kernel.toml": "d"},
                "spec": {"n": 1},
                "target": "sm_90",
                "environment": {"python": "/p"},
                "build": True,
                "alias": None,
            }
        ],
    }


def test_variants_are_read_in_order():
    answer = {"variants": [variant(origin="built"), variant(variant="generic", origin="joined", seconds=1.5)]}
    assert read_result(over_the_wire(answer)) == [
        Resolved(manifest("declared"), "built", 0.5),
        Resolved(manifest("generic"), "joined", 1.5),
    ]


def test_a_pending_build_is_read():
    answer = {"pending": {"build": "b1", "seconds": 3.5, "n_ahead": 2}}
    assert read_result(over_the_wire(answer)) == Pending("b1", 3.5, 2)


def test_an_error_is_read_as_the_exception_it_was():
    error = CompileFailed("m", facts={"compiler": "text"}, hint="h")
    came = read_result(over_the_wire({"error": error.to_wire()}))
    assert (type(came), came.to_wire()) == (CompileFailed, error.to_wire())


def test_a_damaged_manifest_in_an_answer_is_corrupt():
    plain = variant()
    del plain["manifest"]["digest"]
    with pytest.raises(CorruptArtifact):
        read_result({"variants": [plain]})


def test_an_error_of_a_later_version_is_a_service_error():
    assert isinstance(read_result({"error": {"code": "of-a-later-version", "message": "m"}}), ServiceError)


def test_the_same_protocol_is_accepted():
    check_protocol(protocol.PROTOCOL, version="9.9", ours="0.1")


@pytest.mark.parametrize("theirs", [None, 0, protocol.PROTOCOL + 1, str(protocol.PROTOCOL)])
def test_another_protocol_is_refused_with_both_versions(theirs):
    with pytest.raises(ProtocolMismatch) as caught:
        check_protocol(theirs, version="9.9.9", ours="0.1.0")
    assert "9.9.9" in caught.value.message
    assert "0.1.0" in caught.value.message


def test_every_path_is_versioned_and_its_own():
    paths = [value for value in vars(protocol).values() if isinstance(value, str) and value.startswith("/v")]
    assert all(path.startswith("/v1/") for path in paths)
    assert len(set(paths)) == len(paths) >= 8
