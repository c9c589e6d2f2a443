"""Finds a CUDA toolkit: one that is named, the pip wheels, `/usr/local/cuda`. What it lacks is filled from torch's wheels.

Every place that was looked at is kept with the reason why it does not serve, so that the choice, `kserve doctor toolchain` and
the error are one list. Nothing is mixed: not wheels of two versions, not headers of one release with the compiler of another.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kserve.errors import ToolchainMissing

SYSTEM = Path("/usr/local/cuda")
# What makes a directory a compiler; what a build may want besides, and may come from a wheel.
_PROGRAMS = ("bin/nvcc", "bin/ptxas", "bin/cudafe++", "bin/fatbinary", "nvvm/bin/cicc")
_HEADERS = ("cuda_runtime.h", "crt/host_config.h")
_TARGETS = ("", "targets/x86_64-linux/", "targets/sbsa-linux/")
PIECES = ("cuda_runtime.h", "cublas_v2.h", "cusparse.h", "cusolverDn.h", "cufft.h", "curand.h", "libcudart.so")
# The wheels that together are a compiler: all of one release.
_WHEELS = ("nvidia_cuda_nvcc", "nvidia_nvvm", "nvidia_cuda_crt", "nvidia_cuda_cccl", "nvidia_cuda_runtime")
_RELEASE = re.compile(r"release (\d+\.\d+)")
_DEFINED = re.compile(r"^#define\s+CUDA(?:RT)?_VERSION\s+(\d+)", re.MULTILINE)


class Toolkit(NamedTuple):
    """A compiler, its release (`13.0`), and where headers and libraries are, the compiler's own first."""

    origin: str
    home: Path
    version: str
    includes: tuple[Path, ...]
    libraries: tuple[Path, ...]

    @property
    def nvcc(self) -> Path:
        return self.home / "bin" / "nvcc"

    def where(self, piece: str) -> Path | None:
        """The file of that name, or a library under another version of it; None where nothing has it."""
        places = self.libraries if piece.startswith("lib") else self.includes
        return next((path for place in places for path in sorted(place.glob(f"{piece}*")) if path.name != f"{piece}.a"), None)


class Candidate(NamedTuple):
    """A place that was looked at.

    Fields:
        origin:   `configured`, `CUDA_HOME`, `wheels` or `system`.
        place:    as a person would look for it.
        toolkit:  what was found there; None where it does not serve.
        rejected: why it does not; empty where it does.
        named:    somebody asked for this one: nothing else is taken instead.
    """

    origin: str
    place: str
    toolkit: Toolkit | None
    rejected: str
    named: bool = False


def candidates(
    named: Sequence[tuple[str, Path]], sites: Sequence[Path], *, cuda: str, system: Path = SYSTEM
) -> list[Candidate]:
    """Every place in the order of preference.

    Args:
        named: (origin, directory) that a person asked for.
        sites: the directories on an interpreter's path, where packages lie.
        cuda:  the CUDA release torch was built with, such as `13.0`; a toolkit of another major release does not serve it.
    """
    found = [_looked_at(origin, home, sites, cuda=cuda)._replace(named=True) for origin, home in named]
    return [*found, _wheels(sites, cuda=cuda), _looked_at("system", system, sites, cuda=cuda)]


def chosen(looked_at: Sequence[Candidate]) -> Toolkit:
    """The first that serves.

    Raises: ToolchainMissing with the reason for each place; also where a named one does not serve.
    """
    for candidate in looked_at:
        if candidate.toolkit is not None:
            return candidate.toolkit
        if candidate.named:
            break
    facts = {one.origin: f"{one.place}: {one.rejected}" for one in looked_at}
    hint = "kserve doctor toolchain shows what was looked at; pip install 'kserve-jit[extension]' brings the compiler as wheels"
    first = looked_at[0]
    what = f"the CUDA toolkit in {first.place} cannot be used: {first.rejected}" if first.named else "no CUDA toolkit was found"
    raise ToolchainMissing(what, facts=facts, hint=hint)


def _looked_at(origin: str, home: Path, sites: Sequence[Path], *, cuda: str) -> Candidate:
    """A directory that may be a toolkit."""
    refused = Candidate(origin, str(home), None, "")
    if not home.is_dir():
        return refused._replace(rejected="there is no such directory")
    if lacking := [program for program in _PROGRAMS if not (home / program).is_file()]:
        return refused._replace(rejected=f"it has no {', '.join(lacking)}")
    includes = [home / f"{target}include" for target in _TARGETS]
    includes = [include for include in includes if all((include / header).is_file() for header in _HEADERS)]
    if not includes:
        return refused._replace(rejected=f"it has no include/{_HEADERS[0]} and include/{_HEADERS[1]}")
    libraries = [home / f"{target}{name}" for name in ("lib64", "lib") for target in _TARGETS]
    draft = Toolkit(origin, home, "", (includes[0],), _distinct([place for place in libraries if place.is_dir()]))
    return _checked(refused, draft, sites, cuda=cuda)


