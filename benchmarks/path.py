"""Measures get_kernel itself, against what a user would run instead, in one go on a GPU.

Every timed first call happens in a fresh process that has imported torch and made a CUDA context. Arms take turns, round by
round. `python benchmarks/path.py --rounds 7 --out DIR` writes `path-<gpu>.json` and a CSV beside it.

Arms of the first call (from before the import of the library to the result of the first launch, synchronised):
    kserve disk     daemon up, binaries in the store
    kserve built    daemon up, empty store, toolchains loaded
    triton warm     Triton's own launcher, its cache on disk warm
    triton cold     the same with an empty cache
    cupy warm/cold  CuPy RawModule over the CUDA kernel, its cache warm or empty
The vendors' hidden caches are off in every cold arm.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))
SMALL_ROWS, HIDDEN, N_ANG, N_GRID = 337, 128, 3, 9
BURST = 100


def now() -> float:
    return time.perf_counter()


# ---- arms: each runs in a fresh process and returns seconds by name -------------------------------------------------


def start() -> Any:
    """torch imported and a context made: what every arm finds."""
    import torch

    torch.zeros(1, device="cuda").add_(1)
    torch.cuda.synchronize()
    return torch


def norm_inputs(torch: Any, rows: int = SMALL_ROWS) -> list[Any]:
    x, residual = torch.randn(2, rows, HIDDEN, device="cuda")
    gamma, beta = torch.randn(2, HIDDEN, device="cuda")
    return [x, residual, gamma, beta, torch.full_like(x, float("nan")), rows, 1e-5]


def realspace_inputs(torch: Any, rows: int = SMALL_ROWS * 8) -> list[Any]:
    a_cos, a_sin = torch.randn(2, rows, N_ANG, device="cuda")
    angles = torch.arange(N_GRID, device="cuda") * torch.arange(N_ANG, device="cuda")[:, None] * (2 * torch.pi / N_GRID)
    weight = torch.full((N_ANG,), 2 / N_GRID, device="cuda")
    weight[0] = 1 / N_GRID
    c, s = angles.cos().contiguous(), angles.sin().contiguous()
    ca, sa = (c.T * weight).contiguous(), (s.T * weight).contiguous()
    return [a_cos, a_sin, c, s, ca, sa, torch.full_like(a_cos, float("nan")), torch.full_like(a_sin, float("nan")), rows]


def arm_kserve(_: str) -> dict[str, float]:
    torch = start()
    real, norm = realspace_inputs(torch), norm_inputs(torch)
    torch.cuda.synchronize()
    began = now()
    from kserve import get_kernel

    imported = now()
    first = get_kernel("realspace_fwd")
    got = now()
    first(*real)
    torch.cuda.synchronize()
    done = now()
    second = get_kernel("fused_norm_residual")
    second(*norm)
    torch.cuda.synchronize()
    second_done = now()
    third = get_kernel("realspace_bwd")
    third(*real[:2], *real)
    torch.cuda.synchronize()
    third_done = now()
    for _ in range(1000):
        get_kernel("realspace_fwd")
    memo_began = now()
    for _ in range(10_000):
        get_kernel("realspace_fwd")
    memo = (now() - memo_began) / 10_000
    assert get_kernel("realspace_fwd").origin == "memo"
    return {
        "import": imported - began,
        "get": got - imported,
        "first": done - began,
        "further": second_done - done,
        "further_again": third_done - second_done,
        "memo": memo,
    }


def triton_kernels() -> Any:
    import importlib.util

    spec = importlib.util.spec_from_file_location("realspace", REPOSITORY / "triton_src" / "realspace" / "realspace.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def triton_launch(function: Any, arguments: list[Any], block: int) -> Any:
    grid = (-(-arguments[-1] // block),)
    return function[grid](*arguments, N_ANG=N_ANG, N_GRID=N_GRID, BLOCK=block, num_warps=4)


def arm_triton(cache: str) -> dict[str, float]:
    os.environ["TRITON_CACHE_DIR"] = cache
    torch = start()
    real = realspace_inputs(torch)
    torch.cuda.synchronize()
    began = now()
    module = triton_kernels()
    triton_launch(module.realspace_fwd, real, 512)
    torch.cuda.synchronize()
    done = now()
    triton_launch(module.realspace_bwd, [*real[:2], *real], 256)
    torch.cuda.synchronize()
    return {"first": done - began, "further": now() - done}


def cupy_kernel(cupy: Any) -> Any:
    root = REPOSITORY / "cuda_src"
    text = (root / "norm_residual" / "norm_residual.cu").read_text()
    options = (
        "--std=c++17",
        f"-I{root / 'include'}",
        *(f"-DKSERVE_ALIGN_{n}=16" for n in ("X", "RESIDUAL", "GAMMA", "BETA", "OUT")),
    )
    name = f"norm_residual<float, {HIDDEN}, false, 32, 8, 2>"
    module = cupy.RawModule(code=text, options=options, name_expressions=[name])
    return module.get_function(name)


def arm_cupy(cache: str) -> dict[str, float]:
    os.environ["CUPY_CACHE_DIR"] = cache
    torch = start()
    norm = norm_inputs(torch)
    torch.cuda.synchronize()
    began = now()
    import cupy
    import numpy

    kernel = cupy_kernel(cupy)
    arrays = [cupy.asarray(tensor) for tensor in norm[:5]]
    kernel((-(-SMALL_ROWS // 16),), (256,), (*arrays, numpy.int64(SMALL_ROWS), numpy.float32(1e-5)))
    torch.cuda.synchronize()
    return {"first": now() - began}


# ---- host time of a launch, and agreement with float64: one process ------------------------------------------------


def arm_launch(rounds: str) -> dict[str, Any]:
    """Host time of one launch in bursts of 100 between synchronisations, arms in turn; microseconds, median over rounds."""
    torch = start()
    import cupy
    import numpy

    from kserve import get_kernel
    from kserve.client.launch import _Slot, packing
    from kserve.client.loader import driver

    real, norm = realspace_inputs(torch), norm_inputs(torch)
    fwd, fused = get_kernel("realspace_fwd"), get_kernel("fused_norm_residual")
    module, raw = triton_kernels(), cupy_kernel(cupy)
    arrays = [cupy.asarray(tensor) for tensor in norm[:5]]
    cupy_args = (*arrays, numpy.int64(SMALL_ROWS), numpy.float32(1e-5))
    contract, slot = fwd.manifest.contract, _Slot(fwd.manifest.contract)
    packing(contract).pack_into(slot.buffer, 0, *(t.data_ptr() for t in real[:-1]), real[-1])
    function, launch = fwd._roads.libraries[0].functions[0], driver().launch
    grid, threads = -(-real[-1] // contract.constants["BLOCK"]), int(contract.block[0])
    one, other = torch.zeros(SMALL_ROWS, HIDDEN, device="cuda"), torch.zeros(SMALL_ROWS, HIDDEN, device="cuda")
    arms = {
        "driver, prepared": lambda: launch(function, grid, 1, 1, threads, 1, 1, 0, 0, slot.params, None),
        "kserve realspace_fwd": lambda: fwd(*real),
        "kserve fused_norm_residual": lambda: fused(*norm),
        "triton realspace_fwd": lambda: triton_launch(module.realspace_fwd, real, contract.constants["BLOCK"]),
        "cupy RawKernel": lambda: raw((22,), (256,), cupy_args),
        "torch.add": lambda: torch.add(one, other, out=one),
    }
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(int(rounds)):
        for name, call in arms.items():
            for _ in range(3):
                call()
            torch.cuda.synchronize()
            began = now()
            for _ in range(BURST):
                call()
            times[name].append((now() - began) / BURST * 1e6)
            torch.cuda.synchronize()
    medians = {name: statistics.median(found) for name, found in times.items()}
    pairs = zip(times["kserve realspace_fwd"], times["triton realspace_fwd"], strict=True)
    medians["ratio kserve / triton"] = statistics.median(ours / theirs for ours, theirs in pairs)
    return medians


def arm_agree(_: str) -> dict[str, Any]:
    """Largest error against float64, outputs poisoned with NaN first; the bars are those of docs/kernels.md."""
    torch = start()
    from kserve import get_kernel
    from kserve.ops import norm_residual as norm_op
    from kserve.ops.norm_residual import reference as norm_reference
    from kserve.ops.realspace import realspace
    from kserve.ops.realspace import reference as realspace_reference

    found: dict[str, Any] = {}
    torch.manual_seed(1)
    for rows, hidden, mean in ((43_136, 128, 0.0), (1_000, 64, 0.0), (777, 100, 10.0), (5, 7, 0.0)):
        x, residual = torch.randn(2, rows, hidden, device="cuda")
        x += mean
        gamma, beta = torch.randn(2, hidden, device="cuda")
        out = torch.full_like(x, float("nan"))
        get_kernel("fused_norm_residual", hidden=hidden)(x, residual, gamma, beta, out, rows, 1e-5)
        expected = norm_reference(x.double(), residual.double(), gamma.double(), beta.double())
        found[f"fused_norm_residual {rows}x{hidden} mean {mean:g}"] = {
            "error": float((out.double() - expected).abs().max()),
            "bar": 5e-6 if mean == 0 else 1e-5,
            "op_equals_kernel": bool(torch.equal(norm_op(x, residual, gamma, beta), out)),
        }
    for edges, features, n_ang in ((200, 48, 3), (200, 32, 4), (44_032, 16, 3), (7, 5, 8)):
        leaves = [torch.randn(edges, features, n_ang, device="cuda", requires_grad=True) for _ in range(2)]
        wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
        ours, exact = realspace(*leaves), realspace_reference(*wide)
        grads = [torch.randn(edges, features, n_ang, device="cuda") for _ in range(2)]
        torch.autograd.backward(ours, grads)
        torch.autograd.backward(exact, [grad.double() for grad in grads])
        forward = max(float((a.detach().double() - b.detach()).abs().max()) for a, b in zip(ours, exact, strict=True))
        backward = max(float((a.grad.double() - b.grad).abs().max()) for a, b in zip(leaves, wide, strict=True))
        found[f"realspace_fwd {edges}x{features}x{n_ang}"] = {"error": forward, "bar": 5e-6}
        found[f"realspace_bwd {edges}x{features}x{n_ang}"] = {"error": backward, "bar": 5e-6}
    return found


# ---- the run -------------------------------------------------------------------------------------------------------

ARMS = {"kserve": arm_kserve, "triton": arm_triton, "cupy": arm_cupy, "launch": arm_launch, "agree": arm_agree}


def child(arm: str, argument: str, environment: dict[str, str]) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", arm, argument]
    done = subprocess.run(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "benchmarks" / "results")
    parser.add_argument("--child", nargs=2)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(ARMS[arguments.child[0]](arguments.child[1])))
        return
    with tempfile.TemporaryDirectory(prefix="kserve-path-") as place:
        result = run(Path(place), arguments.rounds)
    write(result, arguments.out)
    wrong = [name for name, item in result["agreement"].items() if not item["error"] <= item["bar"]]
    if wrong:
        sys.exit(f"over the bar: {', '.join(wrong)}")


def run(place: Path, rounds: int) -> dict[str, Any]:
    import torch

    base = {"KSERVE_RUNTIME_DIR": str(place / "run"), "KSERVE_STORE": str(place / "store"), "KSERVE_AUTOSTART": "1"}
    cold = {"CUDA_CACHE_DISABLE": "1"}
    samples: dict[str, list[dict[str, float]]] = {}
    child("kserve", "", base)
    agreement = child("agree", "", base)
    child("triton", str(place / "triton"), {})
    child("cupy", str(place / "cupy"), {})
    for number in range(rounds):
        fresh = {**base, "KSERVE_STORE": str(place / f"store-{number}")}
        subprocess.run(
            [sys.executable, "-m", "kserve", "up", "--detach"], env={**os.environ, **fresh}, cwd=REPOSITORY, check=True
        )
        warm_toolchains(fresh)
        turns = [
            ("kserve disk", "kserve", "", base),
            ("kserve built", "kserve", "", {**fresh, **cold}),
            ("triton warm", "triton", str(place / "triton"), {}),
            ("triton cold", "triton", str(place / f"triton-{number}"), cold),
            ("cupy warm", "cupy", str(place / "cupy"), {}),
            ("cupy cold", "cupy", str(place / f"cupy-{number}"), cold),
        ]
        for name, arm, argument, environment in turns[number % 6 :] + turns[: number % 6]:
            samples.setdefault(name, []).append(child(arm, argument, environment))
        subprocess.run([sys.executable, "-m", "kserve", "down"], env={**os.environ, **fresh}, cwd=REPOSITORY, check=True)
        shutil.rmtree(place / f"store-{number}", ignore_errors=True)
    launches = child("launch", "51", base)
    subprocess.run([sys.executable, "-m", "kserve", "down"], env={**os.environ, **base}, cwd=REPOSITORY, check=True)
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "rounds": rounds,
        "first_call_ms": {name: medians(found) for name, found in samples.items()},
        "launch_us": launches,
        "agreement": agreement,
        "samples": samples,
    }


def warm_toolchains(environment: dict[str, str]) -> None:
    """Load the compilers of a fresh daemon with other kernels, so that `built` times builds and not imports."""
    for name, target in (("realspace_fwd", "sm_80"), ("fused_norm_residual", "sm_80")):
        command = [sys.executable, "-m", "kserve", "build", name, "--target", target]
        subprocess.run(command, env={**os.environ, **environment}, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)


def medians(found: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Median, least and most of each figure, in milliseconds."""
    result = {}
    for figure in found[0]:
        values = [sample[figure] * 1e3 for sample in found]
        result[figure] = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return result


