"""CUDA C++ through NVRTC and NVIDIA's Python bindings: name expressions and options as CuPy's RawModule has them."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from kserve.errors import CompileFailed, ToolchainMissing, UnsupportedTarget
from kserve.target import parse_target
from kserve.toolchain import cubin
from kserve.toolchain.base import Built, Fingerprint, Job, fingerprint_files, places_of

# Without the vendor's cache under HOME, with the assembler's report in the log. The seed names what has internal linkage: left
# alone NVRTC draws one for each process, and equal keys would give other bytes.
_FIXED = ("--no-cache", "--ptxas-options=-v", "--frandom-seed=kserve")
_CLOCK = re.compile(r"\b__(DATE|TIME|TIMESTAMP)__\b")
_INCLUDE = "--include-path=include"
# Line tables hold the sources' whole paths. Assertions are for the sanitizer to find, whatever the flags say.
_DEBUG = {
    "": (),
    "lineinfo": ("--generate-line-info",),
    "device": ("--device-debug",),
    "sanitize": ("--generate-line-info", "--undefine-macro=NDEBUG"),
}


def load() -> Nvrtc:
    """Raises ToolchainMissing when the bindings or the library are not installed."""
    try:
        from cuda.bindings import nvrtc

        version = _checked(nvrtc, nvrtc.nvrtcVersion())
    except (ImportError, RuntimeError) as error:
        raise ToolchainMissing(
            f"NVRTC cannot be used by {sys.executable}: {error}", hint="pip install 'kserve-jit[cuda13]'"
        ) from None
    return Nvrtc(nvrtc, f"{version[0]}.{version[1]}")


class Nvrtc:
    """NVRTC of one version."""

    def __init__(self, api: Any, version: str) -> None:
        self._api = api
        self.version = version

    def fingerprint(self) -> Fingerprint:
        """The library, its built-ins, and the options every compile gets."""
        files = self.roots()
        root = files[0].parent if files else Path("/")
        search = places_of(sys.path, "cuda", "nvidia")
        found = fingerprint_files("nvrtc", self.version, root=root, files=files, search=search)
        return found._replace(options=" ".join((*_FIXED, _INCLUDE)))

    def roots(self) -> list[Path]:
        """The library and its built-ins for the device, which it opens at its first compile where it lies itself."""
        libraries = _loaded_libraries()
        built_ins = libraries[0].parent.glob(f"libnvrtc-builtins.so*{self.version}*") if libraries else ()
        return [*dict.fromkeys([*libraries, *built_ins])]

    def build(self, job: Job) -> tuple[Built, bytes]:
        self._check_target(job)
        _refuse_clocks()
        source = Path(job.main).read_bytes()
        program = self._call("nvrtcCreateProgram", source, job.main.encode(), 0, None, None)[0]
        try:
            self._call("nvrtcAddNameExpression", program, job.function.encode())
            self._compile(program, options_of(job))
            return self._result(program, job)
        finally:
            self._api.nvrtcDestroyProgram(program)

    def _check_target(self, job: Job) -> None:
        target = parse_target(job.target)
        known = self._call("nvrtcGetSupportedArchs")[0 if target.backend == "cuda" else -1]
        if target.backend != "cuda" or target.capability not in known:
            raise UnsupportedTarget(
                f"NVRTC {self.version} cannot compile for {target}",
                facts={"allowed": ", ".join(f"sm_{arch}" for arch in known)},
            )

    def _compile(self, program: Any, options: list[str]) -> None:
        encoded = [option.encode() for option in options]
        status = self._api.nvrtcCompileProgram(program, len(encoded), encoded)[0]
        log = self._text(program, "nvrtcGetProgramLog")
        print(log, flush=True)  # noqa: T201 - a worker's output is the build's log
        if int(status) != 0:
            errors = [line for line in log.splitlines() if "error" in line]
            hint = "list the file in `headers` or `shared_headers` of kernel.toml" if "cannot open source file" in log else None
            raise CompileFailed(errors[0] if errors else f"NVRTC: {status}", facts={"compiler": "\n" + log.strip()}, hint=hint)

    def _result(self, program: Any, job: Job) -> tuple[Built, bytes]:
        symbol = self._call("nvrtcGetLoweredName", program, job.function.encode())[0].decode()
        ptx = self._text(program, "nvrtcGetPTX")
        binary = self._bytes(program, "nvrtcGetCUBIN")
        report = self._text(program, "nvrtcGetProgramLog")
        built = Built(
            format="cubin",
            symbol=symbol,
            params=cubin.parameters(binary, symbol),
            kinds=cubin.ptx_kinds(ptx, symbol),
            resources=cubin.resources(binary, symbol, report),
            attachments={"ptx": ptx},
            minimum_driver=int(self.version.partition(".")[0]) * 1000,
        )
        return built, binary

    def _call(self, function: str, *arguments: Any) -> Any:
        return _checked(self._api, getattr(self._api, function)(*arguments))

    def _bytes(self, program: Any, getter: str) -> bytes:
        size = int(self._call(getter + "Size", program)[0])
        content = b" " * size
        self._call(getter, program, content)
        return content

    def _text(self, program: Any, getter: str) -> str:
        return self._bytes(program, getter).rstrip(b"\0").decode(errors="replace")


def _refuse_clocks() -> None:
    """Raises CompileFailed for a file that asks for the time of its own compile: equal keys must give equal bytes."""
    for path in sorted(path for path in Path().rglob("*") if path.is_file()):
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if clock := _CLOCK.search(line):
                raise CompileFailed(
                    f"{path}({number}): {clock[0]} is refused: the same source would give other bytes every time"
                )


def options_of(job: Job) -> list[str]:
    """The ordered command line of the compile: fixed options, the kernel's own, macros of the argument facts."""
    target = parse_target(job.target)
    macros = []
    for argument in job.arguments:
        if argument.kind == "pointer":
            macros.append(f"--define-macro=KSERVE_ALIGN_{argument.name.upper()}={argument.align}")
        elif argument.kind[0] in "iu":
            macros.append(f"--define-macro=KSERVE_DIV_{argument.name.upper()}={argument.divisible_by or 1}")
    return [f"--gpu-architecture={target.arch}", *_FIXED, _INCLUDE, *job.options.get("flags", ()), *_DEBUG[job.debug], *macros]


def _checked(api: Any, answer: tuple[Any, ...]) -> Any:
    status, *values = answer
    if int(status) != 0:
        text = api.nvrtcGetErrorString(status)[1]
        raise RuntimeError(text.decode() if isinstance(text, bytes) else str(text))
    return values


def _loaded_libraries() -> list[Path]:
    """The NVRTC library this process has loaded, by its real file."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[5] for line in lines if "libnvrtc" in line}
    return sorted(Path(path) for path in paths if "builtins" not in path)
