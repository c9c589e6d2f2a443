"""CUDA kernels of this repository on the host, through `host_cuda.hpp`: numerics and edge cases without a GPU.

The same source, spec, derived axes and macros as a build for a device; the host's C++ compiler in place of NVRTC. What only a
device has (its rounding of `rsqrtf` and `expf`, its memory, its speed) is for the `gpu` tests.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from kserve.build.plan import Plan
from kserve.expression import Expression
from kserve.spec import DTYPES, SCALARS
from kserve.toolchain.nvrtc import options_of
from tests.support.built_in import built_in_plan, stage

HEADER = Path(__file__).with_name("host_cuda.hpp")
C_TYPES = {"bool": "bool", "int32": "int", "int64": "long long", "float32": "float", "float64": "double"}
LAUNCH = """
#include "{header}"
#include "{main}"
extern "C" void launch(const unsigned int* shape, unsigned int seed, void** arguments) {{
  const dim3 grid{{shape[0], shape[1], shape[2]}}, block{{shape[3], shape[4], shape[5]}};
  host::launch(grid, block, seed, [&] {{ {function}({arguments}); }});
}}
"""


def host_kernel(name: str, *, facts: bool = True, defines: tuple[str, ...] = (), **spec: Any) -> HostKernel:
    """The kernel `name` for this spec, compiled for the host; skips where there is no C++ compiler.

    Args:
        facts: the variant for the declared argument facts, or the one for none.
        spec:  axes, and knobs.
    """
    if shutil.which("g++") is None:
        pytest.skip("no g++ here")
    return _compiled(name, facts, defines, tuple(sorted(spec.items())))


class HostKernel:
    """Called like a Kernel, with tensors of the CPU; `seed` picks the order in which threads and blocks run."""

    def __init__(self, plan: Plan, library: Path) -> None:
        self._plan = plan
        self._launch = ctypes.CDLL(str(library)).launch

    def __call__(self, *given: Any, seed: int = 0) -> None:
        arguments = self._plan.entry.arguments
        assert len(given) == len(arguments), [argument.name for argument in arguments]
        dense = [value for a, value in zip(arguments, given, strict=True) if isinstance(value, torch.Tensor) and a.contiguous]
        assert all(tensor.is_contiguous() for tensor in dense)
        names = {a.name: value for a, value in zip(arguments, given, strict=True) if isinstance(value, int)}
        known = {**self._plan.spec, **self._plan.knobs, **names}
        launch = self._plan.entry.launch
        shape = [self._size(expressions, known) for expressions in (launch.grid, launch.block)]
        cells = [self._cell(job.kind, value) for job, value in zip(self._plan.job.arguments, given, strict=True)]
        pointers = (ctypes.c_void_p * len(cells))(*[ctypes.addressof(cell) for cell in cells])
        self._launch((ctypes.c_uint * 6)(*shape[0], *shape[1]), ctypes.c_uint(seed), pointers)

    @staticmethod
    def _size(expressions: tuple[Expression, ...], known: dict[str, Any]) -> list[int]:
        sizes = [expression.evaluate(known) for expression in expressions]
        return [*sizes, *[1] * (3 - len(sizes))]

    @staticmethod
    def _cell(kind: str, value: Any) -> Any:
        if kind == "pointer":
            assert value is None or isinstance(value, torch.Tensor)
            return ctypes.c_void_p(None if value is None else value.data_ptr())
        return {"i32": ctypes.c_int, "i64": ctypes.c_longlong, "f32": ctypes.c_float, "u64": ctypes.c_ulonglong}[kind](value)


@lru_cache(maxsize=256)
def _compiled(name: str, facts: bool, defines: tuple[str, ...], spec: tuple[tuple[str, Any], ...]) -> HostKernel:
    plan, files = built_in_plan(name, facts=facts, **dict(spec))
    source = _folder() / hashlib.sha256(repr((name, facts, defines, spec)).encode()).hexdigest()[:16]
    stage(files, source)
    values = ", ".join(f"*static_cast<{_c_type(job)}*>(arguments[{i}])" for i, job in enumerate(plan.job.arguments))
    (source / "launch.cpp").write_text(
        LAUNCH.format(header=HEADER, main=plan.job.main, function=plan.job.function, arguments=values)
    )
    macros = ["-D" + option.partition("=")[2] for option in options_of(plan.job) if option.startswith("--define-macro=")]
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-w", f"-I{source}", f"-I{source}/include", *macros]
    command += [f"-D{define}" for define in defines]
    subprocess.run([*command, "launch.cpp", "-o", "kernel.so"], cwd=source, check=True)
    return HostKernel(plan, source / "kernel.so")


def _c_type(job: Any) -> str:
    if job.kind == "pointer":
        return "host::Pointer"
    return C_TYPES[SCALARS[job.kind]] if SCALARS[job.kind] in C_TYPES else DTYPES[SCALARS[job.kind]].cuda


@lru_cache(maxsize=1)
def _folder() -> Path:
    """For the life of this process; removed by the test session's end is the system's temporary directory's matter."""
    return Path(tempfile.mkdtemp(prefix="kserve-host-"))
