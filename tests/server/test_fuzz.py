"""Requests made from the application's own OpenAPI description: every answer is documented, no error is a fault of kserve."""

from __future__ import annotations

import json
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import schemathesis
from hypothesis import given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from starlette.testclient import TestClient

from kserve import protocol
from kserve.errors import STATUS
from kserve.server.app import create_app
from kserve.server.hot import Activity, HotRoad
from kserve.service import KernelService
from kserve.store.files import FileStore
from tests.support.daemon import place, resolve_body, settings_of, wish
from tests.support.definitions import CUDA_TOML, write_cuda
from tests.support.mutations import JSON_VALUES, TOML_VALUES, damaged, mutated, toml_of

pytestmark = pytest.mark.toolchain

DESCRIPTION = create_app(None, Activity(), stop=lambda: None).openapi()
SCHEMA = schemathesis.openapi.from_dict(DESCRIPTION)
ROUTES = [(method.upper(), path) for path, methods in DESCRIPTION["paths"].items() for method in methods]
# What a request may well hold, by field: most of what is drawn at random gets no further than its form.
LIKELY = {
    "name": st.sampled_from(["scale", "scal", ""]),
    "target": st.sampled_from(["sm_75", "sm_90a", "cuda:sm_90", "gfx942", "pdp11"]),
    "spec": st.dictionaries(
        st.sampled_from(["size", "other"]), st.integers(-1, 9) | st.sampled_from(["8", "x", True]), max_size=2
    ),
    "files": st.dictionaries(st.sampled_from(["kernel.toml", "kernel.cu", "a.cuh", "kernel.cu/a"]), st.just("0" * 64)),
}
PYTHONS = [sys.executable, sys.executable, "/none"]
# What a daemon may answer that is not the request's fault: none of it can come up here.
FAULTS = {code for code, (status, _) in STATUS.items() if status >= 500}


class Served(NamedTuple):
    """The application over a real service with one built kernel; `stops` counts the shutdowns it was asked for."""

    client: TestClient
    kernel: dict[str, Any]
    keys: list[str]
    stops: list[None]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with place() as root:
        write_cuda(root / "kernels" / "scale")
        here = settings_of(root)
        service = KernelService(here, FileStore(here.store, writable=True))
        stops: list[None] = []
        activity = Activity()
        full = create_app(service, activity, stop=lambda: stops.append(None))
        hot = HotRoad(service, activity, lambda: full, stop=lambda: stops.append(None))

        async def app(scope: Any, receive: Any, send: Any) -> None:
            """As in a daemon the hot road first; the test client alone speaks of a lifespan."""
            await (hot if scope["type"] == "http" else full)(scope, receive, send)

        with TestClient(app, base_url="http://kserve", raise_server_exceptions=False) as client:
            kernel, contents = wish(here, "scale", size=8)
            for content in contents:
                client.post(protocol.SOURCES, content=content)
            built = client.post(protocol.RESOLVE, json=resolve_body(kernel)).json()["results"][0]["variants"]
            keys = [variant["manifest"]["key"] for variant in built]
            client.post(protocol.PINS, json={"keys": keys})  # or a generated prune would take them
            yield Served(client, {**kernel, "build": False}, keys, stops)
            assert client.get(protocol.HEALTH).json()["status"] == "ok"
            client.portal.call(service.close)


def send(client: TestClient, case: Case) -> Any:
    """The answer to a generated request, which is one of the documented ones."""
    sent = case.as_transport_kwargs(base_url="http://kserve")
    sent.pop("cookies", None)
    body = sent.pop("data", None)
    answer = client.request(**sent, **({} if body is None else {"content": body}))
    case.validate_response(answer)
    return check(answer)


def check(answer: Any) -> Any:
    """The answer itself: a success, or an error of the documented shape that is not kserve's own."""
    if answer.status_code < 400:
        return answer
    content = answer.json()
    assert set(content) == {"error"}, content
    check_error(content["error"])
    assert answer.status_code in (STATUS[content["error"]["code"]][0], 404, 405), content
    return answer


def check_error(error: dict[str, Any]) -> None:
    assert set(error) == {"code", "message", "facts", "hint"}
    assert error["code"] in set(STATUS) - FAULTS, error
    assert error["message"]
    assert all(isinstance(value, str) for value in error["facts"].values())


