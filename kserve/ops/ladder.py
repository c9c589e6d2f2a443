"""The ladder of an op that stands in for a module of torch: its kernels, then its reference; decided anew at each call.

Reasons not to take the kernels are tested in one order, and the first that holds is the call's:

    opted_out       by KSERVE_NATIVE=0, `override(native=False)`, the backend in force, or another rank
    latched         they have failed in this process; a module that they have served before keeps them
    func_transform  a transform of torch.func, or a forward derivative, is active
    not_gpu         the input lies elsewhere
    subclass        the input is no plain tensor; a DTensor's shard is (sharding.py)
    untuned_device  with KSERVE_TUNED_ONLY=1: no launch table is made for this GPU
    unsupported     the kernels are not made for the input

A failure of the kernels is answered by the reference and latches; anything else that is raised is the caller's. With
`strict` a failure is raised.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from kserve.config import Settings, load_settings
from kserve.errors import UnsupportedTarget
from kserve.ops.backend import CUDA, backend, describers, in_transform, serve

REASONS = ("opted_out", "latched", "func_transform", "not_gpu", "subclass", "untuned_device", "unsupported")


class KernelFailed(Exception):
    """Raised where a kernel could not be had, launched or given memory for its launch; the cause says why."""


class _Unsuited(Exception):
    """The kernels are not made for this device."""


class Decline(NamedTuple):
    """Why the kernels did not serve a call: one of REASONS, and a sentence."""

    reason: str
    detail: str


class Device(NamedTuple):
    """What tells GPUs apart that need launch tables of their own."""

    arch: str
    multiprocessors: int


# What the launch tables of these ops are made for: H100 and H200.
TUNED = frozenset({Device("sm_90", 132)})


@lru_cache(maxsize=64)
def identify(device: torch.device) -> Device | None:
    """The device's identity; None where it cannot be asked."""
    try:
        found = torch.cuda.get_device_properties(device)
    except (RuntimeError, AssertionError):  # torch asserts that it was compiled with CUDA
        return None
    return Device(f"sm_{found.major}{found.minor}", found.multi_processor_count)


class Call(NamedTuple):
    """One call of an op.

    Fields:
        arguments:   what `kernel` and `reference` take; the first is the input.
        unsupported: why the kernels are not made for the arguments; None when they are. Raising stands for a reason.
        module:      whose call it is; None for a function's.
    """

    arguments: tuple[Any, ...]
    kernel: Callable[..., Any]
    reference: Callable[..., Any]
    unsupported: Callable[[], str | None]
    module: torch.nn.Module | None = None


