"""Every route of a real daemon over its socket: answers, the one shape of an error, malformed requests."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import stat
from collections.abc import Iterator
from typing import Any

import pytest

import kserve
from kserve import protocol
from kserve.artifact import manifest_from_json
from kserve.client.connection import Connection
from kserve.errors import CorruptArtifact, NotBuilt, ProtocolMismatch, RequestError
from kserve.key import digest_of
from tests.support.daemon import Daemon, ask, daemon, place, resolve_body, wish
from tests.support.definitions import CUDA_SOURCE, CUDA_TOML, write_cuda
from tests.support.processes import wait_for
from tests.support.slow_kernel import write_slow


@pytest.fixture(scope="module")
def served() -> Iterator[Daemon]:
    with place() as root:
        write_cuda(root / "kernels" / "scale")
        write_slow(root / "kernels" / "slow")
        with daemon(root) as found:
            yield found


@pytest.fixture
def connection(served: Daemon) -> Iterator[Connection]:
    with contextlib.closing(served.connection()) as found:
        yield found


def raw(served: Daemon, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
    """One request without the client's code: status and body."""
    connection = http.client.HTTPConnection("kserve", timeout=20)
    with contextlib.closing(connection):
        connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.sock.connect(str(served.settings.socket))
        connection.request(method, path, body=body, headers={"Content-Type": "application/json", **headers})
        answer = connection.getresponse()
        return answer.status, answer.read()


def error_of(status: int, content: bytes) -> dict[str, Any]:
    """The error in an answer, whose shape is checked."""
    answer = json.loads(content)
    assert set(answer) == {"error"}
    assert set(answer["error"]) == {"code", "message", "facts", "hint"}
    assert 400 <= status < 500, answer
    assert all(isinstance(value, str) for value in answer["error"]["facts"].values())
    return answer["error"]


def test_health(connection: Connection):
    found = connection.call("GET", protocol.HEALTH)
    assert (found["status"], found["protocol"], found["version"]) == ("ok", protocol.PROTOCOL, kserve.__version__)


def test_status(served: Daemon, connection: Connection):
    found = connection.call("GET", protocol.STATUS)
    assert found["pid"] == served.process.pid
    assert found["socket"] == str(served.settings.socket)
    assert found["store"]["path"] == str(served.settings.store)
    assert (found["store"]["degraded"], found["jobs"]) == ("", served.settings.jobs)


def test_kernels(connection: Connection):
    found = {row["name"]: row for row in connection.call("GET", protocol.KERNELS)["kernels"]}
    assert {"scale", "slow", "fused_norm_residual", "realspace_fwd"} <= set(found)
    assert found["scale"]["language"] == "cuda"
    assert set(found["scale"]["axes"]) == {"size"}


def test_openapi_has_every_route(served: Daemon):
    status, content = raw(served, "GET", "/openapi.json")
    assert status == 200
    found = {(method.upper(), path) for path, methods in json.loads(content)["paths"].items() for method in methods}
    assert found == {
        ("GET", protocol.HEALTH),
        ("GET", protocol.STATUS),
        ("GET", protocol.KERNELS),
        ("POST", protocol.RESOLVE),
        ("POST", protocol.SOURCES),
        ("GET", protocol.BUILDS),
        ("GET", protocol.BUILDS + "/{build_id}"),
        ("GET", protocol.ARTIFACTS),
        ("GET", protocol.ARTIFACTS + "/{key}"),
        ("GET", protocol.ARTIFACTS + "/{key}/payload"),
        ("GET", protocol.ARTIFACTS + "/{key}/sass"),
        ("GET", protocol.WHY),
        ("POST", protocol.VERIFY),
        ("POST", protocol.PRUNE),
        ("GET", protocol.PINS),
        ("POST", protocol.PINS),
        ("POST", protocol.PINS + "/remove"),
        ("GET", protocol.QUARANTINE),
        ("POST", protocol.QUARANTINE + "/purge"),
        ("GET", protocol.TUNINGS),
        ("POST", protocol.TUNINGS),
        ("GET", protocol.TUNINGS + "/{name}"),
        ("POST", protocol.TUNINGS + "/{name}/remove"),
        ("POST", protocol.SHUTDOWN),
    }


