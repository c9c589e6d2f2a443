"""Occupancy: NVIDIA's own numbers, and what no kernel can have more of."""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kserve.artifact import Artifact, Contract
from kserve.client.launch import Kernel, Roads
from kserve.occupancy import Occupancy, estimate, occupancy_of
from kserve.target import parse_target
from tests.support.entries import manifest_of

# capability -> warps and shared memory of a multiprocessor, shared memory of a block: the CUDA C++ Programming Guide's table.
ARCHES = {
    75: (32, 64, 64),
    80: (64, 164, 163),
    86: (48, 100, 99),
    87: (48, 164, 163),
    89: (48, 100, 99),
    90: (64, 228, 227),
    100: (64, 228, 227),
    103: (64, 228, 227),
    110: (48, 228, 227),
    120: (48, 100, 99),
    121: (48, 100, 99),
}
CALCULATOR = """
#include <stddef.h>
#include <cuda_occupancy.h>
int blocks(int capability, int warps, int shared_kib, int block_kib, int registers, int threads, size_t bytes) {
  cudaOccDeviceProp device = {0};
  cudaOccFuncAttributes function = {0};
  cudaOccDeviceState state = {0};
  cudaOccResult result;
  device.computeMajor = capability / 10;
  device.computeMinor = capability % 10;
  device.maxThreadsPerBlock = 1024;
  device.maxThreadsPerMultiprocessor = 32 * warps;
  device.regsPerBlock = device.regsPerMultiprocessor = 65536;
  device.warpSize = 32;
  device.sharedMemPerBlock = 48 << 10;
  device.sharedMemPerMultiprocessor = (size_t)shared_kib << 10;
  device.sharedMemPerBlockOptin = (size_t)block_kib << 10;
  device.reservedSharedMemPerBlock = capability < 80 ? 0 : 1024;
  device.numSms = 1;
  function.maxThreadsPerBlock = 1024;
  function.numRegs = registers;
  function.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
  function.maxDynamicSharedSizeBytes = (size_t)block_kib << 10;
  state.carveoutConfig = SHAREDMEM_CARVEOUT_MAX_SHARED;
  int status = cudaOccMaxActiveBlocksPerMultiprocessor(&result, &device, &function, &state, threads, bytes);
  return status ? -status : result.activeBlocksPerMultiprocessor;
}
"""


def header() -> Path | None:
    """The folder of NVIDIA's calculator."""
    spec = importlib.util.find_spec("triton")
    folders = [Path("/usr/local/cuda/include")]
    folders += [Path(spec.origin).parent / "backends/nvidia/include"] if spec and spec.origin else []
    return next((folder for folder in folders if (folder / "cuda_occupancy.h").is_file()), None)


@pytest.fixture(scope="module")
def calculator(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., int]:
    folder = header()
    if folder is None:
        pytest.skip("there is no cuda_occupancy.h here")
    source = tmp_path_factory.mktemp("calculator") / "calculator.c"
    source.write_text(CALCULATOR)
    library = source.with_suffix(".so")
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", f"-I{folder}", "-o", str(library), str(source)], check=True)
    blocks: Any = ctypes.CDLL(str(library)).blocks
    blocks.argtypes = (*[ctypes.c_int] * 6, ctypes.c_size_t)

    def ask(capability: int, *, registers: int, threads: int, shared_bytes: int) -> int:
        return blocks(capability, *ARCHES[capability], registers, threads, shared_bytes)

    return ask


LAUNCHES = st.fixed_dictionaries(
    {"registers": st.integers(1, 255), "threads": st.integers(1, 1024), "shared_bytes": st.integers(0, 227 << 10)}
)


@pytest.mark.parametrize("capability", ARCHES)
def test_the_estimate_is_what_nvidias_calculator_says(calculator: Callable[..., int], capability: int):
    target = parse_target(f"sm_{capability}")

    @settings(max_examples=300)
    @given(LAUNCHES)
    def check(wanted: dict[str, int]) -> None:
        wanted["shared_bytes"] = min(wanted["shared_bytes"], ARCHES[capability][2] << 10)
        found = estimate(target, **wanted)
        assert isinstance(found, Occupancy)
        assert found.blocks_per_sm == calculator(capability, **wanted)

    check()


