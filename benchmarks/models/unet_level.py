"""One level of a 3-D U-Net, channels-last: convolution, GroupNorm, ReLU, twice; with `FastGroupNorm`, and with torch's own.

Random weights: it shows where the time goes and what is copied, no segmentation.

    kserve profile benchmarks/models/unet_level.py      the time of each part
    python benchmarks/models/unet_level.py              forward and gradient under torch's profiler: 1 when a layout is copied
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from kserve.measure.profile import Profiled, Section
from kserve.ops.group_norm import FastGroupNorm

GROUPS = 8
LAYOUT = torch.channels_last_3d
# Channels, voxels an edge; float32 on the CPU: its reference would convert bf16 there and back, which copies too.
SIZES = {"cuda": (64, 128, torch.bfloat16), "cpu": (16, 6, torch.float32)}
_COPY = re.compile(r"cpy|copy|transpose|permute|nchwtonhwc|nhwctonchw", re.IGNORECASE)
# Kernels of cuDNN, which only the convolutions call: in which layout it works is its own choice, and the same in both forms.
_CUDNN = re.compile(r"cudnn|cutlass|cask|xmma", re.IGNORECASE)


class Level(torch.nn.Module):
    """conv -> norm -> relu -> conv -> norm -> relu.

    Args:
        fused: FastGroupNorm with its ReLU; else torch's GroupNorm and ReLU.
    """

    def __init__(self, channels: int, *, fused: bool) -> None:
        super().__init__()
        convolutions = [torch.nn.Conv3d(channels, channels, 3, padding=1, bias=False) for _ in range(2)]
        self.first, self.second = convolutions
        self.first_norm, self.second_norm = (_norm(channels, fused=fused) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second_norm(self.second(self.first_norm(self.first(x))))


def _norm(channels: int, *, fused: bool) -> torch.nn.Module:
    if fused:
        return FastGroupNorm(GROUPS, channels, activation="relu")
    return torch.nn.Sequential(torch.nn.GroupNorm(GROUPS, channels), torch.nn.ReLU())


class Step(NamedTuple):
    """A level and what goes into it, forwards and backwards."""

    level: Level
    x: torch.Tensor
    incoming: torch.Tensor

    def forward(self) -> torch.Tensor:
        return self.level(self.x)

    def joint(self) -> tuple[torch.Tensor, ...]:
        """The gradients of the input and of every parameter."""
        leaf = self.x.detach().requires_grad_()
        return torch.autograd.grad(self.level(leaf), [leaf, *self.level.parameters()], self.incoming)


def step(device: str, *, fused: bool) -> Step:
    """The same weights and inputs for both forms."""
    channels, edge, dtype = SIZES[torch.device(device).type]
    torch.manual_seed(0)
    level = Level(channels, fused=fused).to(device=device, dtype=dtype, memory_format=LAYOUT)
    shape = (1, edge, edge, edge, channels)
    x, incoming = (torch.randn(shape, device=device).to(dtype).permute(0, 4, 1, 2, 3) for _ in range(2))
    return Step(level, x, incoming)


def layout_copies(run: Callable[[], object], *, device: str) -> list[str]:
    """What one call copies, by torch's profiler: copies of volumes that an operation of torch asks for, and kernels that copy.

    Kernels of cuDNN may do as they like inside of its convolutions; everybody else's may not move a volume to another layout.
    """
    run()
    on_gpu = torch.device(device).type == "cuda"
    with profile(
        activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu], record_shapes=True, acc_events=True
    ) as profiler:
        run()
        if on_gpu:
            torch.cuda.synchronize()
    found, n_kernels = [], 0
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            n_kernels += 1
            if _COPY.search(event.name) and not _CUDNN.search(event.name):
                found.append(event.name)
        elif event.name == "aten::copy_" and any(len(shape) == 5 for shape in event.input_shapes):
            found.append(f"{event.name} {event.input_shapes}")
    if on_gpu and not n_kernels:
        raise RuntimeError("the profiler saw no kernel: nothing can be said about copies")
    return found


def strays(one: Step) -> list[str]:
    """Activations and gradients of one forward and backward that do not lie channels-last."""
    found: list[str] = []

    def note(what: str, tensor: torch.Tensor) -> None:
        if not tensor.is_contiguous(memory_format=LAYOUT):
            found.append(f"{what}: shape {list(tensor.shape)}, strides {list(tensor.stride())}")

    def watch(name: str) -> Callable[..., None]:
        def hook(_module: torch.nn.Module, _inputs: object, output: torch.Tensor) -> None:
            note(f"output of {name}", output)
            output.register_hook(lambda gradient: note(f"gradient of the output of {name}", gradient))

        return hook

    hooks = [module.register_forward_hook(watch(name or "the level")) for name, module in one.level.named_modules()]
    try:
        gradients = one.joint()
    finally:
        for hook in hooks:
            hook.remove()
    names = ["the input", *(name for name, _ in one.level.named_parameters())]
    for name, gradient in zip(names, gradients, strict=True):
        if gradient.dim() == 5:
            note(f"gradient of {name}", gradient)
    return found


def profiled(device: str) -> Profiled:
    """The level taken apart; each section has the input it has in the forward, and torch's form of a norm beside the last."""
    ours, theirs = step(device, fused=True), step(device, fused=False)
    level = ours.level
    with torch.no_grad():
        volumes = [ours.x]
        for part in (level.first, level.first_norm, level.second):
            volumes.append(part(volumes[-1]))
    served = level.first_norm.ladder.has_served(level.first_norm)
    sections = [
        Section("conv 0", lambda: level.first(volumes[0])),
        Section("norm + relu 0", lambda: level.first_norm(volumes[1]), fused=served),
        Section("conv 1", lambda: level.second(volumes[2])),
        Section("norm + relu 1", lambda: level.second_norm(volumes[3]), fused=served),
        Section("norm + relu", lambda: theirs.level.second_norm(volumes[3]), reference=True),
    ]
    return Profiled("unet_level", sections, ours.forward, ours.joint)


def findings(device: str) -> Iterator[str]:
    """A line for each copy and each stray of the form with kserve's norm."""
    ours = step(device, fused=True)
    yield from (f"forward copies: {copy}" for copy in layout_copies(ours.forward, device=device))
    yield from (f"forward and gradient copy: {copy}" for copy in layout_copies(ours.joint, device=device))
    yield from (f"not channels-last: {stray}" for stray in strays(ours))
    norm = ours.level.first_norm
    if device == "cuda" and not norm.ladder.has_served(norm):
        yield f"the kernels did not serve: {norm.ladder.last_decline(norm)}"


def main() -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = [*findings(device)]
    theirs = layout_copies(step(device, fused=False).joint, device=device)
    print(*(found or [f"no layout is copied on {device}, and all activations and gradients are channels-last"]), sep="\n")
    print(f"with torch's GroupNorm: {len(theirs)} copies", *sorted(set(theirs)), sep="\n  ")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
