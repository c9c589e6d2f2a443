"""Every arm of the cold-start benchmark: its provider, and what its process finds when it starts."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from cold.places import (
    HIDDEN_CACHES_OFF,
    REPOSITORY,
    Child,
    Places,
    Unavailable,
    forget_logs,
    n_requests,
    road_taken,
    start_child,
    thrown_away,
)
from cold.workloads import Norm, RealSpace

from kserve.measure.timing import ArmFailed

# Providers that are nothing without it: a quick run imports torch for them too.
OF_TORCH = ("extension", "hugging-face")
# An environment, and further words for the child.
Found = tuple[dict[str, str], dict[str, object]]
Setting = Callable[[Places], contextlib.AbstractContextManager[Found]]


class Arm(NamedTuple):
    """One way to get a kernel.

    Fields:
        first:   the kernel asked for first.
        group:   `first` and `crowd` arms take turns; `slow` ones run by themselves, and fill the caches of warm ones.
        further: none, `second`, or `many`: what is asked for after the first.
        torch:   whether the process has imported torch.
        n:       processes at once; 0 for one that is alone and waits for nobody.
        needs:   the cache that has to be filled before.
    """

    name: str
    first: str
    provider: str
    setting: Setting
    group: str = "first"
    further: str = "many"
    torch: bool = True
    n: int = 0
    needs: str = ""

    @property
    def id(self) -> str:
        return f"{self.name}:{self.first}"


@contextlib.contextmanager
def direct(places: Places) -> Iterator[Found]:
    """A filled store and no daemon; a client that needs one all the same starts one that does not stay."""
    try:
        yield places.filled_store, {}
    finally:
        places.down(places.filled_store)


@contextlib.contextmanager
def through_daemon(places: Places) -> Iterator[Found]:
    """A filled store under a daemon; nothing in it lets a client do without."""
    places.forget_aliases(places.served_store)
    yield places.served_store, {}


@contextlib.contextmanager
def built(places: Places) -> Iterator[Found]:
    """An empty store under a daemon that has its toolchains loaded."""
    environment = places.cold_daemon()
    try:
        yield environment, {}
    finally:
        places.down(environment)
        shutil.rmtree(Path(environment["KSERVE_STORE"]).parent, ignore_errors=True)


@contextlib.contextmanager
def autostarted(places: Places) -> Iterator[Found]:
    """A filled store nobody has asked yet, and no daemon: the client starts one that stays."""
    with thrown_away(places) as place:
        places.copy_of_store(place)
        environment = places.kserve(place, autostart=True)
        try:
            yield environment, {}
        finally:
            places.down(environment)


@contextlib.contextmanager
def embedded(places: Places) -> Iterator[Found]:
    """An empty store and no daemon: the client builds through one that ends with it."""
    with thrown_away(places) as place:
        environment = places.kserve(place, **HIDDEN_CACHES_OFF)
        try:
            yield environment, {}
        finally:
            places.down(environment)


@contextlib.contextmanager
def locked(places: Places) -> Iterator[Found]:
    """A filled store, no daemon, and a lock that names what may be served."""
    lock = places.root / "kserve.lock"
    environment = places.filled_store | {"KSERVE_LOCK": str(lock)}
    if not lock.exists():
        command = [sys.executable, "-m", "kserve", "lock", "--all", "--file", str(lock)]
        done = subprocess.run(command, env=environment, cwd=REPOSITORY, check=False, capture_output=True, text=True)
        if done.returncode or not lock.exists():
            lines = done.stderr.strip().splitlines() or ["it wrote no file"]
            raise Unavailable(f"`kserve lock` gave no lock: {lines[-1]}")
    yield environment, {}


def cache(variable: str, name: str, *, state: str) -> Setting:
    """A vendor's cache in a directory of its own.

    Args:
        state: `warm`: filled before; `cold`: empty, and the vendors' hidden caches off; `filling`: as cold, and the first one
               is kept as the warm one.
    """

    @contextlib.contextmanager
    def setting(places: Places) -> Iterator[Found]:
        kept = state == "warm" or (state == "filling" and name not in places.filled)
        folder = places.root / f"cache-{name}" if kept else places.fresh()
        more = {variable: str(folder)} | ({} if state == "warm" else HIDDEN_CACHES_OFF)
        arch = places.options.target.partition("sm_")[2]
        home = folder.with_name(f"home-{folder.name}")
        environment = places.environment(home, TORCH_CUDA_ARCH_LIST=f"{arch[:-1]}.{arch[-1]}", **more)
        folder.mkdir(exist_ok=True)  # torch's extension loader makes none
        try:
            yield environment, {"cache": folder}
            if kept:
                places.filled.add(name)
        finally:
            for used in () if kept else (folder, home):
                shutil.rmtree(used, ignore_errors=True)

    return setting


@contextlib.contextmanager
def hub(places: Places) -> Iterator[Found]:
    """A local kernel repository, as Hugging Face `kernels` reads it, around the extension's library."""
    folder = places.root / "hub" / "build" / "torch-cuda"
    if not folder.exists():
        libraries = list((places.root / "cache-extension").rglob("norm_extension.so"))
        if len(libraries) != 1:
            raise Unavailable("there is no compiled extension to put into a local repository")
        folder.mkdir(parents=True)
        shutil.copy(libraries[0], folder)
        (folder / "__init__.py").write_text("import torch\n\nfrom .norm_extension import norm_residual\n")
        (folder / "metadata.json").write_text(
            '{"name": "norm-extension", "id": "norm_extension_cuda", "version": 1, "license": "Apache-2.0",'
            ' "python-depends": [], "backend": {"type": "cuda"}}\n'
        )
    yield places.environment(places.root / "home-hub", HF_HUB_OFFLINE="1"), {}


