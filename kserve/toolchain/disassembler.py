"""nvdisasm: where one is, and the SASS of a binary.

It takes a third of a second of processor time and more, so nothing is disassembled before somebody looks.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from kserve.config import WORKER_CONSTANTS
from kserve.errors import BuildError, ToolchainMissing

# Inside the packages of an interpreter: NVIDIA's own wheel, then the copy that Triton brings.
_IN_PACKAGES = ("nvidia/cu*/bin/nvdisasm", "triton/backends/nvidia/bin/nvdisasm")
_TOOLKITS = ("/usr/local/cuda/bin", "/usr/local/bin", "/usr/bin")
_LONGEST_S = 60.0
_MOST_BYTES = 32 << 20


def find_disassembler(path: Iterable[str] | None = None) -> Path:
    """The nvdisasm of this very interpreter's packages, else the system's: never one that a client names.

    Args:
        path: where the interpreter's packages are; None for its own.
    Raises: ToolchainMissing.
    """
    entries = [Path(entry) for entry in (sys.path if path is None else path) if entry]
    found = [tool for entry in entries for pattern in _IN_PACKAGES for tool in sorted(entry.glob(pattern))]
    for tool in (*found, *(Path(folder, "nvdisasm") for folder in _TOOLKITS)):
        if tool.is_file():
            return tool
    raise ToolchainMissing(
        "there is no disassembler: no nvdisasm beside the daemon's packages or in a CUDA toolkit",
        hint="pip install nvidia-cuda-nvdisasm, or triton, where the daemon runs",
    )


async def disassemble(tool: Path, binary: Path, *, lines: bool) -> str:
    """The SASS of a cubin.

    Args:
        binary: alone in a directory of its own, in which the tool works.
        lines:  with the source lines that the binary names.
    Raises: BuildError when the tool fails, prints without end or takes too long.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            str(tool),
            "--print-code",
            *(("--print-line-info",) if lines else ()),
            binary.name,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=binary.parent,
            env={"PATH": WORKER_CONSTANTS["PATH"], "LANG": WORKER_CONSTANTS["LANG"], "TMPDIR": str(binary.parent)},
        )
    except OSError as error:
        raise BuildError(f"{tool} cannot be run: {error.strerror}") from None
    try:
        async with asyncio.timeout(_LONGEST_S):
            content = await _read(process)
            status = await process.wait()
    except TimeoutError:
        raise BuildError(f"{tool} took longer than {_LONGEST_S:.0f} s") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.communicate()  # what was still on its way
    text = content.decode(errors="replace")
    if status != 0:
        raise BuildError(f"{tool} ended with status {status}", facts={"tool": "\n" + text.strip()[-2000:]})
    return text


async def _read(process: asyncio.subprocess.Process) -> bytes:
    """All it prints. Raises: BuildError when that is too much."""
    assert process.stdout is not None
    content = bytearray()
    while chunk := await process.stdout.read(1 << 16):
        content += chunk
        if len(content) > _MOST_BYTES:
            raise BuildError(f"the disassembly is larger than {_MOST_BYTES >> 20} MiB")
    return bytes(content)
