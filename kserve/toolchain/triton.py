"""Triton: `triton.compile` on a source file for a named target, without a GPU and without Triton's own launcher or cache."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from kserve.config import WORKER_CONSTANTS
from kserve.errors import CompileFailed, InvalidDefinition, ToolchainMissing, UnsupportedTarget
from kserve.spec import DTYPES, SCALARS
from kserve.target import Target, parse_target
from kserve.toolchain import cubin
from kserve.toolchain.base import (
    Built,
    Fingerprint,
    Job,
    JobArgument,
    fingerprint_files,
    places_of,
)

# What a kernel file may import: anything else would be an input that is not declared and not in the key.
_IMPORTS = ("triton", "math", "__future__")
# LLVM fails on others without naming them. CDNA 2 to 4, RDNA 3 and 4: the ones Triton's AMD back end has cases for.
_HIP_ARCHES = frozenset({"gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1101", "gfx1200", "gfx1201"})
# Parts of the package that no compile reads: bytecode, headers of the launcher, the profiler.
_NOT_COMPILER = {"__pycache__", "include", "profiler", "libproton.so"}
_WARP_SIZE = {"cuda": 32, "hip": 64}
_AMD_RESOURCES = {
    "registers": r"\.vgpr_count:\s+(\d+)",
    "spill_bytes": r"\.vgpr_spill_count:\s+(\d+)",
    "stack_bytes": r"\.private_segment_fixed_size:\s+(\d+)",
    "shared_bytes": r"\.group_segment_fixed_size:\s+(\d+)",
}
_DIVISIBILITY = "tt.divisibility"
# Debug variants with Triton's own checks: device assertions, integer overflow.
_CHECKED = ("device", "sanitize")


def load() -> TritonToolchain:
    """Raises ToolchainMissing when Triton is not installed or too old."""
    try:
        import triton
        from triton.runtime.cache import triton_key
    except ImportError as error:
        raise ToolchainMissing(
            f"Triton 3.6 or newer cannot be used by {sys.executable}: {error}", hint="pip install 'kserve-jit[cuda13]'"
        ) from None
    triton_key()  # hashes Triton itself, 0.3 to 0.7 s: once here, inherited by every job
    return TritonToolchain(triton)


class TritonToolchain:
    """Triton of one version."""

    def __init__(self, triton: Any) -> None:
        self._triton = triton
        self.version = str(triton.__version__)
        self._tools = {"ptxas": triton.knobs.nvidia.ptxas, "ptxas-blackwell": triton.knobs.nvidia.ptxas_blackwell}
        self._arches = {name: _arches_of(tool.path) for name, tool in self._tools.items()}

    def roots(self) -> list[Path]:
        return [Path(self._triton.__file__).parent]

    def fingerprint(self) -> Fingerprint:
        (root,) = self.roots()
        files = [path for path in root.rglob("*") if path.is_file() and not _NOT_COMPILER & {*path.relative_to(root).parts}]
        found = fingerprint_files("triton", self.version, root=root, files=files, search=places_of(sys.path, "triton"))
        options = sorted(f"{name}={value}" for name, value in WORKER_CONSTANTS.items() if name.startswith("TRITON"))
        return found._replace(options=" ".join(options))

    def build(self, job: Job) -> tuple[Built, bytes]:
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        target = parse_target(job.target)
        tool = self._tool_for(target)
        function = _function(job)
        arch = target.capability if target.backend == "cuda" else target.arch
        source = ASTSource(
            fn=function,
            signature={argument.name: _signature(argument) for argument in job.arguments},
            constexprs={argument.name: argument.value for argument in job.arguments if argument.kind == "constexpr"},
            attrs={(i,): found for i, argument in enumerate(job.arguments) if (found := _attributes(argument))},
        )
        gpu = GPUTarget(target.backend, arch, _WARP_SIZE[target.backend])
        options = {**job.options, **({"debug": True} if job.debug in _CHECKED else {})}
        self._set_debug(job.debug)
        try:
            compiled = self._triton.compile(source, target=gpu, options=options)
        except BlockingIOError:  # no process for the assembler: that says nothing about the source
            raise
        except Exception as error:  # whatever the compiler raises is its answer to this source
            facts = {"compiler": "\n" + str(error).strip()}
            raise CompileFailed(_sentence(error), facts=facts, hint=_hint(error)) from error
        return self._amd(compiled) if target.backend == "hip" else self._nvidia(compiled, tool)

    def _set_debug(self, debug: str) -> None:
        """Give the binary line tables, or for `device` all there is and no optimisation. This process compiles once."""
        if debug:
            self._triton.knobs.compilation.disable_line_info = False
        if debug == "device":
            self._triton.knobs.nvidia.disable_ptxas_opt = True

    def _tool_for(self, target: Target) -> str:
        """The assembler for that target.

        Raises: UnsupportedTarget naming Triton's version and the arches of its assemblers.
        """
        if target.backend == "hip":
            tool, arches = "", _HIP_ARCHES
        else:
            tool = "ptxas-blackwell" if target.capability >= 100 else "ptxas"
            arches = self._arches[tool]
        if target.arch in arches and target.suffix != "f":
            return tool
        known = sorted({*_HIP_ARCHES, *self._arches["ptxas"], *self._arches["ptxas-blackwell"]}, key=lambda a: (len(a), a))
        raise UnsupportedTarget(f"Triton {self.version} cannot compile for {target}", facts={"allowed": ", ".join(known)})

    def _nvidia(self, compiled: Any, tool: str) -> tuple[Built, bytes]:
        metadata, ptx, binary = compiled.metadata, compiled.asm["ptx"], compiled.asm["cubin"]
        sys.stdout.flush()
        log = Path("/proc/self/fd/1")  # in a worker a file, wherever the sources lie
        report = log.read_text(errors="replace") if log.is_file() else ""
        params = cubin.parameters(binary, metadata.name)
        scratch = (int(metadata.global_scratch_size or 0), int(metadata.profile_scratch_size or 0))
        built = Built(
            format="cubin",
            symbol=metadata.name,
            params=params,
            kinds=cubin.ptx_kinds(ptx, metadata.name),
            resources=cubin.resources(binary, metadata.name, report),
            attachments={"ptx": ptx, "ttgir": compiled.asm["ttgir"]},
            minimum_driver=int(self._tools[tool].version.partition(".")[0]) * 1000,
            threads=cubin.ptx_threads(ptx) or metadata.num_warps * metadata.warp_size,
            shared_bytes=int(metadata.shared),
            scratch_bytes=scratch,
        )
        return built, binary

    def _amd(self, compiled: Any) -> tuple[Built, bytes]:
        metadata, assembly = compiled.metadata, compiled.asm["amdgcn"]
        found = {name: re.search(pattern, assembly) for name, pattern in _AMD_RESOURCES.items()}
        built = Built(
            format="hsaco",
            symbol=metadata.name,
            params=None,
            kinds=[],
            resources={name: int(match[1]) for name, match in found.items() if match},
            attachments={"amdgcn": assembly, "ttgir": compiled.asm["ttgir"]},
            threads=metadata.num_warps * metadata.warp_size,
            shared_bytes=int(metadata.shared),
        )
        return built, compiled.asm["hsaco"]


def _function(job: Job) -> Any:
    """The jitted function of the job's source file, imported under the file's own name."""
    for path in Path().rglob("*.py"):
        _check_imports(path, local={other.stem for other in Path().rglob("*.py")})
    sys.path.insert(0, str(Path.cwd()))
    spec = importlib.util.spec_from_file_location(Path(job.main).stem, job.main)
    if spec is None or spec.loader is None:
        raise InvalidDefinition(f"{job.main} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the kernel author's code may raise anything
        sentence = f"{job.main} cannot be imported: {type(error).__name__}: {error}"
        raise CompileFailed(sentence, hint=_hint(error)) from error
    function = getattr(module, job.function, None)
    names = getattr(function, "arg_names", None)
    if names is None:
        raise CompileFailed(f"{job.main} has no @triton.jit function called {job.function}")
    declared = [argument.name for argument in job.arguments]
    if list(names) != declared:
        raise CompileFailed(
            f"{job.function} takes ({', '.join(names)}), kernel.toml declares ({', '.join(declared)})",
            hint="make `arguments` in kernel.toml list the function's parameters in order, with the same names",
        )
    return function


def _check_imports(path: Path, *, local: set[str]) -> None:
    try:
        tree = ast.parse(path.read_text())
    except (SyntaxError, ValueError) as error:
        raise CompileFailed(f"{path}: {error}") from None
    for node in ast.walk(tree):
        for name in _imported(node):
            if name.partition(".")[0] not in {*_IMPORTS, *local}:
                raise CompileFailed(
                    f"{path}: import of {name or 'a relative module'}: a kernel file may import {', '.join(_IMPORTS)} "
                    "and files declared beside it",
                    hint="declare the file in `sources` of kernel.toml",
                )


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return ["" if node.level else node.module or ""]
    return []


def _signature(argument: JobArgument) -> str:
    if argument.kind == "constexpr":
        return "constexpr"
    if argument.kind == "pointer":
        return "*" + DTYPES[argument.dtype].triton
    return DTYPES[SCALARS[argument.kind]].triton


def _attributes(argument: JobArgument) -> list[list[object]]:
    """The facts as Triton takes them. Its compiler knows divisibility by 16 and no other: less is no fact to it."""
    stated = argument.align or argument.divisible_by
    return [[_DIVISIBILITY, 16]] if stated and stated % 16 == 0 else []


def _arches_of(ptxas: str) -> frozenset[str]:
    text = subprocess.run([ptxas, "--help"], capture_output=True, text=True, check=False).stdout
    return frozenset(re.findall(r"'(sm_\d+[af]?)'", text))


def _hint(error: Exception) -> str | None:
    refused = "Permission denied" in str(error)
    return "a build reads its declared files only: list the file in `sources` of kernel.toml" if refused else None


def _sentence(error: Exception) -> str:
    """The last non-empty line of a Triton error says what is wrong; the lines above show where."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else repr(error)