@pytest.mark.parametrize(("method", "path"), ROUTES)
@given(data=st.data())
@settings(max_examples=40)
def test_a_generated_request_is_answered(served: Served, method: str, path: str, data: st.DataObject):
    mode = data.draw(st.sampled_from(list(GenerationMode)))
    send(served.client, data.draw(SCHEMA[path][method].as_strategy(generation_mode=mode)))


@pytest.mark.parametrize("path", [path for path in DESCRIPTION["paths"] if "{key}" in path] + [protocol.WHY])
@given(data=st.data())
@settings(max_examples=40)
def test_a_request_for_what_is_there_is_answered(served: Served, path: str, data: st.DataObject):
    case = data.draw(SCHEMA[path]["GET"].as_strategy())
    part = data.draw(st.sampled_from(served.keys))[: data.draw(st.integers(5, 65))]
    if "{key}" in path:
        case.path_parameters["key"] = part
    else:
        case.query = {"key": part, **data.draw(st.sampled_from([{}, *({"other": key} for key in served.keys)]))}
    assert (send(served.client, case).status_code == 200) == (len(part) in range(6, 65))


def post(client: TestClient, body: Any) -> Any:
    """The answer to a resolve request, half characters and all."""
    content = json.dumps(body).encode()
    return check(client.post(protocol.RESOLVE, content=content, headers={"Content-Type": "application/json"}))


def test_a_wish_that_is_nearly_right_has_an_answer_of_its_own(served: Served):
    """It reaches the planning, and builds nothing; a good one beside it is served."""
    seen: Counter[str] = Counter()

    @given(st.data())
    @settings(max_examples=300)
    def ask(data: st.DataObject) -> None:
        field = data.draw(st.sampled_from([*LIKELY, "any", "any"]))
        if field == "any":
            changed = data.draw(mutated(served.kernel, values=JSON_VALUES))
        else:
            changed = {**served.kernel, field: data.draw(LIKELY[field])}
        if isinstance(changed.get("environment"), dict):  # never run what somebody made up
            changed["environment"] = {**served.kernel["environment"], "python": data.draw(st.sampled_from(PYTHONS))}
        changed["build"] = False
        answer = post(served.client, resolve_body(changed, served.kernel, wait_s=5.0))
        if answer.status_code != 200:
            seen["refused"] += 1
            return
        first, second = answer.json()["results"]
        assert [variant["manifest"]["key"] for variant in second["variants"]] == served.keys
        (kind,) = first.keys() & {"variants", "missing", "error", "pending"}
        seen[first["error"]["code"] if kind == "error" else kind] += 1
        if kind == "error":
            check_error(first["error"])

    ask()
    assert {"refused", "variants", "missing", "invalid-spec", "unsupported-target", "unknown-kernel", "toolchain-missing"} <= {
        *seen
    }


@given(data=st.data())
@settings(max_examples=100)
def test_a_body_that_is_nearly_right_is_answered(served: Served, data: st.DataObject):
    post(served.client, data.draw(mutated(resolve_body(wait_s=0.1), values=JSON_VALUES)))


@given(data=st.data())
@settings(max_examples=60)
def test_a_definition_that_is_nearly_right_is_planned_or_refused(served: Served, data: st.DataObject):
    nearly = mutated(tomllib.loads(CUDA_TOML), values=TOML_VALUES, most=1).map(lambda document: toml_of(document).encode())
    content = data.draw(nearly | damaged(CUDA_TOML.encode()))
    digest = served.client.post(protocol.SOURCES, content=content).json()["digest"]
    changed = {**served.kernel, "files": {**served.kernel["files"], "kernel.toml": digest}}
    first, second = post(served.client, resolve_body(changed, served.kernel)).json()["results"]
    assert [variant["manifest"]["key"] for variant in second["variants"]] == served.keys
    if "variants" not in first:
        check_error(first["error"])
        assert STATUS[first["error"]["code"]][0] < 500


def test_nothing_else_was_built_and_a_shutdown_only_asks(served: Served):
    n_stops = len(served.stops)
    assert served.client.post(protocol.SHUTDOWN).json()["status"] == "stopping"
    assert len(served.stops) == n_stops + 1
    counters = served.client.get(protocol.STATUS).json()["counters"]
    assert (counters["built"], counters.get("failed", 0)) == (len(served.keys), 0)
