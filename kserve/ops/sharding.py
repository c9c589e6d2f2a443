"""A DTensor in front of an op: the kernels get the local shard, the caller gets a DTensor with the same placements again."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch

_CHANNELS = 1


class Sharded(NamedTuple):
    """A call whose input is a DTensor.

    Fields:
        input: the DTensor.
        local: the shards of this rank: input, weight, bias. Gradients flow back through them.
    """

    input: Any
    local: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]

    def whole(self, out: torch.Tensor) -> torch.Tensor:
        """The local result as a DTensor, placed and shaped as the input is."""
        is_last = out.dim() == 5 and out.is_contiguous(memory_format=torch.channels_last_3d)
        layout = torch.channels_last_3d if is_last else torch.contiguous_format
        shape = self.input.shape
        stride = torch.empty(shape, device="meta", memory_format=layout).stride()  # shards may be of unequal size
        place = (self.input.device_mesh, self.input.placements)
        found: torch.Tensor = type(self.input).from_local(out, *place, run_check=False, shape=shape, stride=stride)
        return found


def sharded(input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> Sharded | None:  # noqa: A002
    """The call on this rank's shard; None where the input is no DTensor, or one that has to be served as a whole.

    That is one of partial sums, one sharded over its channels, and one with a parameter that is not whole.
    """
    if type(input) in (torch.Tensor, torch.nn.Parameter):
        return None
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    if kind is None or type(input) is not kind or not all(_is_whole_in_channels(one, input) for one in input.placements):
        return None
    parameters = [_whole(parameter, input, kind) for parameter in (weight, bias)]
    if any(parameter is None and given is not None for parameter, given in zip(parameters, (weight, bias), strict=True)):
        return None
    return Sharded(input, (input.to_local(), parameters[0], parameters[1]))


def _is_whole_in_channels(placement: Any, input: torch.Tensor) -> bool:  # noqa: A002
    return bool(placement.is_replicate() or (placement.is_shard() and placement.dim % input.dim() != _CHANNELS))


def _whole(parameter: torch.Tensor | None, input: Any, kind: type) -> torch.Tensor | None:  # noqa: A002
    """A parameter as each rank has it, its gradient a partial sum where the input is sharded; None for a part of one."""
    if parameter is None or not isinstance(parameter, kind):
        return parameter
    found: Any = parameter
    if found.device_mesh != input.device_mesh or not all(one.is_replicate() for one in found.placements):
        return None
    partial = sys.modules["torch.distributed.tensor"].Partial
    sums = [partial() if one.is_shard() else mine for one, mine in zip(input.placements, found.placements, strict=True)]
    local: torch.Tensor = found.to_local(grad_placements=sums)
    return local
