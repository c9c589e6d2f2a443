"""The ops as a model calls them: host time of one call, and seconds to the first results of a graph decoder's three."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import devices
from bursts import BURST, YARDSTICK, burst

# Batch 1. Sizes and dtype are those of kserve/measure/workloads.
CALLS: dict[str, tuple[str, dict[str, int], str]] = {
    "edge_features": ("edge_features", {"n": 337, "e": 3_116, "hidden": 128, "ordered": 1}, "float32"),
    "norm_residual": ("norm_residual", {"n": 337, "hidden": 128, "training": 0}, "float32"),
    "norm_residual with dropout": ("norm_residual", {"n": 337, "hidden": 128, "training": 1}, "float32"),
    "graph_norm_bce": ("graph_norm_bce", {"e": 3_116, "g": 1, "mixed": 0}, "float32"),
    "realspace": ("realspace", {"n_e": 200, "f": 48, "n_ang": 3, "by_order": 0}, "float32"),
    "group_norm": ("group_norm", {"n": 1, "c": 1024, "edge": 8}, "bfloat16"),
}
NODES, EDGES, HIDDEN, GRAPHS = 43_136, 398_848, 128, 128
EPS = 1e-5


def calls(job: Any) -> None:
    """Host seconds of one call of each op and of torch.add of its first input, in turn; each op is checked first."""
    import torch

    from kserve.measure.timing import Rule, measure

    devices.device_for(job)
    place = "cuda" if job.gpu else "cpu"
    synchronise = torch.cuda.synchronize if job.gpu else _nothing
    rule = Rule(soft_s=10.0, hard_s=20.0, rounds=None if job.gpu else 2)  # on the host: that it works
    arms, errors = {}, {}
    for name in CALLS:
        call, yardstick, errors[name] = _checked(name, torch, place)
        for arm, function in ((name, call), (YARDSTICK + name, yardstick)):
            arms[arm] = functools.partial(burst, function, synchronise, n=BURST if job.gpu else 1)
    with torch.no_grad():
        found = measure(arms, rule=rule)
    _check_served(job)
    job.facts.update(medians=found.medians, errors=errors, gpu=_gpu(job, torch), torch=torch.__version__)
    job.facts.update(stop=found.stop, n_rounds=found.n_rounds, balanced=found.balanced)


def _checked(name: str, torch: Any, place: str) -> tuple[Callable[[], object], Callable[[], object], float]:
    from kserve.measure.check import check
    from kserve.measure.workloads import workload

    op, sizes, dtype = CALLS[name]
    wanted = workload(op, sizes, dtype=dtype)
    verdict = check(wanted, device=place)
    if not verdict.is_right:
        raise devices.WrongResult(f"{name}: {verdict}")
    given = wanted.make(place, 1)
    return functools.partial(wanted.served, *given), functools.partial(torch.add, given[0], given[0]), verdict.error


def _check_served(job: Any) -> None:
    """A call that the reference answered is no figure of a kernel."""
    from kserve.ops import given_up, served

    by_reference = [op for op, rungs in served().items() if set(rungs) != {"cuda"}]
    if job.gpu and by_reference:
        raise devices.WrongResult(f"the reference served {', '.join(by_reference)}: {given_up()}")


class Step(NamedTuple):
    """What the three ops of a graph decoder take."""

    edge_features: tuple[Any, ...]
    norm_residual: tuple[Any, ...]
    graph_norm_bce: tuple[Any, ...]


def first_results(job: Any) -> None:
    """Seconds from before the import of kserve to the results of three ops, synchronised; the first calls of this process."""
    device = devices.device_for(job)
    step = _step() if job.gpu else None
    began = job.mark("begun")
    results = _called(job, step) if step else _obtained(job)
    done = job.mark("first")
    job.seconds.update({"first": done - began, "import": job.marks["imported"] - began})

    from kserve.client.report import report

    job.facts.update(device.facts(), origins=dict(report().origins), asked=dict(report().seconds))
    if step:
        job.facts["errors"] = _errors(step, results)
        _check_served(job)


def _step() -> Step:
    """Inputs on the GPU, made without kserve: its import is what is timed."""
    import torch

    torch.manual_seed(0)
    x, edge_h = torch.randn(NODES, HIDDEN, device="cuda"), torch.randn(EDGES, HIDDEN, device="cuda")
    edge_index = torch.randint(NODES, (2, EDGES), device="cuda")
    rows, residual = torch.randn(2, EDGES, HIDDEN, device="cuda")
    gamma, beta = torch.randn(2, HIDDEN, device="cuda")
    logits, target = 3.0 * torch.randn(EDGES, device="cuda"), (torch.rand(EDGES, device="cuda") < 0.1).float()
    graph = torch.arange(EDGES, device="cuda") * GRAPHS // EDGES
    torch.cuda.synchronize()
    return Step((x, edge_index, edge_h), (rows, residual, gamma, beta), (logits, target, graph, GRAPHS))


def _called(job: Any, step: Step) -> list[Any]:
    import torch

    from kserve.ops import edge_features, graph_norm_bce, norm_residual

    job.mark("imported")
    results = []
    for op, given in zip((edge_features, norm_residual, graph_norm_bce), step, strict=True):
        began = time.perf_counter()
        results.append(op(*given))
        job.seconds[op.__name__] = time.perf_counter() - began
    torch.cuda.synchronize()
    return results


def _obtained(job: Any) -> list[Any]:
    """Without a GPU: the kernels that these ops ask for, in their order, up to the bytes."""
    from kserve import get_kernels

    job.mark("imported")
    wishes: list[list[tuple[str, dict[str, Any]]]] = [
        [("fused_edge_features", {"dtype": "float32", "hidden": HIDDEN})],
        [("fused_norm_residual", {"dtype": "float32", "hidden": HIDDEN, "training": False})],
        [("graph_norm_bce_chunks", {}), ("graph_norm_bce_mean", {})],
    ]
    return [kernel for together in wishes for kernel in get_kernels(together, target=job.target)]


def _errors(step: Step, results: list[Any]) -> dict[str, float]:
    """Largest errors against float64. Raises: WrongResult for one over its bar of docs/kernels.md."""
    from kserve.ops.edge_features import reference as features
    from kserve.ops.graph_norm_bce import reference as loss
    from kserve.ops.norm_residual import reference as norm

    found = {}
    bars = (5e-7, 5e-6, 2e-6)  # the last is relative: a loss has no scale of its own
    for name, reference, given, result, bar in zip(Step._fields, (features, norm, loss), step, results, bars, strict=True):
        exact = reference(*(_double(argument) for argument in given))
        found[name] = float((result.double() - exact).abs().max()) / (1.0 if exact.dim() else float(exact))
        if not found[name] <= bar:
            raise devices.WrongResult(f"{name} is off by {found[name]:.1e} from float64, the bar is {bar:.0e}")
    return found


def _double(argument: Any) -> Any:
    is_real = getattr(getattr(argument, "dtype", None), "is_floating_point", False)
    return argument.double() if is_real else argument


def _gpu(job: Any, torch: Any) -> str:
    return str(torch.cuda.get_device_name()) if job.gpu else "none"


def _nothing() -> None:
    """There is nothing to wait for."""