class Ladder:
    """The ladder of one op in this process.

    Args:
        op:          its name.
        device_type: where its kernels run.
        identify, tuned: what a device is, and which ones the launch tables are for.
    """

    def __init__(
        self,
        op: str,
        *,
        device_type: str = "cuda",
        identify: Callable[[torch.device], Device | None] = identify,
        tuned: frozenset[Device] = TUNED,
    ) -> None:
        self.op = op
        self._device_type, self._identify, self._tuned = device_type, identify, tuned
        self._override: bool | None = None
        self._failure = ""  # what latched
        self._withheld = ""  # what another rank lacks
        self._served: WeakKeyDictionary[torch.nn.Module, bool] = WeakKeyDictionary()
        self._declines: WeakKeyDictionary[torch.nn.Module, Decline] = WeakKeyDictionary()
        self._last: dict[str, Decline] = {}
        self._warned: set[tuple[str, object]] = set()
        self._known: Settings | None = load_settings()  # now: a tracer that asks later cannot read the environment
        LADDERS[op] = self
        describers[op] = self.describe

    def call(self, call: Call) -> Any:
        """The result, by the kernels or by the reference.

        Raises: what the reference raises; with `strict` what the kernels failed by, and so for a module that they have
            served while gradients are computed: what the reference keeps for them is not what the kernels kept.
        """
        declined = self.decline(call)
        if declined is None:
            try:
                result = serve(self.op, call.arguments, kernel=_tagged(call.kernel), reference=call.reference, reason=None)
            except KernelFailed as failed:
                declined = self._latch(call, failed)
            except _Unsuited as error:
                declined = Decline("unsupported", str(error))
            else:
                if call.module is not None:
                    self._served[call.module] = True
                return result
        self._note(call, declined)
        return serve(self.op, call.arguments, kernel=call.kernel, reference=call.reference, reason=declined.detail)

    def decline(self, call: Call) -> Decline | None:
        """Why the kernels would not serve that call now; None when they would."""
        for reason, detail in self._rejections(call):
            if detail:
                return Decline(reason, detail)
        return None

    def override(self, *, native: bool | None) -> bool | None:
        """Set aside what KSERVE_NATIVE says; what was set before.

        Args:
            native: False: the reference serves. True: also on a GPU without a launch table, and a failure is forgotten. No
                input is served that the kernels are not made for. None: as KSERVE_NATIVE says; a failure stays.
        """
        before, self._override = self._override, native
        if native:
            self._failure = ""
        return before

    def has_served(self, module: torch.nn.Module) -> bool:
        """Whether the kernels have served a call of that module."""
        return module in self._served

    def last_decline(self, module: torch.nn.Module) -> Decline | None:
        """Why they did not at its last call that they did not serve; None where there was none."""
        return self._declines.get(module)

    def declines(self) -> dict[str, dict[str, int]]:
        """Label of the module -> reason of its last decline -> how many modules."""
        found: dict[str, dict[str, int]] = {}
        for module, declined in self._declines.items():
            counts = found.setdefault(_label(module), {})
            counts[declined.reason] = counts.get(declined.reason, 0) + 1
        return found

    def describe(self) -> dict[str, Any]:
        """What latched, `declines()`, and the last decline of each label, as plain values; a function's label is its name."""
        last = {label: declined._asdict() for label, declined in [*self._last.items()]}
        return {"latch": self._failure, "declines": self.declines(), "last_declines": last}

    def is_able(self) -> bool:
        """Whether the kernels would serve a call that they are made for, on the current device."""
        index = torch.cuda.current_device() if self._device_type == "cuda" and torch.cuda.is_available() else 0
        here = torch.device(self._device_type, index)
        return not (self._opted_out() or self._failure or self._untuned(here))

    def is_closed(self) -> bool:
        """Whether the kernels serve no call at all now; a tracer may ask."""
        return bool(self._opted_out() or self._withheld or self._failure)

    def withhold(self, why: str) -> None:
        """Let the reference serve every call from now on; an empty text ends that."""
        self._withheld = why

    def forget(self) -> None:
        """Read the settings again at the next call, and forget failures and modules."""
        self._override, self._failure, self._withheld, self._known = None, "", "", None
        for memory in (self._served, self._declines, self._last, self._warned):
            memory.clear()

    def _rejections(self, call: Call) -> Iterator[tuple[str, str | None]]:
        tensor = call.arguments[0]
        yield "opted_out", self._opted_out() or self._withheld
        keeps = call.module is not None and self.has_served(call.module)
        yield "latched", None if keeps else self._failure
        yield "func_transform", "a transform of torch.func, or a forward derivative, is active" if in_transform() else None
        yield "not_gpu", f"the input lies on {tensor.device}" if tensor.device.type != self._device_type else None
        is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
        yield "subclass", None if is_plain else f"the input is a {type(tensor).__name__}"
        yield "untuned_device", self._untuned(tensor.device)
        yield "unsupported", self._unsupported(call.unsupported)

    def _opted_out(self) -> str | None:
        if self._wanted() is False:
            return "KSERVE_NATIVE is 0" if self._override is None else "override(native=False) was called"
        if backend() != CUDA:
            return f"the backend is {backend()}"
        return None

    def _wanted(self) -> bool | None:
        return self._override if self._override is not None else self._settings().native

    def _settings(self) -> Settings:
        if self._known is None:
            self._known = load_settings()
        return self._known

    def _untuned(self, device: torch.device) -> str | None:
        found = self._identify(device)
        if found in self._tuned:
            return None
        name = "a device that cannot be identified" if found is None else f"{found.arch} with {found.multiprocessors} SMs"
        wanted = ", ".join(f"{known.arch} with {known.multiprocessors}" for known in sorted(self._tuned))
        if self._settings().tuned_only and not self._wanted():
            switches = "KSERVE_NATIVE=1 or KSERVE_TUNED_ONLY=0 serves it all the same"
            self._warn_once("declined", device, f"{self.op} is left to torch on {name}: tables are for {wanted}; {switches}")
            return f"{name}: launch tables are for {wanted}"
        self._warn_once("default", device, f"{self.op} runs with the default launch table on {name}: tables are for {wanted}")
        return None

    def _unsupported(self, predicate: Callable[[], str | None]) -> str | None:
        try:
            return predicate()
        except Exception as error:  # noqa: BLE001 - whatever a check stumbles over, the reference can serve it
            self._warn_once("check", type(error), f"{self.op} cannot tell whether its kernels take an input: {error!r}")
            return f"the check raised {error!r}"

    def _latch(self, call: Call, failed: KernelFailed) -> Decline:
        """Raises the failure where nothing else may answer the call."""
        cause = failed.__cause__ or failed
        keeps = call.module is not None and self.has_served(call.module)
        if self._settings().strict or (keeps and _in_backward()):
            raise cause
        if not self._failure:
            warnings.warn(f"{self.op} is served by its reference from now on: {cause}", RuntimeWarning, stacklevel=4)
        self._failure = str(cause) or repr(cause)
        return Decline("latched", self._failure)

    def _note(self, call: Call, declined: Decline) -> None:
        self._last[f"{self.op}()" if call.module is None else _label(call.module)] = declined
        if call.module is not None:
            self._declines[call.module] = declined

    def _warn_once(self, kind: str, key: object, message: str) -> None:
        if (kind, key) not in self._warned:
            self._warned.add((kind, key))
            warnings.warn(message, RuntimeWarning, stacklevel=5)