@pytest.mark.parametrize(
    ("target", "registers", "threads", "shared_bytes", "blocks", "percent", "limiter"),
    [
        ("sm_90", 32, 256, 0, 8, 100, "warps"),
        ("sm_90", 255, 256, 0, 1, 12, "registers"),
        ("sm_90", 128, 128, 0, 4, 25, "registers"),
        ("sm_90", 32, 128, 227 << 10, 1, 6, "shared memory"),
        ("sm_90", 32, 128, 113 << 10, 2, 12, "shared memory"),
        ("sm_90", 16, 32, 0, 32, 50, "blocks"),
        ("sm_90a", 168, 384, 0, 1, 18, "registers"),
        ("sm_80", 32, 1024, 0, 2, 100, "warps"),
        ("sm_86", 32, 1024, 0, 1, 66, "warps"),
        ("sm_89", 32, 128, 99 << 10, 1, 8, "shared memory"),
        ("sm_100", 64, 256, 0, 4, 50, "registers"),
        ("sm_120", 40, 256, 0, 6, 100, "warps"),
        ("sm_75", 32, 1024, 0, 1, 100, "warps"),
        ("sm_90", 255, 1024, 0, 0, 0, "registers"),
    ],
)
def test_known_values(target, registers, threads, shared_bytes, blocks, percent, limiter):
    found = estimate(parse_target(target), registers=registers, threads=threads, shared_bytes=shared_bytes)
    assert isinstance(found, Occupancy)
    assert (found.blocks_per_sm, found.percent, found.limiter) == (blocks, percent, limiter)


@given(st.sampled_from([*ARCHES]), LAUNCHES)
def test_no_more_than_the_arch_has_and_never_more_for_a_kernel_that_takes_more(capability, wanted):
    target = parse_target(f"sm_{capability}")
    found = estimate(target, **wanted)
    assert isinstance(found, Occupancy)
    assert found.warps <= found.most_warps == ARCHES[capability][0]
    assert found.warps == found.blocks_per_sm * -(-wanted["threads"] // 32)
    assert found.blocks_per_sm * wanted["shared_bytes"] <= ARCHES[capability][1] << 10
    assert found.blocks_per_sm * wanted["threads"] * wanted["registers"] <= 65536
    for more in ("registers", "threads", "shared_bytes"):
        larger = estimate(target, **{**wanted, more: wanted[more] + 1})
        assert isinstance(larger, Occupancy)
        assert larger.blocks_per_sm <= found.blocks_per_sm


def with_contract(block: tuple[str, ...], shared: str, **resources: int):
    contract = Contract("scale", "cubin", (), {"size": 8, "wide": True}, ("1",), block, shared)
    return manifest_of(0, b"p")._replace(contract=contract, resources={"registers": 32, **resources})


def test_block_and_shared_memory_come_from_the_contract():
    found = occupancy_of(with_contract(("32", "size"), "size * 1024", shared_bytes=100 << 10))
    assert found == estimate(parse_target("sm_90"), registers=32, threads=256, shared_bytes=108 << 10)


def test_shared_memory_that_the_launch_decides_makes_it_an_upper_bound():
    found = occupancy_of(with_contract(("128",), "n * 4", shared_bytes=64 << 10))
    assert isinstance(found, Occupancy)
    assert (found.blocks_per_sm, found.depends_on) == (3, "n")


@pytest.mark.parametrize(
    ("manifest", "named"),
    [
        (with_contract(("n",), "0"), "n"),
        (with_contract(("128",), "0")._replace(target="hip:gfx942"), "hip:gfx942"),
        (with_contract(("128",), "0")._replace(target="cuda:sm_70"), "sm_70"),
        (with_contract(("128",), "0", registers=0), "registers"),
    ],
)
def test_where_there_is_none_it_says_why(manifest, named):
    found = occupancy_of(manifest)
    assert isinstance(found, str)
    assert named in found


def test_a_kernels_resources_carry_it_where_the_launch_decides_nothing():
    def resources(shared: str) -> dict[str, int]:
        manifest = with_contract(("128",), shared)
        return Kernel(Roads([Artifact(manifest, b"p")], device=None), origin="disk", seconds=0.0).resources

    assert resources("0") == {"registers": 32, "blocks_per_sm": 16, "occupancy_percent": 100}
    assert resources("4 * n") == {"registers": 32}
