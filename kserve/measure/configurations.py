"""The configurations of a sweep: every combination of knobs that may be, and why some cannot run on a target."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kserve.artifact import Manifest
from kserve.definition import Entry, KernelDef
from kserve.errors import InvalidSpec, RequestError, closest
from kserve.expression import Expression, parsed
from kserve.knobs import shown
from kserve.spec import Spec
from kserve.target import Target

MOST = 1000
# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": threads and 32-bit registers of a block. AMD's
# workgroups have as many threads.
_MOST_THREADS = 1024
_MOST_REGISTERS = 64 << 10
_REGISTERS_AT_ONCE = 256  # the same table's allocation granularity, for a warp


class Configurations(NamedTuple):
    """What a sweep tries.

    Fields:
        all:        knobs of each; the definition's default among them.
        default:    the one it begins with.
        n_excluded: combinations that the constraints forbid.
    """

    all: list[dict[str, int]]
    default: dict[str, int]
    n_excluded: int


def enumerate_all(
    definition: KernelDef, entry: Entry, spec: Mapping[str, object], wanted: Mapping[str, Sequence[int]]
) -> Configurations:
    """Every combination of the knobs' values.

    Args:
        wanted: values to try for a knob, in place of the definition's.
    Raises: InvalidSpec for a knob or a value there is not; RequestError for no knobs, or too many combinations.
    """
    _check_wanted(entry, wanted)
    axes = [wanted.get(name) or knob.values for name, knob in entry.knobs.items()]
    if math.prod(map(len, axes)) > MOST:
        raise RequestError(
            f"{math.prod(map(len, axes))} combinations are too many", facts={"allowed": f"{MOST}"}, hint="--knob NAME=VALUE,…"
        )
    full = definition.specialise(entry, spec)
    default = definition.knob_values(entry, full, {})
    found, n_excluded = [default], 0
    for values in itertools.product(*axes):
        knobs = dict(zip(entry.knobs, values, strict=True))
        if not all(one.evaluate({**full, **knobs}) for one in definition.constraints):
            n_excluded += 1
        elif knobs != default:
            found.append(knobs)
    return Configurations(found, default, n_excluded)


def _check_wanted(entry: Entry, wanted: Mapping[str, Sequence[int]]) -> None:
    if not entry.knobs:
        raise RequestError(f"{entry.name} has no knobs", hint="docs/writing-kernels.md says how a kernel.toml states them")
    for name, values in wanted.items():
        if name not in entry.knobs:
            raise InvalidSpec(f"{entry.name} has no knob {name!r}: {closest(name, [*entry.knobs])}")
        for value in values:
            if not entry.knobs[name].admits(value):
                raise InvalidSpec(
                    f"knob {name} of {entry.name} cannot be {value}", facts={"allowed": entry.knobs[name].allowed}
                )


def reason_before(definition: KernelDef, entry: Entry, *, spec: Spec, knobs: Mapping[str, int], target: Target) -> str:
    """Why a configuration cannot fit, as far as the definition says it; empty where it may."""
    full = definition.specialise(entry, {name: spec[name] for name in definition.axes}, knobs)
    values = {**full, **knobs}
    block = [one.evaluate(values) for one in entry.launch.block if one.names <= set(values)]
    warps = definition.options.get("num_warps")
    if isinstance(warps, Expression):
        block = [32 * warps.evaluate(values)]
    if block and math.prod(block) > _MOST_THREADS:
        return f"{math.prod(block)} threads a block, {_MOST_THREADS} are the most"
    shared, limit = entry.launch.shared_bytes, target.shared_bytes_limit
    if shared is not None and limit is not None and shared.names <= set(values) and shared.evaluate(values) > limit:
        return f"{shared.evaluate(values)} bytes of shared memory a block, {limit} are the most"
    return ""


def reason_after(manifest: Manifest) -> str:
    """Why a binary cannot be launched, as far as its registers say it; empty where it can."""
    contract = manifest.contract
    block = [parsed(text) for text in contract.block]
    if not all(one.names <= set(contract.constants) for one in block):
        return ""
    warps = -(-math.prod(one.evaluate(contract.constants) for one in block) // 32)
    registers = manifest.resources.get("registers", 0)
    need = warps * (-(-registers * 32 // _REGISTERS_AT_ONCE) * _REGISTERS_AT_ONCE)
    return (
        f"{need} registers a block, {_MOST_REGISTERS} are the most"
        if need > _MOST_REGISTERS and "sm_" in manifest.target
        else ""
    )


def label_of(knobs: Mapping[str, Any]) -> str:
    """The name of a configuration, in any order of its knobs."""
    return shown(dict(sorted(knobs.items())))