def test_a_source_is_kept_under_its_digest(served: Daemon, connection: Connection):
    content = b"\x00any bytes\xff"
    assert connection.call("POST", protocol.SOURCES, content) == {"digest": digest_of(content)}
    assert served.settings.store.joinpath("source", digest_of(content)[:2], digest_of(content)).read_bytes() == content


@pytest.mark.toolchain
def test_resolve_names_what_it_lacks_then_builds_then_hits(served: Daemon, connection: Connection):
    request, contents = wish(served.settings, "scale", size=31)
    changed = {**request["files"], "kernel.cu": digest_of(CUDA_SOURCE.encode() + b"// 31\n")}
    body = resolve_body({**request, "files": changed}, client="one")
    for content in contents:
        connection.call("POST", protocol.SOURCES, content)
    assert connection.call("POST", protocol.RESOLVE, body) == {"results": [{"missing": [changed["kernel.cu"]]}]}
    connection.call("POST", protocol.SOURCES, CUDA_SOURCE.encode() + b"// 31\n")
    (first,) = connection.call("POST", protocol.RESOLVE, body)["results"]
    assert [variant["origin"] for variant in first["variants"]] == ["built", "built"]
    manifests = [manifest_from_json(variant["manifest"]) for variant in first["variants"]]
    assert [manifest.variant for manifest in manifests] == ["declared", "generic"]
    assert manifests[0].components["source.kernel.cu"] == changed["kernel.cu"]
    for client in ("two", "one"):  # the builder, too, gets a hit when it asks anew
        (second,) = connection.call("POST", protocol.RESOLVE, {**body, "client": client})["results"]
        assert [variant["origin"] for variant in second["variants"]] == ["disk", "disk"], client
        assert [variant["manifest"]["key"] for variant in second["variants"]] == [manifest.key for manifest in manifests]


@pytest.mark.toolchain
def test_a_build_is_pending_then_joined(served: Daemon, connection: Connection):
    """Who waits learns which build it is; the build can be watched."""
    ask(connection, served.settings, "scale")  # the toolchain is loaded
    first = ask(connection, served.settings, "slow", tag=1, wait_s=0.2, client="a")["pending"]
    second = ask(connection, served.settings, "slow", tag=1, wait_s=0.0, client="b")["pending"]
    assert first["build"] == second["build"]
    found = connection.call("GET", f"{protocol.BUILDS}/{first['build']}")
    assert (found["name"], found["target"], found["n_joined"]) == ("slow", "cuda:sm_90", 1)
    assert found["state"] in ("queued", "running")
    assert found["error"] is None
    listed = connection.call("GET", protocol.BUILDS + "?limit=1")["builds"]
    assert [build["id"] for build in listed] == [first["build"]]


@pytest.mark.toolchain
def test_artifacts(served: Daemon, connection: Connection):
    made = [
        manifest_from_json(ask(connection, served.settings, "scale", size=size, target=target)["variants"][0]["manifest"])
        for size, target in ((41, "cuda:sm_90"), (42, "cuda:sm_80"))
    ]
    listed = connection.call("GET", protocol.ARTIFACTS)["artifacts"]
    assert [row["created_at"] for row in listed] == sorted((row["created_at"] for row in listed), reverse=True)
    assert {manifest.key for manifest in made} <= {row["key"] for row in listed}
    narrowed = connection.call("GET", protocol.ARTIFACTS + "?name=scale&target=cuda:sm_80")["artifacts"]
    assert {(row["name"], row["target"]) for row in narrowed} == {("scale", "cuda:sm_80")}
    assert connection.call("GET", protocol.ARTIFACTS + "?name=nothing")["artifacts"] == []

    key = made[0].key
    for prefix in (key, key[:12]):
        found = connection.call("GET", f"{protocol.ARTIFACTS}/{prefix}")
        assert manifest_from_json(found["manifest"]) == made[0]
        assert "ptxas info" in found["attachments"]["log"]
        assert ".entry" in found["attachments"]["ptx"]
        content = connection.call_raw("GET", f"{protocol.ARTIFACTS}/{prefix}/payload")
        assert digest_of(content) == made[0].digest


