"""Host time of a call: bursts between synchronisations, by each launcher there is. Imports nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.util import find_spec

BURST = 100  # calls between synchronisations: a longer burst would measure the queue, not the call
YARDSTICK = "torch.add beside "


def roads() -> tuple[str, ...]:
    """The launchers there are: the one in C is optional. Imports kserve's client."""
    return ("python", "compiled") if find_spec("kserve.client._launcher") else ("python",)


def burst(call: Callable[[], object], synchronise: Callable[[], None], *, n: int = BURST) -> float:
    """Host seconds of one call, the mean of `n` that nobody waits for."""
    for _ in range(min(3, n)):
        call()
    synchronise()
    began = time.perf_counter()
    for _ in range(n):
        call()
    seconds = (time.perf_counter() - began) / n
    synchronise()
    return seconds
