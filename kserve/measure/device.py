"""Durations of calls: by replays of a CUDA graph of them, between device events, or by the host's clock.

An instrument turns calls into arms for `timing.measure`. All arms of one run share a stream and a width, the number of calls
in one timed interval, so what the instrument itself costs is the same for all of them and a small share of each. What is
timed is the device's work: dispatch, checks and launchers are outside for every arm, or, without a graph, inside for every arm.
"""

from __future__ import annotations

import contextlib
import ctypes
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from kserve.measure.timing import Arm, ArmFailed

Call = Callable[[], object]
BLOCK_S = 0.015
_N_WARM_UPS = 3
_MOST_ITERATIONS = 512
_MOST_WIDTH = 128
_OVERHEAD = 0.01  # what starting a replay may be of an interval
_LONGEST_IN_GRAPH_S = 0.040
_SHORTEST_S = 1e-7
_HOST_INTERVAL_S = 1e-3


class Prepared(NamedTuple):
    """Calls that are ready to be measured.

    Fields:
        arms:       name -> arm; each gives seconds a call, the median of one block of intervals.
        first_s:    name -> seconds of its very first call, waited for: compilers and lazy loads are in there.
        failed:     name -> why there is no arm.
        width:      calls in one interval, the same for all arms.
        overhead:   what starting an interval is of the shortest arm's interval, measured.
        instrument: graph, events, host.
    """

    arms: dict[str, Arm]
    first_s: dict[str, float]
    failed: dict[str, str]
    width: int
    overhead: float
    instrument: str


class Instrument(Protocol):
    """Times calls on one kind of device."""

    def active(self) -> AbstractContextManager[None]:
        """Inputs and autograd graphs of the calls are made in here: the backward of a call runs on its forward's stream."""

    def prepare(self, calls: Mapping[str, Call]) -> Prepared:
        """Run each call a few times and make arms of them. A call that raises has no arm."""


