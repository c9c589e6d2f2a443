"""kserve: GPU kernels compiled once and launched everywhere.

Public names are resolved on first use, so that `from kserve import get_kernel` imports the client and nothing else.
"""

from __future__ import annotations

__version__ = "0.1.0"

TYPE_CHECKING = False
if TYPE_CHECKING:
    from kserve.client import Kernel, get_kernel, get_kernels
    from kserve.errors import KserveError
    from kserve.target import Target

_HOMES = {
    "get_kernel": "kserve.client",
    "get_kernels": "kserve.client",
    "Kernel": "kserve.client",
    "Target": "kserve.target",
    "KserveError": "kserve.errors",
}
__all__ = ["Kernel", "KserveError", "Target", "__version__", "get_kernel", "get_kernels"]


def __getattr__(name: str) -> object:
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module 'kserve' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
