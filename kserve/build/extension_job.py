"""What the build of a torch extension is: its units, what it depends on of torch and Python, the contract of the library."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from kserve.artifact import Contract
from kserve.definition import EXTENSION, ROOT, Entry, KernelDef
from kserve.errors import InvalidDefinition
from kserve.spec import Spec
from kserve.target import Target
from kserve.toolchain.base import Built, Fingerprint, Job

PROJECT = "project"
UNIT_SUFFIXES = (".c", ".cc", ".cpp", ".cxx", ".cu")
_OF_CXX, _OF_CUDA = ("cflags",), ("cuda_cflags",)
_OF_LIBRARY = ("ldflags", "binding")


class Root(NamedTuple):
    """A directory, or a file, outside of what is declared.

    Fields:
        use:      `quote FOLDER` for `#include "…"` in the units of that folder, `include` and `system` as a compiler has them,
                  `library` for the linker, `read` for nothing but reading; `project` for reading too, and in no key: whether
                  sources lie in one says nothing about them. Those come last.
        identity: name and version of the package it belongs to; empty where each file is looked at.
    """

    path: str
    use: str
    identity: str = ""


class Outside(NamedTuple):
    """What a request names outside: roots, and the digests of the files in them that the caller has looked at."""

    roots: tuple[Root, ...]
    digests: dict[str, str]


def extension_job(
    definition: KernelDef, entry: Entry, *, target: Target, sources: Mapping[str, str], outside: Outside | None
) -> Job:
    """The job that builds the whole library. Raises: InvalidDefinition."""
    roots = outside.roots if outside else ()
    options: dict[str, Any] = {name: list(value) for name, value in definition.options.items() if isinstance(value, tuple)}
    options["units"] = list(_units(definition, sources))
    options["with_cuda"] = target.backend == "cuda"
    options["roots"] = [[root.use, root.identity] for root in roots if root.use != PROJECT]
    if not options["units"]:
        allowed = {"allowed": f"at least one file that ends in {', '.join(UNIT_SUFFIXES)}"}
        raise InvalidDefinition(f"{entry.name} has nothing to compile", facts=allowed)
    if not options["with_cuda"] and (device := [unit for unit in options["units"] if unit.endswith(".cu")]):
        raise InvalidDefinition(f"{entry.name} has {device[0]} and no `cuda` in [target]", facts={"allowed": 'cuda = "sm_80"'})
    for flag in options.get("ldflags", ()):
        for number in ROOT.findall(flag):
            if int(number) >= len(roots):
                raise InvalidDefinition(f"{entry.name}: {flag} names a root that the request has not")
    return Job(EXTENSION, str(target), "", entry.name, (), options, tuple(root.path for root in roots))


def _units(definition: KernelDef, sources: Mapping[str, str]) -> Iterator[str]:
    """What is compiled, in the order it is linked: files that `sources` names, then those its patterns match."""
    named = [name for name in definition.sources if name in sources]
    matched = [name for name in sorted(sources) if not name.startswith("include/")]
    for name in dict.fromkeys((*named, *matched)):
        if name.endswith(UNIT_SUFFIXES) and name not in definition.headers:
            yield name


def with_macros(job: Job, spec: Spec, spelled: Mapping[str, str]) -> Job:
    """The job whose units see the spec as macros, `KSERVE_HIDDEN` for an axis `hidden`."""
    return job._replace(options={**job.options, "macros": {axis.upper(): spelled[axis] for axis in spec}})


def facts_of(job: Job, fingerprint: Fingerprint) -> dict[str, str]:
    """What a key has of torch and Python: a library on the stable ABI loads under every torch from that release on."""
    facts = fingerprint.facts
    found = {"fact.cxx": facts["cxx"]}
    if job.options.get("stable_abi"):
        found["fact.stable_headers"] = facts["stable_headers"]
    else:
        found["fact.torch"] = facts["torch"]
    if job.options.get("binding") != ["operators"]:
        found["fact.python"] = facts["python"]
    return found


def unit_job(job: Job, unit: str, *, codes: list[str], host: Target) -> Job:
    """The compile of one unit: with the options that change its object and no others, for no target but its device code's."""
    unwanted = {"units", "arches", *_OF_LIBRARY, *(_OF_CXX if unit.endswith(".cu") else _OF_CUDA)}
    options = {name: value for name, value in job.options.items() if name not in unwanted}
    if unit.endswith(".cu"):
        options["arches"] = codes
    return job._replace(target=str(host), main=unit, options=options)


def library_contract(spec: Spec, built: Built) -> Contract:
    """The contract of a library, or of an object, that nothing launches."""
    return Contract(built.symbol, built.format, (), {**spec}, (), (), needs=built.needs)


def is_header_of(unit: str, name: str, units: list[str]) -> bool:
    """Whether the file may be read by the compile of that unit: itself, and everything that is no unit."""
    return name == unit or name not in units
