"""What benchmarks, tuning and profilers run an op or a kernel on: inputs, references, bytes. One module for each op.

A module of this package is named for its op and has

    SIZES                              the sizes of the benchmark, first those the op is judged by
    DIRECTIONS, DTYPES                 what the op is made for: of fwd and bwd; torch's names
    workload(sizes, *, direction, dtype) -> Workload
    KERNELS                            entry name -> Example, for each kernel behind the op

Adding an op is adding a module: nothing here lists them.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from kserve.errors import InvalidSpec, closest

Sizes = Mapping[str, int]


class Workload(NamedTuple):
    """One op at one shape.

    Fields:
        op, direction, dtype, sizes: what is run; direction is fwd or bwd, dtype one of torch's names.
        make:      (device, seed) -> the op's arguments, random.
        served:    the op, as a user calls it.
        plain:     the same in plain torch as one would write it: the baselines `eager` and `compile`.
        exact:     the reference; given arguments in float64 it is exact enough to judge by.
        vendor:    a library's own kernel for it; None where there is none.
        tolerance: largest error against float64; over the largest magnitude of the result where `relative`.
        n_bytes, n_flops: what the op must move at least, each input read once and each output written once; what it computes.
        gradients: positions of the arguments that bwd differentiates by.
    """

    op: str
    direction: str
    dtype: str
    sizes: dict[str, int]
    make: Callable[[str, int], tuple[Any, ...]]
    served: Callable[..., Any]
    plain: Callable[..., Any]
    exact: Callable[..., Any]
    tolerance: float
    n_bytes: int
    n_flops: int
    relative: bool = False
    vendor: Callable[..., Any] | None = None
    gradients: tuple[int, ...] = ()

    @property
    def shape(self) -> str:
        return shape_name(self.sizes)


class Example(NamedTuple):
    """How to call one kernel without its op.

    Fields:
        sizes:     what `arguments` needs, with the values of the benchmark's first shape.
        arguments: (spec, sizes, device, seed) -> the launch arguments in order; outputs filled with NaN.
        tolerance: largest difference between two right results of it, relative to the largest magnitude.
        n_bytes:   (spec, sizes) -> what a launch must move at least.
    """

    sizes: dict[str, int]
    arguments: Callable[[Mapping[str, Any], Sizes, str, int], tuple[Any, ...]]
    tolerance: float
    n_bytes: Callable[[Mapping[str, Any], Sizes], int]


def shape_name(sizes: Sizes) -> str:
    """`n=43136,hidden=128`."""
    return ",".join(f"{name}={value}" for name, value in sizes.items())


def ops() -> list[str]:
    """The ops that have workloads."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def sizes_of(op: str) -> Sequence[Sizes]:
    """The benchmark's sizes of an op. Raises: InvalidSpec for an unknown op."""
    found: Sequence[Sizes] = _module(op).SIZES
    return found


def forms_of(op: str) -> list[tuple[str, str]]:
    """Each (direction, dtype) the op is made for. Raises: InvalidSpec for an unknown op."""
    module = _module(op)
    return [(direction, dtype) for direction in module.DIRECTIONS for dtype in module.DTYPES]


def workload(op: str, sizes: Sizes, *, direction: str = "fwd", dtype: str = "float32") -> Workload:
    """The op at these sizes.

    Raises: InvalidSpec for an unknown op, sizes it does not have, or a direction or dtype it is not made for.
    """
    module = _module(op)
    names = tuple(module.SIZES[0])
    if set(sizes) != set(names):
        allowed = ",".join(f"{name}=N" for name in names)
        raise InvalidSpec(f"{op} has no sizes {shape_name(sizes)!r}", facts={"allowed": allowed})
    for what, value, allowed in (("direction", direction, module.DIRECTIONS), ("dtype", dtype, module.DTYPES)):
        if value not in allowed:
            raise InvalidSpec(f"{op} has no {what} {value!r}", facts={"allowed": ", ".join(allowed)})
    found: Workload = module.workload({name: sizes[name] for name in names}, direction=direction, dtype=dtype)
    return found


def example(kernel: str) -> Example | None:
    """How to call the kernel of that name; None for one that no op here stands in front of."""
    for op in ops():
        kernels: dict[str, Example] = _module(op).KERNELS
        if kernel in kernels:
            return kernels[kernel]
    return None


def _module(op: str) -> Any:
    if op not in ops():
        raise InvalidSpec(f"no workload for an op named {op!r}: {closest(op, ops())}")
    return importlib.import_module(f"{__name__}.{op}")