def write(result: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"path-{result['gpu'].replace(' ', '-').lower()}"
    stem.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    first = result["first_call_ms"]
    with stem.with_suffix(".csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["arm", "figure", "median_ms", "min_ms", "max_ms", "gpu", "torch", "date"])
        for arm, figures in first.items():
            for figure, item in figures.items():
                spread = [f"{item[field]:.4f}" for field in ("median", "min", "max")]
                rows.writerow([arm, figure, *spread, result["gpu"], result["torch"], time.strftime("%Y-%m-%d")])
        for arm, value in result["launch_us"].items():
            rows.writerow([arm, "launch_us", f"{value:.3f}", "", "", result["gpu"], result["torch"], time.strftime("%Y-%m-%d")])
    for arm, figures in first.items():
        print(f"{arm:<14}", "  ".join(f"{figure} {item['median']:.4f} ms" for figure, item in figures.items()))
    ours = first["kserve disk"]["first"]["median"]
    print(
        f"first call, own cache warm: triton / kserve {first['triton warm']['first']['median'] / ours:.2f}, "
        f"cupy / kserve {first['cupy warm']['first']['median'] / ours:.2f}"
    )
    print("\n".join(f"{name:<28} {value:.3f}" for name, value in result["launch_us"].items()))
    print(
        "\n".join(f"{name:<44} error {item['error']:.2e} bar {item['bar']:.0e}" for name, item in result["agreement"].items())
    )


if __name__ == "__main__":
    main()
