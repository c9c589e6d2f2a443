"""The documented functions in front of the built-in kernels, one module each.

    from kserve.ops import norm_residual, realspace

An op is imported when it is first named, and torch with it. Each module also has `reference`, the same function in plain
torch: it serves CPU tensors and whatever the kernel is not made for.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import ModuleType

from kserve.errors import LaunchError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager
    from typing import Any

    from kserve.ops.backend import backend as backend
    from kserve.ops.backend import given_up as given_up
    from kserve.ops.backend import served as served
    from kserve.ops.backend import set_backend as set_backend
    from kserve.ops.edge_features import edge_features as edge_features
    from kserve.ops.graph_norm_bce import graph_norm_bce as graph_norm_bce
    from kserve.ops.group_norm import group_norm as group_norm
    from kserve.ops.norm_residual import norm_residual as norm_residual
    from kserve.ops.realspace import realspace as realspace

_OF_BACKEND = ("backend", "given_up", "served", "set_backend")
__all__ = [
    "backend",
    "edge_features",
    "given_up",
    "graph_norm_bce",
    "group_norm",
    "norm_residual",
    "realspace",
    "served",
    "set_backend",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{'backend' if name in _OF_BACKEND else name}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]


class _Package(ModuleType):
    """An op has the name of its module: the name means the function, whichever was imported first."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in __all__ and isinstance(value, ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


_NO_REGION = nullcontext()


def region(label: str) -> AbstractContextManager[Any]:
    """A named region of torch's profiler, `<op>.<fwd|bwd>`: without one a compiled kernel belongs to nobody."""
    profiler = sys.modules["torch.autograd.profiler"]  # ops import torch, which imports it
    return profiler.record_function(label) if profiler._is_profiler_enabled else _NO_REGION  # noqa: SLF001 - torch's own flag


def check_shape(name: str, tensor: Any, shape: Sequence[int]) -> None:
    """Raises LaunchError unless the tensor has that shape."""
    if tensor.shape != tuple(shape):
        raise LaunchError(
            f"{name} has shape {list(tensor.shape)}",
            facts={"allowed": str(list(shape))},
        )


def check_dtype(name: str, tensor: Any, allowed: Sequence[Any]) -> None:
    """Raises LaunchError unless the tensor has one of those dtypes."""
    if tensor.dtype not in allowed:
        raise LaunchError(
            f"{name} has dtype {_plain(tensor.dtype)}",
            facts={"allowed": ", ".join(_plain(dtype) for dtype in allowed)},
        )


def check_device(name: str, tensor: Any, device: Any) -> None:
    """Raises LaunchError unless the tensor lies on that device."""
    if tensor.device != device:
        raise LaunchError(f"{name} lies on {tensor.device}", facts={"allowed": f"{device}, where the first argument lies"})


def _plain(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
