"""What the device reaches in this very run: a large copy, and a large matrix product. Every share of a roofline is of these."""

from __future__ import annotations

from typing import NamedTuple

from kserve.measure.device import Instrument
from kserve.measure.timing import Rule, measure

COPY_BYTES = 1 << 30
_COPY_BYTES_HOST = 1 << 26
_MATMUL = 8192
_MATMUL_HOST = 512


class Ceilings(NamedTuple):
    """Measured limits.

    Fields:
        copy_gb_s:      the faster of `dst.copy_(src)` and an addition of zero, bytes read plus bytes written, 1e9 a second.
                        A graph gives a copy to the copy engines, which are slower than a kernel on some devices.
        matmul_tflop_s: a square product in bf16 (on the host in f32), 1e12 operations a second.
    """

    copy_gb_s: float
    matmul_tflop_s: float


def measure_ceilings(instrument: Instrument, device: str) -> Ceilings:
    """Measure both, a second or two."""
    import torch

    on_host = device == "cpu"
    n_bytes, side = (_COPY_BYTES_HOST, _MATMUL_HOST) if on_host else (COPY_BYTES, _MATMUL)
    with instrument.active():
        source = torch.randint(-128, 127, (n_bytes,), dtype=torch.int8, device=device)
        target = torch.empty_like(source)
        a, b = torch.randn(2, side, side, device=device).to(torch.float32 if on_host else torch.bfloat16)
        out = torch.empty_like(a)
        words, copies = source.view(torch.int32), target.view(torch.int32)
    copied = min(
        _seconds(instrument, lambda: target.copy_(source)),
        _seconds(instrument, lambda: torch.add(words, 0, out=copies)),
    )
    multiplied = _seconds(instrument, lambda: torch.mm(a, b, out=out))
    return Ceilings(2 * n_bytes / copied / 1e9, 2 * side**3 / multiplied / 1e12)


def _seconds(instrument: Instrument, call: object) -> float:
    prepared = instrument.prepare({"ceiling": call})  # type: ignore[dict-item]
    found = measure(prepared.arms, rule=Rule(soft_s=2.0, most=32))
    return found.medians["ceiling"].value