@pytest.mark.toolchain
def test_a_damaged_payload_is_gone_not_served(served: Daemon, connection: Connection):
    found = manifest_from_json(ask(connection, served.settings, "scale", size=51)["variants"][0]["manifest"])
    path = served.settings.store / "payload" / found.digest[:2] / found.digest
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptArtifact):
        connection.call("GET", f"{protocol.ARTIFACTS}/{found.key}/payload")
    with pytest.raises(NotBuilt):
        connection.call("GET", f"{protocol.ARTIFACTS}/{found.key}")
    assert connection.call("GET", protocol.STATUS)["store"]["n_quarantined"] >= 1


ABSENT = [
    ("GET", "/v1/nothing", 404, "bad-request"),
    ("GET", "/", 404, "bad-request"),
    ("GET", protocol.RESOLVE, 405, "bad-request"),
    ("DELETE", protocol.ARTIFACTS, 405, "bad-request"),
    ("GET", protocol.BUILDS + "/b999999", 404, "not-built"),
    ("GET", protocol.BUILDS + "?limit=0", 400, "bad-request"),
    ("GET", protocol.BUILDS + "?limit=many", 400, "bad-request"),
    ("GET", protocol.ARTIFACTS + "/" + "0" * 64, 404, "not-built"),
    ("GET", protocol.ARTIFACTS + "/" + "0" * 12, 404, "not-built"),
    ("GET", protocol.ARTIFACTS + "/" + "0" * 64 + "/payload", 404, "not-built"),
    ("GET", protocol.ARTIFACTS + "/00000", 400, "bad-request"),
    ("GET", protocol.ARTIFACTS + "/..%2f..%2flock", 404, "bad-request"),
    ("GET", protocol.ARTIFACTS + "/ABCDEF", 400, "bad-request"),
    ("GET", protocol.ARTIFACTS + "?name=" + "x" * 101, 400, "bad-request"),
    ("POST", protocol.SHUTDOWN + "?", 400, "bad-request"),
]


@pytest.mark.parametrize(("method", "path", "status", "code"), ABSENT)
def test_what_is_not_there(served: Daemon, method: str, path: str, status: int, code: str):
    found, content = raw(served, method, path, b"[1]" if method == "POST" else None)
    assert (found, error_of(found, content)["code"]) == (status, code)


def body_with(**changes: object) -> dict[str, Any]:
    return resolve_body(**changes)


def kernel_with(**changes: object) -> dict[str, Any]:
    """A resolve body whose one kernel is valid but for the changes."""
    kernel = {"name": "scale", "files": {}, "spec": {}, "target": "sm_90", "environment": {"python": "/python"}}
    return resolve_body({**kernel, **changes})


