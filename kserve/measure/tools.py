"""NVIDIA's tools over one launch of a kernel: `ncu` profiles it, `compute-sanitizer` checks its accesses.

The tool runs a small child process (`launch_once.py`) that gets a debug variant, built before the tool starts.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from kserve.client.direct import Wanted, resolve
from kserve.client.loader import driver
from kserve.config import environment_with, python_command
from kserve.errors import LoadError, ToolchainMissing


class Tool(NamedTuple):
    """One tool.

    Fields:
        debug:    the variant it is shown.
        places:   where it is when PATH has none; globs below the root.
        comes_in: what brings it.
        failed:   a sentence for when it ends with an error; empty for none.
    """

    name: str
    debug: str
    places: tuple[str, ...]
    comes_in: str
    failed: str = ""


NCU = Tool(
    "ncu",
    "lineinfo",
    ("usr/local/cuda/bin/ncu", "opt/nvidia/nsight-compute/*/ncu"),
    "Nsight Compute: the CUDA toolkit, or the package nsight-compute",
    "If ncu said ERR_NVGPUCTRPERM: this user may not read the GPU's counters; run as root, or have the driver's module loaded "
    "with NVreg_RestrictProfilingToAdminUsers=0.",
)
SANITIZER = Tool(
    "compute-sanitizer",
    "sanitize",
    ("usr/local/cuda/bin/compute-sanitizer", "usr/local/cuda/compute-sanitizer/compute-sanitizer"),
    "the CUDA toolkit",
)
SANITIZER_TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")


def find_tool(tool: Tool, *, root: Path = Path("/")) -> str:
    """The tool's file: on PATH, else where NVIDIA installs it. Raises: ToolchainMissing."""
    known = [str(path) for place in tool.places for path in sorted(root.glob(place)) if path.is_file()]
    found = shutil.which(tool.name) or next(iter(reversed(known)), None)
    if found is None:
        raise ToolchainMissing(f"{tool.name} is not installed, or not on PATH", hint=f"it comes with {tool.comes_in}")
    return found


def target_here(tool: Tool) -> str:
    """The current device's target. Raises: LoadError where there is no device to run on."""
    try:
        found = driver()
        return str(found.target_of(found.current_device()))
    except LoadError as error:
        raise LoadError(f"{tool.name} needs a GPU to launch on: {error.message}") from None


def run(tool: Tool, wish: Wanted, *, inputs: str, options: list[str]) -> int:
    """Build the wish's debug variant, then run the tool over one launch of it; the tool's exit status.

    Args:
        inputs:  where they come from, as `launch_once.place_of` gives it.
        options: the tool's own, after those it gets anyway.
    """
    path = find_tool(tool)
    symbol = resolve([wish], load=False)[0].manifest.contract.symbol
    command = [path, *_watched(tool, symbol), *options, *_child(wish, inputs)]
    sys.stderr.write(f"{shlex.join(command)}\n")
    sys.stderr.flush()
    # torch's own pool would hide an access past the end of a tensor.
    status = subprocess.run(command, env=environment_with(PYTORCH_NO_CUDA_MEMORY_CACHING="1"), check=False).returncode
    if status and tool.failed:
        sys.stderr.write(f"{tool.failed}\n")
    return status if status >= 0 else 128 - status


def _watched(tool: Tool, symbol: str) -> list[str]:
    """What makes the tool look at this kernel, in the child alone, and say so in its exit status."""
    if tool is NCU:
        names = ["--kernel-name-base", "mangled", "--kernel-name", symbol]
        return ["--target-processes", "application-only", *names, "--import-source", "yes"]
    return ["--target-processes", "application-only", "--error-exitcode", "1"]


def _child(wish: Wanted, inputs: str) -> list[str]:
    plain: dict[str, Any] = {"name": wish.name, "target": wish.target, "spec": wish.spec, "debug": wish.debug, "inputs": inputs}
    return python_command(sys.executable, "kserve.measure.launch_once", json.dumps(plain))
