"""`kserve ncu` and `kserve sanitize`: what the tools are given, and what comes back from them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kserve import cli, client
from kserve.errors import LoadError, RequestError, ToolchainMissing
from kserve.measure import launch_once, tools
from kserve.measure.launch_once import maker_of, place_of
from kserve.measure.tools import NCU, SANITIZER, find_tool
from kserve.measure.workloads import example
from tests.support.daemon import Daemon, daemon, place, variables
from tests.support.definitions import CUDA_SOURCE, CUDA_TOML, write_cuda
from tests.support.processes import kserve
from tests.support.stub_driver import build_stub

# Says what it was given, runs the child behind its options, and ends with the status it was told or the child's.
STAND_IN = """#!{python}
import json, os, subprocess, sys
options, child = sys.argv[1:sys.argv.index({python!r})], sys.argv[sys.argv.index({python!r}):]
status = subprocess.run(child).returncode
pool = os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING")
with open({record!r}, "w") as file:
    json.dump({{"options": options, "wish": json.loads(child[-1]), "status": status, "pool": pool}}, file)
sys.exit(int(os.environ.get("STAND_IN_STATUS", status)))
"""
# Inputs without a GPU: addresses that the stand-in for the driver takes for a device's.
INPUTS = """
import atexit, ctypes, json
def make(spec, device):
    stub = ctypes.CDLL("libcuda.so.1")
    for name in ("stub_memory", "stub_memory_bytes"):
        ctypes.c_uint64.in_dll(stub, name).value = 1 << 20
    def note():
        n_launches = ctypes.c_int.in_dll(stub, "stub_n_launches").value
        json.dump([spec, device, n_launches], open({record!r}, "w"))
    atexit.register(note)
    return 1 << 20, (1 << 20) + 4096, 100, 2.0
def too_few(spec, device):
    return ()
