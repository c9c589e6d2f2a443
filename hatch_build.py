"""Builds the optional compiled launcher: into wheels, as hatchling's hook, and in place: `python hatch_build.py`.

Without a C compiler or Python's headers it says so in one line, and launches take the road in pure Python.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # in place: nothing but a compiler is needed
    BuildHookInterface = object

SOURCE = Path(__file__).resolve().parent / "kserve" / "client" / "_launcher.c"
TARGET = SOURCE.with_name("_launcher.abi3.so")
FLAGS = ("-std=c11", "-O2", "-Wall", "-Wextra", "-fPIC", "-shared", "-fvisibility=hidden")


def build_launcher(target: Path, *flags: str) -> str | None:
    """Compile the launcher. None when it is there, else the reason why not."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    headers = sysconfig.get_paths()["include"]
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "this Python has another binary interface"
    if shutil.which(compiler[0]) is None:
        return f"no C compiler ({compiler[0]})"
    if not Path(headers, "Python.h").is_file():
        return f"no Python.h in {headers}"
    # Under another name first: a process may have the old one mapped.
    fresh = target.with_name(f"{target.name}.{os.getpid()}")
    command = [*compiler, *FLAGS, *flags, f"-I{headers}", str(SOURCE), "-o", str(fresh)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return f"{compiler[0]} failed:\n{done.stderr}"
    fresh.rename(target)
    return None


class CustomBuildHook(BuildHookInterface):
    """Adds the launcher to a wheel, and then names the wheel for this platform. An editable install gets none."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        self.place = Path(tempfile.mkdtemp(prefix="kserve-launcher-"))
        if version == "editable" or os.environ.get("KSERVE_LAUNCHER") == "python":
            return
        reason = build_launcher(self.place / TARGET.name)
        if reason:
            self.app.display_warning(f"kserve: no compiled launcher: {reason}")
            return
        build_data["force_include"][str(self.place / TARGET.name)] = f"kserve/client/{TARGET.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"cp311-abi3-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def finalize(self, _version: str, _build_data: dict[str, Any], _artifact_path: str) -> None:
        shutil.rmtree(self.place, ignore_errors=True)


if __name__ == "__main__":
    print(f"{TARGET.name}: {build_launcher(TARGET) or 'built'}")
