"""A daemon does not grow with the requests it has answered, and stays well."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from kserve import protocol
from tests.support.daemon import Daemon, ask, daemon, place, resolve_body, wish
from tests.support.definitions import write_cuda

N_REQUESTS = 10_000
N_WARM = 1_000
MOST_GROWTH = 1.05
_JSON = {"Content-Type": "application/json"}


def rss_bytes(pid: int) -> int:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def kept(served: Daemon) -> http.client.HTTPConnection:
    """A connection that is kept alive, without the client's code."""
    connection = http.client.HTTPConnection("kserve", timeout=20)
    connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.sock.connect(str(served.settings.socket))
    return connection


def requests_of(served: Daemon, key: str) -> list[tuple[str, str, Any]]:
    """What is asked in turn: (method, path, body). A function makes another body each time."""
    known, _ = wish(served.settings, "scale")
    unknown = {**known, "name": "other"}
    return [
        ("GET", protocol.HEALTH, None),
        ("POST", protocol.RESOLVE, lambda n: resolve_body(known, client=f"client {n}")),
        ("POST", protocol.RESOLVE, lambda n: resolve_body({**known, "spec": {"size": -n}}, client=f"client {n}")),
        ("POST", protocol.RESOLVE, lambda n: resolve_body({**known, "build": False, "spec": {"size": 9 + n % 20}})),
        ("POST", protocol.RESOLVE, lambda n: {"protocol": n}),
        ("POST", protocol.RESOLVE, resolve_body(unknown)),
        ("POST", protocol.RESOLVE, b"{"),
        ("POST", protocol.SOURCES, b"the same bytes"),
        ("GET", protocol.ARTIFACTS, None),
        ("GET", f"{protocol.ARTIFACTS}/{key}", None),
        ("GET", f"{protocol.ARTIFACTS}/{key[:8]}/payload", None),
        ("GET", f"{protocol.WHY}?key={key}", None),
        ("GET", f"{protocol.BUILDS}?limit=5", None),
        ("GET", f"{protocol.BUILDS}/none", None),
        ("GET", "/v1/nothing", None),
    ]


@pytest.mark.slow
@pytest.mark.toolchain
def test_ten_thousand_requests_do_not_grow_the_daemon():
    with place() as root:
        write_cuda(root / "kernels" / "scale")
        with daemon(root) as served, contextlib.closing(served.connection()) as own:
            key = ask(own, served.settings, "scale")["variants"][0]["manifest"]["key"]
            asked = itertools.cycle(requests_of(served, key))
            with contextlib.closing(kept(served)) as connection:
                for n in range(N_REQUESTS):
                    method, path, body = next(asked)
                    made = body(n) if callable(body) else body
                    content = made if made is None or isinstance(made, bytes) else json.dumps(made).encode()
                    connection.request(method, path, body=content, headers=_JSON)
                    answer = connection.getresponse()
                    answer.read()
                    assert answer.status < 500, (method, path, made)
                    if n == N_WARM:
                        warm = rss_bytes(served.process.pid)
            assert rss_bytes(served.process.pid) <= warm * MOST_GROWTH
            assert own.call("GET", protocol.HEALTH)["status"] == "ok"
            assert "Traceback" not in served.log
