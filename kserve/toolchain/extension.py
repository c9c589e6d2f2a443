"""Torch extensions: C++ through the system's compiler, CUDA through nvcc, linked into a shared library.

The flags are those of `torch.utils.cpp_extension`, whose own ninja file `tests/build/test_extension_flags.py` holds them to,
with others that keep paths and chance out of the bytes (docs/decisions/0006). A job compiles one unit into an object, or links
the objects that lie beside it; a unit without one is compiled first.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from kserve.alias import stamp
from kserve.config import foreign_variable
from kserve.errors import CompileFailed, ToolchainMissing, UnsupportedTarget
from kserve.target import parse_target
from kserve.toolchain.base import Built, Fingerprint, Job
from kserve.toolchain.cuda_root import Toolkit, candidates, chosen, link_libraries
from kserve.toolchain.depfile import Roots, inside, listed, read_from_roots, refuse_unlisted
from kserve.toolchain.host import Host, find_host
from kserve.toolchain.library import needs_of
from kserve.toolchain.torch_facts import Torch, find_torch

CUDA_SUFFIXES = (".cu", ".cuh")
# Uses of a root in which includes are looked for, in that order.
_SEARCHED = ("quote", "include", "system")
_NVCC_FLAGS = (
    "-D__CUDA_NO_HALF_OPERATORS__",
    "-D__CUDA_NO_HALF_CONVERSIONS__",
    "-D__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "-D__CUDA_NO_HALF2_OPERATORS__",
    "--expt-relaxed-constexpr",
)
# Of the C++ library's two strings the newer: torch from 2.11 on has no other.
_CXX_ABI = "1"
_ERROR = re.compile(r"(?:fatal )?error\b|undefined reference|cannot find -l|multiple definition")
_UNREADABLE = re.compile(r"No such file or directory|Permission denied|cannot open source file")


def load() -> ExtensionToolchain:
    """Raises ToolchainMissing where there is no torch or no C++ compiler. Without a CUDA toolkit only CUDA units fail."""
    torch = find_torch(sys.path)
    if torch is None:
        raise ToolchainMissing(f"torch cannot be found by {sys.executable}", hint="pip install 'kserve-jit[cuda13]'")
    named = [("CUDA_HOME", Path(home))] if (home := foreign_variable("CUDA_HOME")) else []
    try:
        toolkit = chosen(candidates(named, [Path(entry) for entry in sys.path if entry], cuda=torch.cuda))
    except ToolchainMissing as error:
        return ExtensionToolchain(torch, find_host(), error)
    return ExtensionToolchain(torch, find_host(), toolkit)


class ExtensionToolchain:
    """The compilers of one environment.

    Args:
        cuda: the toolkit, or why there is none.
    """

    def __init__(self, torch: Torch, host: Host, cuda: Toolkit | ToolchainMissing) -> None:
        self._torch = torch
        self._host = host
        self._cuda = cuda
        self._python = Path(sysconfig.get_path("include"))
        self._links = (
            link_libraries(cuda, Path(tempfile.mkdtemp(prefix="cuda-"))) if isinstance(cuda, Toolkit) else Path(os.devnull)
        )

    @property
    def _toolkit(self) -> Toolkit:
        if isinstance(self._cuda, ToolchainMissing):
            raise self._cuda
        return self._cuda

    def roots(self) -> list[Path]:
        """The programs, the headers of all, the libraries that are linked."""
        toolkit = self._cuda
        cuda = (
            [] if isinstance(toolkit, ToolchainMissing) else [toolkit.home, *toolkit.includes, *toolkit.libraries, self._links]
        )
        torch = [self._torch.include, self._torch.libraries]
        found = [*self._host.roots, *cuda, *torch, self._python]
        return [*found, *(real for path in found if (real := path.resolve()) != path)]

    def fingerprint(self) -> Fingerprint:
        """Programs and headers of the compilers by their bytes; torch by its version and the commit it was built from."""
        programs, trees = [*self._host.programs], [*self._host.trees, self._python]
        version = f"c++ {self._host.version}"
        if isinstance(self._cuda, Toolkit):
            home = self._cuda.home
            programs += [path for path in sorted((home / "bin").iterdir()) if path.is_file()]
            trees += [home / "nvvm", *self._cuda.includes]
            version += f", nvcc {self._cuda.version}"
        stamps = {str(path): stamp(str(path)) for path in (*programs, self._torch.root / "version.py")}
        hasher = hashlib.sha256()
        for path in programs:
            hasher.update(f"{path.name}\0{_file_digest(path)}\n".encode())
        for tree in trees:
            hasher.update(f"{_tree_digest(tree, stamps)}\n".encode())
        facts = {
            "torch": f"{self._torch.version} {self._torch.build}",
            "stable_headers": _digest_of_all(self._torch.stable_headers, stamps),
            "python": sys.implementation.cache_tag,
            "cxx": _CXX_ABI,
        }
        return Fingerprint("torch-extension", version, hasher.hexdigest(), stamps, "reproducible 1", facts)

    def build(self, job: Job) -> tuple[Built, bytes]:
        since_ns = time.time_ns()
        scratch = Path("../scratch")
        if job.main:
            content, read = self._compile(job, job.main)
            return Built("object", job.main, None, [], {}, {}, includes=self._includes(job, read, since_ns)), content
        units = job.options["units"]
        objects = [Path(f"{unit}.o") for unit in units]
        read = []
        for unit, path in zip(units, objects, strict=True):
            if not path.is_file():
                content, more = self._compile(job, unit)
                path.write_bytes(content)
                read += more
        library = scratch / "library.so"
        _run([*self._link_line(job, objects), "-o", str(library)])
        read += inside(listed(scratch / "link.d"), job.roots) if job.roots else []
        content = library.read_bytes()
        needs = {**needs_of(content), **self._needs(job)}
        built = Built("so", job.function, None, [], {}, {}, includes=self._includes(job, read, since_ns), needs=needs)
        return built, content

    def _needs(self, job: Job) -> dict[str, str]:
        """What a process must have that loads the library."""
        stable = job.options.get("stable_abi")
        found = {"torch": f"stable {stable[0]}" if stable else self._torch.version, "cxx": _CXX_ABI}
        if not is_operators(job):
            found["python"] = sys.implementation.cache_tag
        return {**found, "codes": " ".join(codes_of(job)) if job.options["with_cuda"] else ""}

    def _compile(self, job: Job, unit: str) -> tuple[bytes, list[str]]:
        """The object of one unit, and the files it was made of. The object's name is in its bytes: it is always the same."""
        if job.roots:
            refuse_unlisted(Path(unit).read_bytes(), unit)
        line = self._nvcc_line(job, unit) if unit.endswith(CUDA_SUFFIXES) else self._cxx_line(job, unit)
        target, depfile = Path("../scratch/unit.o"), Path("../scratch/unit.d")
        _run([*line, "-MD", "-MF", str(depfile), "-c", unit, "-o", str(target)])
        read = listed(depfile)
        if job.options.get("stable_abi"):
            self._refuse_unstable(unit, read)
        return target.read_bytes(), read

    def _refuse_unstable(self, unit: str, read: Iterable[str]) -> None:
        stable = [str(path) for path in self._torch.stable_headers]
        for path in read:
            if path.startswith(f"{self._torch.include}/") and not path.startswith(tuple(stable)):
                raise CompileFailed(
                    f"{unit} reads {os.path.relpath(path, self._torch.include)}, which is not of torch's stable ABI",
                    facts={"allowed": "headers of torch/csrc/stable and torch/headeronly"},
                    hint="leave out `stable_abi` to build for this torch alone",
                )

    def _includes(self, job: Job, read: list[str], since_ns: int) -> dict[str, str]:
        if not job.roots:
            return {}
        known = [str(Path.cwd()), str(Path.cwd().parent), *map(str, self._known())]
        uses = job.options["roots"]
        order = [number for kind in _SEARCHED for number, (use, _) in enumerate(uses) if use.startswith(kind)]
        # Those without a use are projects, whose files are looked at.
        identified = [identity for _, identity in uses] + [""] * (len(job.roots) - len(uses))
        roots = Roots(job.roots, identified, order)
        return read_from_roots([*dict.fromkeys(read)], roots, known=known, since_ns=since_ns)

    def _known(self) -> Iterator[Path]:
        """Directories whose files the fingerprint covers."""
        cuda = (
            [] if isinstance(self._cuda, ToolchainMissing) else [self._cuda.home, *self._cuda.includes, *self._cuda.libraries]
        )
        for path in (*self._host.trees, *self._host.libraries, self._python, self._torch.root, self._links, *cuda):
            yield path
            if (real := path.resolve()) != path:
                yield real

    def _defines(self, job: Job) -> list[str]:
        module = [f"-DTORCH_EXTENSION_NAME={job.function}", "-DTORCH_API_INCLUDE_EXTENSION_H"]
        stable = [f"-DTORCH_TARGET_VERSION={_stable_version(abi)}" for abi in job.options.get("stable_abi", ())]
        return [*module, *stable, *(f"-DKSERVE_{name}={text}" for name, text in sorted(job.options["macros"].items()))]

    def _quoted(self, job: Job, unit: str) -> list[str]:
        """Where the unit came from: what it includes in quotes lies beside it there."""
        uses = zip(job.roots, job.options.get("roots", ()), strict=False)
        return [f"-iquote{root}" for root, (use, _) in uses if use == f"quote {Path(unit).parent}"]

    def _include_flags(self, job: Job) -> list[str]:
        """The kernel's own folder, the roots in their order, then torch, CUDA and Python as the system's."""
        found = ["-I.", "-Iinclude"]
        for root, (use, _) in zip(job.roots, job.options.get("roots", ()), strict=False):
            found += {"include": [f"-I{root}"], "system": ["-isystem", root]}.get(use, [])
        system = [self._torch.include, self._torch.include / "torch" / "csrc" / "api" / "include"]
        system += self._toolkit.includes if job.options["with_cuda"] else ()
        for path in (*system, self._python):
            found += ["-isystem", str(path)]
        return found

    def _mapped(self, job: Job) -> list[str]:
        """Names instead of this machine's paths, wherever a source asks for its file: as given, and without links."""
        places = {str(self._torch.include): "/torch", str(self._python): "/python", str(Path.cwd()): "/kserve"}
        if isinstance(self._cuda, Toolkit):
            places |= {str(path): "/cuda" for path in (self._cuda.home, *self._cuda.includes)}
        places |= {root: f"/root{number}" for number, root in enumerate(job.roots)}
        real = {os.path.realpath(place): name for place, name in places.items()}
        return [f"-ffile-prefix-map={place}={name}" for place, name in {**real, **places}.items()]

    def _cxx_line(self, job: Job, unit: str) -> list[str]:
        flags = [*self._defines(job), *self._quoted(job, unit), *self._include_flags(job), "-fPIC", self._torch.standard]
        flags += job.options.get("cflags", ())
        return [str(self._host.cxx), *flags, f"-frandom-seed={_seed(job, unit)}", "-Werror=date-time", *self._mapped(job)]

    def _nvcc_line(self, job: Job, unit: str) -> list[str]:
        own = list(job.options.get("cuda_cflags", ()))
        flags = [*self._defines(job), *self._include_flags(job), *_NVCC_FLAGS, *_gencode(job), "-Xcompiler", "-fPIC", *own]
        if not any(flag.startswith(("-std=", "--std=")) for flag in own):
            flags.append(self._torch.standard)
        to_host = [*self._quoted(job, unit), "-Werror=date-time", *self._mapped(job)]
        fixed = ["-objtemp", f"-frandom-seed={_seed(job, unit)}", "-Xcudafe", f"--orig_src_path_name /kserve/{unit}"]
        fixed += [part for flag in to_host for part in ("-Xcompiler", flag.replace(",", "\\,"))]
        return [str(self._toolkit.nvcc), "-ccbin", str(self._host.cxx), *flags, *fixed]

    def _link_line(self, job: Job, objects: list[Path]) -> list[str]:
        cuda = job.options["with_cuda"]
        flags = ["-shared", *(_rooted(flag, job.roots) for flag in job.options.get("ldflags", ()))]
        uses = zip(job.roots, job.options.get("roots", ()), strict=False)
        flags += [f"-L{root}" for root, (use, _) in uses if use == "library"]
        flags += [f"-L{self._torch.libraries}", "-lc10", *(["-lc10_cuda"] if cuda else []), "-ltorch_cpu"]
        flags += [*(["-ltorch_cuda"] if cuda else []), "-ltorch", *([] if is_operators(job) else ["-ltorch_python"])]
        if cuda:
            flags += [*(f"-L{path}" for path in self._toolkit.libraries), f"-L{self._links}", "-lcudart"]
        if job.roots:
            flags.append("-Wl,--dependency-file=../scratch/link.d")
        return [str(self._host.cxx), *map(str, objects), *flags]


