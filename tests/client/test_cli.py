"""The command `kserve`, as a person and a script see it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kserve as package
from kserve.config import load_settings
from kserve.errors import STATUS
from tests.support.daemon import answers
from tests.support.definitions import CUDA_SOURCE, CUDA_TOML, write_cuda
from tests.support.processes import REPOSITORY, daemon_pid, kserve, wait_for
from tests.support.slow_kernel import write_slow

pytestmark = pytest.mark.toolchain
FIELDS = {"key": str, "digest": str, "target": str, "origin": str, "size_bytes": int, "seconds": float, "resources": dict}


def parsed(*arguments: str, status: int = 0) -> Any:
    """What `--json` prints."""
    done = kserve(*arguments, "--json")
    assert done.returncode == status, done.stderr
    return json.loads(done.stdout)


def test_build_then_look_into_the_store(kernels: Path):
    write_cuda(kernels / "scale")
    built = parsed("build", "scale", "--target", "sm_90", "--set", "size=16")
    assert {name: type(built[name]) for name in FIELDS} == FIELDS
    assert (built["name"], built["target"], built["origin"]) == ("scale", "cuda:sm_90", "built")
    assert built["spec"] == {"size": 16}
    assert built["resources"]["registers"] > 0
    assert len(built["key"]) == len(built["digest"]) == len(built["generic"]["key"]) == 64
    again = parsed("build", "scale", "--target", "cuda:sm_90", "--set", "size=16")
    assert again["origin"] == "disk"
    assert {**again, "origin": "", "seconds": 0} == {**built, "origin": "", "seconds": 0}

    listed = parsed("cache", "ls")["artifacts"]
    assert {row["key"] for row in listed} == {built["key"], built["generic"]["key"]}
    assert {row["digest"] for row in listed} == {built["digest"], built["generic"]["digest"]}
    assert parsed("cache", "ls", "--target", "cuda:sm_80")["artifacts"] == []
    assert len(parsed("cache", "ls", "--name", "scale")["artifacts"]) == 2
    shown = parsed("cache", "show", built["key"][:12])
    assert shown["manifest"]["key"] == built["key"]
    assert shown["manifest"]["contract"]["symbol"].startswith("_Z5scale")

    text = kserve("cache", "show", built["key"]).stdout
    assert all(word in text for word in (built["key"], built["digest"], "cuda:sm_90", "source.kernel.cu", "registers"))
    assert ".entry" in kserve("cache", "show", built["key"], "--ptx").stdout
    assert "ptxas info" in kserve("cache", "show", built["key"], "--log").stdout
    assert built["key"][:12] in kserve("cache", "ls").stdout


def test_several_targets_in_one_call(kernels: Path):
    write_cuda(kernels / "scale")
    found = parsed("build", "scale", "--target", "sm_90", "--target", "sm_80")["kernels"]
    assert [kernel["target"] for kernel in found] == ["cuda:sm_90", "cuda:sm_80"]
    text = kserve("build", "scale", "--target", "sm_90").stdout
    assert found[0]["key"][:12] in text
    assert "disk" in text


def test_kernels(kernels: Path):
    write_cuda(kernels / "mine")
    found = {row["name"]: row for row in parsed("kernels")["kernels"]}
    assert {"scale", "fused_norm_residual", "realspace_fwd", "realspace_bwd"} <= set(found)
    assert found["scale"]["folder"] == str((kernels / "mine").resolve())
    assert found["scale"]["axes"]["size"] == {"allowed": "an integer, 1 to 4096", "default": 8}
    assert "size=8" in kserve("kernels").stdout
    assert daemon_pid(kernels.parent) is None, "listing needs no daemon"


def test_status_up_and_down(own_place: Path):
    assert parsed("status", status=6)["error"]["code"] == "daemon-unreachable"
    assert parsed("down") == {"stopped": False}
    assert kserve("up", "--detach").returncode == 0
    status = parsed("status")
    assert status["pid"] == daemon_pid(own_place)
    assert {"version", "workers", "counters", "store", "n_running", "n_queued", "uptime_s"} <= set(status)
    assert parsed("down") == {"stopped": True, "pid": status["pid"]}


BROKEN = CUDA_SOURCE.replace("out[i]", "nowhere[i]")
# arguments, source, code, what the message holds
FAILURES: dict[str, tuple[list[str], str, str, list[str]]] = {
    "an unknown kernel": (["build", "scael", "--target", "sm_90"], CUDA_SOURCE, "unknown-kernel", ["scale", "kserve kernels"]),
    "an unknown axis": (["build", "scale", "--target", "sm_90", "--set", "sise=1"], CUDA_SOURCE, "invalid-spec", ["size"]),
    "a value": (["build", "scale", "--target", "sm_90", "--set", "size=0"], CUDA_SOURCE, "invalid-spec", ["1 to 4096"]),
    "no value": (["build", "scale", "--target", "sm_90", "--set", "size"], CUDA_SOURCE, "bad-request", ["AXIS=VALUE"]),
    "a target": (["build", "scale", "--target", "sm_75"], CUDA_SOURCE, "unsupported-target", ["sm_80"]),
    "an arch": (["build", "scale", "--target", "sm_999"], CUDA_SOURCE, "unsupported-target", ["NVRTC", "sm_90"]),
    "a compile": (["build", "scale", "--target", "sm_90"], BROKEN, "compile-failed", ["kernel.cu(5)", "nowhere"]),
    "a key": (["cache", "show", "0123456789"], CUDA_SOURCE, "not-built", ["kserve cache ls"]),
    "a short key": (["cache", "show", "0123"], CUDA_SOURCE, "bad-request", ["key"]),
    "a key with spaces": (["cache", "show", "not a key"], CUDA_SOURCE, "bad-request", ["key"]),
    "a key in letters": (["cache", "show", "schlüssel"], CUDA_SOURCE, "bad-request", ["key"]),
    "a key that is a path": (["cache", "show", "../../v1/status"], CUDA_SOURCE, "bad-request", []),
    "a long name": (["cache", "ls", "--name", "x" * 200], CUDA_SOURCE, "bad-request", ["name"]),
}


@pytest.mark.parametrize(("arguments", "source", "code", "named"), FAILURES.values(), ids=FAILURES.keys())
def test_a_failure_has_its_exit_status_and_names_what_helps(
    kernels: Path, arguments: list[str], source: str, code: str, named: list[str]
):
    write_cuda(kernels / "scale", source=source)
    done = kserve(*arguments)
    assert done.returncode == STATUS[code][1], done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert [word for word in named if word not in done.stderr] == []
    error = parsed(*arguments, status=STATUS[code][1])["error"]
    assert error["code"] == code
    assert set(error) == {"code", "message", "facts", "hint"}


@pytest.mark.parametrize("name", ["a b", "größe", "a&target=b", "a#b", "a/b?c"])
def test_any_name_may_be_looked_for(kernels: Path, name: str):
    assert parsed("cache", "ls", "--name", name) == {"artifacts": []}


def test_a_name_is_not_a_second_filter(kernels: Path):
    write_cuda(kernels / "scale")
    kserve("build", "scale", "--target", "sm_90")
    assert parsed("cache", "ls", "--name", "scale&target=cuda:sm_90") == {"artifacts": []}


@pytest.mark.parametrize(
    "arguments", [[], ["nothing"], ["build"], ["build", "x"], ["cache"], ["cache", "show"], ["up", "--idle", "x"]]
)
def test_wrong_use(own_place: Path, arguments: list[str]):
    done = kserve(*arguments)
    assert done.returncode == 2
    assert "usage: kserve" in done.stderr


@pytest.mark.parametrize("idle", ["-1", "nan"])
def test_an_idle_time_that_is_none_is_refused(own_place: Path, idle: str):
    command = [sys.executable, "-m", "kserve", "up", f"--idle={idle}"]
    started = subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: started.poll() is not None or answers(load_settings()), what="an end or an answer")
    finally:
        started.terminate()
        errors = started.communicate(timeout=20)[1]
    assert started.returncode == 2, errors
    assert "idle" in errors


def test_a_setting_that_cannot_be_read(own_place: Path):
    done = kserve("kernels", KSERVE_IDLE_S="soon")
    assert done.returncode == 2
    assert all(word in done.stderr for word in ("KSERVE_IDLE_S", "soon", "seconds above 0"))


def test_a_build_that_outlasts_its_deadline(kernels: Path):
    write_slow(kernels / "slow")
    error = parsed("build", "slow", "--target", "sm_90", "--timeout", "0.2", status=STATUS["build-timeout"][1])["error"]
    assert error["code"] == "build-timeout"
    assert error["hint"]


def test_a_folder_that_cannot_be_read_is_named(kernels: Path):
    write_cuda(kernels / "scale", toml=CUDA_TOML.replace("schema = 1", "schema = 2"))
    listed = kserve("kernels")
    assert str(kernels / "scale" / "kernel.toml") in listed.stdout + listed.stderr
    built = kserve("build", "scale", "--target", "sm_90")
    assert built.returncode == STATUS["invalid-definition"][1]
    assert str(kernels / "scale" / "kernel.toml") in built.stderr


def test_version(own_place: Path):
    assert kserve("--version").stdout.strip() == f"kserve {package.__version__}"
