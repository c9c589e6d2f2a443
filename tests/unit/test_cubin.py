"""Reading a compiler's output: parameters, resources, PTX, and bytes that are no cubin."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest

from kserve.errors import CompileFailed
from kserve.toolchain import cubin

SOURCE = r"""
struct Plain { int a; double b; char c; };
extern "C" __global__ void scale(const float* x, char c, short s, double d, Plain p, float f, bool b) {
  __shared__ float tile[32];
  tile[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  ((float*)x)[threadIdx.x] = tile[31 - threadIdx.x] * f + d + p.a + c + s + b;
}
extern "C" __global__ void scale_more(float* x, int n) {
  float a[64];
  #pragma unroll
  for (int i = 0; i < 64; i++) a[i] = x[i];
  #pragma unroll
  for (int i = 0; i < 64; i++) x[i + n] = a[i] * a[63 - i] + a[(i * 7) % 64];
}
extern "C" __global__ void indexed(float* x, int n) {
  float a[64];
  for (int i = 0; i < 64; i++) a[i] = x[i];
  for (int i = 0; i < 64; i++) x[i] = a[(i * n) & 63];
}
extern "C" __global__ void nothing() {}
"""


class Compiled(NamedTuple):
    cubin: bytes
    ptx: str
    report: str


def compile_for(arch: str) -> Compiled:
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc")

    def call(function, *arguments):
        status, *found = getattr(nvrtc, function)(*arguments)
        assert int(status) == 0, (function, status)
        return found[0] if found else None

    def output(getter):
        content = b" " * call(getter + "Size", program)
        call(getter, program, content)
        return content

    program = call("nvrtcCreateProgram", SOURCE.encode(), b"kernels.cu", 0, None, None)
    options = [f"--gpu-architecture={arch}".encode(), b"--ptxas-options=-v", b"--no-cache"]
    call("nvrtcCompileProgram", program, len(options), options)
    report, ptx = (output(getter).decode() for getter in ("nvrtcGetProgramLog", "nvrtcGetPTX"))
    return Compiled(output("nvrtcGetCUBIN"), ptx, report)


@pytest.fixture(scope="module", params=["sm_80", "sm_90", "sm_100"])
def compiled(request) -> Compiled:
    return compile_for(request.param)


@pytest.mark.toolchain
@pytest.mark.parametrize(
    ("symbol", "places"),
    [
        ("scale", [(0, 8), (8, 1), (10, 2), (16, 8), (24, 24), (48, 4), (52, 1)]),
        ("scale_more", [(0, 8), (8, 4)]),
        ("nothing", []),
        ("missing", []),
    ],
)
def test_parameters_have_the_compilers_offsets_and_sizes(compiled, symbol, places):
    assert cubin.parameters(compiled.cubin, symbol) == places


@pytest.mark.toolchain
def test_registers_are_the_kernels_own(compiled):
    found = {name: cubin.resources(compiled.cubin, name, compiled.report)["registers"] for name in ("scale", "scale_more")}
    assert 64 < found["scale_more"] <= 255
    assert 8 <= found["scale"] < 32


@pytest.mark.toolchain
@pytest.mark.parametrize(("symbol", "shared_bytes"), [("scale", 128), ("scale_more", 0), ("nothing", 0)])
def test_shared_memory_is_what_the_source_declares(compiled, symbol, shared_bytes):
    assert cubin.resources(compiled.cubin, symbol, compiled.report)["shared_bytes"] == shared_bytes


@pytest.mark.toolchain
@pytest.mark.parametrize(("symbol", "stack_bytes"), [("scale", 0), ("scale_more", 0), ("indexed", 256)])
def test_stack_and_spills_are_the_kernels_own(compiled, symbol, stack_bytes):
    found = cubin.resources(compiled.cubin, symbol, compiled.report)
    assert (found["stack_bytes"], found["spill_bytes"]) == (stack_bytes, 0)


@pytest.mark.toolchain
def test_without_a_report_nothing_is_said_about_the_stack(compiled):
    assert not {"stack_bytes", "spill_bytes"} & set(cubin.resources(compiled.cubin, "scale", ""))


@pytest.mark.toolchain
def test_ptx_tells_floats_from_integers(compiled):
    assert cubin.ptx_kinds(compiled.ptx, "scale") == ["int", "int", "int", "float", "", "float", "int"]
    assert cubin.ptx_kinds(compiled.ptx, "nothing") == []
    assert cubin.ptx_kinds(compiled.ptx, "missing") == []


@pytest.mark.toolchain
def test_damaged_bytes_are_a_failed_compile_and_nothing_else():
    sound = compile_for("sm_90").cubin
    draw = random.Random(0)
    for _ in range(4000):
        damaged = bytearray(sound[: draw.randrange(len(sound))] if draw.random() < 0.3 else sound)
        for _ in range(draw.choice([1, 2, 8])):
            at = draw.randrange(64 if draw.random() < 0.3 else max(len(damaged), 1))
            if at < len(damaged):
                damaged[at] ^= 1 << draw.randrange(8)
        try:
            cubin.parameters(bytes(damaged), "scale")
            cubin.resources(bytes(damaged), "scale", "")
        except CompileFailed:
            continue


@pytest.mark.parametrize(
    "content", [b"", b"\x7fELF", b"\x7fELF\x01\x01" + b"\0" * 64, b"MZ" + b"\0" * 100, b"\x7fELF\x02\x01" + b"\xff" * 58]
)
def test_what_is_no_elf_file_is_a_failed_compile(content):
    with pytest.raises(CompileFailed):
        list(cubin.sections(content))


REPORT = """ptxas info    : Compiling entry function 'scale_more' for 'sm_90'
ptxas info    : Function properties for scale_more
ptxas         .     256 bytes stack frame, 12 bytes spill stores, 30 bytes spill loads
ptxas info    : Used 72 registers, used 0 barriers
ptxas info    : Compiling entry function 'scale' for 'sm_90'
ptxas info    : Function properties for scale
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 12 registers, used 1 barriers, 128 bytes smem
"""


@pytest.mark.toolchain
@pytest.mark.parametrize(("symbol", "stack_bytes", "spill_bytes"), [("scale_more", 256, 42), ("scale", 0, 4)])
def test_a_report_of_several_kernels_is_read_for_one(symbol, stack_bytes, spill_bytes):
    found = cubin.resources(compile_for("sm_90").cubin, symbol, REPORT)
    assert (found["stack_bytes"], found["spill_bytes"]) == (stack_bytes, spill_bytes)


PTX = """
.visible .entry first(
    .param .u64 .ptr .align 1 first_param_0,
    .param .f32 first_param_1,
    .param .align 8 .b8 first_param_2[24],
    .param .s32 first_param_3
)
.maxntid 256, 1, 1
{ ret; }
.visible .entry second$x( .param .f64 p ) { ret; }
.entry bare() { ret; }
"""


@pytest.mark.parametrize(
    ("symbol", "kinds"), [("first", ["int", "float", "", "int"]), ("second$x", ["float"]), ("second", []), ("bare", [])]
)
def test_the_kinds_of_parameters_in_ptx(symbol, kinds):
    assert cubin.ptx_kinds(PTX, symbol) == kinds


@pytest.mark.parametrize(
    ("ptx", "threads"), [(PTX, 256), (".reqntid 128", 128), (".entry k() {}", 0), ("", 0), (".minnctapersm 2", 0)]
)
def test_the_threads_a_block_needs(ptx, threads):
    assert cubin.ptx_threads(ptx) == threads
