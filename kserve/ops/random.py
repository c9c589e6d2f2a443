"""The state of the random streams that kernels draw from: torch's own generator, mirrored in device memory.

A kernel reads seed and offset from a tensor, so that a captured graph draws new numbers at each replay; a kernel of one thread
moves the offset on after it. Outside a capture the tensor follows the generator of its device: `torch.manual_seed` reproduces
a run, and what is drawn here moves the generator on.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kserve.client import get_kernel

# torch counts an offset in numbers, kept a multiple of four; a block is four numbers.
_BLOCK = 4


class _Mirror(NamedTuple):
    """The tensor, and where torch's generator stood when it was last the same."""

    state: torch.Tensor
    seed: int
    offset: int


_mirrors: dict[torch.device, _Mirror] = {}


def random_state(device: torch.device) -> torch.Tensor:
    """[2] int64 on the device: seed, and offset in blocks of four numbers.

    During a capture it is the one that the capture's graph will read at each replay: it must exist by then.
    """
    known = _mirrors.get(device)
    if torch.cuda.is_current_stream_capturing():
        if known is None:
            raise RuntimeError("no random numbers were drawn on this device yet: call the op once before the capture")
        return known.state
    generator = _generator(device)
    seed, offset = generator.initial_seed(), generator.get_offset()
    if known is None or (seed, offset) != known[1:]:
        # Seeded, set, or moved on by torch's own operations: the tensor follows.
        fresh = torch.tensor([_signed(seed), offset // _BLOCK], dtype=torch.int64)
        if known is None:
            state = fresh.to(device)
        else:
            state = known.state
            state.copy_(fresh)
        _mirrors[device] = _Mirror(state, seed, offset)
    return _mirrors[device].state


def advance(device: torch.device, n_blocks: int) -> None:
    """After the launch that drew them: move tensor and generator past so many blocks, on the current stream."""
    known = _mirrors[device]
    get_kernel("philox_advance")(known.state, n_blocks)
    if not torch.cuda.is_current_stream_capturing():
        offset = known.offset + n_blocks * _BLOCK
        _generator(device).set_offset(offset)
        _mirrors[device] = known._replace(offset=offset)


def _generator(device: torch.device) -> torch.Generator:
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def _signed(seed: int) -> int:
    """The same 64 bits as torch's int64 holds them."""
    return (seed + 2**63) % 2**64 - 2**63
