"""The driver: loads binaries through its library API and hands out functions. ctypes, 2 ms, no binding is imported."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref, c_char_p, c_int, c_void_p
from functools import cached_property
from typing import TYPE_CHECKING, Any

from kserve.artifact import Artifact
from kserve.errors import LoadError
from kserve.target import Target, parse_target, target_of_capability

if TYPE_CHECKING:
    from kserve.tuning import Device

NO_CONTEXT = 201  # CUDA_ERRORNO_CONTEXT: the calling thread has none
_NOT_INITIALIZED = 3
_CAPABILITY_MAJOR, _CAPABILITY_MINOR, _SHARED_OPTIN = 75, 76, 97  # CUdevice_attribute
_SM_COUNT, _L2_BYTES = 16, 38  # the same
_FUNCTION_SHARED_STATIC, _FUNCTION_SHARED_DYNAMIC = 1, 8  # CUfunction_attribute
_POINTER_DEVICE = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class Driver:
    """libcuda, initialised.

    Args:
        library: its file.
    Raises: LoadError when there is no driver, or no device.
    """

    def __init__(self, library: str = "libcuda.so.1") -> None:
        try:
            # Two views of one library: calls that take under a microsecond keep the interpreter's lock.
            self.slow = ctypes.CDLL(library)
            self.quick = ctypes.PyDLL(library)
        except OSError:
            raise LoadError(
                f"there is no NVIDIA driver on this machine ({library})",
                hint="name a target to build without one: get_kernel(…, target='cuda:sm_90')",
            ) from None
        self._current = self.quick.cuCtxGetDevice
        self._primaries: dict[int, c_void_p] = {}
        self._attributes: dict[tuple[int, int], int] = {}
        self._kinds: dict[int, Device] = {}
        self.pid = os.getpid()
        self.check(self.slow.cuInit(0), "initialise the driver")
        version = c_int()
        self.check(self.slow.cuDriverGetVersion(byref(version)), "read the driver's version")
        self.version = version.value

    @cached_property
    def launch(self) -> Any:
        """cuLaunchKernelEx(config, function, parameters, None): four prepared ctypes objects, none of them converted.

        cuLaunchKernel takes eleven arguments, and ctypes pays for each of them.
        """
        return self.slow.cuLaunchKernelEx

    def check(self, status: int, what: str) -> None:
        """Raises LoadError for any status but 0."""
        if status == 0:
            return
        if status == _NOT_INITIALIZED and os.getpid() != self.pid:
            raise LoadError(
                f"cannot {what}: this process was forked after CUDA was initialised in its parent",
                hint="start workers with the spawn method: multiprocessing.set_start_method('spawn')",
            )
        name, text = c_char_p(), c_char_p()
        self.slow.cuGetErrorName(status, byref(name))
        self.slow.cuGetErrorString(status, byref(text))
        reason = b": ".join(part for part in (name.value, text.value) if part).decode()
        raise LoadError(f"cannot {what}: {reason or f'driver status {status}'}")

    def current_device(self) -> int:
        """The device of the calling thread's current context; 0 when it has none yet."""
        device = c_int()
        status = self._current(byref(device))
        if status and status != NO_CONTEXT:
            self.check(status, "ask for the current device")
        return device.value

    def device_count(self) -> int:
        count = c_int()
        self.check(self.slow.cuDeviceGetCount(byref(count)), "count the devices")
        return count.value

    def has_context(self) -> bool:
        return bool(self._current(byref(c_int())) == 0)

    def target_of(self, device: int) -> Target:
        """Raises LoadError when there is no such device."""
        return target_of_capability(self._attribute(device, _CAPABILITY_MAJOR), self._attribute(device, _CAPABILITY_MINOR))

    def _attribute(self, device: int, attribute: int) -> int:
        """A fact about the device, asked once: it does not change."""
        known = self._attributes.get((device, attribute))
        if known is None:
            value = c_int()
            self.check(self.slow.cuDeviceGetAttribute(byref(value), attribute, device), f"ask CUDA device {device}")
            known = self._attributes[device, attribute] = value.value
        return known

    def kind_of(self, device: int) -> Device:
        """What makes this device one kind with others. A MIG instance says its profile at the end of its name."""
        known: Device | None = self._kinds.get(device)
        if known is not None:
            return known
        from kserve.tuning import Device

        text = ctypes.create_string_buffer(256)
        self.check(self.slow.cuDeviceGetName(text, len(text), device), f"ask CUDA device {device}")
        name = text.value.decode(errors="replace")
        profile = name.partition(" MIG ")[2]
        found = Device(name, self._attribute(device, _SM_COUNT), self._attribute(device, _L2_BYTES), profile)
        self._kinds[device] = found
        return found

    def synchronize(self) -> None:
        """Wait for all that the current context was given. Raises: LoadError for what went wrong in it."""
        self.check(self.slow.cuCtxSynchronize(), "finish what was launched")

    def use(self, device: int) -> None:
        """Make the device's primary context the calling thread's."""
        self.check(self.slow.cuCtxSetCurrent(self._primary(device)), f"use CUDA device {device}")

    def shared_bytes_limit(self, device: int) -> int:
        return self._attribute(device, _SHARED_OPTIN)

    def device_of_pointer(self, pointer: int) -> int:
        """The device whose memory the pointer lies in, or -1 for memory the driver does not know."""
        device = c_int(-1)
        status = self.quick.cuPointerGetAttribute(byref(device), _POINTER_DEVICE, c_void_p(pointer))
        return -1 if status else device.value

    @contextmanager
    def on_device(self, device: int) -> Iterator[None]:
        """Make a context of that device current for the block: the caller's own where it fits, else the primary one.

        A thread without any context, such as autograd's, keeps the primary one, as after its first call of the runtime.
        """
        if not self.has_context():
            self.use(device)
        if self.current_device() == device:
            yield
            return
        self.check(self.slow.cuCtxPushCurrent_v2(self._primary(device)), f"use CUDA device {device}")
        try:
            yield
        finally:
            self.slow.cuCtxPopCurrent_v2(byref(c_void_p()))

    @contextmanager
    def allowed_while_capturing(self) -> Iterator[None]:
        """Let this thread load code although a stream is being captured, which forbids by default what may wait."""
        mode = c_int(_RELAXED)
        self.check(self.quick.cuThreadExchangeStreamCaptureMode(byref(mode)), "change the capture mode")
        try:
            yield
        finally:
            self.quick.cuThreadExchangeStreamCaptureMode(byref(mode))

    def _primary(self, device: int) -> c_void_p:
        """The device's primary context, the one torch and CuPy use; held for the life of the process."""
        if device not in self._primaries:
            context = c_void_p()
            self.check(self.slow.cuDevicePrimaryCtxRetain(byref(context), device), f"use CUDA device {device}")
            self._primaries[device] = context
        return self._primaries[device]


