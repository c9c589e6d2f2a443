"""The memory of one launch: the driver's CUlaunchConfig, the packed parameters, pointers to them; and the driver's limits."""

from __future__ import annotations

import ctypes
import struct

from kserve.artifact import Contract, Param
from kserve.spec import DTYPES, SCALARS

# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": threads of a block along one axis, blocks of a
# grid along x, y and z.
MOST_THREADS = 1024
MOST_BLOCKS = (2**31 - 1, 65535, 65535)
MOST_SHARED = 2**31 - 1
# CUlaunchConfig: grid, block and dynamic shared memory as seven u32, the stream, no attributes. 56 bytes.
_CONFIG = "7I4xQ16x"
# Where the parameters begin: behind the config.
PARAMS_AT = 64


def layout(contract: Contract) -> struct.Struct:
    """Config and parameters as one struct: seven sizes, the stream, then every argument. Packing also checks ranges."""
    text, at = f"<{_CONFIG}", -(PARAMS_AT - struct.calcsize(f"<{_CONFIG}"))
    for param in contract.params:
        if param.kind == "scratch":
            continue
        text += f"{param.offset - at}x" if param.offset > at else ""
        text += _format(param)
        at = param.offset + param.size_bytes
    return struct.Struct(text)


def _format(param: Param) -> str:
    if param.kind == "pointer":
        return "Q"
    if param.kind in ("struct", "tensor_map"):
        return f"{param.size_bytes}s"
    return DTYPES[SCALARS[param.kind]].packing


class Slot:
    """The memory of one launch, and the driver's view of it. The driver copies it all during the launch call.

    Attributes:
        buffer: what `layout` packs into.
        config, params: arguments of the driver's call; scratch pointers stay null.
    """

    __slots__ = ("buffer", "config", "params")

    def __init__(self, contract: Contract) -> None:
        size = max((param.offset + param.size_bytes for param in contract.params), default=0)
        self.buffer = ctypes.create_string_buffer(PARAMS_AT + size)
        base = ctypes.addressof(self.buffer)
        self.config = ctypes.c_void_p(base)
        pointers = [base + PARAMS_AT + param.offset for param in contract.params]
        self.params = (ctypes.c_void_p * max(len(pointers), 1))(*pointers)
