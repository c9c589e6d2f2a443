"""What one build is: from a definition, a spec, a target and a toolchain to key components, a job and a launch contract.

The list of everything that enters a build key is the function `_components`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from kserve.artifact import DECLARED, GENERIC, Contract, Param
from kserve.build.extension_job import Outside, extension_job, facts_of, library_contract, with_macros
from kserve.definition import EXTENSION, Argument, Entry, KernelDef
from kserve.errors import DoesNotFit, InvalidDefinition, InvalidSpec
from kserve.expression import Expression
from kserve.key import build_key, canonical_json
from kserve.knobs import Values
from kserve.outline import FILE_NAME
from kserve.spec import DTYPES, Spec, SpecValue
from kserve.target import Target
from kserve.toolchain.base import Built, Fingerprint, Job, JobArgument, size_of

# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": threads of a block. AMD's is the same.
_MOST_THREADS = 1024


class Choice(NamedTuple):
    """How the knobs of a build were chosen.

    Fields:
        values:   the chosen ones; the others have their defaults.
        base:     what tunings of this kernel are filed under (`tuned.base_of`); empty for a kernel without knobs.
        is_tuned: a tuning chose them, not the caller.
    """

    values: Values
    base: str = ""
    is_tuned: bool = False


NO_CHOICE = Choice({})


class Debug(NamedTuple):
    """A debug variant: which one, and the folder in which its sources stay, each key's in a folder of its own.

    The binary names them there, so the folder is part of the key: equal keys give equal bytes.
    """

    kind: str
    root: str


class Plan(NamedTuple):
    """One build, planned.

    Fields:
        knobs:   every knob of the entry with its value.
        tuned:   names in the grid's expressions whose value follows from a knob.
        files:   relative name -> digest of every file the build may read.
        choice:  how the knobs came by their values.
        outside: of an extension that may read more.
    """

    key: str
    components: dict[str, str]
    name: str
    target: Target
    spec: Spec
    knobs: dict[str, int]
    tuned: tuple[str, ...]
    variant: str
    job: Job
    entry: Entry
    files: dict[str, str]
    choice: Choice
    outside: Outside | None = None


def plan_builds(
    definition: KernelDef,
    entry: Entry,
    *,
    spec: Mapping[str, object],
    target: Target,
    fingerprint: Fingerprint,
    files: Mapping[str, str],
    choice: Choice = NO_CHOICE,
    debug: Debug | None = None,
) -> list[Plan]:
    """The builds one request needs: with the declared facts and, where they say anything, with none.

    Raises: InvalidSpec, UnsupportedTarget, InvalidDefinition.
    """
    if definition.language == EXTENSION:
        if debug:
            raise InvalidSpec(f"{entry.name} is an extension, without debug variants", facts={"allowed": "cflags, cuda_cflags"})
        return [plan_extension(definition, entry, spec=spec, target=target, fingerprint=fingerprint, files=files)]
    full = definition.specialise(entry, spec, choice.values)
    knobs = definition.knob_values(entry, full, choice.values)
    values, tuned = {**full, **knobs}, _tuned(definition, entry)
    exact = definition.resolve_target(entry, target)
    sources = _sources(entry, files)
    plans = []
    for variant in (DECLARED, GENERIC) if entry.has_facts else (DECLARED,):
        arguments = tuple(_job_argument(argument, values, variant) for argument in entry.arguments)
        job = Job(
            language=definition.language,
            target=str(exact),
            main=_main_source(definition, sources),
            function=_function(entry, values),
            arguments=arguments,
            options={name: _option(option, values) for name, option in definition.options.items()},
            debug=debug.kind if debug else "",
        )
        components = _components(entry, job, spec=full, knobs=knobs, fingerprint=fingerprint, sources=sources)
        components |= {"launch.tuned": canonical_json(tuned)} if tuned else {}
        components |= {"debug": debug.kind, "debug.sources": debug.root} if debug else {}
        key = build_key(components)
        plans.append(Plan(key, components, entry.name, exact, full, knobs, tuned, variant, job, entry, sources, choice))
    return plans[:1] if plans[0].components == plans[-1].components else plans  # facts that always hold are none


def _sources(entry: Entry, files: Mapping[str, str]) -> dict[str, str]:
    """The files but the definition. Raises: InvalidDefinition where they cannot lie in one folder."""
    sources = {name: digest for name, digest in files.items() if name != FILE_NAME}
    folders = {str(parent) for name in sources for parent in PurePosixPath(name).parents}
    if both := sorted(folders & set(sources)):
        raise InvalidDefinition(f"{entry.name}: {both[0]} is a file and a folder of another file")
    return sources


def plan_extension(
    definition: KernelDef,
    entry: Entry,
    *,
    spec: Mapping[str, object],
    target: Target,
    fingerprint: Fingerprint,
    files: Mapping[str, str],
    outside: Outside | None = None,
) -> Plan:
    """The build of an extension's library; `unit_plan.unit_plans` has those of its units.

    Raises: InvalidSpec, UnsupportedTarget, InvalidDefinition.
    """
    full, exact = definition.specialise(entry, spec), definition.resolve_target(entry, target)
    sources = _sources(entry, files)
    job = extension_job(definition, entry, target=exact, sources=sources, outside=outside)
    job = with_macros(job, full, {axis: _spelled(value) for axis, value in full.items()})
    components = _components(entry, job, spec=full, knobs={}, fingerprint=fingerprint, sources=sources)
    components |= facts_of(job, fingerprint)
    key = build_key(components)
    return Plan(key, components, entry.name, exact, full, {}, (), DECLARED, job, entry, sources, NO_CHOICE, outside)


def _tuned(definition: KernelDef, entry: Entry) -> tuple[str, ...]:
    """The names in the grid's expressions that are knobs, or derived from one."""
    tuned = set(entry.knobs)
    values = definition.derived | {argument.name: argument.value for argument in entry.arguments if argument.value}
    for name, expression in values.items():
        if expression.names & tuned:
            tuned.add(name)
    return tuple(sorted({name for expression in entry.launch.grid for name in expression.names} & tuned))


