"""A CUDA kernel whose compile takes tens of seconds: a binary tree of templates, all of it inlined into one function."""

from __future__ import annotations

from pathlib import Path

from tests.support.definitions import write_cuda

NAME = "slow"

# The axis `tag` only makes further keys.
TOML = """
schema = 1
language = "cuda"
sources = ["kernel.cu"]
[spec]
tag = { type = "int", min = 0, max = 1000000, default = 0 }
[target]
cuda = "sm_80"
[[entry]]
name = "slow"
summary = "takes long to compile"
function = "slow<{tag}>"
arguments = [
  { name = "out", type = "pointer", dtype = "float32", mutated = true },
  { name = "x", type = "f32" },
]
launch = { grid = [1], block = [32] }
"""

# 2^10 leaves, each with a sine and a cosine and their slow paths.
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
template <int TAG>
__global__ void slow(float* out, float x) {
  out[threadIdx.x] = Tree<10, 1>::sum(x + TAG);
}
"""


def write_slow(folder: Path) -> Path:
    """The folder of the kernel `slow`: one variant, so one build a tag."""
    return write_cuda(folder, toml=TOML, source=SOURCE)