"""


class Place:
    """A daemon with one kernel, both tools as stand-ins on PATH, and a stand-in for the driver."""

    def __init__(self, running: Daemon, folder: Path) -> None:
        self.running = running
        self.inputs, self.launched, self.given = folder / "inputs.py", folder / "launched.json", folder / "given.json"
        self.inputs.write_text(INPUTS.format(record=str(self.launched)))
        for tool in (NCU, SANITIZER):
            (folder / tool.name).write_text(STAND_IN.format(python=sys.executable, record=str(self.given)))
            (folder / tool.name).chmod(0o700)
        build_stub(folder).rename(folder / "libcuda.so.1")
        self.variables = {**variables(running.root), "PATH": f"{folder}:/usr/bin:/bin", "LD_LIBRARY_PATH": str(folder)}

    def __call__(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        for file in (self.launched, self.given):
            file.unlink(missing_ok=True)
        return kserve(*arguments, **self.variables, **environment)

    def read(self) -> tuple[dict[str, Any], list[Any]]:
        return json.loads(self.given.read_text()), json.loads(self.launched.read_text())


@pytest.fixture(scope="module")
def tool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with place() as root:
        write_cuda(root / "kernels" / "scale")
        with daemon(root) as running:
            yield Place(running, tmp_path_factory.mktemp("tools"))


@pytest.mark.toolchain
@pytest.mark.parametrize(
    ("command", "debug", "options"),
    [
        (["ncu"], "lineinfo", ["--kernel-name-base", "mangled", "--kernel-name", "_Z5scaleILi9EEvPKfPfif"]),
        (["sanitize", "--tool", "racecheck"], "sanitize", ["--error-exitcode", "1", "--tool", "racecheck"]),
    ],
)
def test_the_tool_watches_one_launch_of_the_debug_variant(tool: Place, command: list[str], debug: str, options: list[str]):
    own = ["--set", "full", "--", "more"]
    done = tool(*command, "scale", "--set", "size=9", "--inputs", f"{tool.inputs}:make", "--", *own)
    assert done.returncode == 0, done.stderr
    given, (spec, device, n_launches) = tool.read()
    assert (spec, device, n_launches) == ({"size": 9}, "cuda", 1)
    assert given["wish"] == {
        "name": "scale",
        "target": "cuda:sm_90",
        "spec": {"size": 9},
        "debug": debug,
        "inputs": f"{tool.inputs}:make",
    }
    joined = " ".join(given["options"])
    assert " ".join(options) in joined
    assert joined.endswith(" ".join(own)), "the caller's come last, and all of them"
    assert "--target-processes application-only" in joined
    assert given["pool"] == "1"
    assert f"{tool.inputs.parent}/{NCU.name if command == ['ncu'] else SANITIZER.name} --target-processes" in done.stderr
    built = [row for row in tool.running.call("GET", "/v1/artifacts")["artifacts"] if row["debug"] == debug]
    assert {row["variant"] for row in built} == {"declared", "generic"}


@pytest.mark.toolchain
def test_the_exit_status_is_the_tools(tool: Place):
    command = ("scale", "--inputs", f"{tool.inputs}:make")
    refused = tool("ncu", *command, STAND_IN_STATUS="9")
    assert refused.returncode == 9
    assert "ERR_NVGPUCTRPERM" in refused.stderr
    assert "ERR_NVGPUCTRPERM" not in tool("ncu", *command).stderr
    assert tool("sanitize", *command, STAND_IN_STATUS="1").returncode == 1
    failing = tool("sanitize", "scale", "--inputs", f"{tool.inputs}:too_few")
    assert failing.returncode == 7
    assert "takes 4 arguments" in failing.stderr


@pytest.mark.toolchain
def test_what_is_wrong_is_said_before_the_tool_runs(tool: Place):
    for arguments, status, named in (
        (("scale",), 2, "--inputs"),
        (("scale", "--inputs", "/does/not/exist.py:make"), 2, "exist.py"),
        (("scale", "--inputs", str(tool.inputs)), 2, "FILE.py:FUNCTION"),
        (("scael",), 3, "scale"),
        (("scale", "--set", "size=x", "--inputs", f"{tool.inputs}:make"), 2, "size"),
    ):
        done = tool("ncu", *arguments)
        assert (done.returncode, named in done.stderr) == (status, True), done.stderr
        assert not tool.given.exists()


def test_a_missing_tool_is_named_with_what_brings_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    for one in (NCU, SANITIZER):
        with pytest.raises(ToolchainMissing) as caught:
            find_tool(one, root=tmp_path)
        assert one.name in caught.value.message
        assert "CUDA toolkit" in str(caught.value.hint)


def test_path_comes_first_then_the_latest_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for release in ("2024.1", "2025.3"):
        (tmp_path / "opt/nvidia/nsight-compute" / release).mkdir(parents=True)
        (tmp_path / "opt/nvidia/nsight-compute" / release / "ncu").touch()
    assert find_tool(NCU, root=tmp_path) == str(tmp_path / "opt/nvidia/nsight-compute/2025.3/ncu")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/ncu").touch()
    (tmp_path / "bin/ncu").chmod(0o700)
    assert find_tool(NCU, root=tmp_path) == str(tmp_path / "bin/ncu")


def test_without_a_gpu_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def no_driver() -> None:
        raise LoadError("there is no NVIDIA driver on this machine")

    monkeypatch.setattr(tools, "driver", no_driver)
    (tmp_path / "ncu").touch()
    (tmp_path / "ncu").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "inputs.py").write_text("def make(spec, device): pass")
    assert cli.main(["ncu", "fused_norm_residual", "--inputs", f"{tmp_path}/inputs.py:make"]) == 7
    assert "ncu needs a GPU" in capsys.readouterr().err


def test_a_file_without_the_function_is_named(tmp_path: Path):
    (tmp_path / "beside.py").write_text("n = 3\n")
    (tmp_path / "inputs.py").write_text("import beside\ndef make(spec, device):\n    return (beside.n,)\n")
    assert maker_of("scale", place_of("scale", f"{tmp_path}/inputs.py:make"))({}, "cuda") == (3,)
    with pytest.raises(RequestError, match="made"):
        maker_of("scale", place_of("scale", f"{tmp_path}/inputs.py:made"))


@pytest.mark.parametrize(("name", "spec"), [("fused_norm_residual", {"hidden": 8}), ("realspace_fwd", {"n_ang": 2})])
def test_a_kernel_behind_an_op_needs_no_file(name: str, spec: dict[str, int], monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("torch")
    known = example(name)
    assert known is not None
    monkeypatch.setattr(launch_once, "example", lambda _: known._replace(sizes=dict.fromkeys(known.sizes, 3)))
    assert place_of(name, None) == ""
    arguments = maker_of(name, "")(spec, "cpu")
    assert [argument for argument in arguments if isinstance(argument, int)] == [3], "the count"
    assert all(tensor.device.type == "cpu" for tensor in arguments if hasattr(tensor, "device"))


GPU_INPUTS = """
import torch
def make(spec, device):
    x = torch.ones(1000, device=device)
    return x, torch.empty_like(x), x.numel(), 2.0
