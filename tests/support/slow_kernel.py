"""Kernels whose compile takes long: a binary tree of templates, a long chain of sines, a million instantiations."""

from __future__ import annotations

from pathlib import Path

from tests.support.definitions import TRITON_SOURCE, TRITON_TOML, write_cuda, write_triton

NAME = "slow"

# The axis `tag` only makes further keys; `depth` says how long it takes: at 10 a minute, at 6 a second.
TOML = """
schema = 1
language = "cuda"
sources = ["kernel.cu"]
[spec]
tag = { type = "int", min = 0, max = 1000000, default = 0 }
depth = { type = "int", min = 1, max = 10, default = 10 }
[target]
cuda = "sm_80"
[[entry]]
name = "slow"
summary = "takes long to compile"
function = "slow<{tag}, {depth}>"
arguments = [
  { name = "out", type = "pointer", dtype = "float32", mutated = true },
  { name = "x", type = "f32" },
]
launch = { grid = [1], block = [32] }
"""

# 2^depth leaves, each with a sine and a cosine and their slow paths.
SOURCE = """
template <int DEPTH, int TAG>
struct Tree {
  static __device__ float sum(float x) {
    return Tree<DEPTH - 1, 2 * TAG>::sum(x) + Tree<DEPTH - 1, 2 * TAG + 1>::sum(x * 1.5f + TAG);
  }
};
template <int TAG>
struct Tree<0, TAG> {
  static __device__ float sum(float x) { return sinf(x + TAG) * cosf(x - TAG); }
};
template <int TAG, int DEPTH>
__global__ void slow(float* out, float x) {
  out[threadIdx.x] = Tree<DEPTH, 1>::sum(x + TAG);
}
"""


def write_slow(folder: Path) -> Path:
    """The folder of the kernel `slow`: one variant, so one build a spec."""
    return write_cuda(folder, toml=TOML, source=SOURCE)


TRITON_SLOW_TOML = (
    TRITON_TOML.replace("tscale", "tslow")
    .replace(", align = 16", "")
    .replace("[target]", 'rounds = { type = "int", min = 1, max = 200, default = 200 }\n[target]')
    .replace("[target]", 'tag = { type = "int", min = 0, max = 1000000, default = 0 }\n[target]')
    .replace('value = "block" },', 'value = "block" },\n  { name = "ROUNDS", type = "constexpr", value = "rounds" },')
)
# With 1 round a tenth to a third of a second, with 40 half a second to two, with 150 one to eight.
TRITON_SLOW_SOURCE = (
    TRITON_SOURCE.replace("tscale", "tslow")
    .replace("BLOCK: tl.constexpr", "BLOCK: tl.constexpr, ROUNDS: tl.constexpr")
    .replace(
        "    tl.store(",
        "    y = tl.load(x + at, mask=at < n)\n"
        "    for i in tl.static_range(ROUNDS):\n        y = tl.sin(y * factor + i)\n    tl.store(",
    )
    .replace("factor * tl.load(x + at, mask=at < n)", "y")
)


def write_slow_triton(folder: Path) -> Path:
    """The folder of the kernel `tslow`: one variant, so one build a spec."""
    return write_triton(folder, toml=TRITON_SLOW_TOML, source=TRITON_SLOW_SOURCE)
