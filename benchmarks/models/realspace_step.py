"""A step of a small force field around the RealSpace nonlinearity: energies of edges, and forces by its gradient.

Positions -> edge vectors -> Fourier coefficients about each edge -> (mix the channels, SiLU on the circle) twice -> energy.
Random weights: it shows where the time goes, not chemistry. `kserve profile benchmarks/models/realspace_step.py`
"""

from __future__ import annotations

import torch

from kserve.measure.profile import Profiled, Section
from kserve.ops.realspace import realspace, reason_for_reference, reference

N_ANG = 3
SIZES = {"cuda": (512, 86, 128), "cpu": (8, 6, 16)}  # atoms, neighbours of each, channels


class Step(torch.nn.Module):
    """The parts of the forward, each a method that takes what the one before it gives."""

    def __init__(self, device: str) -> None:
        super().__init__()
        n_atoms, n_neighbours, channels = SIZES[torch.device(device).type]
        random = torch.Generator().manual_seed(0)
        first = torch.arange(n_atoms).repeat_interleave(n_neighbours)
        second = (first + 1 + torch.randint(n_atoms - 1, first.shape, generator=random)) % n_atoms
        self.first, self.second = first.to(device), second.to(device)
        self.orders = torch.arange(N_ANG, device=device, dtype=torch.float32)
        self.widths = torch.linspace(0.5, 4.0, channels, device=device)
        self.positions = torch.randn(n_atoms, 3, generator=random).to(device)
        mixing = torch.randn(2, N_ANG, channels, channels, generator=random) / channels**0.5
        self.mixing = mixing.to(device)

    def edges(self, positions: torch.Tensor) -> torch.Tensor:
        return positions[self.second] - positions[self.first]

    def coefficients(self, vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[E, channels, N_ANG] each."""
        distance = vectors.square().sum(1).add(1e-6).sqrt()
        angle = torch.atan2(vectors[:, 1], vectors[:, 0] + 1e-6)[:, None, None] * self.orders
        radial = torch.exp(-((distance[:, None] - self.widths) ** 2))[:, :, None]
        return radial * angle.cos(), radial * angle.sin()

    def mix(self, both: tuple[torch.Tensor, torch.Tensor], layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        cosines, sines = (torch.einsum("efm,mfg->egm", part, self.mixing[layer]).contiguous() for part in both)
        return cosines, sines

    def energy(self, both: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return both[0].square().sum() + both[1].square().sum()

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        both = self.coefficients(self.edges(positions))
        for layer in range(len(self.mixing)):
            both = realspace(*self.mix(both, layer))
        return self.energy(both)


def profiled(device: str) -> Profiled:
    """The step taken apart; each section has the input it has in the forward."""
    step = Step(device)
    with torch.no_grad():
        vectors = step.edges(step.positions)
        both = step.coefficients(vectors)
        mixed = [step.mix(both, 0)]
        mixed.append(step.mix(realspace(*mixed[0]), 1))
        last = realspace(*mixed[1])
    fused = reason_for_reference(*mixed[0], 4 * N_ANG - 3, "silu") is None

    def leaf() -> torch.Tensor:
        return step.positions.clone().requires_grad_()

    def forward() -> torch.Tensor:
        return step(leaf())

    def joint() -> torch.Tensor:
        positions = leaf()
        return torch.autograd.grad(step(positions), positions)[0]

    sections = [
        Section("edges", lambda: step.edges(leaf())),
        Section("coefficients", lambda: step.coefficients(vectors.clone().requires_grad_())),
        Section("mix 0", lambda: step.mix(both, 0)),
        Section("realspace 0", lambda: realspace(*mixed[0]), fused=fused),
        Section("mix 1", lambda: step.mix(mixed[0], 1)),
        Section("realspace 1", lambda: realspace(*mixed[1]), fused=fused),
        Section("energy", lambda: step.energy(last)),
        Section("realspace", lambda: reference(*mixed[0]), reference=True),
    ]
    return Profiled("realspace_step", sections, forward, joint)