def _components(
    entry: Entry, job: Job, *, spec: Spec, knobs: Values, fingerprint: Fingerprint, sources: Mapping[str, str]
) -> dict[str, str]:
    """Everything that can change the bytes, or how they are launched: label -> text. An ordered list numbers its labels."""
    launch = entry.launch
    found = {
        "language": job.language,
        "entry": entry.name,
        "function": job.function,
        "main": job.main,
        "target": job.target,
        "toolchain.name": fingerprint.name,
        "toolchain.version": fingerprint.version,
        "toolchain.files": fingerprint.files,
        "toolchain.options": fingerprint.options,
        "launch.grid": canonical_json([expression.text for expression in launch.grid]),
        "launch.block": canonical_json([expression.text for expression in launch.block]),
        "launch.shared_bytes": launch.shared_bytes.text if launch.shared_bytes else "0",
    }
    for axis, value in spec.items():
        found[f"spec.{axis}"] = canonical_json(value)
    for name, number in knobs.items():
        found[f"knob.{name}"] = str(number)
    for name, value in job.options.items():
        found[f"option.{name}"] = canonical_json(value)
    for position, (declared, compiled) in enumerate(zip(entry.arguments, job.arguments, strict=True)):
        how = {"mutated": declared.mutated, "nullable": declared.nullable, "contiguous": declared.contiguous}
        found[f"argument.{position:03}"] = canonical_json({**compiled._asdict(), **how})
    for name, digest in sources.items():
        found[f"source.{name}"] = digest
    return found


def job_of(components: Mapping[str, str]) -> tuple[Job, dict[str, str]]:
    """`_components` read backwards: the job, and its files by digest, that a stored artifact was made of."""

    def part(prefix: str) -> dict[str, str]:
        return {label.removeprefix(prefix): components[label] for label in sorted(components) if label.startswith(prefix)}

    arguments = [json.loads(text) for text in part("argument.").values()]
    job = Job(
        language=components["language"],
        target=components["target"],
        main=components["main"],
        function=components["function"],
        arguments=tuple(JobArgument(**{field: found[field] for field in JobArgument._fields}) for found in arguments),
        options={name: json.loads(text) for name, text in part("option.").items()},
        debug=components.get("debug", ""),
    )
    return job, part("source.")


def _main_source(definition: KernelDef, sources: Mapping[str, str]) -> str:
    name = definition.sources[0]
    if name not in sources:
        raise InvalidDefinition(f"{FILE_NAME}: the first of `sources` is compiled and must be a file, not {name!r}")
    return name


def _function(entry: Entry, spec: Spec) -> str:
    """The entry's function with the values of axes and knobs in place of {name}, spelled as C++ spells them."""
    text = entry.function
    for axis, value in spec.items():
        text = text.replace("{" + axis + "}", _spelled(value))
    return text


def _spelled(value: SpecValue) -> str:
    """The value as C++ spells it."""
    return DTYPES[value].cuda if value in DTYPES else str(value).lower() if isinstance(value, bool) else str(value)


def _option(option: tuple[str, ...] | Expression, spec: Spec) -> list[str] | int:
    return option.evaluate(spec) if isinstance(option, Expression) else list(option)


