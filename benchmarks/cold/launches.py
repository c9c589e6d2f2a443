"""Host time of a launch, and agreement with float64: one process each, on a GPU."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import providers
import workloads
from bursts import burst, roads
from devices import TorchDevice, WrongResult

BASELINE, FLOOR = "triton realspace_fwd", "driver realspace_fwd, prepared"
NORM_FLOOR = "driver fused_norm_residual, prepared"
CUPY = "cupy fused_norm_residual, prepared"


def launch(job: Any) -> None:
    """Host seconds of one launch, arms in turn: medians, ratios to Triton's launcher, differences to the driver's call."""
    from kserve.measure.timing import Rule, measure, median_interval

    torch, device = _device(job)
    job.read_binaries()
    calls = _calls(job, torch, device)
    arms = {name: functools.partial(burst, call, torch.cuda.synchronize) for name, call in calls.items()}
    found = measure(arms, baseline=BASELINE, rule=Rule(soft_s=20.0, hard_s=30.0))
    over = {}
    for name, samples in found.samples.items():
        floor = found.samples[NORM_FLOOR if "fused_norm_residual" in name else FLOOR]
        if floor is not samples:
            over[name] = median_interval(
                [ours - theirs for ours, theirs in zip(samples, floor, strict=True)], error=found.error
            )
    job.facts.update(medians=found.medians, ratios=found.ratios, over_driver=over)
    job.facts.update(stop=found.stop, n_rounds=found.n_rounds, balanced=found.balanced)


def _device(job: Any) -> tuple[Any, TorchDevice]:
    if not job.gpu:
        raise providers.Unavailable("there is nothing to launch on")
    import torch

    return torch, TorchDevice(job)


def _calls(job: Any, torch: Any, device: TorchDevice) -> dict[str, Callable[[], object]]:
    """One call of each launcher, its result checked once."""
    real, norm = workloads.RealSpace(), workloads.Norm()
    cuda, fact = ctypes.CDLL("libcuda.so.1"), job.fact(real)
    device.place([real, norm])
    kserve = providers.kserve(job)
    calls = {
        BASELINE: (real, functools.partial(providers.triton(job)(real), *real.arguments)),
        FLOOR: (real, providers.prepared(cuda, providers.loaded(cuda, fact), fact, real.arguments)),
        NORM_FLOOR: (norm, providers.prepared(cuda, providers.loaded(cuda, job.fact(norm)), job.fact(norm), norm.arguments)),
        **{
            f"kserve {wish.name}, {road}": (wish, functools.partial(_on(kserve(wish), road), *wish.arguments))
            for wish in (real, norm)
            for road in roads()
        },
        **_cupy_call(job, norm),
    }
    for name, (wish, call) in calls.items():
        for output in wish.outputs:
            output.fill_(float("nan"))
        call()
        torch.cuda.synchronize()
        job.facts[f"error of {name}"] = device.check([wish])
    one, other = torch.zeros(2, workloads.ROWS, norm.hidden, device="cuda")
    return {name: call for name, (_, call) in calls.items()} | {"torch.add": lambda: torch.add(one, other, out=one)}


def _on(kernel: Any, road: str) -> Any:
    """The same kernel, launched by one road."""
    from kserve.client.launch import Kernel, Roads

    return Kernel(Roads(kernel._roads.artifacts, device=0, launcher=road), origin="memo", seconds=0.0)


def _cupy_call(job: Any, norm: Any) -> dict[str, Any]:
    try:
        import cupy
        import numpy

        kernel, fact = providers.cupy_kernel(job, norm), job.fact(norm)
    except (ImportError, RuntimeError) as reason:  # not installed, or not for this driver: the others go on
        job.facts["cupy"] = str(reason)
        return {}
    arrays = [cupy.asarray(tensor) for tensor in norm.arguments[:5]]
    passed = (*arrays, numpy.int64(norm.arguments[5]), numpy.float32(norm.arguments[6]))
    return {CUPY: (norm, functools.partial(kernel, tuple(fact["grid"]), tuple(fact["block"]), passed))}


def agree(job: Any) -> None:
    """Largest errors of kernels and ops against float64, outputs poisoned first; the bars are those of docs/kernels.md."""
    torch, _ = _device(job)
    torch.manual_seed(1)
    found = {}
    for rows, hidden, mean in ((43_136, 128, 0.0), (1_000, 64, 0.0), (777, 100, 10.0), (5, 7, 0.0)):
        case = f"fused_norm_residual {rows}x{hidden} mean {mean:g}"
        found[case] = {"error": _norm_error(torch, rows, hidden, mean), "bar": 5e-6 if mean == 0 else 1e-5}
    for edges, features, n_ang in ((200, 48, 3), (200, 32, 4), (44_032, 16, 3), (7, 5, 8)):
        for name, error in _realspace_errors(torch, (edges, features, n_ang)).items():
            found[f"{name} {edges}x{features}x{n_ang}"] = {"error": error, "bar": 5e-6}
    job.facts["agreement"] = found
    over = [name for name, case in found.items() if not case["error"] <= case["bar"]]
    if over:
        raise WrongResult(f"over the bar: {', '.join(over)}")


def _norm_error(torch: Any, rows: int, hidden: int, mean: float) -> float:
    from kserve import get_kernel
    from kserve.ops import norm_residual
    from kserve.ops.norm_residual import reference

    x, residual = torch.randn(2, rows, hidden, device="cuda")
    x += mean
    gamma, beta = torch.randn(2, hidden, device="cuda")
    out = torch.full_like(x, float("nan"))
    get_kernel("fused_norm_residual", hidden=hidden)(x, residual, gamma, beta, out, rows, 1e-5)
    if not torch.equal(norm_residual(x, residual, gamma, beta), out):
        raise WrongResult(f"norm_residual and its kernel differ at {rows}x{hidden}")
    expected = reference(x.double(), residual.double(), gamma.double(), beta.double())
    return float((out.double() - expected).abs().max())


def _realspace_errors(torch: Any, shape: tuple[int, int, int]) -> dict[str, float]:
    from kserve.ops import realspace
    from kserve.ops.realspace import reference

    leaves = [torch.randn(shape, device="cuda", requires_grad=True) for _ in range(2)]
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    ours, exact = realspace(*leaves), reference(*wide)
    grads = [torch.randn(shape, device="cuda") for _ in range(2)]
    torch.autograd.backward(ours, grads)
    torch.autograd.backward(exact, [grad.double() for grad in grads])
    forward = [(a.detach().double() - b.detach()).abs().max() for a, b in zip(ours, exact, strict=True)]
    backward = [(a.grad.double() - b.grad).abs().max() for a, b in zip(leaves, wide, strict=True)]
    # torch's max, not Python's: it does not lose a NaN.
    return {"realspace_fwd": float(torch.stack(forward).max()), "realspace_bwd": float(torch.stack(backward).max())}