MALFORMED: dict[str, object] = {
    "nothing": b"",
    "no JSON": b"{",
    "not UTF-8": b'{"protocol": "\xff"}',
    "null": b"null",
    "a list": b"[]",
    "a number": b"1",
    "deep": b"[" * 100_000,
    "an empty object": {},
    "a further field": body_with(extra=1),
    "a further field with half a character": body_with(**{"\ud800": 1}),
    "no kernels": {name: value for name, value in body_with().items() if name != "kernels"},
    "kernels of another type": body_with(kernels={}),
    "a kernel of another type": body_with(kernels=[1]),
    "too many kernels": body_with(kernels=[{}] * 1001),
    "protocol as text": body_with(protocol="1"),
    "a negative wait": body_with(wait_s=-1),
    "an endless wait": body_with(wait_s=1e9),
    "a wait that is no number": json.dumps(body_with(wait_s=float("nan"))).encode(),
    "a long client": body_with(client="x" * 5000),
    "a file outside": kernel_with(files={"../../etc/passwd": "0" * 64}),
    "a file by its path": kernel_with(files={"/etc/passwd": "0" * 64}),
    "a hidden file": kernel_with(files={".bashrc": "0" * 64}),
    "a file without a name": kernel_with(files={"": "0" * 64}),
    "a digest that is none": kernel_with(files={"kernel.cu": "../lock"}),
    "an upper-case digest": kernel_with(files={"kernel.cu": "A" * 64}),
    "a list in the spec": kernel_with(spec={"size": [8]}),
    "a text for a boolean": kernel_with(build="no"),
    "a fraction in the spec": kernel_with(spec={"size": 8.5}),
    "null in the spec": kernel_with(spec={"size": None}),
    "no environment": kernel_with(environment={}),
    "an environment of another form": kernel_with(environment={"python": "/python", "home": "/root"}),
    "a search path as text": kernel_with(environment={"python": "/python", "python_path": "/a:/b"}),
}


@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_body(served: Daemon, body: object):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    status, answer = raw(served, "POST", protocol.RESOLVE, content)
    assert error_of(status, answer)["code"] == "bad-request"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "application/octet-stream"])
def test_another_content_type(served: Daemon, kind: str):
    status, answer = raw(served, "POST", protocol.RESOLVE, b"{}", **{"Content-Type": kind})
    error_of(status, answer)


def test_a_source_that_is_too_large(served: Daemon):
    status, answer = raw(served, "POST", protocol.SOURCES, b"x" * ((4 << 20) + 1))
    assert error_of(status, answer)["code"] == "bad-request"


@pytest.mark.parametrize("theirs", [0, protocol.PROTOCOL - 1, protocol.PROTOCOL + 1])
def test_another_protocol_is_refused(served: Daemon, theirs: int):
    status, answer = raw(served, "POST", protocol.RESOLVE, json.dumps(body_with(protocol=theirs, version="9.9")).encode())
    error = error_of(status, answer)
    assert (status, error["code"]) == (426, "protocol-mismatch")
    assert "9.9" in error["message"]
    assert kserve.__version__ in error["message"]


