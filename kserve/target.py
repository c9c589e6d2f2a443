"""Target: what a binary is built for, written `cuda:sm_90a`, `hip:gfx942`, or `cpu:x86_64` where it has no device code."""

from __future__ import annotations

import os
import re
from functools import lru_cache
from typing import NamedTuple

from kserve.errors import UnsupportedTarget

CUDA_BASE = r"sm_([1-9][0-9]{1,2})"
_CUDA_ARCH = re.compile(CUDA_BASE + "([af]?)")
# The first compute capability that has a suffix: sm_90a, sm_100f.
_OLDEST_WITH = {"": 0, "a": 90, "f": 100}
# Integrated GPUs: CUDA keeps no binary compatibility between them and the discrete ones of the same major version.
_TEGRA = frozenset({72, 87, 101, 110})
HIP_ARCH = r"gfx[0-9a-f]{3,4}"
_HIP_ARCH = re.compile(HIP_ARCH)
_CPU_ARCH = re.compile(r"x86_64|aarch64")

# Shared memory one block may ask for, bytes, by compute capability: CUDA C++ Programming Guide, table "Technical
# Specifications per Compute Capability", "maximum amount of shared memory per thread block".
_CUDA_SHARED_LIMIT = {
    75: 64 << 10,
    80: 163 << 10,
    86: 99 << 10,
    87: 163 << 10,
    89: 99 << 10,
    90: 227 << 10,
    100: 227 << 10,
    103: 227 << 10,
    110: 227 << 10,
    120: 99 << 10,
    121: 99 << 10,
}
# Local data share of a workgroup, bytes: AMD Instinct MI300 ISA, section "LDS".
_HIP_SHARED_LIMIT = 64 << 10


class Target(NamedTuple):
    """A backend (`cuda`, `hip` or `cpu`) and an arch (`sm_90a`, `gfx942`, `x86_64`)."""

    backend: str
    arch: str

    def __str__(self) -> str:
        return f"{self.backend}:{self.arch}"

    @property
    def capability(self) -> int:
        """Compute capability as one number, 90 for sm_90a; CUDA only."""
        match = _CUDA_ARCH.fullmatch(self.arch)
        if match is None:
            raise UnsupportedTarget(f"{self} has no compute capability: it is not a CUDA target")
        return int(match[1])

    @property
    def suffix(self) -> str:
        """`a` (this arch only), `f` (its family) or nothing (any later minor version)."""
        match = _CUDA_ARCH.fullmatch(self.arch)
        return match[2] if match else ""

    @property
    def shared_bytes_limit(self) -> int | None:
        """Bytes of shared memory a block may use; None for an arch this version does not know."""
        if self.backend == "hip":
            return _HIP_SHARED_LIMIT
        return _CUDA_SHARED_LIMIT.get(self.capability)

    def with_features(self, features: str) -> Target:
        """The target with the suffix its kernel's features call for; a suffix the caller named stays."""
        if self.backend != "cuda" or self.suffix or features == "none":
            return self
        suffix = {"arch": "a", "family": "f"}[features]
        return self if self.capability < _OLDEST_WITH[suffix] else Target("cuda", self.arch + suffix)

    def runs_on(self, capability: int) -> bool:
        """Whether a device of that compute capability runs this binary (CUDA's binary compatibility rules)."""
        if self.backend != "cuda":
            return False
        if (self.capability in _TEGRA) != (capability in _TEGRA):
            return False
        same_major = self.capability // 10 == capability // 10
        if self.suffix == "a":
            return self.capability == capability
        return same_major and self.capability <= capability


@lru_cache(maxsize=256)
def parse_target(text: str) -> Target:
    """Read `cuda:sm_90`, `sm_90a`, `hip:gfx942` or `gfx942`.

    Raises: UnsupportedTarget when the text is none of these.
    """
    backend, colon, arch = str(text).rpartition(":")
    if not colon:
        backend = "hip" if arch.startswith("gfx") else "cuda"
    pattern = {"cuda": _CUDA_ARCH, "hip": _HIP_ARCH, "cpu": _CPU_ARCH}.get(backend)
    match = pattern.fullmatch(arch) if pattern else None
    if match is None or (backend == "cuda" and int(match[1]) < _OLDEST_WITH[match[2]]):
        raise UnsupportedTarget(
            f"target {text!r} cannot be read",
            facts={"allowed": "cuda:sm_NN, sm_NNa from 90, sm_NNf from 100, hip:gfxNNN; the backend may be left out"},
        )
    return Target(backend, arch)


def host() -> Target:
    """This machine's processor: the target of a library without device code."""
    return Target("cpu", os.uname().machine)


def target_of_capability(major: int, minor: int) -> Target:
    """The CUDA target of a device's compute capability."""
    return Target("cuda", f"sm_{major}{minor}")
