"""Memory for results, at less of the host's time than torch's public functions take."""

from __future__ import annotations

from typing import Any

import torch

_guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)  # noqa: SLF001 - as below
# What the code that torch.compile writes allocates with: it goes around the dispatcher.
_on_current_device: Any = getattr(_guards, "_empty_strided_cuda", None)
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)  # noqa: SLF001 - the public wrapper costs more than the memory


def empty(
    sizes: tuple[int, ...], strides: tuple[int, ...], like: torch.Tensor, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """A tensor without values.

    Args:
        strides: of a dense tensor of these sizes.
        like:    a real tensor: its device, and its dtype where none is named.
    """
    dtype = dtype or like.dtype
    if _on_current_device is not None and like.is_cuda and like.get_device() == _current_device():
        found: torch.Tensor = _on_current_device(sizes, strides, dtype)
        return found
    return torch.empty_strided(sizes, strides, dtype=dtype, device=like.device)