def test_a_client_refuses_a_daemon_of_another_protocol(served: Daemon, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(protocol, "PROTOCOL", protocol.PROTOCOL + 1)
    with pytest.raises(ProtocolMismatch):
        served.call("GET", protocol.STATUS)


def toml(old: str, new: str) -> bytes:
    assert old in CUDA_TOML
    return CUDA_TOML.replace(old, new, 1).encode()


# What a well-formed request may ask for in vain: kernel fields, kernel.toml, code.
REFUSED: dict[str, tuple[dict[str, Any], bytes, str]] = {
    "an unknown entry": ({"name": "other"}, CUDA_TOML.encode(), "unknown-kernel"),
    "a target that is none": ({"target": "pdp11"}, CUDA_TOML.encode(), "unsupported-target"),
    "too old a target": ({"target": "sm_75"}, CUDA_TOML.encode(), "unsupported-target"),
    "an axis that is none": ({"spec": {"width": 1}}, CUDA_TOML.encode(), "invalid-spec"),
    "a value out of range": ({"spec": {"size": 0}}, CUDA_TOML.encode(), "invalid-spec"),
    "a huge value": ({"spec": {"size": 10**30}}, CUDA_TOML.encode(), "invalid-spec"),
    "no TOML": ({}, b"[", "invalid-definition"),
    "not UTF-8": ({}, b"\xff", "invalid-definition"),
    "an empty definition": ({}, b"", "invalid-definition"),
    "a deep definition": ({}, b"a = " + b"[" * 5000 + b"]" * 5000, "invalid-definition"),
    "a number of 5000 digits": ({}, b"a = " + b"9" * 5000, "invalid-definition"),
    "a field that is none": ({}, toml("schema = 1", "schema = 1\nextra = 1"), "invalid-definition"),
    "an endless text": (
        {},
        toml("[target]", "[derived]\nlong = \"'a' * 99999999999999999999\"\n[target]"),
        "invalid-definition",
    ),
    "a derived axis without a value": (
        {},
        toml("[target]", '[derived]\nzero = "size // (size - 8)"\n[target]'),
        "invalid-spec",
    ),
    "another python": ({"environment": {"python": "/nonexistent"}}, CUDA_TOML.encode(), "toolchain-missing"),
    "a python that is none": ({"environment": {"python": "a\0b"}}, CUDA_TOML.encode(), "toolchain-missing"),
}


@pytest.mark.toolchain
@pytest.mark.parametrize(("changes", "definition", "code"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_wish(served: Daemon, connection: Connection, changes: dict[str, Any], definition: bytes, code: str):
    """An answer of its own for each kernel: the others of the request are served."""
    good = ask(connection, served.settings, "scale")
    request, _ = wish(served.settings, "scale")
    digest = connection.call("POST", protocol.SOURCES, definition)["digest"]
    bad = {**request, **changes, "files": {**request["files"], "kernel.toml": digest}}
    found = connection.call("POST", protocol.RESOLVE, resolve_body(bad, request))["results"]
    assert found[0]["error"]["code"] == code
    assert found[1]["variants"][0]["manifest"] == good["variants"][0]["manifest"]


@pytest.mark.toolchain
def test_a_file_that_is_also_a_folder_is_refused(served: Daemon, connection: Connection):
    ask(connection, served.settings, "scale")
    request, _ = wish(served.settings, "scale", size=61)
    files = {**request["files"], "kernel.cu/inside.h": request["files"]["kernel.cu"]}
    body = json.dumps(resolve_body({**request, "files": files}, wait_s=20)).encode()
    status, content = raw(served, "POST", protocol.RESOLVE, body)
    error = json.loads(content)["results"][0]["error"] if status == 200 else error_of(status, content)
    assert error["code"] in ("bad-request", "invalid-definition")
    unfinished = [build for build in connection.call("GET", protocol.BUILDS)["builds"] if build["state"] == "queued"]
    assert unfinished == [], "the key stays taken"


@pytest.mark.toolchain
def test_a_staging_directory_that_was_taken_away_is_made_again(served: Daemon, connection: Connection):
    ask(connection, served.settings, "scale")
    scratch = served.settings.store / "tmp"
    scratch.rename(scratch.with_name("away"))
    assert ask(connection, served.settings, "scale", size=71)["variants"][0]["origin"] == "built"
    assert stat.S_IMODE(scratch.stat().st_mode) == 0o700


def test_status_of_a_daemon_that_never_idles_out():
    with place() as root, daemon(root, arguments=("--idle", "0")) as found:
        status = found.call("GET", protocol.STATUS)
        assert status["pid"] == found.process.pid


@pytest.mark.toolchain
def test_shutdown_answers_first_then_ends(own_place: Any):
    with place() as root:
        write_slow(root / "kernels" / "slow")
        with daemon(root) as found, contextlib.closing(found.connection()) as connection:
            ask(connection, found.settings, "slow", wait_s=0.0)
            assert connection.call("POST", protocol.SHUTDOWN) == {"status": "stopping", "pid": found.process.pid}
            wait_for(lambda: found.process.poll() is not None, deadline_s=5, what="the daemon to end")
            assert found.process.returncode == 0


def test_a_client_gets_the_servers_error(connection: Connection):
    with pytest.raises(RequestError) as caught:
        connection.call("POST", protocol.RESOLVE, {"kernels": []})
    assert {"body.protocol", "body.version", "body.client", "body.wait_s"} <= set(caught.value.facts)
