"""What machine a result is of, and where it is written."""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


def gpu_name() -> str:
    """The GPU's name; empty where there is none."""
    import torch

    return str(torch.cuda.get_device_name()) if torch.cuda.is_available() else ""


def write(kind: str, found: dict[str, Any], *, device: str, out: Path = RESULTS) -> Path:
    """Write `<kind>-<device>.json`, without a GPU `<kind>-cpu-<N>-cores.json`; the file."""
    n_cores = len(os.sched_getaffinity(0))
    name = (device or f"cpu {n_cores} cores").lower().replace(" ", "-")
    facts = {
        "device": device or "none",
        "cores": n_cores,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{kind}-{name}.json"
    path.write_text(json.dumps({**facts, **found}, indent=1) + "\n")
    return path
