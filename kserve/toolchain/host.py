"""The system's C++ compiler: its programs, the headers that come with it, the libraries it links."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from kserve.errors import ToolchainMissing

_PROGRAMS = ("cc1plus", "collect2", "as", "ld")
# What is started besides: nvcc gives its steps to a shell.
_STARTED = ("c++", "g++", "gcc", "cc", "sh", "rm", *_PROGRAMS)
# Headers of the C library and the kernel: in a build's world, and in a key by the releases that these two name.
_RELEASES = ("features.h", "linux/version.h")
_SYSTEM = Path("/usr/include")


class Host(NamedTuple):
    """A C++ compiler.

    Fields:
        programs:  what it consists of, and the files that name the releases of the C library and the kernel's headers.
        trees:     its own headers and objects.
        libraries: where the system's libraries are, for the linker and for the programs themselves.
        roots:     all that a compile may read of it.
    """

    cxx: Path
    version: str
    programs: tuple[Path, ...]
    trees: tuple[Path, ...]
    libraries: tuple[Path, ...]
    roots: tuple[Path, ...]


def find_host() -> Host:
    """Raises ToolchainMissing where there is none."""
    found = shutil.which("c++")
    if found is None:
        raise ToolchainMissing("there is no C++ compiler on the path", hint="install g++, or a C++ compiler called c++")
    cxx = Path(found)
    searched = _asked(cxx, "-E", "-v", "-x", "c++", os.devnull).partition("search starts here:\n#include <...>")[2]
    includes = [Path(line.strip()).resolve() for line in searched.splitlines() if line.startswith(" /")]
    own = Path(_asked(cxx, "-print-libgcc-file-name").strip()).resolve().parent
    system = {
        _SYSTEM,
        Path("/usr/local/include"),
        *(path for path in includes if path.parent == _SYSTEM and path.name.count("-")),
    }
    trees = [path for path in includes if path not in system and not path.is_relative_to(own)]
    programs = [path for name in _PROGRAMS if (path := _program(cxx, name)) is not None]
    programs += [path for name in _RELEASES if (path := _SYSTEM / name).is_file()]
    libraries = [Path(_asked(cxx, f"-print-file-name={name}").strip()).resolve().parent for name in ("libc.so.6", "crt1.o")]
    started = [path for name in _STARTED if (path := _program(cxx, name)) is not None]
    roots = (*started, own, *includes, _SYSTEM, *libraries)
    version = _asked(cxx, "-dumpfullversion").strip()
    return Host(cxx, version, (cxx.resolve(), *programs), (own, *trees), tuple(libraries), tuple(dict.fromkeys(roots)))


def _program(cxx: Path, name: str) -> Path | None:
    asked = _asked(cxx, f"-print-prog-name={name}").strip()
    found = shutil.which(asked or name)
    return Path(found).resolve() if found else None


def _asked(cxx: Path, *arguments: str) -> str:
    done = subprocess.run([cxx, *arguments], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr
