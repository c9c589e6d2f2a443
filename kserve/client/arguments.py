"""One launch argument of any array library: its value, device and stream, or the error that names it.

This is the slow and complete road. `launch.py` takes a shorter one for torch tensors that fit, and comes here with the rest.
"""

from __future__ import annotations

import operator
import sys
from typing import Any, NamedTuple

from kserve.artifact import Param
from kserve.client.loader import driver
from kserve.errors import LaunchError
from kserve.spec import DTYPES, SCALARS, is_bool

_LEGACY_STREAM = 1  # what the interface calls the default stream, 0 to the driver


class Passed(NamedTuple):
    """An argument, read.

    Fields:
        value:  what is packed: an address or a number.
        device: of a pointer; None where it cannot be told (a null pointer, a number).
        stream: the owner library's current stream; None where the owner has none.
    """

    value: Any
    device: int | None = None
    stream: int | None = None


def read(kernel: str, param: Param, argument: object) -> Passed:
    """The argument as its parameter needs it.

    Raises: LaunchError naming kernel, parameter, what came and what is allowed.
    """
    if param.kind == "pointer":
        return _pointer(kernel, param, argument)
    if param.kind in ("struct", "tensor_map"):
        return Passed(_block(kernel, param, argument))
    return Passed(_number(kernel, param, argument))


def _refused(kernel: str, param: Param, came: str, allowed: str, *, hint: str | None = None) -> LaunchError:
    return LaunchError(f"{kernel}: argument {param.name} is {came}", facts={"allowed": allowed}, hint=hint)


def _pointer(kernel: str, param: Param, argument: object) -> Passed:
    if argument is None:
        if param.nullable:
            return Passed(0)
        raise _refused(kernel, param, "None", f"an array of {param.dtype} on a CUDA device")
    if isinstance(argument, int) and not isinstance(argument, bool):
        return _address(kernel, param, argument)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(argument, torch.Tensor):
        return _tensor(kernel, param, argument, torch)
    try:
        interface = argument.__cuda_array_interface__  # type: ignore[attr-defined]
    except AttributeError:
        kind = "host memory" if hasattr(argument, "__array_interface__") else "not an array"
        raise _refused(
            kernel, param, f"a {type(argument).__name__}: {kind}", f"an array of {param.dtype} on a CUDA device"
        ) from None
    return _array(kernel, param, argument, interface)


def _address(kernel: str, param: Param, address: int) -> Passed:
    """A device address as it is. Whose memory it is, and so on which stream it is in use, cannot be told."""
    if address == 0 and param.nullable:
        return Passed(0)
    device = driver().device_of_pointer(address) if 0 < address < 2**64 else -1
    if device < 0:
        raise _refused(kernel, param, f"the address {address:#x}, which is no CUDA memory", "the address of CUDA memory")
    element = DTYPES[param.dtype].size_bytes
    if address % element:
        raise _refused(kernel, param, f"the address {address:#x}", f"a multiple of {element} bytes ({param.dtype})")
    return Passed(address, device)


def _tensor(kernel: str, param: Param, tensor: Any, torch: Any) -> Passed:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.device.type != "cuda":
        raise _refused(kernel, param, f"a tensor on {tensor.device}", "a tensor on a CUDA device", hint="move it with .cuda()")
    if dtype != param.dtype:
        raise _refused(kernel, param, f"a tensor of {dtype}", param.dtype)
    if param.contiguous and not tensor.is_contiguous():
        came = f"a strided view, shape {tuple(tensor.shape)}, strides {tensor.stride()}"
        raise _refused(kernel, param, came, "a contiguous tensor", hint="call .contiguous() on it")
    try:
        pointer = tensor.data_ptr()
    except (RuntimeError, Warning):  # a sparse tensor; a fake one, where warnings are errors
        pointer = 0
    if not pointer and tensor.numel():
        raise _refused(kernel, param, f"a {type(tensor).__name__} without memory of its own", "a plain tensor")
    device = tensor.get_device()
    return Passed(pointer, device, torch._C._cuda_getCurrentRawStream(device))  # noqa: SLF001 - the public call: 8 µs