_driver: Driver | None = None


def driver() -> Driver:
    """The process's driver. Raises: LoadError."""
    global _driver  # noqa: PLW0603 - one driver a process
    if _driver is None:
        _driver = Driver()
    return _driver


class Library:
    """One binary and its function on each device it was asked for.

    Args:
        ahead: check it and give it to the driver now; else the first launch that needs it does.
    Raises: LoadError when the binary does not fit this driver or device, before the driver sees a byte of it.
    """

    def __init__(self, artifact: Artifact, *, device: int, ahead: bool = True) -> None:
        self._artifact = artifact
        self._driver = driver()
        self.functions: dict[int, c_void_p] = {}
        self._handle: c_void_p | None = None
        if ahead:
            self.load_on(device)

    def _check_contract(self) -> None:
        manifest = self._artifact.manifest
        contract = manifest.contract
        if contract.format != "cubin":
            raise LoadError(f"{manifest.name} is a {contract.format} for {manifest.target}: only CUDA binaries run here")
        if self._driver.version < contract.minimum_driver:
            ours, needed = _release(self._driver.version), _release(contract.minimum_driver)
            raise LoadError(f"{manifest.name} needs a driver for CUDA {needed} or newer, this one is for {ours}")
        if any(contract.scratch_bytes):
            raise LoadError(f"{manifest.name} needs {sum(contract.scratch_bytes)} bytes of scratch a block: not supported")

    def _check_device(self, device: int) -> None:
        manifest, found = self._artifact.manifest, self._driver.target_of(device)
        if not parse_target(manifest.target).runs_on(found.capability):
            raise LoadError(
                f"{manifest.name} was built for {manifest.target}, CUDA device {device} is {found}",
                hint=f"get_kernel(…, target='{found}'), or leave target out",
            )

    def load_on(self, device: int) -> c_void_p:
        """The function's handle on that device, its code resident: a launch of it loads nothing."""
        name = self._artifact.manifest.name
        if self._handle is None:
            self._check_contract()
        self._check_device(device)
        check, slow = self._driver.check, self._driver.slow
        kernel, function = c_void_p(), c_void_p()
        symbol = self._artifact.manifest.contract.symbol.encode()
        with self._driver.allowed_while_capturing(), self._driver.on_device(device):
            if self._handle is None:  # two threads at once load it twice, and either is as good
                handle = c_void_p()
                status = slow.cuLibraryLoadData(byref(handle), self._artifact.payload, None, None, 0, None, None, 0)
                check(status, f"load {name} ({self._artifact.manifest.target})")
                self._handle = handle
            check(slow.cuLibraryGetKernel(byref(kernel), self._handle, symbol), f"find {symbol.decode()} in {name}")
            check(slow.cuKernelGetFunction(byref(function), kernel), f"load {name} on device {device}")
            check(slow.cuFuncLoad(function), f"load {name} on device {device}")
            static = c_int()
            check(slow.cuFuncGetAttribute(byref(static), _FUNCTION_SHARED_STATIC, function), f"inspect {name}")
            most = self._driver.shared_bytes_limit(device) - static.value
            check(slow.cuFuncSetAttribute(function, _FUNCTION_SHARED_DYNAMIC, most), f"raise shared memory of {name}")
        self.functions[device] = function
        return function


def _release(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
