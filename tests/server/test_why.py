"""The reason of a build, where a person meets it: log line, API, command."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from kserve import client, get_kernel, protocol
from kserve.client.connection import Connection, log_path
from kserve.config import load_settings
from tests.support.daemon import ask, daemon, place
from tests.support.definitions import CUDA_SOURCE, CUDA_TOML, write_cuda
from tests.support.processes import kserve, wait_for

pytestmark = pytest.mark.toolchain
TOML = CUDA_TOML.replace("headers = []", 'headers = ["scan.cuh"]')


def last_reasons() -> set[str]:
    """The reasons of the two builds (declared, generic) that ended last."""
    with contextlib.closing(Connection(load_settings())) as connection:
        return {build["reason"] for build in connection.call("GET", protocol.BUILDS)["builds"][:2]}


def built(folder: Path, **spec: int) -> str:
    client.forget()
    kernel = get_kernel("scale", target="sm_90", **spec)
    assert kernel.origin == "built"
    return kernel.key


def test_every_build_has_its_reason(kernels: Path):
    folder = write_cuda(kernels / "scale", toml=TOML, source='#include "scan.cuh"\n' + CUDA_SOURCE, scan__cuh="// one")
    first = built(folder)
    assert last_reasons() == {"first build"}
    (folder / "scan.cuh").write_text("// two")
    second = built(folder)
    assert last_reasons() == {"header scan.cuh changed"}
    third = built(folder, size=9)
    assert last_reasons() == {"size 8 -> 9"}
    assert 'reason="header scan.cuh changed"' in log_path(load_settings()).read_text()

    told = json.loads(kserve("cache", "why", third, first, "--json").stdout)
    assert told["differences"] == ["header scan.cuh changed", "size 8 -> 9"]
    nearest = json.loads(kserve("cache", "why", third[:12], "--json").stdout)
    assert (nearest["other"], nearest["differences"], nearest["reason"]) == (second, ["size 8 -> 9"], "size 8 -> 9")
    shown = kserve("cache", "why", second)
    assert shown.returncode == 0
    assert "header scan.cuh changed" in shown.stdout


def test_a_damaged_entry_is_built_again_for_that_reason(kernels: Path):
    write_cuda(kernels / "scale")
    client.forget()
    digest = get_kernel("scale", target="sm_90").digest
    path = load_settings().store / "payload" / digest[:2] / digest
    path.chmod(0o600)
    path.write_bytes(b"damaged")
    client.forget()
    assert get_kernel("scale", target="sm_90").digest == digest
    assert "quarantined: digest mismatch" in last_reasons()


def test_who_polls_hears_that_all_of_it_was_built():
    """With one job at a time the first variant is done while the second one waits: its origin must not become `disk`."""
    with place() as root:
        write_cuda(root / "kernels" / "scale")
        with daemon(root, KSERVE_JOBS="1") as found, contextlib.closing(found.connection()) as connection:
            answer = wait_for(lambda: settled(ask(connection, found.settings, "scale", wait_s=0.0)), what="the build")
    assert [variant["origin"] for variant in answer["variants"]] == ["built", "built"]


def settled(answer: dict) -> dict | None:
    return answer if "variants" in answer else None
