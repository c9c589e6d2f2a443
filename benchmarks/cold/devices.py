"""Where a child launches: torch's device, the bare driver's, or nowhere.

Each makes its context when it is made, and has `place`, `launch` and `check` for wishes. Imports nothing before that.
"""

from __future__ import annotations

import workloads

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class WrongResult(Exception):
    """The arm ran and its result is wrong: it has no number."""


class TorchDevice:
    """torch imported, a context made."""

    def __init__(self, job: Any) -> None:
        import torch

        job.mark("torch")
        self._torch = torch
        torch.zeros(1, device="cuda").add_(1)
        torch.cuda.synchronize()

    def place(self, wishes: list[Any]) -> None:
        for wish in wishes:
            wish.place(self._torch, "cuda")
        self._torch.cuda.synchronize()

    def launch(self, kernel: Any, wish: Any) -> None:
        """Launch and wait for the result."""
        kernel(*wish.arguments)
        self._torch.cuda.synchronize()

    def launch_all(self, kernels: list[Any], wishes: list[Any]) -> None:
        for kernel, wish in zip(kernels, wishes, strict=True):
            kernel(*wish.arguments)
        self._torch.cuda.synchronize()

    def check(self, wishes: list[Any]) -> float:
        """The largest error of the wishes' results. Raises: WrongResult for one that is over the bar."""
        errors = {workloads.variant(wish.name, wish.spec): wish.error(self._torch) for wish in wishes}
        for name, error in errors.items():
            if not error <= workloads.BAR:  # a NaN is over every bar
                raise WrongResult(f"{name} is off by {error:.1e} from float64, the bar is {workloads.BAR:.0e}")
        return max(errors.values())

    def facts(self) -> dict[str, str]:
        return {"gpu": self._torch.cuda.get_device_name()}


class NoDevice:
    """No GPU: kernels are obtained, not launched."""

    def __init__(self, job: Any) -> None:
        if job.torch:
            import torch  # noqa: F401 - its cost and what it loads are what the arm is said to have

        job.mark("torch")

    def place(self, wishes: list[Any]) -> None:
        pass

    def launch(self, kernel: Any, wish: Any) -> None:
        pass

    def launch_all(self, kernels: list[Any], wishes: list[Any]) -> None:
        pass

    def check(self, _: list[Any]) -> None:
        return None

    def facts(self) -> dict[str, str]:
        return {"gpu": "none"}


class PlainDevice:
    """A context and memory from the driver, through ctypes: a program without any array library."""

    def __init__(self, job: Any) -> None:
        import ctypes

        from providers import Unavailable, called

        job.mark("torch")
        self._ctypes, self._called = ctypes, called
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError:
            raise Unavailable("there is no NVIDIA driver on this machine") from None
        context = ctypes.c_void_p()
        called(self._cuda.cuInit(0))
        called(self._cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
        called(self._cuda.cuCtxSetCurrent(context))

    def place(self, wishes: list[Any]) -> None:
        """The first wish alone, a Norm."""
        wish, rows = wishes[0], workloads.ROWS
        sizes = [rows * wish.hidden] * 2 + [wish.hidden] * 2
        self._values = [self._noise(size, seed=i) for i, size in enumerate(sizes)]
        self._out = (self._ctypes.c_float * (rows * wish.hidden))(*[float("nan")] * (rows * wish.hidden))
        shapes = [(rows, wish.hidden)] * 2 + [(wish.hidden,)] * 2 + [(rows, wish.hidden)]
        arrays = [self._array(host, shape) for host, shape in zip([*self._values, self._out], shapes, strict=True)]
        wish.arguments = [*arrays, rows, workloads.EPS]

    def _noise(self, size: int, *, seed: int) -> Any:
        """Numbers in -1..1, all different: no module for random numbers is loaded for them."""
        words = ((i + 1) * (2654435761 + 2 * seed) % 2**32 for i in range(size))
        return (self._ctypes.c_float * size)(*(word / 2**31 - 1 for word in words))

    def _array(self, host: Any, shape: tuple[int, ...]) -> Any:
        pointer, size = self._ctypes.c_uint64(), self._ctypes.c_size_t(self._ctypes.sizeof(host))
        self._called(self._cuda.cuMemAlloc_v2(self._ctypes.byref(pointer), size))
        self._called(self._cuda.cuMemcpyHtoD_v2(pointer, host, size))
        return _Array(pointer.value, shape)

    def launch(self, kernel: Any, wish: Any) -> None:
        """Launch on the default stream and wait for the result."""
        kernel(*wish.arguments, stream=0)
        self._called(self._cuda.cuCtxSynchronize())

    def check(self, wishes: list[Any]) -> float:
        """The largest error of the first wish's result, in Python's own float64."""
        wish, out = wishes[0], self._out
        pointer = self._ctypes.c_uint64(wish.arguments[4].pointer)
        self._called(self._cuda.cuMemcpyDtoH_v2(out, pointer, self._ctypes.c_size_t(self._ctypes.sizeof(out))))
        errors = [abs(found - expected) for found, expected in zip(out, self._expected(wish.hidden), strict=True)]
        wrong = [error for error in errors if not error <= workloads.BAR]
        if wrong:
            raise WrongResult(f"{len(wrong)} of {len(errors)} elements are off, the first by {wrong[0]:.1e}")
        return max(errors)

    def _expected(self, hidden: int) -> list[float]:
        x, residual, gamma, beta = self._values
        found = []
        for start in range(0, len(x), hidden):
            row = x[start : start + hidden]
            mean = sum(row) / hidden
            scale = (sum((value - mean) ** 2 for value in row) / hidden + workloads.EPS) ** -0.5
            found += [(row[h] - mean) * scale * gamma[h] + beta[h] + residual[start + h] for h in range(hidden)]
        return found

    def facts(self) -> dict[str, str]:
        return {}


class _Array:
    """Device memory as the CUDA Array Interface describes it."""

    def __init__(self, pointer: int, shape: tuple[int, ...]) -> None:
        self.pointer = pointer
        self.__cuda_array_interface__ = {"typestr": "<f4", "shape": shape, "data": (pointer, False), "version": 3}


def device_for(job: Any) -> Any:
    """The device of this child, its context made."""
    found = NoDevice(job) if not job.gpu else TorchDevice(job) if job.torch else PlainDevice(job)
    job.mark("context")
    return found
