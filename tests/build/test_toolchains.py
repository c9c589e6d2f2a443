"""NVRTC and Triton through a real daemon: what they give for each target, and what they refuse."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kserve import client, get_kernel
from kserve.artifact import manifest_from_bytes
from kserve.client import Kernel
from kserve.errors import BuildError, CompileFailed, KserveError, UnsupportedTarget
from tests.support.daemon import Daemon, daemon, place, variables
from tests.support.definitions import CUDA_SOURCE, CUDA_TOML, TRITON_SOURCE, TRITON_TOML, write_cuda, write_triton

pytestmark = pytest.mark.toolchain
_ELF_MACHINE = {"cubin": 190, "hsaco": 224}  # EM_CUDA, EM_AMDGPU


@pytest.fixture(scope="module")
def running() -> Iterator[Daemon]:
    with place() as root, daemon(root) as found:
        yield found


@pytest.fixture
def served(running: Daemon, own_place: Path, monkeypatch: pytest.MonkeyPatch) -> Daemon:
    """One daemon and one pair of warm workers for this file; each case has a kernel folder of its own."""
    for name, value in variables(running.root, KSERVE_PATH=str(own_place / "kernels")).items():
        monkeypatch.setenv(name, value)
    return running


def cuda(own_place: Path, *, toml: str = CUDA_TOML, source: str = CUDA_SOURCE, target: str = "sm_90", **more: str) -> Kernel:
    write_cuda(own_place / "kernels" / "case", toml=toml, source=source, **more)
    return get_kernel("scale", target=target)


def triton(
    own_place: Path, *, toml: str = TRITON_TOML, source: str = TRITON_SOURCE, target: str = "sm_90", **more: str
) -> Kernel:
    write_triton(own_place / "kernels" / "case", toml=toml, source=source, **more)
    return get_kernel("tscale", target=target)


def payload(running: Daemon, kernel: Kernel) -> bytes:
    return (running.root / "store" / "payload" / kernel.digest[:2] / kernel.digest).read_bytes()


def attachments(kernel: Kernel) -> set[str]:
    return set(kernel.manifest.attachments)


PLACES = [("x", 0, 8), ("out", 8, 8), ("n", 16, 4), ("factor", 20, 4)]


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90", "cuda:sm_120"])
def test_cuda_contract(served: Daemon, own_place: Path, target: str):
    kernel = cuda(own_place, target=target)
    contract = kernel.manifest.contract
    assert str(kernel.target) == target
    assert contract.symbol == "_Z5scaleILi8EEvPKfPfif"
    assert [(param.name, param.offset, param.size_bytes) for param in contract.params] == PLACES
    assert (contract.format, contract.shared_bytes, contract.scratch_bytes) == ("cubin", "0", ())
    assert contract.minimum_driver >= 12000
    assert kernel.resources["registers"] > 0
    assert {"shared_bytes", "spill_bytes", "stack_bytes"} <= set(kernel.resources)
    assert attachments(kernel) == {"ptx", "log"}
    assert kernel.generic is not None
    assert kernel.generic.key != kernel.key
    content = payload(served, kernel)
    assert len(content) == kernel.manifest.size_bytes
    assert (content[:4], content[18]) == (b"\x7fELF", _ELF_MACHINE["cubin"])
    assert contract.symbol.encode() in content


@pytest.mark.parametrize(("asked", "exact"), [("sm_80", "cuda:sm_80"), ("sm_90", "cuda:sm_90a"), ("sm_120", "cuda:sm_120a")])
def test_triton_contract(served: Daemon, own_place: Path, asked: str, exact: str):
    kernel = triton(own_place, target=asked)
    contract = kernel.manifest.contract
    assert str(kernel.target) == exact, "arch-specific code exists from sm_90 on"
    assert contract.symbol == "tscale"
    assert [(param.name, param.offset, param.size_bytes) for param in contract.params[:4]] == PLACES
    scratch = contract.params[4:]
    assert [(param.kind, param.offset, param.size_bytes) for param in scratch] == [("scratch", 24, 8), ("scratch", 32, 8)]
    assert contract.scratch_bytes == (0, 0)
    assert contract.block == ("128",)
    assert contract.constants == {"block": 128, "BLOCK": 128}
    assert kernel.resources["registers"] > 0
    assert attachments(kernel) == {"ptx", "ttgir", "log"}
    assert payload(served, kernel)[18] == _ELF_MACHINE["cubin"]


def test_triton_for_amd(served: Daemon, own_place: Path):
    kernel = triton(own_place, target="gfx942")
    contract = kernel.manifest.contract
    assert str(kernel.target) == "hip:gfx942"
    assert (contract.format, contract.symbol) == ("hsaco", "tscale")
    assert [(param.name, param.offset, param.size_bytes) for param in contract.params[:4]] == PLACES
    assert contract.block == ("256",), "four wavefronts of 64"
    assert kernel.resources["registers"] > 0
    assert payload(served, kernel)[18] == _ELF_MACHINE["hsaco"]


def test_declared_facts_reach_the_compilers(served: Daemon, own_place: Path):
    """The variant for aligned pointers is other code than the one for any pointer."""
    source = CUDA_SOURCE.replace("if (i < n)", "if (KSERVE_ALIGN_X == 16 && KSERVE_DIV_N == 4) out[i] = 1.0f; else if (i < n)")
    for kernel in (
        cuda(own_place, toml=CUDA_TOML.replace('"i32"', '"i32", divisible_by = 4'), source=source),
        triton(own_place, toml=TRITON_TOML.replace("default = 128", "default = 1024")),
    ):
        assert kernel.generic is not None
        assert kernel.digest != kernel.generic.digest


@pytest.mark.parametrize("make", [cuda, triton])
def test_same_key_and_bytes_from_another_place(own_place: Path, monkeypatch: pytest.MonkeyPatch, make: Any):
    """Two daemons, so two workers, two stores and two staging directories."""
    found = []
    for _ in range(2):
        with place() as root, daemon(root):
            for name, value in variables(root).items():
                monkeypatch.setenv(name, value)
            client.forget()
            kernel = make(root)
            assert kernel.origin == "built"
            found.append((kernel.key, kernel.digest, kernel.generic.key, kernel.generic.digest))
            assert str(root).encode() not in (root / "store/payload" / kernel.digest[:2] / kernel.digest).read_bytes()
    assert found[0] == found[1]


def cuda_arguments(old: str, new: str) -> str:
    assert old in CUDA_TOML
    return CUDA_TOML.replace(old, new, 1)


MISMATCHES = {
    "one too few": (cuda_arguments('  { name = "factor", type = "f32" },\n', ""), ["4", "3", "factor|n"]),
    "one too many": (cuda_arguments('"f32" },', '"f32" },\n  { name = "more", type = "i32" },'), ["4", "5", "more"]),
    "size": (cuda_arguments('"i32"', '"i64"'), [r"\bn\b", "i64", "4 bytes", "8 bytes"]),
    "size of a float": (cuda_arguments('"f32"', '"f64"'), ["factor", "f64", "4 bytes", "8 bytes"]),
    "float for an int": (cuda_arguments('"i32"', '"f32"'), [r"\bn\b", "int", "f32"]),
    "int for a float": (cuda_arguments('"f32"', '"i32"'), ["factor", "float", "i32"]),
    "pointer for a number": (
        cuda_arguments('name = "n", type = "i32"', 'name = "n", type = "pointer", dtype = "int32"'),
        [r"\bn\b"],
    ),
    "struct": (cuda_arguments('"f32"', '"struct", size_bytes = 12'), ["factor", "12"]),
}


@pytest.mark.parametrize(("toml", "named"), MISMATCHES.values(), ids=MISMATCHES.keys())
def test_arguments_that_do_not_match_the_source(served: Daemon, own_place: Path, toml: str, named: list[str]):
    toml = toml.replace("cdiv(n, 128)", "1")
    with pytest.raises(CompileFailed) as caught:
        cuda(own_place, toml=toml)
    for pattern in named:
        assert re.search(pattern, str(caught.value)), f"{pattern} is not in {caught.value}"


FIRST_TWO = '{ name = "x", type = "pointer", dtype = "float32", align = 16 },\n  { name = "out",'
TRITON_MISMATCHES = {
    "one too few": ('  { name = "factor", type = "f32" },\n', "", "factor"),
    "one too many": ('"f32" },', '"f32" },\n  { name = "more", type = "i32" },', "more"),
    "another name": ('"factor"', '"scale"', "scale"),
    "another order": (FIRST_TWO, FIRST_TWO.replace('"x"', '"_"').replace('"out"', '"x"').replace('"_"', '"out"'), "out, x"),
}


@pytest.mark.parametrize(("old", "new", "named"), TRITON_MISMATCHES.values(), ids=TRITON_MISMATCHES.keys())
def test_triton_arguments_that_do_not_match_the_source(served: Daemon, own_place: Path, old: str, new: str, named: str):
    assert old in TRITON_TOML
    with pytest.raises(CompileFailed, match=named):
        triton(own_place, toml=TRITON_TOML.replace(old, new, 1))


@pytest.mark.parametrize(
    ("make", "source", "found"),
    [
        (cuda, CUDA_SOURCE.replace("out[i]", "nowhere[i]"), r"kernel\.cu\(\d+\).*nowhere"),
        (cuda, CUDA_SOURCE.replace("scale", "other"), "scale"),
        (cuda, CUDA_SOURCE.replace("__global__ void", "__device__ void"), "scale"),
        (cuda, '#include "undeclared.cuh"\n' + CUDA_SOURCE, r"kernel\.cu\(1\).*undeclared\.cuh"),
        (triton, TRITON_SOURCE.replace("tl.load(x", "tl.load(nowhere"), "nowhere"),
        (triton, TRITON_SOURCE.replace("def tscale", "def other"), "tscale"),
        (triton, TRITON_SOURCE + "\n1 +\n", r"kernel\.py"),
        (triton, TRITON_SOURCE + "\n1 / 0\n", "ZeroDivisionError"),
        (triton, "import numpy\n" + TRITON_SOURCE, "numpy"),
        (triton, "from os import path\n" + TRITON_SOURCE, r"\bos\b"),
        (triton, "from . import sibling\n" + TRITON_SOURCE, "relative"),
        (triton, TRITON_SOURCE.replace("    at =", "    import torch\n    at ="), "torch"),
    ],
)
def test_a_source_that_does_not_compile(served: Daemon, own_place: Path, make: Any, source: str, found: str):
    with pytest.raises(CompileFailed, match=found):
        make(own_place, source=source)


def test_a_triton_file_may_use_the_files_declared_beside_it(served: Daemon, own_place: Path):
    helper = "import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef twice(x):\n    return x + x\n"
    source = "from helper import twice\n" + TRITON_SOURCE.replace("factor * tl.load", "factor * twice(tl.load").replace(
        "at < n), mask", "at < n)), mask"
    )
    declared = TRITON_TOML.replace('sources = ["kernel.py"]', 'sources = ["kernel.py", "helper.py"]')
    assert triton(own_place, toml=declared, source=source, helper__py=helper).origin == "built"
    with pytest.raises(CompileFailed, match="helper"):
        get_undeclared(own_place, source, helper)


def get_undeclared(own_place: Path, source: str, helper: str) -> Kernel:
    """The same kernel with its second file on the disk, but not declared."""
    client.forget()
    return triton(own_place, source=source, helper__py=helper)


BIG_STATIC = CUDA_SOURCE.replace(
    "int i =", "__shared__ float big[20000]; big[threadIdx.x] = factor; __syncthreads(); out[n] = big[n];\n  int i ="
)


def dot(deep: int) -> str:
    """A product of [64, deep] and [deep, 64] half-precision matrices: both go through shared memory, 256 * deep bytes."""
    return f"""
