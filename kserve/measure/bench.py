"""The launch that a sweep times, on the current device: its arguments come from a built-in op's workloads, or a user's file."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from kserve.artifact import Artifact
from kserve.errors import LoadError, RequestError
from kserve.measure.sweep import Bench, written_of

_COPIED_BYTES = 1 << 30
_SEED = 0


class Inputs(NamedTuple):
    """Where the arguments of a launch come from.

    Fields:
        arguments: (spec, sizes, device, seed) -> the launch arguments in order.
        sizes:     what sizes that are not named are.
        tolerance: between two right results, over the largest magnitude; None for the dtype's own.
        n_bytes:   (spec, sizes) -> what a launch moves at least; None where nobody says.
    """

    arguments: Callable[..., tuple[Any, ...]]
    sizes: Mapping[str, int] = {}
    tolerance: float | None = None
    n_bytes: Callable[..., int] | None = None


def inputs_of(kernel: str, place: str | None) -> Inputs | None:
    """The inputs in FILE:NAME, a function or an `Inputs`; else those of the built-in op behind the kernel; None for none.

    Raises: RequestError for a file or a name that is not there.
    """
    if place is None:
        found = import_module("kserve.measure.workloads").example(kernel)
        return None if found is None else Inputs(found.arguments, found.sizes, found.tolerance, found.n_bytes)
    file, _, name = place.rpartition(":")
    path = Path(file)
    spec = importlib.util.spec_from_file_location(path.stem, path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise RequestError(f"--inputs cannot be {place!r}", facts={"allowed": "FILE.py:FUNCTION"})
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    value = getattr(module, name, None)
    if value is None:
        raise RequestError(f"{file} has no {name!r}", facts={"allowed": "a function (spec, sizes, device, seed) -> arguments"})
    return value if isinstance(value, Inputs) else Inputs(value)


def bench_for(
    inputs: Inputs, artifact: Artifact, *, spec: Mapping[str, Any], sizes: Mapping[str, int], tolerance: float | None
) -> Bench:
    """The bench on the current CUDA device. Raises: LoadError when torch sees none."""
    import torch

    if not torch.cuda.is_available():
        raise LoadError("torch sees no CUDA device: nothing can be timed")
    device = f"cuda:{torch.cuda.current_device()}"
    instrument = import_module("kserve.measure.device").instrument_for(device)
    with instrument.active():
        arguments = tuple(inputs.arguments(spec, {**inputs.sizes, **sizes}, device, _SEED))
    source, target = (torch.empty(_COPIED_BYTES, dtype=torch.int8, device=device) for _ in range(2))
    return Bench(
        prepare=instrument.prepare,
        arguments=arguments,
        written=written_of(artifact, arguments),
        tolerance=inputs.tolerance if tolerance is None else tolerance,
        copy=(lambda: target.copy_(source), 2 * _COPIED_BYTES),
    )