def _checked(refused: Candidate, draft: Toolkit, sites: Sequence[Path], *, cuda: str) -> Candidate:
    """The toolkit, filled from the wheels of its release, where its parts are of one release, and of torch's major one."""
    try:
        version, headers = release_of(draft.nvcc), _header_release(draft.includes)
    except OSError as error:
        return refused._replace(rejected=f"its nvcc cannot be run: {error}")
    if version != headers:
        return refused._replace(
            rejected=f"its nvcc is of release {version or 'unknown'}, its headers are of {headers or 'none'}"
        )
    if cuda and version.partition(".")[0] != cuda.partition(".")[0]:
        return refused._replace(
            rejected=f"it is of release {version}, torch was built with CUDA {cuda}: not of one major release"
        )
    more = [place for place in _wheel_homes(sites) if _header_release([place / "include"]) == version]
    includes = _distinct([*draft.includes, *(place / "include" for place in more)])
    libraries = _distinct([*draft.libraries, *(place / "lib" for place in more)])
    return refused._replace(toolkit=draft._replace(version=version, includes=includes, libraries=libraries))


def _wheels(sites: Sequence[Path], *, cuda: str) -> Candidate:
    """The compiler that lies in the packages of an interpreter."""
    homes = _wheel_homes(sites)
    refused = Candidate("wheels", ", ".join(map(str, homes)) or "nvidia/cu13 on the interpreter's path", None, "")
    versions = _wheel_versions(sites)
    if lacking := [name for name in _WHEELS if name not in versions]:
        names = ", ".join(name.replace("_", "-") for name in lacking)
        return refused._replace(rejected=f"not installed: {names}")
    if len({tuple(version.split(".")[:2]) for version in versions.values()}) > 1:
        mixed = ", ".join(f"{name.replace('_', '-')} {version}" for name, version in versions.items())
        return refused._replace(rejected=f"its wheels are of different releases and are not mixed: {mixed}")
    home = next((place for place in homes if all((place / program).is_file() for program in _PROGRAMS)), None)
    if home is None:
        return refused._replace(rejected=f"no one directory has {', '.join(_PROGRAMS)}")
    includes = [place / "include" for place in (home, *homes)]
    libraries = [place / "lib" for place in (home, *homes)]
    return _checked(refused, Toolkit("wheels", home, "", _distinct(includes), _distinct(libraries)), sites, cuda=cuda)


def _wheel_homes(sites: Sequence[Path]) -> list[Path]:
    """`nvidia/cu13` of each site: one tree of bin, include, lib and nvvm, into which every wheel puts its part."""
    return list(_distinct([path for site in sites for path in sorted((site / "nvidia").glob("cu[0-9][0-9]"))]))


def _wheel_versions(sites: Sequence[Path]) -> dict[str, str]:
    """The installed release of each of `_WHEELS`: that of the first site that has it, as an import would find it."""
    found: dict[str, str] = {}
    for site in sites:
        for name in _WHEELS:
            for path in site.glob(f"{name}-[0-9]*.dist-info"):
                found.setdefault(name, path.name.removeprefix(f"{name}-").removesuffix(".dist-info"))
    return found


def release_of(nvcc: Path) -> str:
    """`13.0`; empty when it does not say. Raises: OSError when it cannot be run."""
    done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False, timeout=60)
    match = _RELEASE.search(done.stdout)
    return match[1] if match else ""


def _header_release(includes: Sequence[Path]) -> str:
    for path in (include / name for include in includes for name in ("cuda.h", "cuda_runtime_api.h")):
        try:
            match = _DEFINED.search(path.read_text(errors="replace"))
        except OSError:
            continue
        if match:
            return f"{int(match[1]) // 1000}.{int(match[1]) % 1000 // 10}"
    return ""


def _distinct(places: Sequence[Path]) -> tuple[Path, ...]:
    """Those that are directories, each once, whatever links lead there."""
    return tuple({place.resolve(): place for place in reversed(places) if place.is_dir()}.values())[::-1]


def link_libraries(toolkit: Toolkit, folder: Path) -> Path:
    """A directory of links by which a linker finds `-lcudart` where a wheel has `libcudart.so.13` only."""
    folder.mkdir(exist_ok=True)
    for place in toolkit.libraries:
        for path in sorted(place.glob("lib*.so.*")):
            plain = path.name.partition(".so.")[0] + ".so"
            if not any((other / plain).exists() for other in (*toolkit.libraries, folder)):
                (folder / plain).symlink_to(path)
    return folder
