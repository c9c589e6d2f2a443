"""Other users of the machine, for tests that run as root: ids without a passwd entry."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest

from tests.support.processes import REPOSITORY

SOMEBODY, SOMEBODY_ELSE, STRANGER = 54321, 54322, 54323
# What the kernel shows in place of an id that a user namespace does not map; on many systems also the user `nobody`.
OVERFLOW = 65534

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")


@functools.cache
def interpreter() -> str | None:
    """A Python that a user without a passwd entry can run with the package, its daemon and a compiler; None where none is.

    This process's own may lie where only its user can read: then the system's, in an environment with the same packages.
    """
    if os.getuid() != 0:
        return None
    folder = Path(tempfile.mkdtemp(prefix="kt-", dir="/tmp"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    folder.chmod(0o755)
    system = f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    for python in (sys.executable, make_environment(folder, python=system, packages=site_packages())):
        with contextlib.suppress(OSError):
            if _run(python, SOMEBODY, "import kserve.cli, uvicorn, cuda.bindings.nvrtc").returncode == 0:
                return python
    return None


def site_packages() -> Path:
    """Where this process's packages are installed."""
    return Path(sysconfig.get_paths()["platlib"])


def make_environment(folder: Path, *, python: str, packages: Path) -> str:
    """A virtual environment over installed packages; its interpreter."""
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    (folder / "bin" / "python").symlink_to(python)
    (folder / "pyvenv.cfg").write_text(f"home = {Path(python).parent}\n")
    own = folder / Path(sysconfig.get_paths(vars={"base": "", "platbase": ""})["platlib"].lstrip("/"))
    own.parent.mkdir(parents=True)
    own.symlink_to(packages)
    return str(folder / "bin" / "python")


def run_as(
    uid: int, code: str, *arguments: str, cwd: Path = REPOSITORY, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run Python code as that user, in exactly this environment and PATH."""
    python = interpreter()
    assert python is not None
    return _run(python, uid, code, *arguments, cwd=cwd, **environment)


def _run(
    python: str, uid: int, code: str, *arguments: str, cwd: Path = REPOSITORY, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, "-c", code, *arguments],
        cwd=cwd,
        env={"PATH": os.environ["PATH"], **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        user=uid,
        group=uid,
        extra_groups=[],
    )


def give(path: Path, uid: int) -> Path:
    """Make the directory and all that is in it that user's; the way to it stays open."""
    path.mkdir(exist_ok=True)
    for entry in (path, *path.rglob("*")):
        os.chown(entry, uid, uid, follow_symlinks=False)
    return path


def copy_package(folder: Path) -> Path:
    """The package as an installation has it, its kernels inside: `folder` is what goes on PYTHONPATH."""
    unwanted = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPOSITORY / "kserve", folder / "kserve", ignore=unwanted, copy_function=shutil.copy)
    for kernels in ("cuda_src", "triton_src"):
        shutil.copytree(
            REPOSITORY / kernels, folder / "kserve" / "_kernels" / kernels, ignore=unwanted, copy_function=shutil.copy
        )
    return folder