"""


def on_gpu(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *command: str, source: str = CUDA_SOURCE, toml: str = CUDA_TOML
) -> Any:
    write_cuda(folder / "kernels" / "scale", source=source, toml=toml)
    (folder / "inputs.py").write_text(GPU_INPUTS)
    monkeypatch.setenv("KSERVE_PATH", str(folder / "kernels"))
    client.forget()
    split = command.index("--") if "--" in command else len(command)
    return kserve(command[0], "scale", *command[1:split], "--inputs", f"{folder}/inputs.py:make", *command[split:])


def installed(one: tools.Tool) -> None:
    try:
        find_tool(one)
    except ToolchainMissing as error:
        pytest.skip(error.message)


@pytest.mark.gpu
@pytest.mark.toolchain
def test_the_real_ncu_profiles_the_kernel(gpu, own_place: Path, monkeypatch: pytest.MonkeyPatch):
    installed(NCU)
    done = on_gpu(own_place, monkeypatch, "ncu", "--", "--section", "LaunchStats")
    said = done.stdout + done.stderr
    if "ERR_NVGPUCTRPERM" in done.stdout:
        assert done.returncode != 0
        assert "NVreg_RestrictProfilingToAdminUsers" in done.stderr
    else:
        assert done.returncode == 0, said
        assert "scale" in done.stdout
        assert "Registers Per Thread" in done.stdout


@pytest.mark.gpu
@pytest.mark.toolchain
def test_the_real_sanitizer_passes_a_sound_kernel(gpu, own_place: Path, monkeypatch: pytest.MonkeyPatch):
    installed(SANITIZER)
    done = on_gpu(own_place, monkeypatch, "sanitize")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ERROR SUMMARY: 0 errors" in done.stdout


@pytest.mark.gpu
@pytest.mark.toolchain
def test_the_real_sanitizer_passes_a_built_in_kernel(gpu):
    installed(SANITIZER)
    done = kserve("sanitize", "fused_norm_residual", "--set", "hidden=128")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ERROR SUMMARY: 0 errors" in done.stdout


@pytest.mark.gpu
@pytest.mark.toolchain
@pytest.mark.parametrize(
    ("check", "source", "line"),
    [
        ("memcheck", CUDA_SOURCE.replace("if (i < n) out[i] = factor * x[i]", "out[i + 4096] = factor * x[i]"), 5),
        (
            "racecheck",
            CUDA_SOURCE.replace(
                "if (i < n)", "__shared__ float s[128]; s[threadIdx.x] = x[0];\n  factor += s[127 - threadIdx.x];\n  if (i < n)"
            ),
            6,
        ),
    ],
)
def test_the_real_sanitizer_names_the_line(gpu, own_place: Path, monkeypatch: pytest.MonkeyPatch, check, source, line):
    installed(SANITIZER)
    done = on_gpu(own_place, monkeypatch, "sanitize", "--tool", check, source=source)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"kernel.cu:{line}" in done.stdout