def _array(kernel: str, param: Param, argument: object, interface: dict[str, Any]) -> Passed:
    """Anything with `__cuda_array_interface__`, CuPy arrays among them (CUDA Array Interface, version 3)."""
    typestr, (pointer, read_only) = interface["typestr"], interface["data"]
    if typestr != DTYPES[param.dtype].typestr:
        raise _refused(
            kernel, param, f"an array of {typestr}", f"{param.dtype} ({DTYPES[param.dtype].typestr or 'torch only'})"
        )
    if param.contiguous and not _is_contiguous(interface):
        came = f"a strided view, shape {interface['shape']}, strides {interface['strides']} bytes"
        raise _refused(kernel, param, came, "a C-contiguous array")
    device = driver().device_of_pointer(pointer) if pointer else None
    if device is not None and device < 0:
        raise _refused(kernel, param, f"at {pointer:#x}, which is no CUDA memory", "an array on a CUDA device")
    if read_only and param.mutated:
        raise _refused(kernel, param, "read-only", "an array the kernel may write to")
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(argument, cupy.ndarray):
        return Passed(pointer, device, cupy.cuda.get_current_stream().ptr)
    stream = interface.get("stream")
    return Passed(pointer, device, 0 if stream == _LEGACY_STREAM else stream)


def _is_contiguous(interface: dict[str, Any]) -> bool:
    strides, expected = interface.get("strides"), int(interface["typestr"][2:])
    if strides is None or 0 in interface["shape"]:
        return True
    for extent, stride in zip(reversed(interface["shape"]), reversed(strides), strict=True):
        if extent > 1 and stride != expected:
            return False
        expected *= extent
    return True


def _block(kernel: str, param: Param, argument: object) -> bytes:
    if not isinstance(argument, bytes | bytearray | memoryview) or len(bytes(argument)) != param.size_bytes:
        raise _refused(kernel, param, f"a {type(argument).__name__}", f"exactly {param.size_bytes} bytes")
    return bytes(argument)


def _number(kernel: str, param: Param, argument: object) -> int | float | bool:
    if hasattr(argument, "__cuda_array_interface__") or hasattr(argument, "data_ptr"):
        raise _refused(
            kernel, param, f"an array ({type(argument).__name__})", f"a number ({param.kind})", hint="pass its .item()"
        )
    if param.kind == "bool":
        if is_bool(argument):
            return bool(argument)
        raise _refused(kernel, param, f"{argument!r}", "True, False")
    if param.kind.startswith("f"):
        return _float(kernel, param, argument)
    return _integer(kernel, param, argument)


def _float(kernel: str, param: Param, argument: object) -> float:
    # No texts, no complex numbers, no arrays: only what is a number by itself.
    real = not isinstance(argument, str | bytes | complex) and not is_bool(argument) and hasattr(argument, "__float__")
    if not real or getattr(argument, "shape", ()) != () or str(getattr(argument, "dtype", "")).startswith("complex"):
        raise _refused(kernel, param, f"{argument!r} ({type(argument).__name__})", f"a number ({param.kind})")
    try:
        return float(argument)  # type: ignore[arg-type]  # it has __float__
    except (OverflowError, TypeError):
        raise _refused(kernel, param, "a number out of range", f"a number ({param.kind})") from None


def _integer(kernel: str, param: Param, argument: object) -> int:
    bits = DTYPES[SCALARS[param.kind]].size_bytes * 8
    low, high = (0, 2**bits - 1) if param.kind.startswith("u") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    allowed = f"an integer from {low} to {high} ({param.kind})"
    try:
        value = operator.index(argument)  # type: ignore[arg-type]  # anything else raises TypeError
    except TypeError:
        raise _refused(kernel, param, f"{argument!r} ({type(argument).__name__})", allowed) from None
    if is_bool(argument) or getattr(argument, "shape", ()) != ():
        raise _refused(kernel, param, f"{argument!r} ({type(argument).__name__})", allowed)
    if not low <= value <= high:
        raise _refused(kernel, param, f"{value}", allowed)
    return value
