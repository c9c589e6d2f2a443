"""What tuning costs: 48 configurations of a Triton matmul, compiled from cold; the same by Triton's autotuner; a later process.

    python benchmarks/tuning.py                 compile all 48 through a daemon of its own, cold, several times
    python benchmarks/tuning.py --size 4096     with a GPU: also triton.autotune, kserve tune, and processes with the winner

Every arm starts from nothing: an empty store and a new daemon, an empty cache of Triton's. What Python and torch take to start
is outside. Without a GPU only the compiling is timed: Triton's autotuner needs a device. Results go to benchmarks/results.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import machine

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
KERNELS = HERE / "tuning"

COMPILE = """
import sys, time
from kserve import catalog
from kserve.client.direct import Wanted
from kserve.client.resolve import ask_each
from kserve.config import load_settings
from kserve.errors import KserveError
from kserve.measure.configurations import enumerate_all
from kserve.measure.sweep import Subject, compile_all
from kserve.target import parse_target
definition = catalog.definition_of(catalog.find("tuned_matmul", load_settings()).folder)
entry = definition.entries["tuned_matmul"]
target = parse_target(sys.argv[1])
found = enumerate_all(definition, entry, {}, {})
subject = Subject(definition, entry, {}, target, found)
began = time.perf_counter()
wish = Wanted("tuned_matmul", str(target), {})
def build(asked):
    return ask_each([wish._replace(knobs=one) for one in asked], deadline=time.monotonic() + 600)
rows, built = compile_all(subject, build)
seconds = time.perf_counter() - began
states = [row.state for row in rows]
print(seconds, len(rows), states.count("compiled"), states.count("pruned"))
"""

AUTOTUNE = """
import importlib.util, itertools, sys, time
import torch, triton
spec = importlib.util.spec_from_file_location("matmul", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
size = int(sys.argv[2])
a, b, c = (torch.randn(size, size, device="cuda").half() for _ in range(3))
every = itertools.product((64, 128), (64, 128, 256), (32, 64), (8,), (4, 8), (3, 4))
names = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_M")
configs = [triton.Config(dict(zip(names, one)), num_warps=one[4], num_stages=one[5]) for one in every]
tuned = triton.autotune(configs, key=["m", "n", "k"])(module.matmul)
torch.cuda.synchronize()
began = time.perf_counter()
tuned[lambda meta: (triton.cdiv(size, meta["BLOCK_M"]) * triton.cdiv(size, meta["BLOCK_N"]),)](a, b, c, size, size, size)
torch.cuda.synchronize()
print(time.perf_counter() - began, len(configs), tuned.best_config)
"""

LATER = """
import time
import torch
torch.cuda.synchronize()
from kserve import get_kernel
began = time.perf_counter()
kernel = get_kernel("tuned_matmul", sizes={name: SIZE for name in "mnk"})
print(time.perf_counter() - began, kernel.origin, kernel.knobs)
"""

INPUTS = '''
"""Arguments of the benchmark's matmul."""
import torch

def arguments(spec, device, m, n, k):
    random = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(shape, generator=random, device=device).half() for shape in ((m, k), (k, n)))
    return a, b, torch.full((m, n), torch.nan, device=device, dtype=torch.float16), m, n, k
'''


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--target", default="cuda:sm_90")
    parser.add_argument("--size", type=int, default=4096, help="of the square matrices")
    arguments = parser.parse_args()
    device = machine.gpu_name()
    found: dict[str, Any] = {"target": arguments.target}
    found["compile_s"] = [_compiled(arguments.target) for _ in range(arguments.repeats)]
    if device:
        found["autotune_s"] = [_autotuned(arguments.size) for _ in range(arguments.repeats)]
        found |= _tuned(arguments.size)
        found["compile_over_autotune"] = statistics.median(found["compile_s"]) / statistics.median(found["autotune_s"])
    print(machine.write("tuning", found, device=device).read_text())


@contextlib.contextmanager
def _place() -> Iterator[dict[str, str]]:
    """The environment of an arm: an empty store with a daemon of its own, an empty cache of Triton's."""
    root = Path(tempfile.mkdtemp(prefix="kt-", dir="/tmp"))
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("KSERVE_", "TRITON_"))}
    places = {"KSERVE_STORE": root / "store", "KSERVE_RUNTIME_DIR": root / "run", "TRITON_CACHE_DIR": root / "triton"}
    environment = {**clean, **{name: str(path) for name, path in places.items()}, "KSERVE_PATH": str(KERNELS)}
    environment |= {"KSERVE_AUTOSTART": "1", "PYTHONPATH": f"{HERE.parent}{os.pathsep}{clean.get('PYTHONPATH', '')}"}
    try:
        yield environment
    finally:
        _run(["-m", "kserve", "down"], environment)
        shutil.rmtree(root, ignore_errors=True)


def _run(arguments: list[str], environment: dict[str, str]) -> list[str]:
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout.split()


def _compiled(target: str) -> float:
    """Seconds from the request to the last binary; the daemon and its compiler are started within."""
    with _place() as environment:
        seconds, n_rows, n_compiled, n_pruned = _run(["-c", COMPILE, target], environment)[:4]
        print(f"compiled {n_compiled} of {n_rows}, {n_pruned} do not fit: {float(seconds):.2f} s", file=sys.stderr)
        return float(seconds)


def _autotuned(size: int) -> float:
    """Seconds of the first call of an autotuned kernel: 48 compiles and their timing."""
    with _place() as environment:
        seconds = float(_run(["-c", AUTOTUNE, str(KERNELS / "matmul" / "matmul.py"), str(size)], environment)[0])
        print(f"triton.autotune: {seconds:.2f} s", file=sys.stderr)
        return seconds


def _tuned(size: int) -> dict[str, Any]:
    """`kserve tune` once, then get_kernel in later processes."""
    with _place() as environment:
        inputs = Path(environment["KSERVE_STORE"]).parent / "inputs.py"
        inputs.write_text(INPUTS)
        shape = [part for name in "mnk" for part in ("--shape", f"{name}={size}")]
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "kserve", "tune", "tuned_matmul", *shape, "--inputs", f"{inputs}:arguments", "--json"],
            env=environment, capture_output=True, text=True, check=True,
        )  # fmt: skip
        tune_s = time.perf_counter() - began
        swept = json.loads(done.stdout)
        later = [_run(["-c", LATER.replace("SIZE", str(size))], environment) for _ in range(5)]
        kept = {name: swept[name] for name in ("winner", "n_timed", "stop", "n_excluded")}
        return {"tune_s": tune_s, **kept, "later_ms": [1e3 * float(one[0]) for one in later], "later_origin": later[-1][1]}


if __name__ == "__main__":
    main()
