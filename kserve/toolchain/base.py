"""The toolchain contract: `fingerprint()` names everything about a compiler that can change its bytes, `build(job)` compiles.

Jobs and results are plain records that cross process borders as JSON.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from kserve.alias import stamp
from kserve.errors import CompileFailed, ToolchainMissing
from kserve.spec import DTYPES, SCALARS

_TOOK = re.compile(r"^.*Compile time = .*\n?", re.MULTILINE)  # ptxas -v
MODULES = {
    "cuda": "kserve.toolchain.nvrtc",
    "triton": "kserve.toolchain.triton",
    "torch-extension": "kserve.toolchain.extension",
}


class JobArgument(NamedTuple):
    """One argument as a compiler needs it: dtype resolved, facts of this variant only, a constexpr with its value."""

    name: str
    kind: str
    dtype: str = ""
    size_bytes: int = 0
    value: int | None = None
    align: int = 0
    divisible_by: int = 0


class Job(NamedTuple):
    """One compile. Its files lie under their relative names in the worker's current directory.

    Fields:
        main:     the source file that is compiled.
        function: a C++ name expression, or a Triton function's name.
        options:  the language's compile options: `flags` (texts, in order), `num_warps` and so on (integers).
        roots:    directories and files outside that the compile may read; never part of a key.
        debug:    which debug variant (`artifact.DEBUGS`); empty for none.
    """

    language: str
    target: str
    main: str
    function: str
    arguments: tuple[JobArgument, ...]
    options: dict[str, Any]
    roots: tuple[str, ...] = ()
    debug: str = ""

    def to_json(self) -> dict[str, Any]:
        return {**self._asdict(), "arguments": [argument._asdict() for argument in self.arguments]}


class Built(NamedTuple):
    """What a compiler gave.

    Fields:
        params:        (offset, size_bytes) of each parameter, in order; None where the format has no table.
        kinds:         `float` or `int` for each scalar parameter, `` where unknown; from the PTX of the same compile.
        threads:       of a block, where the compiler decides; else 0.
        shared_bytes:  dynamic shared memory a launch must ask for, where the compiler decides.
        scratch_bytes: per block, for each pointer parameter after the declared ones.
        resources:     as in `artifact.Manifest`.
        attachments:   kind -> text.
        cpu_s:         processor seconds of the compile's process, from its start to its end; the worker's word.
        closed_world:  the compile could read nothing but its compiler and the declared files; the worker's word.
        needs:         as in `artifact.Contract`.
        includes:      digests of the files that were read from the job's roots, by `<number of the root>/<relative name>`.
    """

    format: str
    symbol: str
    params: list[tuple[int, int]] | None
    kinds: list[str]
    resources: dict[str, int]
    attachments: dict[str, str]
    minimum_driver: int = 0
    threads: int = 0
    shared_bytes: int = 0
    scratch_bytes: tuple[int, ...] = ()
    closed_world: bool = False
    cpu_s: float = 0.0
    needs: Mapping[str, str] = {}
    includes: Mapping[str, str] = {}


class Fingerprint(NamedTuple):
    """Everything about a compiler that can change its bytes, and how to notice that it changed.

    Fields:
        name, version: the compiler's, for people.
        files:         SHA-256 over the compiler's own files, by relative name.
        options:       what every compile of it gets besides the job's own, as one text.
        stamps:        path -> stamp (`alias.stamp`) of those files and of the directories they were found through:
                       while all are the same, the fingerprint is. Never part of a key.
        facts:         further facts, of which a language takes into a key what a build depends on.
    """

    name: str
    version: str
    files: str
    stamps: dict[str, list[int]]
    options: str = ""
    facts: Mapping[str, str] = {}


class Toolchain(Protocol):
    """One compiler, inside a worker."""

    def fingerprint(self) -> Fingerprint:
        """Raises ToolchainMissing when the compiler is not installed."""

    def roots(self) -> list[Path]:
        """Files and folders of the compiler: with the job's own files, all that a compile may read."""

    def build(self, job: Job) -> tuple[Built, bytes]:
        """Compile; the result's facts and the binary.

        Raises: CompileFailed with the compiler's text, UnsupportedTarget naming the targets the compiler has.
        """