def default_device() -> str:
    """`cuda` where there is one, else `cpu`."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def instrument_for(device: str, *, flush: bool = False) -> Instrument:
    """The instrument for a torch device.

    Args:
        flush: empty the device's last-level cache before every interval, which then holds one call.
    """
    return HostInstrument() if device == "cpu" else GraphInstrument(flush=flush)


class HostInstrument:
    """Calls that end before they return: bursts by the host's clock."""

    def active(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def prepare(self, calls: Mapping[str, Call]) -> Prepared:
        first_s, failed = _first_calls(calls, wait=lambda: None)
        shortest = min((_seconds(calls[name], 1) for name in first_s), default=_HOST_INTERVAL_S)
        width = _power_of_two(_HOST_INTERVAL_S / max(shortest, _SHORTEST_S))
        arms = {name: self._arm(calls[name], width) for name in first_s}
        return Prepared(arms, first_s, failed, width, 0.0, "host")

    def _arm(self, call: Call, width: int) -> Arm:
        iterations = _iterations(_seconds(call, width))
        return lambda: statistics.median(_seconds(call, width) for _ in range(iterations)) / width


class GraphInstrument:
    """Replays of captured graphs on one side stream of the current CUDA device."""

    def __init__(self, *, flush: bool = False) -> None:
        import torch

        self._torch = torch
        self._stream = torch.cuda.Stream()
        self._events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(_MOST_ITERATIONS)]
        last_level = torch.cuda.get_device_properties(self._stream.device).L2_cache_size
        self._flushed = torch.empty(2 * last_level, dtype=torch.int8, device=self._stream.device) if flush else None

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        self._stream.wait_stream(self._torch.cuda.current_stream())
        with self._torch.cuda.stream(self._stream):
            yield

    def prepare(self, calls: Mapping[str, Call]) -> Prepared:
        with self.active():
            first_s, failed = _first_calls(calls, wait=self._stream.synchronize)
            direct = {name: self._median_s(calls[name], _N_WARM_UPS) for name in first_s}
            in_graphs = bool(direct) and min(direct.values()) <= _LONGEST_IN_GRAPH_S
            graphs, width, overhead = self._graphs(calls, first_s, failed) if in_graphs else ({}, 1, 0.0)
        replays = {name: graph.replay for name, graph in graphs.items()} if in_graphs else {n: calls[n] for n in direct}
        arms = {name: self._arm(replay, width) for name, replay in replays.items()}
        return Prepared(arms, first_s, failed, width, overhead, "graph" if in_graphs else "events")

    def _graphs(self, calls: Mapping[str, Call], names: Mapping[str, float], failed: dict[str, str]) -> Any:
        """(graphs, width, overhead): each call captured `width` times; what cannot be captured has failed."""
        cell = self._torch.zeros(1, device=self._stream.device)
        start_s = self._median_s(self._captured(cell.zero_, 1).replay, 64)
        single: dict[str, float] = {}
        for name in names:
            try:
                single[name] = self._median_s(self._captured(calls[name], 1).replay, 16)
            except Exception as error:  # whatever a capture does not allow  # noqa: BLE001
                failed[name] = f"cannot be captured in a graph: {error}"
        shortest = max(min(single.values(), default=1.0) - start_s, _SHORTEST_S)
        width = 1 if self._flushed is not None else _power_of_two(start_s / (_OVERHEAD * shortest))
        graphs = {name: self._captured(calls[name], width) for name in single}
        return graphs, width, start_s / (width * shortest)

    def _captured(self, call: Call, width: int) -> Any:
        """Raises ArmFailed for a call that puts nothing on the stream: its replay would time nothing."""
        graph = self._torch.cuda.CUDAGraph(keep_graph=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*CUDA Graph is empty.*")
            with self._torch.cuda.graph(graph, stream=self._stream):
                for _ in range(width):
                    call()
            if not _n_nodes(graph.raw_cuda_graph()):
                raise ArmFailed("the call launched nothing on the current stream")
            graph.instantiate()
        return graph

    def _arm(self, replay: Call, width: int) -> Arm:
        iterations = 1 if self._flushed is not None else _iterations(self._median_s(replay, _N_WARM_UPS))
        return lambda: self._median_s(replay, iterations) / width

    def _median_s(self, replay: Call, iterations: int) -> float:
        """The median of so many intervals, seconds."""
        pairs = self._events[:iterations]
        with self.active():
            for start, end in pairs:
                if self._flushed is not None:
                    self._flushed.zero_()
                start.record()
                replay()
                end.record()
        self._stream.synchronize()
        return float(statistics.median(start.elapsed_time(end) for start, end in pairs)) * 1e-3


def _first_calls(calls: Mapping[str, Call], *, wait: Call) -> tuple[dict[str, float], dict[str, str]]:
    """Seconds of the first call of each, and why the others have none. Each is warm afterwards."""
    first_s: dict[str, float] = {}
    failed: dict[str, str] = {}
    for name, call in calls.items():
        try:
            wait()
            began = time.perf_counter()
            call()
            wait()
            took = time.perf_counter() - began
            for _ in range(_N_WARM_UPS):
                call()
            wait()
            first_s[name] = took
        except Exception as error:  # an arm may fail in any way: the others go on  # noqa: BLE001
            failed[name] = f"{type(error).__name__}: {error}"
    return first_s, failed


def _seconds(call: Call, width: int) -> float:
    began = time.perf_counter()
    for _ in range(width):
        call()
    return time.perf_counter() - began


def _iterations(interval_s: float) -> int:
    return max(1, min(_MOST_ITERATIONS, round(BLOCK_S / max(interval_s, _SHORTEST_S))))


def _power_of_two(wanted: float) -> int:
    """The least power of two that is not below `wanted`, 1 to 128."""
    width = 1
    while width < min(wanted, _MOST_WIDTH):
        width *= 2
    return width


def _n_nodes(graph: int) -> int:
    """The nodes of a captured graph: cuGraphGetNodes without a place to put them."""
    count = ctypes.c_size_t()
    status = ctypes.CDLL("libcuda.so.1").cuGraphGetNodes(ctypes.c_void_p(graph), None, ctypes.byref(count))
    if status:
        raise ArmFailed(f"the captured graph cannot be read: driver error {status}")
    return count.value