LADDERS: dict[str, Ladder] = {}
_printed: set[str] = set()


def agree(group: Any = None) -> None:
    """Let all ranks of the group decide alike: call it once, before the first step, on every rank.

    Where one rank cannot take the kernels of an op, none does. What else a call may be declined for is the same on all
    ranks, or of no consequence to the others.
    """
    from torch import distributed

    place = "cuda" if distributed.get_backend(group) == "nccl" else "cpu"
    for op in sorted(LADDERS):
        able = torch.tensor(int(LADDERS[op].is_able()), device=place)
        distributed.all_reduce(able, op=distributed.ReduceOp.MIN, group=group)
        LADDERS[op].withhold("" if able.item() else "another rank does without the kernels")


def report_once(model: torch.nn.Module, *, rank: int = 0) -> list[str]:
    """One line for each kind of module with a ladder: who has served its modules. Rank 0 prints them, once a process.

    Call it after the first forward: before, nothing has been served. A module says which ladder is its own by an attribute
    `ladder`, and how it is called by `ladder_label`, else by the name of its class.
    """
    counts: dict[str, list[bool]] = {}
    for module in model.modules():
        ladder = getattr(module, "ladder", None)
        if isinstance(ladder, Ladder):
            counts.setdefault(_label(module), []).append(ladder.has_served(module))
    width = max(map(len, counts), default=0)
    lines = [f"{label:<{width}}  {_shares(served)}" for label, served in sorted(counts.items())]
    if rank == 0:
        for label, line in zip(sorted(counts), lines, strict=True):
            if label not in _printed:
                _printed.add(label)
                sys.stderr.write(line + "\n")
    return lines


def _label(module: torch.nn.Module) -> str:
    return str(getattr(module, "ladder_label", type(module).__name__))


def _shares(served: list[bool]) -> str:
    n, n_kernels = len(served), sum(served)
    parts = [("kernels", n_kernels), ("torch", n - n_kernels)]
    return ", ".join(f"{name} {count}/{n}" for name, count in parts if count)


def _tagged(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel with its failures told apart from everybody else's."""

    def call(*arguments: Any) -> Any:
        with _tagging():
            return kernel(*arguments)

    return call


@contextmanager
def _tagging() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except UnsupportedTarget as error:
        raise _Unsuited(error.message) from error
    except Exception as error:
        raise KernelFailed(str(error)) from error


def _in_backward() -> bool:
    return int(torch._C._current_graph_task_id()) != -1  # noqa: SLF001 - no public name tells it