def load_toolchain(language: str) -> Toolchain:
    """Import that language's toolchain: the expensive step a worker takes once."""
    return cast(Toolchain, importlib.import_module(MODULES[language]).load())


def job_from_json(plain: dict[str, Any]) -> Job:
    """The job that `Job.to_json` wrote."""
    arguments = tuple(JobArgument(**argument) for argument in plain["arguments"])
    return Job(**{**plain, "arguments": arguments, "roots": tuple(plain["roots"])})


def built_from_json(plain: Mapping[str, Any]) -> Built:
    """What a worker has left as JSON."""
    fields = dict(plain)
    fields["params"] = None if plain["params"] is None else [(offset, size) for offset, size in plain["params"]]
    fields["attachments"] = dict.fromkeys(plain["attachments"], "")
    fields["scratch_bytes"] = tuple(plain["scratch_bytes"])
    return Built(**fields)


def fingerprint_files(name: str, version: str, *, root: Path, files: Iterable[Path], search: Iterable[str]) -> Fingerprint:
    """The fingerprint of a compiler that consists of these files under `root`.

    Args:
        search: places where another copy of it could appear and be found first.
    """
    hasher = hashlib.sha256()
    stamps = {}
    for path in sorted(files):
        stamps[str(path)] = stamp(str(path))
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        hasher.update(f"{path.relative_to(root).as_posix()}\0{digest}\n".encode())
    if not stamps:
        raise ToolchainMissing(f"no files of {name} {version} were found under {root}")
    stamps |= {place: stamp(place) for place in search}
    return Fingerprint(name, version, hasher.hexdigest(), stamps)


def check_parameters(job: Job, built: Built) -> None:
    """Hold the declared arguments against the binary's own parameters: count, size, float or integer.

    Signedness and what a pointer points to cannot be seen in a binary. Parameters after the declared ones must be the
    compiler's own scratch pointers.

    Raises: CompileFailed naming the first difference.
    """
    declared = [argument for argument in job.arguments if argument.kind != "constexpr"]
    n_own = len(built.scratch_bytes)
    if built.params is None:
        return
    if len(built.params) != len(declared) + n_own:
        names = ", ".join(argument.name for argument in declared)
        raise CompileFailed(
            f"{job.function} takes {len(built.params) - n_own} parameters, kernel.toml declares {len(declared)} ({names})",
            hint="make `arguments` in kernel.toml list the function's parameters in order",
        )
    for position, argument in enumerate(declared):
        size = built.params[position][1]
        if size != size_of(argument):
            raise CompileFailed(
                f"parameter {position} of {job.function} has {size} bytes, "
                f"kernel.toml declares {argument.name} as {argument.kind} ({size_of(argument)} bytes)"
            )
        seen = built.kinds[position] if position < len(built.kinds) else ""
        if seen and argument.kind in SCALARS and seen != _number(argument.kind):
            raise CompileFailed(
                f"parameter {position} of {job.function} is of type {seen}, "
                f"kernel.toml declares {argument.name} as {argument.kind}"
            )


def size_of(argument: JobArgument) -> int:
    """Bytes of the argument in the parameter block."""
    if argument.kind == "pointer":
        return 8
    if argument.kind in ("struct", "tensor_map"):
        return argument.size_bytes
    return DTYPES[SCALARS[argument.kind]].size_bytes


def _number(kind: str) -> str:
    return "float" if kind.startswith("f") else "int"


def without_times(log: str) -> str:
    """A compiler's text less the lines that say how long it took: equal builds then share one log."""
    return _TOOK.sub("", log)


def places_of(path: Iterable[str], *names: str) -> list[str]:
    """Where packages of these names are, or would be, on an interpreter's path."""
    return [os.path.join(entry, name) for entry in path if entry for name in names]  # noqa: PTH118 - plain texts
