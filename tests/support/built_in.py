"""What a built-in kernel is compiled from, and what the compiler makes of it, without a store or a daemon."""

from __future__ import annotations

import contextlib
import subprocess
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kserve import catalog
from kserve.artifact import DECLARED, GENERIC
from kserve.build.plan import Choice, Plan, plan_builds
from kserve.config import Settings
from kserve.errors import ToolchainMissing
from kserve.key import digest_of
from kserve.target import parse_target
from kserve.toolchain import nvrtc
from kserve.toolchain.base import Fingerprint, check_parameters
from kserve.toolchain.disassembler import find_disassembler
from kserve.toolchain.sass import instruction_mix

_NOBODY = Fingerprint("none", "0", "", {})


class DeviceCode(NamedTuple):
    """What NVRTC gave: registers, spills and so on; instructions by class."""

    resources: dict[str, int]
    mix: dict[str, int]


def built_in_plan(name: str, *, facts: bool = True, target: str = "cuda:sm_90", **spec: Any) -> tuple[Plan, dict[str, bytes]]:
    """How the kernel is built for the declared argument facts, or for none, and its files by name. Knobs go with the spec."""
    folder, definition, entry = next(found for found in catalog.every_entry(Settings()) if found[2].name == name)
    files = catalog.collect_files(folder, definition)
    digests = {relative: digest_of(content) for relative, content in files.items()}
    choice = Choice({name: value for name, value in spec.items() if name in entry.knobs})
    axes = {name: value for name, value in spec.items() if name not in choice.values}
    known = {"target": parse_target(target), "fingerprint": _NOBODY, "files": digests}
    plans = plan_builds(definition, entry, spec=axes, choice=choice, **known)
    wanted = DECLARED if facts else GENERIC
    return next((plan for plan in plans if plan.variant == wanted), plans[0]), files


def stage(files: dict[str, bytes], directory: Path) -> None:
    """Lay the files out as a worker finds them."""
    for relative, content in files.items():
        (directory / relative).parent.mkdir(parents=True, exist_ok=True)
        (directory / relative).write_bytes(content)


def device_code(name: str, directory: Path, *, facts: bool = True, arch: str = "sm_90", **spec: Any) -> DeviceCode:
    """Compile for that arch and read the result; skips without NVRTC or a disassembler."""
    try:
        compiler = _nvrtc()
    except ToolchainMissing as error:
        pytest.skip(error.message)
    plan, files = built_in_plan(name, facts=facts, target=f"cuda:{arch}", **spec)
    stage(files, directory)
    with contextlib.chdir(directory):
        built, payload = compiler.build(plan.job)
    check_parameters(plan.job, built)
    binary = directory / "binary" / "kernel.cubin"
    binary.parent.mkdir()
    binary.write_bytes(payload)
    sass = subprocess.run(
        [find_disassembler(), "--print-code", binary.name], cwd=binary.parent, capture_output=True, text=True, check=True
    ).stdout
    return DeviceCode(built.resources, instruction_mix(sass))


@lru_cache(maxsize=1)
def _nvrtc() -> nvrtc.Nvrtc:
    return nvrtc.load()
