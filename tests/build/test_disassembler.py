"""SASS and what is read from it: the instruction mix, where a disassembler comes from, and one that misbehaves."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kserve import cli, client, get_kernel, protocol
from kserve.errors import BuildError, ToolchainMissing
from kserve.toolchain import disassembler
from kserve.toolchain.disassembler import disassemble, find_disassembler
from kserve.toolchain.sass import instruction_mix
from tests.support.daemon import Daemon, daemon, place, variables
from tests.support.definitions import write_cuda, write_triton
from tests.support.processes import wait_for

# What each line must be counted as; NVIDIA's spelling, Turing to Blackwell.
LINES = {
    "HMMA.16816.F32 R4, R8, R12, R4": ["matrix"],
    "IMMA.16832.S8.S8.SAT R4, R8.ROW, R12.COL, R4": ["matrix"],
    "DMMA.884 R4, R8, R12, R4": ["matrix"],
    "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24, gsb0": ["matrix"],
    "QGMMA.64x64x32.F32.E4M3.E4M3 R24, gdesc[UR8], R24": ["matrix"],
    "UTCHMMA gdesc[UR8], gdesc[UR10], tmem[UR4], tmem[UR6], idesc[UR7], UP0": ["matrix"],
    "UTCQMMA.2CTA gdesc[UR8], gdesc[UR10], tmem[UR4], tmem[UR6], idesc[UR7], UP0": ["matrix"],
    "@!P0 LDG.E R0, desc[UR6][R2.64]": ["global_loads", "global_loads_32"],
    "@P1 LDG.E.128.CONSTANT R4, desc[UR6][R2.64]": ["global_loads", "global_loads_128"],
    "LDG.E.64 R4, desc[UR6][R2.64]": ["global_loads", "global_loads_64"],
    "LDG.E.U8 R4, desc[UR6][R2.64]": ["global_loads", "global_loads_8"],
    "LDG.E.S16 R4, desc[UR6][R2.64]": ["global_loads", "global_loads_16"],
    "LDG.E.ENL2.256 R8, R4, desc[UR6][R2.64]": ["global_loads", "global_loads_256"],
    "LD.E R4, [R2.64]": ["global_loads", "global_loads_32"],
    "STG.E.128 desc[UR6][R4.64], R8": ["global_stores", "global_stores_128"],
    "LDGSTS.E.BYPASS.128 [R5], desc[UR6][R2.64]": ["async_copies", "async_copies_128"],
    "LDS.128 R4, [R0]": ["shared_loads"],
    "LDSM.16.M88.4 R4, [R0]": ["shared_loads"],
    "STS [R7], R0": ["shared_stores"],
    "LDL.LU R3, [R1+0x8]": ["local_loads"],
    "STL.64 [R1], R2": ["local_stores"],
    "RED.E.ADD.F32.FTZ.RN.STRONG.GPU desc[UR4][R2.64], R5": ["atomics"],
    "ATOMG.E.ADD.STRONG.GPU PT, R2, desc[UR4][R2.64], R5": ["atomics"],
    "ATOMS.ADD RZ, [R2], R5": ["atomics"],
    "BAR.SYNC.DEFER_BLOCKING 0x0": ["barriers"],
    "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4], RZ": ["barriers"],
    "UTMALDG.2D [UR8], [UR4], desc[UR6]": ["bulk_copies"],
    "UBLKCP.S.G [UR8], [UR4], UR6": ["bulk_copies"],
    "LDTM.x32 R4, tmem[UR4]": ["tensor_memory"],
    "MUFU.RSQ R7, R8": ["special_functions"],
    "@!UP0 BRA `(.L_x_3)": ["branches"],
    "IMAD.WIDE R2, R5.reuse, 0x4, R2": [],
    "LDC.64 R2, c[0x0][0x210]": [],
    "REDUX.SUM UR4, R5": [],
    "STALL": [],
    "@P0 EXIT": [],
}


@pytest.mark.parametrize(("line", "classes"), LINES.items())
def test_an_instruction_is_counted_as_what_it_is(line: str, classes: list[str]):
    found = instruction_mix(f"        /*00a0*/                   {line} ;\n        /*0220*/                   NOP;\n")
    assert {name for name, count in found.items() if count} == {"total", *classes}
    assert set(found.values()) <= {0, 1}


def test_text_around_the_code_is_no_instruction():
    text = '\t.target\tsm_90\n//--------------------- .text.scale ---\nscale:\n\t//## File "/a/HMMA.cu", line 4\n.L_x_0:\n'
    assert not any(instruction_mix(text).values())


def test_the_first_in_the_packages_is_taken_then_triton_then_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    system, packages = tmp_path / "bin", tmp_path / "site-packages"
    monkeypatch.setattr(disassembler, "_TOOLKITS", (str(system),))
    with pytest.raises(ToolchainMissing) as caught:
        find_disassembler(["", str(packages), "/does/not/exist"])
    assert "nvidia-cuda-nvdisasm" in str(caught.value.hint)
    for folder in (system, packages / "triton/backends/nvidia/bin", packages / "nvidia/cu13/bin"):
        folder.mkdir(parents=True)
        (folder / "nvdisasm").touch()
        assert find_disassembler(["", str(packages)]) == folder / "nvdisasm"


def tool(folder: Path, script: str) -> Path:
    """An executable in place of nvdisasm."""
    path = folder / "nvdisasm"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    return path


def run(folder: Path, script: str) -> str:
    binary = folder / "work" / "payload.cubin"
    binary.parent.mkdir(exist_ok=True)
    binary.write_bytes(b"bytes")
    return asyncio.run(disassemble(tool(folder, script), binary, lines=False))


def test_the_tool_works_in_the_binarys_folder_and_sees_nothing_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SECRET", "of ours")
    seen = run(tmp_path, 'pwd; cat payload.cubin; echo; echo "$@"; /usr/bin/env')
    assert seen.splitlines()[:3] == [str(tmp_path / "work"), "bytes", "--print-code payload.cubin"]
    assert "SECRET" not in seen


@pytest.mark.parametrize(
    ("script", "named"),
    [("echo unknown arch; exit 3", "status 3"), ("kill -SEGV $$", "status -11"), ("yes", "larger"), ("sleep 60", "longer")],
)
def test_a_tool_that_misbehaves_is_an_error_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, named: str):
    monkeypatch.setattr(disassembler, "_LONGEST_S", 1.0 if "sleep" in script else 60.0)
    monkeypatch.setattr(disassembler, "_MOST_BYTES", 1 << 20)
    pid = tmp_path / "pid"
    with pytest.raises(BuildError) as caught:
        run(tmp_path, f"echo $$ > {pid}; exec {script}" if script in ("yes", "sleep 60") else script)
    assert named in caught.value.message
    if "unknown" in script:
        assert "unknown arch" in caught.value.facts["tool"]
    if pid.exists():
        wait_for(lambda: not Path(f"/proc/{pid.read_text().strip()}").exists(), what="the tool to be gone")


def test_a_tool_that_cannot_be_run(tmp_path: Path):
    (tmp_path / "payload").touch()
    with pytest.raises(BuildError, match="cannot be run"):
        asyncio.run(disassemble(tmp_path / "payload", tmp_path / "payload", lines=False))


MIX_TOML = """
schema = 1
language = "cuda"
sources = ["kernel.cu"]
[target]
cuda = "sm_80"
[[entry]]
name = "mixed"
summary = "one of each"
function = "mixed"
arguments = [
  { name = "x", type = "pointer", dtype = "float32", mutated = true },
  { name = "n", type = "i32" },
]
launch = { grid = [1], block = [128], shared_bytes = "4 * n" }
"""
MIX_SOURCE = """
__global__ void mixed(float* x, int n) {
  __shared__ float tile[128];
  float kept[64];
  int t = threadIdx.x;
  float4 four = reinterpret_cast<float4*>(x)[t];
  tile[t] = four.x + four.y;
  for (int i = 0; i < 64; i++) kept[i] = x[i] * four.z;
  __syncthreads();
  float sum = kept[(t * n) & 63] + __sinf(tile[127 - t]);
  unsigned a[4] = {1u, 2u, 3u, 4u}, b[2] = {5u, 6u};
  float c[4] = {sum, 0.f, 0.f, 0.f};
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  atomicAdd(x + 1024, c[0]);
  reinterpret_cast<float2*>(x)[t + 1024] = make_float2(c[1], c[2]);
}
"""


@pytest.fixture(scope="module")
def running() -> Iterator[Daemon]:
    with place() as root:
        write_cuda(root / "kernels" / "mixed", toml=MIX_TOML, source=MIX_SOURCE)
        write_triton(root / "kernels" / "tscale")
        with daemon(root) as found:
            yield found


@pytest.fixture
def served(running: Daemon, monkeypatch: pytest.MonkeyPatch) -> Daemon:
    for name, value in variables(running.root).items():
        monkeypatch.setenv(name, value)
    client.forget()
    return running


def looked_at(served: Daemon, key: str, query: str = "?instructions=1") -> dict[str, Any]:
    found: dict[str, Any] = served.call("GET", f"/v1/artifacts/{key}{query}", wait_s=60)["facts"]
    return found


@pytest.mark.toolchain
def test_the_facts_of_a_real_kernel(served: Daemon, capsys: pytest.CaptureFixture[str]):
    kernel = get_kernel("mixed", target="sm_90")
    facts = looked_at(served, kernel.key)
    mix = facts["instructions"]
    for name in (
        "matrix",
        "global_loads_128",
        "global_stores_64",
        "shared_loads",
        "shared_stores",
        "local_loads",
        "local_stores",
    ):
        assert mix[name] >= 1, name
    for name in ("atomics", "barriers", "special_functions", "branches"):
        assert mix[name] >= 1, name
    assert (mix["bulk_copies"], mix["tensor_memory"]) == (0, 0)
    assert sum(count for name, count in mix.items() if name != "total" and not name[-1].isdigit()) < mix["total"]
    assert facts["occupancy"]["depends_on"] == "n"
    assert kernel.resources["stack_bytes"] >= 256

    began = time.monotonic()
    assert looked_at(served, kernel.key)["instructions"] == mix
    again_s = time.monotonic() - began
    capsys.readouterr()
    assert cli.main(["cache", "show", kernel.key]) == 0
    shown = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if len(line.split(maxsplit=1)) == 2)
    assert shown["matrix"] == f"yes, {mix['matrix']} instructions"
    assert shown["instructions"].startswith(f"{mix['total']}: ")
    assert shown["registers"] == f"{kernel.resources['registers']} a thread"
    assert "depends on n" in shown["occupancy"]
    assert cli.main(["cache", "show", kernel.key, "--sass"]) == 0
    sass = capsys.readouterr().out
    assert "HMMA" in sass
    assert instruction_mix(sass) == mix
    assert again_s < 1.0, "a second look needs no disassembler"
    assert cli.main(["cache", "show", kernel.key, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["facts"] == facts


TIGHT_SOURCE = """
__global__ void tight(float* x, int n) {
  float kept[64];
  #pragma unroll
  for (int i = 0; i < 64; i++) kept[i] = x[i];
  #pragma unroll
  for (int i = 0; i < 64; i++) x[i + n] = kept[i] * kept[63 - i] + kept[(i * 7) % 64];
}
"""


@pytest.mark.toolchain
def test_a_build_says_what_it_spills(served: Daemon, capsys: pytest.CaptureFixture[str]):
    toml = MIX_TOML.replace('"mixed"', '"tight"').replace("[[entry]]", '[options]\nflags = ["--maxrregcount=24"]\n[[entry]]')
    write_cuda(served.root / "kernels" / "tight", toml=toml, source=TIGHT_SOURCE)
    assert cli.main(["build", "tight", "--target", "sm_90", "--target", "sm_80"]) == 0
    spilled = [get_kernel("tight", target=target).resources["spill_bytes"] for target in ("sm_90", "sm_80")]
    said = capsys.readouterr().out.splitlines()
    assert min(spilled) > 0
    assert said[-2:] == [
        f"tight for cuda:{target} spills {n_bytes} bytes a thread"
        for target, n_bytes in zip(("sm_90", "sm_80"), spilled, strict=True)
    ]
    assert cli.main(["build", "mixed", "--target", "sm_90"]) == 0
    assert "spills" not in capsys.readouterr().out


SLOW_TOOL = """#!/bin/sh
echo > {started}
read line < {gate}
echo '        /*0000*/                   HMMA.16816.F32 R4, R8, R12, R4 ;'
"""


@pytest.mark.toolchain
def test_the_daemon_answers_while_a_disassembler_works(own_place: Path, monkeypatch: pytest.MonkeyPatch):
    started, gate = own_place / "started", own_place / "gate"
    os.mkfifo(gate)
    tool(own_place, "").write_text(SLOW_TOOL.format(started=started, gate=gate))
    program = "import sys; from kserve import cli; from kserve.toolchain import disassembler as d\n"
    program += f"d._IN_PACKAGES, d._TOOLKITS = (), ({str(own_place)!r},)\nsys.exit(cli.main())"
    write_cuda(own_place / "kernels" / "scale")
    monkeypatch.setenv("KSERVE_PATH", str(own_place / "kernels"))
    with daemon(own_place, program=("-c", program)) as found, ThreadPoolExecutor() as pool:
        kernel = get_kernel("scale", target="sm_90")
        looks = [pool.submit(looked_at, found, kernel.key) for _ in range(2)]
        wait_for(started.exists, what="the disassembler to start")
        assert found.call("GET", protocol.HEALTH)["status"] == "ok"
        assert found.call("GET", f"{protocol.ARTIFACTS}/{kernel.key}")["facts"]["occupancy"]["percent"] == 100
        assert not any(look.done() for look in looks)
        gate.write_text("go\n")  # who waits behind the first look needs no second one
        assert [look.result()["instructions"]["matrix"] for look in looks] == [1, 1]


@pytest.mark.toolchain
def test_without_a_look_at_the_instructions_nothing_is_disassembled(served: Daemon):
    facts = looked_at(served, get_kernel("mixed", target="sm_80").key, "")
    assert list(facts) == ["occupancy"]


@pytest.mark.toolchain
def test_where_a_fact_cannot_be_had_it_says_so(served: Daemon, capsys: pytest.CaptureFixture[str]):
    kernel = get_kernel("tscale", target="gfx942")
    facts = looked_at(served, kernel.key)
    assert "hip:gfx942" in facts["occupancy"]["unavailable"]
    assert "hip:gfx942" in facts["instructions"]["unavailable"]
    assert cli.main(["cache", "show", kernel.key]) == 0
    assert "not available for hip:gfx942" in capsys.readouterr().out
    assert cli.main(["cache", "show", kernel.key, "--sass"]) == 4


@pytest.mark.toolchain
def test_a_machine_without_a_disassembler_says_what_to_install(
    own_place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    program = "import sys; from kserve import cli; from kserve.toolchain import disassembler as d\n"
    program += "d._IN_PACKAGES = d._TOOLKITS = ()\nsys.exit(cli.main())"
    write_cuda(own_place / "kernels" / "scale")
    monkeypatch.setenv("KSERVE_PATH", str(own_place / "kernels"))
    with daemon(own_place, program=("-c", program)) as found:
        kernel = get_kernel("scale", target="sm_90")
        facts = looked_at(found, kernel.key)
        assert "no disassembler" in facts["instructions"]["unavailable"]
        assert facts["occupancy"]["blocks_per_sm"] == 16
        assert cli.main(["cache", "show", kernel.key]) == 0
        assert "pip install nvidia-cuda-nvdisasm" in capsys.readouterr().out
        assert cli.main(["cache", "show", kernel.key, "--sass"]) == 4
        assert "pip install nvidia-cuda-nvdisasm" in capsys.readouterr().err
