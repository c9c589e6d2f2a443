"""The main job, shown: a daemon, kernels built once, found on disk by a second process, in memory by a second call.

Without a GPU the kernels are built for named targets; with one they are also launched and checked against float64.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
NAMED = [
    ("fused_norm_residual", "cuda:sm_80"),
    ("fused_norm_residual", "cuda:sm_90"),
    ("realspace_fwd", "cuda:sm_80"),
    ("realspace_fwd", "cuda:sm_90"),
    ("realspace_fwd", "hip:gfx942"),
]

# What one client process does: ask twice, report both answers.
CLIENT = """
import json, sys, time
began = time.perf_counter()
from kserve import get_kernel
imported = time.perf_counter()
rows = []
for name, target in json.loads(sys.argv[1]):
    for _ in range(2):
        start = time.perf_counter()
        kernel = get_kernel(name, target=target)
        rows.append([name, str(kernel.target), kernel.origin, time.perf_counter() - start, kernel.digest[:12]])
print(json.dumps({"import_ms": (imported - began) * 1e3, "rows": rows}))
"""


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="kserve-demo-") as place:
        environment = {**os.environ, "KSERVE_STORE": f"{place}/store", "KSERVE_RUNTIME_DIR": f"{place}/run"}
        kserve(environment, "up", "--detach")
        try:
            kserve(environment, "kernels")
            show("first process: everything is built", client(environment))
            show("second process: everything is on disk", client(environment))
            if has_gpu():
                subprocess.run([sys.executable, __file__, "--launch"], env=environment, cwd=REPOSITORY, check=True)
            else:
                print("\nno GPU here: built for the targets above, not launched")
            kserve(environment, "status")
        finally:
            kserve(environment, "down")


def kserve(environment: dict[str, str], *arguments: str) -> None:
    print(f"\n$ kserve {' '.join(arguments)}", flush=True)
    subprocess.run([sys.executable, "-m", "kserve", *arguments], env=environment, cwd=REPOSITORY, check=True)


def client(environment: dict[str, str]) -> dict[str, object]:
    command = [sys.executable, "-c", CLIENT, json.dumps(NAMED)]
    done = subprocess.run(command, env=environment, cwd=REPOSITORY, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, object] = json.loads(done.stdout)
    return found


def show(title: str, found: dict[str, object]) -> None:
    print(f"\n{title} (import of the client: {found['import_ms']:.0f} ms)")
    for name, target, origin, seconds, digest in found["rows"]:  # type: ignore[attr-defined]
        print(f"  {name:<20} {target:<12} {origin:<6} {seconds * 1e3:10.3f} ms   {digest}")


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def launch() -> None:
    """Run both kernels through their front doors on the current device and hold them against float64."""
    import torch

    from kserve.ops import norm_residual, realspace
    from kserve.ops.norm_residual import reference as norm_reference
    from kserve.ops.realspace import reference as realspace_reference

    torch.manual_seed(0)
    x, residual = torch.randn(2, 10_000, 128, device="cuda")
    gamma, beta = torch.randn(2, 128, device="cuda")
    a_cos, a_sin = torch.randn(2, 5_000, 64, 3, device="cuda")
    print("\non the device")
    for name, run, reference in (
        ("norm_residual", norm_residual, norm_reference),
        ("realspace", realspace, realspace_reference),
    ):
        inputs = (x, residual, gamma, beta) if name == "norm_residual" else (a_cos, a_sin)
        start = time.perf_counter()
        out = run(*inputs)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        expected = reference(*(tensor.double() for tensor in inputs))
        pairs = [(out, expected)] if isinstance(out, torch.Tensor) else list(zip(out, expected, strict=True))
        error = max(float((a.double() - b).abs().max()) for a, b in pairs)
        print(f"  {name:<14} first call {seconds * 1e3:7.2f} ms, largest error against float64 {error:.1e}")
        if not error <= 5e-6:
            raise SystemExit(f"{name}: error {error:.1e} is over 5e-6")


if __name__ == "__main__":
    launch() if "--launch" in sys.argv else main()
