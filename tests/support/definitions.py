"""Kernel folders for tests: a valid baseline and what a case changes in it."""

from __future__ import annotations

from pathlib import Path

CUDA_TOML = """
schema = 1
language = "cuda"
sources = ["kernel.cu"]
headers = []
[spec]
size = { type = "int", min = 1, max = 4096, default = 8 }
[target]
cuda = "sm_80"
[[entry]]
name = "scale"
summary = "out = factor * x"
function = "scale<{size}>"
arguments = [
  { name = "x", type = "pointer", dtype = "float32", align = 16 },
  { name = "out", type = "pointer", dtype = "float32", mutated = true, align = 16 },
  { name = "n", type = "i32" },
  { name = "factor", type = "f32" },
]
launch = { grid = ["cdiv(n, 128)"], block = [128] }
"""

CUDA_SOURCE = """
template <int SIZE>
__global__ void scale(const float* x, float* out, int n, float factor) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = factor * x[i];
}
"""


def write_cuda(folder: Path, *, toml: str = CUDA_TOML, source: str = CUDA_SOURCE, **files: str) -> Path:
    """A CUDA kernel folder called `folder`; `files` are further ones, `name__ext` for `name.ext`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kernel.toml").write_text(toml)
    (folder / "kernel.cu").write_text(source)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content)
    return folder


TRITON_TOML = """
schema = 1
language = "triton"
sources = ["kernel.py"]
[spec]
block = { type = "int", min = 16, max = 4096, default = 128 }
[target]
cuda = "sm_80"
hip = ["gfx942"]
[options]
num_warps = 4
[[entry]]
name = "tscale"
summary = "out = factor * x"
function = "tscale"
arguments = [
  { name = "x", type = "pointer", dtype = "float32", align = 16 },
  { name = "out", type = "pointer", dtype = "float32", mutated = true, align = 16 },
  { name = "n", type = "i32" },
  { name = "factor", type = "f32" },
  { name = "BLOCK", type = "constexpr", value = "block" },
]
launch = { grid = ["cdiv(n, BLOCK)"] }
"""

TRITON_SOURCE = """
import triton
import triton.language as tl


@triton.jit
def tscale(x, out, n, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, factor * tl.load(x + at, mask=at < n), mask=at < n)
"""


def write_triton(folder: Path, *, toml: str = TRITON_TOML, source: str = TRITON_SOURCE, **files: str) -> Path:
    """A Triton kernel folder called `folder`, as `write_cuda`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kernel.toml").write_text(toml)
    (folder / "kernel.py").write_text(source)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content)
    return folder


# Definitions with every field there is.
FULL_CUDA = """
schema = 1
language = "cuda"
sources = ["kernel.cu", "more/*.cu"]
headers = ["*.cuh"]
shared_headers = ["kserve/access.cuh"]
[spec]
size = { type = "int", min = 1, max = 4096, values = [8, 16], default = 8 }
dtype = { type = "dtype", values = ["float32", "torch.float16"], default = "float32" }
fast = { type = "bool", values = [false], default = false }
mode = { type = "enum", values = ["a", "b"], default = "a" }
tag = { type = "string", default = "x" }
[knobs]
THREADS = { values = [64, 128], min = 32, max = 1024, default = 128, alias = "FULL_THREADS" }
UNROLL = { values = [1, 2], default = "1 + (size > 8)" }
constraints = ["THREADS % 32 == 0", "UNROLL <= size"]
[derived]
twice = "2 * size"
one = 1
[options]
flags = ["--std=c++17", "-DX=1"]
[target]
cuda = "sm_80"
features = "arch"
[[entry]]
name = "scale"
summary = "one line"
function = "scale<{size}, {dtype}, {twice}, {UNROLL}>"
knob_defaults = { UNROLL = 2 }
arguments = [
  { name = "x", type = "pointer", dtype = "dtype", mutated = true, nullable = true, contiguous = false, align = 16 },
  { name = "n", type = "i64", divisible_by = 4 },
  { name = "f", type = "f32" },
  { name = "flag", type = "bool" },
  { name = "s", type = "struct", size_bytes = 24 },
  { name = "m", type = "tensor_map" },
]
launch = { grid = ["cdiv(n, 128)", 1, "one"], block = ["THREADS"], shared_bytes = "4 * size" }
"""
FULL_TRITON = """
schema = 1
language = "triton"
sources = ["kernel.py"]
[spec]
block = { type = "int", default = 128 }
[knobs]
WARPS = { values = [2, 4, 8], default = 4 }
SPLIT = { values = [1, 2], default = "1 + (block > 64)" }
[options]
num_warps = "WARPS"
num_stages = "1 + (block > 64)"
maxnreg = 64
[target]
cuda = "cuda:sm_80"
hip = ["gfx942", "hip:gfx90a"]
[[entry]]
name = "scale"
summary = "one line"
function = "scale"
arguments = [
  { name = "x", type = "pointer", dtype = "float32", align = 32 },
  { name = "n", type = "i64", divisible_by = 16 },
  { name = "BLOCK", type = "constexpr", value = "block" },
  { name = "FLAG", type = "constexpr", value = true },
  { name = "SPLIT", type = "constexpr", value = "SPLIT" },
]
launch = { grid = ["cdiv(n, BLOCK) * SPLIT"] }
"""

# `scale` with a knob that reaches the source, the block and the grid, and one that the source alone sees.
KNOB_TOML = (
    CUDA_TOML.replace(
        "[target]",
        """[knobs]
BLOCK = { values = [64, 128, 256], default = "128 + 128 * (size > 8)", alias = "THE_BLOCK" }
UNROLL = { values = [1, 2], default = 1 }
constraints = ["BLOCK * UNROLL <= 256"]
[target]""",
    )
    .replace("scale<{size}>", "scale<{size}, {BLOCK}, {UNROLL}>")
    .replace('"cdiv(n, 128)"', '"cdiv(n, BLOCK)"')
    .replace("block = [128]", 'block = ["BLOCK"]')
)
KNOB_SOURCE = """
template <int SIZE, int BLOCK, int UNROLL>
__global__ void scale(const float* x, float* out, int n, float factor) {
  static_assert(BLOCK % 32 == 0, "whole warps");
  int i = blockIdx.x * BLOCK + threadIdx.x;
  if (i < n) out[i] = factor * x[i] + UNROLL - UNROLL;
}
"""

FULL_EXTENSION = """
schema = 1
language = "torch-extension"
sources = ["unit.cpp", "more/*.cu"]
headers = ["*.h"]
shared_headers = ["kserve/access.cuh"]
[spec]
size = { type = "int", min = 1, max = 4096, default = 8 }
[derived]
twice = "2 * size"
[target]
cuda = "sm_80"
features = "arch"
[options]
cflags = ["-O3", "-DX=1"]
cuda_cflags = ["--use_fast_math"]
ldflags = ["-lcublas"]
arches = ["sm_80", "sm_90a", "compute_90"]
stable_abi = "2.11"
binding = "operators"
[[entry]]
name = "Named_1"
summary = "one line"
"""
