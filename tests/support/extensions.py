"""Extensions for tests: without torch's headers, so that a unit compiles in a second, not in ninety."""

from __future__ import annotations

from pathlib import Path

# A Python module of one function, `answer`, in plain C++.
MODULE = """
#include <Python.h>
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)
static PyObject* answer(PyObject*, PyObject*) { return PyLong_FromLong(ANSWER); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, "what it is"}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, TEXT(TORCH_EXTENSION_NAME), nullptr, -1, methods};
PyMODINIT_FUNC JOIN(PyInit_, TORCH_EXTENSION_NAME)(void) { return PyModule_Create(&definition); }
"""

TOML = """
schema = 1
language = "torch-extension"
sources = ["main.cpp", "*.cpp"]
headers = ["*.h"]
[[entry]]
name = "numbered"
summary = "a module whose answer is a sum"
"""

# Four units: the module, and three that it adds up.
PART = '#include "parts.h"\nint {name}() {{ return BASE + {value}; }}\n'
PARTS = ("one", "two", "three")
HEADER = "#pragma once\n#define BASE 10\n" + "".join(f"int {name}();\n" for name in PARTS)

CUDA_TOML = """
schema = 1
language = "torch-extension"
sources = ["scale.cu"]
[target]
cuda = "sm_80"
[options]
binding = "operators"
[[entry]]
name = "scaling"
summary = "a kernel without any header of torch"
"""
CUDA_SOURCE = """
#include <cassert>
namespace {
__global__ void scale(float* x, int n, float factor) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  assert(n > 0);
  if (i < n) x[i] *= factor;
}
}  // namespace
extern "C" int scale_on_device(float* x, int n, float factor) {
  scale<<<(n + 127) / 128, 128>>>(x, n, factor);
  return static_cast<int>(cudaGetLastError());
}
extern "C" const char* where() { return __FILE__; }
"""


def module(answer: str) -> str:
    """The source of a module whose answer is that expression."""
    return MODULE.replace("ANSWER", answer)


def write_parts(folder: Path, **values: int) -> Path:
    """A kernel folder of four units, whose answer is the sum of the values and three times BASE."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kernel.toml").write_text(TOML)
    (folder / "parts.h").write_text(HEADER)
    (folder / "main.cpp").write_text('#include "parts.h"\n' + module(" + ".join(f"{name}()" for name in PARTS)))
    for name in PARTS:
        (folder / f"{name}.cpp").write_text(PART.format(name=name, value=values.get(name, 0)))
    return folder


def write_cuda_extension(folder: Path, *, toml: str = CUDA_TOML, source: str = CUDA_SOURCE) -> Path:
    """A kernel folder of one CUDA unit."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kernel.toml").write_text(toml)
    (folder / "scale.cu").write_text(source)
    return folder