def codes_of(job: Job) -> list[str]:
    """What device code is made for: `sm_90`, `compute_90`. The arches that are named, else the target's own."""
    target = parse_target(job.target)
    named = list(job.options.get("arches", ()))
    return named or ([target.arch] if target.backend == "cuda" else [])


def _gencode(job: Job) -> list[str]:
    return [f"-gencode=arch={code.replace('sm_', 'compute_')},code={code}" for code in codes_of(job)]


def is_operators(job: Job) -> bool:
    """Whether the library registers operators instead of being a Python module."""
    return job.options.get("binding") == ["operators"]


def _rooted(flag: str, roots: tuple[str, ...]) -> str:
    for number, root in enumerate(roots):
        flag = flag.replace(f"{{root{number}}}", root)
    return flag


def _seed(job: Job, unit: str) -> str:
    """Names that a compiler makes up differ between the units of a library, and are the same in every build of one."""
    content = Path(unit).read_bytes()
    return hashlib.sha256(f"{job.function}\0{unit}\0".encode() + content).hexdigest()[:16]


def _stable_version(abi: str) -> str:
    major, minor = map(int, abi.split("."))
    return f"0x{major:02x}{minor:02x}000000000000"


def _run(command: list[str]) -> None:
    """Run a compiler with its output in the build's log. Raises: CompileFailed with its text, UnsupportedTarget."""
    print(shlex.join(command), flush=True)  # noqa: T201 - a worker's output is the build's log
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    text = done.stdout.decode(errors="replace")
    print(text, flush=True)  # noqa: T201 - the same
    if done.returncode == 0:
        return
    if "Unsupported gpu architecture" in text or "is not defined for option 'gpu-architecture'" in text:
        known = subprocess.run([command[0], "--list-gpu-code"], capture_output=True, text=True, check=False).stdout.split()
        raise UnsupportedTarget(text.strip().splitlines()[-1], facts={"allowed": ", ".join(known)})
    lines = [line for line in text.splitlines() if _ERROR.search(line)]
    hint = None
    if _UNREADABLE.search(text):
        hint = "a build reads declared files only: `headers` of kernel.toml, or extra_include_paths where the door was used"
    raise CompileFailed(
        lines[0] if lines else f"{Path(command[0]).name} ended with status {done.returncode}",
        facts={"compiler": "\n" + text.strip()},
        hint=hint,
    )


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _tree_digest(root: Path, stamps: dict[str, list[int]]) -> str:
    """A digest over every file below, by relative name. Directories are stamped: what replaces a file changes its directory."""
    hasher = hashlib.sha256()
    for folder, folders, files in os.walk(root):
        folders.sort()
        stamps[folder] = stamp(folder)
        for name in sorted(files):
            path = Path(folder, name)
            if path.is_file():
                hasher.update(f"{path.relative_to(root)}\0{_file_digest(path)}\n".encode())
    return hasher.hexdigest()


def _digest_of_all(roots: Iterable[Path], stamps: dict[str, list[int]]) -> str:
    return hashlib.sha256("".join(_tree_digest(root, stamps) for root in roots).encode()).hexdigest()