@contextlib.contextmanager
def bare(places: Places) -> Iterator[Found]:
    """Files, and nothing else."""
    yield places.environment(places.root / "home-bare"), {}


N, R = Norm.name, RealSpace.name
TRITON, CUPY = ("TRITON_CACHE_DIR", "triton"), ("CUPY_CACHE_DIR", "cupy")
CORE, EXTENSION = ("CUDA_CORE_CACHE_DIR", "cuda-core"), ("TORCH_EXTENSIONS_DIR", "extension")

FIRST = [
    Arm("triton-warm", R, "triton", cache(*TRITON, state="warm"), needs="triton"),
    Arm("triton-cold", R, "triton", cache(*TRITON, state="cold"), further="second"),
    Arm("kserve-direct", R, "kserve", direct),
    Arm("kserve-direct", N, "kserve", direct),
    Arm("kserve-direct-no-torch", N, "kserve", direct, further="none", torch=False),
    Arm("kserve-locked", R, "kserve", locked),
    Arm("kserve-daemon", R, "kserve", through_daemon),
    Arm("kserve-autostarted", R, "kserve", autostarted, further="second"),
    Arm("kserve-built", R, "kserve", built, further="second"),
    Arm("kserve-built", N, "kserve", built, further="second"),
    Arm("kserve-embedded", R, "kserve", embedded, further="second"),
    Arm("cupy-warm", N, "cupy", cache(*CUPY, state="warm"), needs="cupy"),
    Arm("cupy-cold", N, "cupy", cache(*CUPY, state="cold"), further="second"),
    Arm("cuda-core-warm", N, "cuda-core", cache(*CORE, state="warm"), needs="cuda-core"),
    Arm("cuda-core-cold", N, "cuda-core", cache(*CORE, state="cold"), further="second"),
    Arm("extension-warm", N, "extension", cache(*EXTENSION, state="warm"), further="none", needs="extension"),
    Arm("hugging-face", N, "hugging-face", hub, further="none", needs="extension"),
    Arm("driver", R, "driver", bare),
    Arm("driver", N, "driver", bare),
]
SLOW = [
    Arm("triton-cold-further", R, "triton", cache(*TRITON, state="filling"), "slow"),
    Arm("cupy-cold-further", N, "cupy", cache(*CUPY, state="filling"), "slow"),
    Arm("cuda-core-cold-further", N, "cuda-core", cache(*CORE, state="filling"), "slow"),
    Arm("kserve-built-further", R, "kserve", built, "slow"),
    Arm("kserve-built-further", N, "kserve", built, "slow"),
    Arm("extension-cold", N, "extension", cache(*EXTENSION, state="filling"), "slow", further="none"),
]
FILLED_BY = {"triton": SLOW[0], "cupy": SLOW[1], "cuda-core": SLOW[2], "extension": SLOW[5]}


def crowds(sizes: tuple[int, ...]) -> list[Arm]:
    """The same first kernel for many processes at once."""
    found = []
    for n in sizes:
        found += [
            Arm(f"crowd-{n}-kserve-built", R, "kserve", built, "crowd", "none", n=n),
            Arm(f"crowd-{n}-kserve-direct", R, "kserve", direct, "crowd", "none", n=n),
        ]
        if n in (min(sizes), max(sizes)):
            found += [
                Arm(f"crowd-{n}-triton-cold", R, "triton", cache(*TRITON, state="cold"), "crowd", "none", n=n),
                Arm(f"crowd-{n}-triton-warm", R, "triton", cache(*TRITON, state="warm"), "crowd", "none", n=n, needs="triton"),
            ]
    return found


def run_arm(places: Places, arm: Arm) -> dict[str, Any]:
    """One turn of an arm: what its process, or its crowd, reports. Raises: ArmFailed, Unavailable."""
    with arm.setting(places) as (environment, told):
        run = _crowd if arm.n else alone
        if arm.provider != "kserve":
            return run(places, arm, environment, told)
        before = n_requests(environment)
        if before is None:
            forget_logs(environment)
        report = run(places, arm, environment, told)
        report["facts"]["road"] = road_taken(environment, before)
        return report


