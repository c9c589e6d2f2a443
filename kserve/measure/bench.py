"""The launch that a sweep times, on the current device: its arguments come from a built-in op's workloads, or a user's file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kserve.artifact import Artifact
from kserve.errors import LoadError
from kserve.measure.device import instrument_for
from kserve.measure.launch_once import example_of, maker_of, place_of
from kserve.measure.sweep import Bench, check_facts, written_of

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


def inputs_of(kernel: str, inputs: str | None) -> Inputs:
    """The inputs of FILE.py:FUNCTION, called with the spec, the device and every size by its name; else of the kernel's op.

    Raises: RequestError for no inputs, or a file or function that is not there.
    """
    place = place_of(kernel, inputs)
    known = None if place else example_of(kernel)
    if known is not None:
        return Inputs(known.arguments, known.sizes, known.tolerance, known.n_bytes)
    maker: Any = maker_of(kernel, place)
    return Inputs(lambda spec, sizes, device, _seed: maker(dict(spec), device, **sizes))


def bench_for(
    inputs: Inputs, artifact: Artifact, *, spec: Mapping[str, Any], sizes: Mapping[str, int], tolerance: float | None
) -> Bench:
    """The bench on the current CUDA device. Raises: LoadError when torch sees none."""
    import torch

    if not torch.cuda.is_available():
        raise LoadError("torch sees no CUDA device: nothing can be timed")
    device = f"cuda:{torch.cuda.current_device()}"
    instrument = instrument_for(device)
    with instrument.active():
        arguments = tuple(inputs.arguments(spec, {**inputs.sizes, **sizes}, device, _SEED))
    check_facts(artifact, arguments)
    source, target = (torch.empty(_COPIED_BYTES // 4, dtype=torch.int32, device=device) for _ in range(2))
    return Bench(
        prepare=instrument.prepare,
        arguments=arguments,
        written=written_of(artifact, arguments),
        tolerance=inputs.tolerance if tolerance is None else tolerance,
        copy=(lambda: torch.add(source, 0, out=target), 2 * _COPIED_BYTES),  # by a kernel: a graph gives a copy to the engines
    )
