"""The exception tree: codes, statuses, wire form."""

from __future__ import annotations

import json

import pytest

from kserve import errors
from kserve.errors import KserveError, ServiceError, closest, from_wire

# class -> code, HTTP status, exit status: scripts and other clients depend on all three.
CONTRACT = {
    "KserveError": ("internal", 500, 1),
    "RequestError": ("bad-request", 400, 2),
    "UnknownKernel": ("unknown-kernel", 404, 3),
    "InvalidSpec": ("invalid-spec", 422, 2),
    "InvalidDefinition": ("invalid-definition", 422, 2),
    "UnsupportedTarget": ("unsupported-target", 422, 2),
    "BuildError": ("build-failed", 424, 4),
    "CompileFailed": ("compile-failed", 424, 4),
    "BuildTimeout": ("build-timeout", 504, 4),
    "NotBuilt": ("not-built", 404, 4),
    "ToolchainMissing": ("toolchain-missing", 424, 4),
    "StoreError": ("store-unusable", 507, 5),
    "CorruptArtifact": ("corrupt-artifact", 410, 5),
    "ServiceError": ("service-failed", 503, 6),
    "DaemonUnreachable": ("daemon-unreachable", 503, 6),
    "ForeignPeer": ("foreign-peer", 403, 6),
    "ProtocolMismatch": ("protocol-mismatch", 426, 6),
    "LoadError": ("load-failed", 500, 7),
    "LaunchError": ("launch-refused", 400, 7),
}


def every_error() -> list[type[KserveError]]:
    return [found for found in vars(errors).values() if isinstance(found, type) and issubclass(found, KserveError)]


@pytest.mark.parametrize("name", CONTRACT)
def test_code_and_statuses_are_stable(name):
    error = getattr(errors, name)("x")
    assert (error.code, error.http_status, error.exit_status) == CONTRACT[name]


def test_every_class_has_a_code_of_its_own_and_every_code_a_class():
    codes = [found.code for found in every_error()]
    assert sorted(codes) == sorted(errors.STATUS)


def test_the_drawn_tree_names_every_class():
    assert [found.__name__ for found in every_error() if found.__name__ not in errors.__doc__] == []


@pytest.mark.parametrize(
    ("name", "bases"),
    [
        ("UnknownKernel", ["RequestError"]),
        ("InvalidSpec", ["RequestError", "ValueError"]),
        ("InvalidDefinition", ["RequestError", "ValueError"]),
        ("UnsupportedTarget", ["RequestError"]),
        ("CompileFailed", ["BuildError"]),
        ("BuildTimeout", ["BuildError"]),
        ("NotBuilt", ["BuildError"]),
        ("ToolchainMissing", ["BuildError"]),
        ("CorruptArtifact", ["StoreError"]),
        ("DaemonUnreachable", ["ServiceError"]),
        ("ForeignPeer", ["ServiceError"]),
        ("ProtocolMismatch", ["ServiceError"]),
        ("LaunchError", ["TypeError", "ValueError"]),
    ],
)
def test_an_error_is_caught_as_its_family_and_as_the_builtin_it_stands_for(name, bases):
    caught = {base.__name__ for base in getattr(errors, name).__mro__}
    assert {*bases, "KserveError"} <= caught


@pytest.mark.parametrize("kind", every_error(), ids=lambda kind: kind.__name__)
def test_an_error_survives_the_wire(kind):
    sent = kind("what failed", facts={"allowed": "a, b"}, hint="kserve status")
    came = from_wire(json.loads(json.dumps(sent.to_wire())))
    assert (type(came), came.message, came.facts, came.hint) == (kind, sent.message, sent.facts, sent.hint)


@pytest.mark.parametrize(
    "wire",
    [
        {"code": "of-a-later-version", "message": "m"},
        {"message": "m"},
        {"code": None, "message": "m", "facts": None},
        {"code": ["x"], "message": "m", "facts": {}},
    ],
)
def test_a_code_this_version_does_not_know_becomes_a_service_error(wire):
    came = from_wire(wire)
    assert (type(came), came.message, came.facts, came.hint) == (ServiceError, "m", {}, None)


@pytest.mark.parametrize(
    "wire", ["text", ["list"], None, {"message": "m", "facts": ["list"]}, {"message": "m", "facts": "text"}]
)
def test_an_answer_of_another_shape_is_still_an_error_of_ours(wire):
    assert isinstance(from_wire(wire), ServiceError)


def test_facts_become_text():
    assert from_wire({"code": "internal", "message": "m", "facts": {"n": 3}}).facts == {"n": "3"}


def test_printing_shows_message_then_facts_then_hint():
    lines = str(KserveError("message", facts={"key": "3f9c", "allowed": "1, 2"}, hint="kserve up")).splitlines()
    assert lines[0] == "message"
    assert [line.split(maxsplit=1) for line in lines[1:]] == [["key:", "3f9c"], ["allowed:", "1, 2"], ["hint:", "kserve up"]]


def test_an_error_without_facts_prints_one_line():
    assert str(KserveError("message")) == "message"


@pytest.mark.parametrize(
    ("word", "known", "shown", "hidden"),
    [
        ("hiden", ["hidden", "dtype"], ["hidden"], ["dtype"]),
        ("qqq", ["hidden", "dtype"], ["hidden", "dtype"], []),
        ("qqq", [], ["none"], []),
    ],
)
def test_closest_names_what_is_near_or_all_there_is(word, known, shown, hidden):
    text = closest(word, known)
    assert all(name in text for name in shown)
    assert not any(name in text for name in hidden)
