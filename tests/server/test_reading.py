"""The hot road reads a resolve request as the documented model does: the same bodies pass, the same are refused."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from kserve.errors import ForeignPeer, RequestError
from kserve.server.models import ResolveModel
from kserve.server.reading import read_resolve

VALID: dict[str, Any] = {
    "protocol": 1,
    "version": "0.1.0",
    "client": "c",
    "wait_s": 2.0,
    "kernels": [
        {
            "name": "k",
            "files": {"kernel.toml": "0" * 64, "include/a.cuh": "f" * 64},
            "spec": {"n": 1, "on": True, "dtype": "float32"},
            "target": "cuda:sm_90",
            "environment": {"python": "/p", "python_path": ["/a"], "loaded": {"torch": "2.11"}, "cuda_home": "/c"},
            "build": False,
            "debug": "device",
            "alias": {"request": "a" * 64, "stamps": {"0": [1, 2, 3, 4], "0/k": []}, "variables": {"B": ["KSERVE_K_B"]}},
            "knobs": {
                "values": {"B": 64},
                "sizes": {"n": 8},
                "device": {"name": "GPU", "sm_count": 132, "l2_bytes": 1 << 20, "mig": ""},
            },
            "generic": True,
            "outside": {
                "roots": [
                    {"path": "/r", "use": "quote a/b", "identity": "p-1"},
                    {"path": "/s", "use": "include", "identity": ""},
                ],
                "digests": {"0/x.h": "c" * 64, "system/y.h": ""},
            },
        }
    ],
}
PLACES = [
    (),
    ("protocol",),
    ("wait_s",),
    ("client",),
    ("kernels",),
    ("kernels", 0),
    *(("kernels", 0, field) for field in VALID["kernels"][0]),
    ("kernels", 0, "files", "kernel.toml"),
    ("kernels", 0, "files", "../up"),
    ("kernels", 0, "files", "a\n"),
    ("kernels", 0, "spec", "n"),
    ("kernels", 0, "environment", "python"),
    ("kernels", 0, "environment", "python_path"),
    ("kernels", 0, "environment", "loaded"),
    ("kernels", 0, "environment", "more"),
    ("kernels", 0, "environment", "cuda_home"),
    *(("kernels", 0, "outside", field) for field in ("roots", "digests", "more")),
    *(("kernels", 0, "outside", "roots", 0, field) for field in ("path", "use", "identity", "more")),
    ("kernels", 0, "outside", "roots", 0),
    ("kernels", 0, "outside", "digests", "0/x.h"),
    ("kernels", 0, "alias", "request"),
    ("kernels", 0, "alias", "stamps"),
    ("kernels", 0, "alias", "stamps", "0"),
    ("kernels", 0, "alias", "variables"),
    ("kernels", 0, "alias", "variables", "B"),
    ("kernels", 0, "knobs", "values"),
    ("kernels", 0, "knobs", "sizes", "n"),
    ("kernels", 0, "knobs", "device"),
    ("kernels", 0, "knobs", "device", "name"),
    ("kernels", 0, "knobs", "device", "sm_count"),
    ("kernels", 0, "knobs", "device", "more"),
    ("kernels", 0, "knobs", "more"),
    ("more",),
]
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.sampled_from(["lineinfo", "0" * 64, "0" * 63, "A" * 64, "x" * 5000]),
    st.lists(st.integers(0, 9), max_size=6),
    st.dictionaries(st.text(max_size=4), st.integers(0, 9) | st.text(max_size=4), max_size=3),
)


def with_value(place: tuple[Any, ...], value: object) -> Any:
    body = copy.deepcopy(VALID)
    if not place:
        return value
    inside: Any = body
    for step in place[:-1]:
        inside = inside[step]
    inside[place[-1]] = value
    return body


def is_documented(body: object) -> bool:
    try:
        ResolveModel.model_validate(body, strict=True)
    except ValidationError:
        return False
    return True


def is_read(body: object) -> bool:
    try:
        read_resolve(json.dumps(body).encode(), may_alias=True)
    except RequestError:
        return False
    return True


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(place=st.sampled_from(PLACES), value=VALUES)
def test_what_is_documented_is_what_is_read(place, value):
    body = with_value(place, value)
    assert is_read(body) == is_documented(body)


@pytest.mark.parametrize("place", [place for place in PLACES if place and place[-1] not in ("more", "../up", "a\n")], ids=str)
def test_a_field_left_out(place):
    body: Any = copy.deepcopy(VALID)
    inside = body
    for step in place[:-1]:
        inside = inside[step]
    del inside[place[-1]]
    assert is_read(body) == is_documented(body)


def test_a_valid_request_is_read_whole():
    found = read_resolve(json.dumps(VALID).encode(), may_alias=True)
    (kernel,) = found.kernels
    assert (found.protocol, found.client, found.wait_s) == (1, "c", 2.0)
    assert (kernel.name, kernel.build, kernel.spec) == ("k", False, {"n": 1, "on": True, "dtype": "float32"})
    assert kernel.environment == ("/p", ("/a",), (("torch", "2.11"),), "/c")
    assert kernel.alias is not None
    assert [root.use for root in kernel.outside.roots] == ["quote a/b", "include"]
    assert kernel.outside.digests == {"0/x.h": "c" * 64, "system/y.h": ""}


def test_another_user_names_no_place_and_no_alias():
    with pytest.raises(ForeignPeer, match="directories outside"):
        read_resolve(json.dumps(VALID).encode(), may_alias=False)
    inside = copy.deepcopy(VALID)
    del inside["kernels"][0]["outside"]
    (kernel,) = read_resolve(json.dumps(inside).encode(), may_alias=False).kernels
    assert kernel.alias is None


@pytest.mark.parametrize("content", [b"", b"[" * 100_000, b"\xff", b"nan", b'{"a":' * 50_000])
def test_what_is_no_json_is_refused(content):
    with pytest.raises(RequestError):
        read_resolve(content, may_alias=True)