def _job_argument(argument: Argument, spec: Spec, variant: str) -> JobArgument:
    if argument.kind == "constexpr":
        assert argument.value is not None
        return JobArgument(argument.name, "constexpr", value=argument.value.evaluate(spec))
    if argument.kind == "tensor_map":
        return JobArgument(argument.name, "tensor_map", size_bytes=128)
    dtype = str(spec.get(argument.dtype, argument.dtype))
    align, divisible_by = (argument.align, argument.divisible_by) if variant == DECLARED else (0, 0)
    if argument.kind == "pointer":
        return JobArgument(argument.name, "pointer", dtype, align=max(align, _natural_align(dtype)))
    return JobArgument(argument.name, argument.kind, dtype, argument.size_bytes, divisible_by=divisible_by)


def _natural_align(dtype: str) -> int:
    """Bytes that divide every pointer to that dtype: an element's own size always holds and is no fact."""
    return DTYPES[dtype].size_bytes if dtype else 0


def contract_of(plan: Plan, built: Built) -> Contract:
    """The contract of what was built.

    Raises: DoesNotFit when a kernel needs more shared memory than a block of its target has.
    """
    return library_contract(plan.spec, built) if plan.job.language == EXTENSION else _launch_contract(plan, built)


def _launch_contract(plan: Plan, built: Built) -> Contract:
    """The launch contract: the declared arguments at the places the binary gives them."""
    declared = [
        (argument, compiled)
        for argument, compiled in zip(plan.entry.arguments, plan.job.arguments, strict=True)
        if argument.kind != "constexpr"
    ]
    places = built.params if built.params is not None else _natural_layout([size_of(job) for _, job in declared])
    params = [
        Param(
            name=argument.name,
            kind=argument.kind,
            dtype=compiled.dtype,
            offset=offset,
            size_bytes=size,
            mutated=argument.mutated,
            nullable=argument.nullable,
            contiguous=argument.contiguous,
            align=compiled.align if compiled.align > _natural_align(compiled.dtype) else 0,
            divisible_by=compiled.divisible_by,
        )
        for (argument, compiled), (offset, size) in zip(declared, places, strict=False)
    ]
    params += [Param(f"scratch_{i}", "scratch", "", *place) for i, place in enumerate(places[len(declared) :])]
    shared = plan.entry.launch.shared_bytes
    contract = Contract(
        symbol=built.symbol,
        format=built.format,
        params=tuple(params),
        constants=_constants(plan),
        grid=tuple(expression.text for expression in plan.entry.launch.grid),
        block=tuple(expression.text for expression in plan.entry.launch.block) or (str(built.threads),),
        shared_bytes=shared.text if shared else str(built.shared_bytes),
        scratch_bytes=built.scratch_bytes,
        minimum_driver=built.minimum_driver,
        knobs=tuple(plan.knobs),
        tuned=plan.tuned,
    )
    _check_shared_memory(plan, built, contract)
    _check_block(plan, contract)
    return contract


def _constants(plan: Plan) -> dict[str, Any]:
    compiled = {job.name: job.value for job in plan.job.arguments if job.kind == "constexpr"}
    return {**plan.spec, **plan.knobs, **compiled}


def _natural_layout(sizes: list[int]) -> list[tuple[int, int]]:
    """(offset, size) of parameters laid out each at a multiple of its own size."""
    places, at = [], 0
    for size in sizes:
        at = -(-at // size) * size
        places.append((at, size))
        at += size
    return places


def _check_block(plan: Plan, contract: Contract) -> None:
    """Raises DoesNotFit for a block no device launches, where its size is known before the launch."""
    sizes = [Expression(text) for text in contract.block]
    if not all(size.names <= set(contract.constants) for size in sizes):
        return
    block = [size.evaluate(contract.constants) for size in sizes]
    if min(block) < 1 or math.prod(block) > _MOST_THREADS:
        raise DoesNotFit(f"{plan.name} has a block of {block} threads", facts={"allowed": f"1 to {_MOST_THREADS} in all"})


def _check_shared_memory(plan: Plan, built: Built, contract: Contract) -> None:
    limit = plan.target.shared_bytes_limit
    dynamic = Expression(contract.shared_bytes)
    if limit is None or not dynamic.names <= set(contract.constants):
        return  # depends on an argument: the launch checks it
    need = built.resources.get("shared_bytes", 0) + dynamic.evaluate(contract.constants)
    if need > limit:
        raise DoesNotFit(
            f"{plan.name} needs {need} bytes of shared memory a block, {plan.target} has {limit}",
            facts={"spec": canonical_json(plan.spec)},
        )
