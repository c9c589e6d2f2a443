"""Where a step of a model spends its time: wall time section by section, and the framework's profiler over whole closures.

A profiled file defines `profiled(device) -> Profiled`. Every closure builds the leaves that it differentiates by, so that it
can run any number of times. The line of an operation which a fused kernel serves says `(fused)`, that of the plain form it
replaces `(unfused ref)`: the lines that are no reference add up to the forward.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from kserve.client.report import report as process_report
from kserve.errors import RequestError

N_WARM_UPS, N_TIMED, N_ROWS = 3, 10, 25
FUSED, REFERENCE = " (fused)", " (unfused ref)"
Closure = Callable[[], object]


class Section(NamedTuple):
    """One line: a part of the forward, or, with `reference`, the plain form of a part that a fused kernel serves."""

    name: str
    run: Closure
    fused: bool = False
    reference: bool = False

    @property
    def label(self) -> str:
        return self.name + (REFERENCE if self.reference else FUSED if self.fused else "")


class Profiled(NamedTuple):
    """A step of a model, taken apart.

    Fields:
        sections: the parts of the forward in order, and references.
        forward, joint: the whole forward; the forward and its gradient.
    """

    name: str
    sections: list[Section]
    forward: Closure
    joint: Closure


class Line(NamedTuple):
    """Milliseconds of one call, by the host's clock between synchronisations."""

    label: str
    time_ms: float


class Row(NamedTuple):
    """One operation, kernel or region of a table, over all calls of one step."""

    name: str
    calls: int
    self_ms: float
    percent: float
    self_mb: float
    is_region: bool


class Table(NamedTuple):
    """One aggregate table, sorted by `sorted_by`."""

    title: str
    sorted_by: str
    rows: list[Row]


def load_profiled(path: Path, *, device: str) -> Profiled:
    """What the file's `profiled` gives. Raises: RequestError when it has none."""
    spec = importlib.util.spec_from_file_location(path.stem, path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise RequestError(f"{path} cannot be profiled: no Python file is there")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    build = getattr(module, "profiled", None)
    if build is None:
        raise RequestError(f"{path} cannot be profiled: it defines no `profiled(device)`", hint="see benchmarks/models/")
    found: Profiled = build(device)
    return found


def time_sections(subject: Profiled, *, device: str, n_warm_ups: int = N_WARM_UPS, n_timed: int = N_TIMED) -> list[Line]:
    """Every section, then the totals."""
    wait = _waiter(device)
    totals = [Section("forward", subject.forward), Section("forward + gradient", subject.joint)]
    return [
        Line(section.label, _time_ms(section.run, wait, n_warm_ups=n_warm_ups, n_timed=n_timed))
        for section in (*subject.sections, *totals)
    ]


def _time_ms(run: Closure, wait: Closure, *, n_warm_ups: int, n_timed: int) -> float:
    for _ in range(n_warm_ups):
        run()
    wait()
    began = time.perf_counter()
    for _ in range(n_timed):
        run()
    wait()
    return 1e3 * (time.perf_counter() - began) / n_timed


def _waiter(device: str) -> Closure:
    import torch

    return torch.cuda.synchronize if device != "cpu" else lambda: None


def torch_tables(subject: Profiled, *, device: str, n_rows: int = N_ROWS) -> list[Table]:
    """Three tables: the forward by time, the step with its gradient by time, and that step by memory.

    Rows that grow from the first to the second are the backward. On the host the device's columns are the processor's.
    """
    forward, joint = (_profile(run, device) for run in (subject.forward, subject.joint))
    of = "device" if device != "cpu" else "processor"
    return [
        _table(f"forward, by self {of} time", "self_ms", forward, n_rows),
        _table(f"forward + gradient, by self {of} time", "self_ms", joint, n_rows),
        _table(f"forward + gradient, by self {of} memory", "self_mb", joint, n_rows),
    ]


def _profile(run: Closure, device: str) -> list[Row]:
    """The rows of one call, after warm-up."""
    from torch.profiler import ProfilerActivity, profile

    wait = _waiter(device)
    for _ in range(N_WARM_UPS):
        run()
    wait()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device != "cpu" else [])]
    with profile(activities=activities, profile_memory=True, acc_events=True) as profiler:
        run()
        wait()
    return _rows(profiler.key_averages(), "cpu" if device == "cpu" else "device")


def _rows(events: Iterable[Any], kind: str) -> list[Row]:
    """A region spans operations that have rows of their own: its time is no part of the sum that shares are taken of."""
    found = [
        (
            event.key,
            event.count,
            getattr(event, f"self_{kind}_time_total") / 1e3,
            getattr(event, f"self_{kind}_memory_usage") / 1e6,
            bool(event.is_user_annotation),
        )
        for event in events
    ]
    whole = sum(self_ms for _, _, self_ms, _, is_region in found if not is_region)
    return [
        Row(name, calls, self_ms, 100 * self_ms / whole if whole else 0.0, self_mb, is_region)
        for name, calls, self_ms, self_mb, is_region in found
    ]


def _table(title: str, sorted_by: str, rows: list[Row], n_rows: int) -> Table:
    """The first rows; a region is never cut off, because it names what a compiled kernel belongs to."""
    ordered = sorted(rows, key=lambda row: getattr(row, sorted_by), reverse=True)
    shown = [*ordered[:n_rows], *(row for row in ordered[n_rows:] if row.is_region)]
    return Table(title, sorted_by, shown)


def report(subject: Profiled, *, device: str, lines: list[Line], tables: list[Table]) -> dict[str, Any]:
    """Everything as plain JSON values, with the kernels that this process was served."""
    loaded = {kernel.key: kernel for call in process_report().calls for kernel in call.kernels}
    return {
        "name": subject.name,
        "device": device,
        "kernels": [{"name": kernel.name, "target": kernel.target, "key": key} for key, kernel in loaded.items()],
        "sections": [line._asdict() for line in lines],
        "tables": [{**table._asdict(), "rows": [row._asdict() for row in table.rows]} for table in tables],
    }