def _words(places: Places, arm: Arm, told: dict[str, object]) -> dict[str, object]:
    torch = arm.torch and (places.options.torch or arm.provider in OF_TORCH)
    words = dict(told, torch=int(torch))
    if arm.further != "none":
        words["further"] = places.options.n_further if arm.further == "many" else 0
    return words


def alone(places: Places, arm: Arm, environment: dict[str, str], told: dict[str, object]) -> dict[str, Any]:
    """One process of the arm in that environment: its report."""
    child = start_child(places, environment, arm=arm.provider, kernel=arm.first, **_words(places, arm, told))
    # A compile of torch's headers takes its time.
    return child.report(places.options.timeout_s * (3 if arm.provider == "extension" else 1))


def _crowd(places: Places, arm: Arm, environment: dict[str, str], told: dict[str, object]) -> dict[str, Any]:
    """All processes held until each has its context, then let go at once: the wall from there to the last one's result."""
    ready, wait = os.pipe(), os.pipe()
    words = _words(places, arm, told) | {"barrier": f"{ready[1]},{wait[0]}"}
    children = [
        start_child(places, environment, arm=arm.provider, kernel=arm.first, pass_fds=(ready[1], wait[0]), **words)
        for _ in range(arm.n)
    ]
    os.close(ready[1])
    os.close(wait[0])
    try:
        _until_ready(ready[0], children, places.options.timeout_s)
        released = time.perf_counter()
        os.close(wait[1])  # every reader of the pipe wakes up
        reports = [child.report(places.options.timeout_s) for child in children]
    finally:
        os.close(ready[0])
        for child in children:
            if child.process.poll() is None:
                child.kill()
    return _together(reports, released)


def _until_ready(descriptor: int, children: list[Child], timeout_s: float) -> None:
    """Until every child has written its byte, or one has ended, which its report will explain. Raises: ArmFailed."""
    until, n_ready = time.monotonic() + timeout_s, 0
    while n_ready < len(children) and all(child.process.poll() is None for child in children):
        if time.monotonic() > until:
            raise ArmFailed(f"{n_ready} of {len(children)} processes were ready in {timeout_s:.0f} s")
        if select.select([descriptor], [], [], 0.2)[0]:
            n_ready += len(os.read(descriptor, len(children)))


def _together(reports: list[dict[str, Any]], released: float) -> dict[str, Any]:
    """One report of many: wall from the barrier, and the slowest and median process."""
    facts: dict[str, Any] = dict(reports[0]["facts"])
    digests = {report["facts"].get("digest") for report in reports}
    if len(digests) > 1:
        raise ArmFailed(f"{len(reports)} processes were given {len(digests)} different binaries")
    origins = [report["facts"]["origin"] for report in reports if "origin" in report["facts"]]
    facts["origins"] = {origin: origins.count(origin) for origin in sorted(set(origins))}
    each = sorted(report["seconds"]["first"] for report in reports)
    wall = max(report["marks"]["first"] for report in reports) - released
    return {"seconds": {"wall": wall, "first": each[len(each) // 2], "first_slowest": each[-1]}, "facts": facts}


def write_extension(places: Places) -> None:
    """The sources of the extension: the binding apart from the kernel, so that nvcc reads none of torch's headers."""
    folder = places.root / "extension"
    folder.mkdir()
    (folder / "binding.cpp").write_text(BINDING)
    (folder / "kernel.cu").write_text(KERNEL)


BINDING = """
#include <c10/cuda/CUDAStream.h>
#include <torch/extension.h>

void launch(const float* x, const float* residual, const float* gamma, const float* beta, float* out, long long n, float eps,
            void* stream);

void norm_residual(torch::Tensor x, torch::Tensor residual, torch::Tensor gamma, torch::Tensor beta, torch::Tensor out,
                   int64_t n, double eps) {
  launch(x.data_ptr<float>(), residual.data_ptr<float>(), gamma.data_ptr<float>(), beta.data_ptr<float>(),
         out.data_ptr<float>(), n, static_cast<float>(eps), c10::cuda::getCurrentCUDAStream().stream());
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("norm_residual", &norm_residual); }
"""
# 128 channels: 32 lanes, 8 groups of 2 rows, as kernel.toml derives them.
KERNEL = """
#include "norm_residual.cu"

void launch(const float* x, const float* residual, const float* gamma, const float* beta, float* out, long long n, float eps,
            void* stream) {
  const unsigned int blocks = static_cast<unsigned int>((n + 15) / 16);
  norm_residual<float, 128, false, 32, 8, 2>
      <<<blocks, 256, 0, static_cast<cudaStream_t>(stream)>>>(x, residual, gamma, beta, out, n, eps);
}
"""
