"""What loading an extension costs, by kserve and by torch's own loader, in one run: cold, in a second process, after edits.

    python benchmarks/extensions.py [--pybind] [--rounds N] [--part NAME]

Each figure is a process of its own, timed from after `import torch` to the loaded module. Both loaders work with the same
sources and flags in fresh directories, in turns. `--pybind` adds the common case, a source with <torch/extension.h>: a minute.
Rows go to benchmarks/results/extensions-<device>.json as they come, without a GPU extensions-cpu-<N>-cores.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import machine

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.support.extensions import CUDA_SOURCE, module  # noqa: E402

PARTS = ("edits", "tree", "c++", "cuda")
VERSIONS = {"torch": metadata.version("torch")}
TIMED = """
import json, sys, time, torch
call = json.loads(sys.argv[2])
began = time.perf_counter()
if sys.argv[1] == "kserve":
    from kserve.doors.cpp_extension import load
else:
    from torch.utils.cpp_extension import load
load(**call)
print(time.perf_counter() - began)
"""
PYBIND = """
#include <torch/extension.h>
torch::Tensor twice(torch::Tensor x) { return 2 * x; }
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("twice", &twice); }
"""


def timed(loader: str, call: dict[str, object], place: Path) -> float:
    """Seconds in a fresh process. Torch's compilers run at the priority of kserve's, so that other work slows both alike."""
    variables = {
        "KSERVE_STORE": str(place / "store"),
        "KSERVE_RUNTIME_DIR": str(place / "run"),
        "TORCH_EXTENSIONS_DIR": str(place / "torch"),
        "TORCH_CUDA_ARCH_LIST": "9.0",
        "CUDA_HOME": os.environ.get("CUDA_HOME", "/usr/local/cuda"),
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [*(("nice", "-n", "10") if loader == "torch" else ()), sys.executable, "-c", TIMED, loader, json.dumps(call)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return float(done.stdout.split()[-1])


def ended(place: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "kserve", "down"],
        cwd=ROOT,
        env={**os.environ, "KSERVE_STORE": str(place / "store"), "KSERVE_RUNTIME_DIR": str(place / "run")},
        capture_output=True,
        check=False,
    )


class Results:
    """The rows of a run, printed and written as they come."""

    def __init__(self, out: Path) -> None:
        self._out, self._device = out, machine.gpu_name()
        self._rows: list[dict[str, Any]] = []

    def add(self, text: str, **row: Any) -> None:
        """Say it to a person and keep the row."""
        print(text, flush=True)
        self._rows.append(row)
        self.path = machine.write("extensions", {**VERSIONS, "rows": self._rows}, device=self._device, out=self._out)


def compared(results: Results, name: str, call: dict[str, object], rounds: int) -> None:
    """Cold and warm of both loaders, each round in a place of its own; kserve also beside a daemon that has built before."""
    cold: dict[str, list[float]] = {"torch": [], "kserve": [], "kserve, daemon up": []}
    warm: dict[str, list[float]] = {"torch": [], "kserve": [], "kserve, daemon up": []}
    for number in range(rounds):
        for arm in sorted(cold, reverse=bool(number % 2)):
            with tempfile.TemporaryDirectory(prefix="kb-", dir="/tmp") as text:
                place = Path(text)
                if arm.endswith("up"):
                    other = place / "other.cpp"
                    other.write_text(module("1"))
                    timed("kserve", {"name": "other", "sources": [str(other)]}, place)
                cold[arm].append(timed(arm.partition(",")[0], call, place))
                warm[arm] += [timed(arm.partition(",")[0], call, place) for _ in range(3)]
                ended(place)
    for arm, seconds in cold.items():
        ratio = statistics.median(ours / theirs for ours, theirs in zip(seconds, cold["torch"], strict=True))
        first, again = statistics.median(seconds), statistics.median(warm[arm])
        results.add(
            f"{name}, {arm:20} cold {first:6.2f} s ({ratio:.3f} of torch's), second process {1000 * again:5.0f} ms",
            case=name,
            arm=arm,
            cold_s=seconds,
            second_process_s=warm[arm],
            cold_over_torch=ratio,
        )


def edited(results: Results, place: Path) -> None:
    """Four sources: all, then one of them, then a header, then both as they were."""
    sources = place / "four"
    sources.mkdir()
    header = sources / "all.h"
    header.write_text("#define BASE 1\n" + "".join(f"int part{n}();\n" for n in range(3)))
    for n in range(3):
        (sources / f"part{n}.cpp").write_text(f'#include "all.h"\n#include <map>\nint part{n}() {{ return BASE; }}\n')
    (sources / "main.cpp").write_text('#include "all.h"\n' + module("part0() + part1() + part2()"))
    call = {"name": "four", "sources": [str(path) for path in sorted(sources.glob("*.cpp"))]}
    part, whole = sources / "part1.cpp", header.read_text()
    before = part.read_text()
    steps: list[tuple[str, Callable[[], object]]] = [
        ("first", lambda: None),
        ("nothing", lambda: None),
        ("one source of four", lambda: part.write_text(before + "// edited\n")),
        ("the header", lambda: header.write_text(whole + "#define MORE 1\n")),
        ("both reverted", lambda: (part.write_text(before), header.write_text(whole))),
    ]
    for name, edit in steps:
        edit()
        row = {loader: timed(loader, call, place) for loader in ("torch", "kserve")}
        text = f"four sources, {name:18}  torch {row['torch']:6.2f} s, kserve {row['kserve']:6.3f} s"
        results.add(text, case=f"four sources, {name}", torch_s=row["torch"], kserve_s=row["kserve"])
    ended(place)


def tree(results: Results, place: Path, *, n_headers: int = 5000) -> None:
    """A source that includes thousands of headers of a directory outside."""
    for number in range(n_headers):
        path = place / "tree" / f"d{number % 50}" / f"h{number}.h"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#define H{number} {number}\n")
    source = place / "treed.cpp"
    lines = "".join(f'#include "d{number % 50}/h{number}.h"\n' for number in range(n_headers))
    source.write_text(lines + module(f"H{n_headers - 1}"))
    call = {"name": "treed", "sources": [str(source)], "extra_include_paths": [str(place / "tree")]}
    first = timed("kserve", call, place)
    hits = [timed("kserve", call, place) for _ in range(5)]
    text = f"{n_headers} headers outside: first {first:.2f} s, hit {1000 * min(hits):.0f} ms"
    results.add(text, case=f"{n_headers} headers outside", kserve_s=first, hits_s=hits)
    ended(place)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pybind", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--part", action="append", choices=PARTS, help="all of them")
    parser.add_argument("--headers", type=int, default=5000, help="outside, of the part tree")
    parser.add_argument("--out", type=Path, default=machine.RESULTS)
    arguments = parser.parse_args(words)
    parts, results = arguments.part or PARTS, Results(arguments.out)
    with tempfile.TemporaryDirectory(prefix="kb-", dir="/tmp") as text:
        place = Path(text)
        plain, device, bound = place / "plain.cpp", place / "scale.cu", place / "bound.cpp"
        plain.write_text(module("42"))
        device.write_text(CUDA_SOURCE)
        bound.write_text(PYBIND)
        if "edits" in parts:
            edited(results, place)
        if "tree" in parts:
            tree(results, place, n_headers=arguments.headers)
        if "c++" in parts:
            compared(results, "C++, no torch headers", {"name": "plain", "sources": [str(plain)]}, arguments.rounds)
        if "cuda" in parts:
            call = {"name": "scale", "sources": [str(device)], "is_python_module": False}
            compared(results, "CUDA, no torch headers", call, arguments.rounds)
        if arguments.pybind:
            compared(results, "C++, <torch/extension.h>", {"name": "bound", "sources": [str(bound)]}, 1)
    print(results.path)


if __name__ == "__main__":
    main()