import triton
import triton.language as tl


@triton.jit
def tscale(x, out, n, factor, BLOCK: tl.constexpr):
    row, deep = tl.arange(0, 64), tl.arange(0, {deep})
    a = tl.load(x + row[:, None] * n + deep[None, :]).to(tl.float16)
    b = tl.load(x + n + deep[:, None] * 64 + row[None, :]).to(tl.float16)
    tl.store(out + row[:, None] * 64 + row[None, :], tl.dot(a, b) * factor)
"""


@pytest.mark.parametrize(
    ("make", "toml", "source", "target", "limit"),
    [
        (cuda, cuda_arguments("block = [128]", "block = [128], shared_bytes = 233473"), CUDA_SOURCE, "sm_90", 232448),
        (cuda, cuda_arguments("block = [128]", 'block = [128], shared_bytes = "size * 12800"'), CUDA_SOURCE, "sm_120", 101376),
        (triton, TRITON_TOML, dot(1024), "sm_90", 232448),
        (triton, TRITON_TOML, dot(512), "gfx942", 65536),
    ],
)
def test_too_much_shared_memory(served: Daemon, own_place: Path, make: Any, toml: str, source: str, target: str, limit: int):
    with pytest.raises(CompileFailed) as caught:
        make(own_place, toml=toml, source=source, target=target)
    need, stated = (int(number) for number in re.findall(r"\b(\d{5,7})\b", caught.value.message))
    assert stated == limit
    assert need > limit


def test_too_much_static_shared_memory_is_the_assemblers_error(served: Daemon, own_place: Path):
    with pytest.raises(CompileFailed) as caught:
        cuda(own_place, source=BIG_STATIC)
    assert "0x13880" in str(caught.value), "80000 bytes, as the assembler spells them"
    assert "0xc000" in str(caught.value)


@pytest.mark.parametrize("clock", ["__DATE__", "__TIME__", "__TIMESTAMP__"])
def test_a_source_that_asks_for_the_time_is_refused(served: Daemon, own_place: Path, clock: str):
    with pytest.raises(CompileFailed) as caught:
        cuda(own_place, source=CUDA_SOURCE + f"__device__ const char* when = {clock};\n")
    assert clock in caught.value.message
    assert "kernel.cu" in caught.value.message


def test_a_block_may_use_all_shared_memory_of_its_arch(served: Daemon, own_place: Path):
    kernel = triton(own_place, source=dot(256), target="gfx942")
    assert kernel.manifest.contract.shared_bytes == "65536"


@pytest.mark.parametrize(
    ("make", "toml", "target", "named"),
    [
        (cuda, CUDA_TOML, "sm_999", ["NVRTC", r"\d+\.\d+", "sm_90", "sm_80"]),
        (cuda, cuda_arguments('"sm_80"', '"sm_52"'), "sm_52", ["NVRTC", r"\d+\.\d+", "sm_90"]),
        (triton, TRITON_TOML, "sm_999", ["Triton", r"\d+\.\d+", "sm_90"]),
        (triton, TRITON_TOML.replace("gfx942", "gfx9ff"), "gfx9ff", ["Triton", r"\d+\.\d+", "gfx942"]),
    ],
)
def test_an_arch_the_compiler_lacks(served: Daemon, own_place: Path, make: Any, toml: str, target: str, named: list[str]):
    with pytest.raises(UnsupportedTarget) as caught:
        make(own_place, toml=toml, target=target)
    for pattern in named:
        assert re.search(pattern, str(caught.value)), f"{pattern} is not in {caught.value}"


@pytest.mark.parametrize(("make", "target"), [(cuda, "sm_80a"), (cuda, "sm_90f"), (triton, "sm_80a"), (triton, "sm_100f")])
def test_a_suffix_the_arch_does_not_have(served: Daemon, own_place: Path, make: Any, target: str):
    with pytest.raises(UnsupportedTarget, match=target):
        make(own_place, target=target)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("num_warps = 4", "num_warps = 3"),
        ("num_warps = 4", "num_warps = 0"),
        ("num_warps = 4", 'num_warps = "block - 1"'),
    ],
)
def test_a_bad_option_is_an_error_and_the_worker_lives(served: Daemon, own_place: Path, old: str, new: str):
    with pytest.raises(BuildError):
        triton(own_place, toml=TRITON_TOML.replace(old, new))
    assert all(worker["alive"] for worker in served.call("GET", "/v1/status")["workers"])


def test_a_crash_inside_the_compiler_is_this_builds_error(served: Daemon, own_place: Path):
    crash = TRITON_SOURCE + "\ntriton.knobs.os.abort()\n"
    with pytest.raises(BuildError) as caught:
        triton(own_place, source=crash)
    assert not isinstance(caught.value, CompileFailed)
    assert "-6" in caught.value.message
    client.forget()
    assert triton(own_place, source=TRITON_SOURCE + "\n# again\n").origin == "built"


def test_the_stored_manifest_is_what_the_client_got(served: Daemon, own_place: Path):
    kernel = cuda(own_place)
    path = served.root / "store" / "manifest" / kernel.key[:2] / f"{kernel.key}.json"
    assert manifest_from_bytes(path.read_bytes(), key=kernel.key) == kernel.manifest


def test_a_failed_build_keeps_its_log(served: Daemon, own_place: Path):
    with pytest.raises(KserveError):
        cuda(own_place, source=CUDA_SOURCE.replace("float factor", "floot factor"))
    failed = next(build for build in served.call("GET", "/v1/builds")["builds"] if build["state"] == "failed")
    assert "floot" in served.call("GET", f"/v1/builds/{failed['id']}")["log"]
