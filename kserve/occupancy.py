"""Occupancy: how many blocks of a kernel one multiprocessor holds, estimated from what the compiler and the contract say.

The rules are those of NVIDIA's occupancy calculator (cuda_occupancy.h of the CUDA toolkit); a test holds both to the same
numbers. An estimate: named barriers, clusters and registers that a kernel hands on at run time play no part.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from kserve.artifact import Manifest
from kserve.expression import cdiv, parsed
from kserve.target import Target, parse_target

_WARP = 32
# Of every arch here: 32-bit registers of a multiprocessor and of a block; its parts, among which warps are dealt out; the
# registers a warp gets are a multiple of this.
_REGISTERS, _PARTS, _REGISTER_UNIT = 65536, 4, 256
_MOST_REGISTERS = 255


class _Limits(NamedTuple):
    """What one multiprocessor holds; what shared memory of a block is rounded up to, after the driver's own was added."""

    warps: int
    blocks: int
    shared_bytes: int
    shared_reserved: int = 1 << 10
    shared_unit: int = 128


# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; the last two columns are cuda_occupancy.h's and
# the guide's "1 KB per thread block reserved for system use" from compute capability 8.0 on.
_LIMITS = {
    75: _Limits(32, 16, 64 << 10, 0, 256),
    80: _Limits(64, 32, 164 << 10),
    86: _Limits(48, 16, 100 << 10),
    87: _Limits(48, 16, 164 << 10),
    89: _Limits(48, 24, 100 << 10),
    90: _Limits(64, 32, 228 << 10),
    100: _Limits(64, 32, 228 << 10),
    103: _Limits(64, 32, 228 << 10),
    110: _Limits(48, 24, 228 << 10),
    120: _Limits(48, 24, 100 << 10),
    121: _Limits(48, 24, 100 << 10),
}


class Occupancy(NamedTuple):
    """How full a multiprocessor is.

    Fields:
        warps, most_warps: resident ones, and what the arch has room for.
        limiter:    what there is least of: warps, blocks, registers or shared memory.
        depends_on: the launch argument that adds shared memory: then these are upper bounds; empty for none.
    """

    blocks_per_sm: int
    warps: int
    most_warps: int
    limiter: str
    depends_on: str = ""

    @property
    def percent(self) -> int:
        """The share of the arch's warps."""
        return 100 * self.warps // self.most_warps


def occupancy_of(manifest: Manifest) -> Occupancy | str:
    """The occupancy of an artifact's launches, or why there is none to tell."""
    contract, target, registers = manifest.contract, parse_target(manifest.target), manifest.resources.get("registers", 0)
    if registers < 1:
        return "the compiler reported no registers"
    block = [parsed(text) for text in contract.block]
    open_ones = sorted({name for size in block for name in size.names} - set(contract.constants))
    if open_ones:
        return f"the block depends on {', '.join(open_ones)}"
    dynamic = parsed(contract.shared_bytes)
    depends_on = ", ".join(sorted(dynamic.names - set(contract.constants)))
    shared = manifest.resources.get("shared_bytes", 0)
    return estimate(
        target,
        registers=registers,
        threads=prod(size.evaluate(contract.constants) for size in block),
        shared_bytes=shared if depends_on else shared + dynamic.evaluate(contract.constants),
        depends_on=depends_on,
    )


def estimate(target: Target, *, registers: int, threads: int, shared_bytes: int, depends_on: str = "") -> Occupancy | str:
    """The occupancy of blocks of so many threads with so many registers each, or why there is none to tell.

    Args:
        shared_bytes: of a block, static and dynamic.
    """
    limits = _LIMITS.get(target.capability) if target.backend == "cuda" else None
    if limits is None:
        return f"not available for {target}"
    warps = cdiv(threads, _WARP)
    rooms = {
        "warps": limits.warps // warps,
        "blocks": limits.blocks,
        "registers": _by_registers(registers, warps),
        "shared memory": _by_shared_memory(shared_bytes, limits),
    }
    limiter = min(rooms, key=rooms.__getitem__)
    return Occupancy(rooms[limiter], rooms[limiter] * warps, limits.warps, limiter, depends_on)


def _by_registers(registers: int, warps: int) -> int:
    """Blocks that the registers suffice for: a warp takes them from one part of the multiprocessor."""
    of_a_warp = cdiv(registers * _WARP, _REGISTER_UNIT) * _REGISTER_UNIT
    if registers > _MOST_REGISTERS or of_a_warp * cdiv(warps, _PARTS) * _PARTS > _REGISTERS:
        return 0
    return _REGISTERS // _PARTS // of_a_warp * _PARTS // warps


def _by_shared_memory(shared_bytes: int, limits: _Limits) -> int:
    of_a_block = cdiv(shared_bytes + limits.shared_reserved, limits.shared_unit) * limits.shared_unit
    return limits.shared_bytes // of_a_block if of_a_block else limits.blocks
