"""kserve: GPU kernels compiled once and launched everywhere.

Public names are resolved on first use, so that `from kserve import get_kernel` imports the client and nothing else.
"""

from __future__ import annotations

__version__ = "0.1.0"

TYPE_CHECKING = False
if TYPE_CHECKING:
    from kserve.client import Kernel, get_kernel, get_kernels
    from kserve.client.extension import get_extension
    from kserve.client.report import report, warmed
    from kserve.errors import KserveError
    from kserve.target import Target

_HOMES = {
    "get_extension": "kserve.client.extension",
    "get_kernel": "kserve.client",
    "get_kernels": "kserve.client",
    "report": "kserve.client.report",
    "warmed": "kserve.client.report",
    "Kernel": "kserve.client",
    "Target": "kserve.target",
    "KserveError": "kserve.errors",
}
__all__ = ["Kernel", "KserveError", "Target", "__version__", "get_extension", "get_kernel", "get_kernels", "report", "warmed"]
# Seconds that importing the client took, for the report.
import_s = 0.0


def __getattr__(name: str) -> object:
    import importlib
    import time

    global import_s  # noqa: PLW0603 - a sum over this module's life
    if name not in _HOMES:
        raise AttributeError(f"module 'kserve' has no attribute {name!r}")
    began = time.perf_counter()
    value = getattr(importlib.import_module(_HOMES[name]), name)
    import_s += time.perf_counter() - began
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
