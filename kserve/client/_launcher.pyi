from collections.abc import Callable
from typing import Any

# One step of an expression in postfix order: ("k", constant), ("v", place of a parameter), (operator, 0). Operators are
# + - * / (rounds down) % n (minus) = ! < l (<=) > g (>=) m (min) M (max) 2 (next power of two).
Step = tuple[str, int]

class Launcher:
    """The quick road of one kernel.

    Args:
        params:      of each parameter (kind, dtype code, dtype bits, offset, size, align, divisible_by, contiguous, nullable);
                     kind is p pointer, i signed, u unsigned, f float, b bool, s bytes, 0 scratch; dtype as DLPack counts.
        sizes:       grid, block and shared memory: seven times (steps, least, most).
        tensor, parameter: the types whose instances are plain tensors.
        exchange:    the capsule `__dlpack_c_exchange_api__` of that library.
        device_type: of the tensors, as DLPack counts; 2 is CUDA.
        declared, generic: device -> function (a c_void_p) of each variant.
        slow:        takes (args, stream, grid) of what does not fit.
        failed:      raises for (status, sizes) of what the driver refused.
        launch_kernel, current_device: addresses of cuLaunchKernel and cuCtxGetDevice.
    Raises: ValueError for a kernel it cannot launch.
    """

    def __new__(
        cls,
        *,
        params: tuple[tuple[str, int, int, int, int, int, int, bool, bool], ...],
        sizes: tuple[tuple[tuple[Step, ...], int, int], ...],
        tensor: type,
        parameter: type,
        exchange: object,
        device_type: int,
        declared: dict[int, Any],
        generic: dict[int, Any],
        slow: Callable[..., None],
        failed: Callable[..., None],
        launch_kernel: int,
        current_device: int,
    ) -> Launcher: ...
    def launch(self, *args: Any, stream: Any = None, grid: Any = None) -> None: ...

class Signature:
    """What calls of one op have in common: how many tensors, dense ones on one device, and which of their sizes are equal.

    Args:
        pattern: "n H, n H, H": for each tensor a letter or a digit (1 to 9: that size) for every dimension.
        others:  as above.
    Raises: ValueError for another pattern.
    """

    def __new__(cls, pattern: str, *, tensor: type, parameter: type, exchange: object, device_type: int) -> Signature: ...
    def match(self, *tensors: Any) -> tuple[Any, ...] | None:
        """(key, size of each letter in order of appearance), or None for tensors that do not fit or have no elements.

        The key is bytes, equal for calls with the same dtypes, device and sizes of upper-case letters.
        """
