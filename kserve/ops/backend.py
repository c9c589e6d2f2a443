"""Which implementation serves an op, and how often each one did.

    cuda      the kernel, where it is made for the input and no transform is active; else the reference
    compiled  the reference under torch.compile
    pytorch   the reference

A kernel that cannot be had (no compiler, a failed build, a driver that refuses) costs one warning, and the reference serves
instead; with `strict` it is an error. What is wrong with a call itself is always an error.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch.autograd import forward_ad, profiler

from kserve.client.report import report
from kserve.config import load_settings
from kserve.errors import (
    BuildError,
    InvalidSpec,
    LaunchError,
    LoadError,
    LockMismatch,
    ServiceError,
    StoreError,
    UnsupportedTarget,
)
from kserve.ops.signature import PLAIN, Match, matcher

CUDA, COMPILED, PYTORCH = "cuda", "compiled", "pytorch"
BACKENDS = (PYTORCH, COMPILED, CUDA)
# No public names tell the first two. Bound once: to look them up costs as much as to call them.
_n_modes = torch._C._len_torch_dispatch_stack  # noqa: SLF001
_transforms = torch._C._functorch.peek_interpreter_stack  # noqa: SLF001
_records = torch.is_grad_enabled
# What keeps a kernel from being there, as opposed to what is wrong with a call.
_MISSING = (BuildError, LoadError, LockMismatch, ServiceError, StoreError)


# op -> what else the process's report says of it.
describers: dict[str, Callable[[], dict[str, Any]]] = {}


class _Served(Counter[tuple[str, str]]):
    """Calls by op and rung. The first of a kind lets the process's report look at them; no other one does more than count."""

    def __missing__(self, key: tuple[str, str]) -> int:
        report().watch(summary)
        return 0


class _State:
    """Of this process."""

    def __init__(self) -> None:
        settings = load_settings()
        self.backend = PYTORCH if settings.disable else settings.backend
        self.is_strict = settings.strict
        self.given_up: dict[str, str] = {}
        self.served = _Served()
        self.usual: dict[tuple[Any, ...], Any] = {}


# Made when the first op is imported, not when it is called: a tracer can read a global, but not the environment.
_known: _State | None = _State()


def _count_anew() -> None:
    if _known is not None:
        _known.served = _Served()


os.register_at_fork(after_in_child=_count_anew)


def _state() -> _State:
    global _known  # noqa: PLW0603 - one a process, made again after `forget`
    if _known is None:
        _known = _State()
    return _known


def forget() -> None:
    """Read the settings again at the next call, and count from nothing."""
    global _known  # noqa: PLW0603 - as above
    _known = None


def set_backend(name: str) -> str:
    """Let that backend serve every op of this process from now on; the one that was in force.

    Choosing `cuda` also tries the kernels again that could not be had before. Raises: InvalidSpec for another name.
    """
    wanted = name.lower() if isinstance(name, str) else name
    if wanted not in BACKENDS:
        raise InvalidSpec(f"backend cannot be {name!r}", facts={"allowed": ", ".join(BACKENDS)})
    state = _state()
    before, state.backend = state.backend, wanted
    state.given_up.clear()
    state.usual.clear()
    return before


def backend() -> str:
    """The backend in force."""
    return _state().backend


def served() -> dict[str, dict[str, int]]:
    """op -> backend -> calls that it really served in this process."""
    return _by_op(_state().served)


def _by_op(served: _Served) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for (op, rung), count in sorted(served.items()):
        found.setdefault(op, {})[rung] = count
    return found


def given_up() -> dict[str, str]:
    """op -> why its kernel could not be had; the reference serves it since."""
    return dict(_state().given_up)


def summary() -> dict[str, Any]:
    """op -> calls by rung, what latched, and why modules were left to torch, as plain values."""
    # Not `_state()`: the thread that looks would read the settings before the call that they are meant for.
    state = _known
    counts, missing = (_by_op(state.served), dict(state.given_up)) if state is not None else ({}, {})
    nothing: dict[str, Any] = {"declines": {}, "last_declines": {}}
    found = {op: {"served": counts.get(op, {}), "latch": missing.get(op, ""), **nothing} for op in {*counts, *missing}}
    for op, describe in [*describers.items()]:
        more = describe()
        if op in found or any(more.values()):
            found[op] = {"served": counts.get(op, {}), **more}
    return dict(sorted(found.items()))


def serve(
    op: str, arguments: tuple[Any, ...], *, kernel: Callable[..., Any], reference: Callable[..., Any], reason: str | None
) -> Any:
    """Call what serves.

    Args:
        kernel, reference: take the arguments.
        reason: why the kernel is not made for them; None when it is.
    """
    state = _state()
    if state.backend == CUDA and reason is None and op not in state.given_up and not in_transform():
        try:
            result = kernel(*arguments)
        except UnsupportedTarget:  # another device than it is made for, which is the input's matter
            pass
        except _MISSING as error:
            if state.is_strict:
                raise
            state.given_up[op] = error.message
            state.usual.clear()
            warnings.warn(f"{op} is served by its reference from now on: {error.message}", RuntimeWarning, stacklevel=3)
        else:
            state.served[op, CUDA] += 1
            return result
    rung = COMPILED if state.backend == COMPILED else PYTORCH
    state.served[op, rung] += 1
    return (_compiled(reference) if rung == COMPILED else reference)(*arguments)


@lru_cache(maxsize=64)
def _compiled(reference: Callable[..., Any]) -> Callable[..., Any]:
    found: Callable[..., Any] = torch.compile(reference, dynamic=True)
    return found


class Usual:
    """Calls of one op whose like has been served: what serves them, found in a microsecond or two.

    A front door checks, asks for the backend and looks for its kernel: 5 to 10 us of Python, more than the launch. A model
    makes the same kind of call thousands of times, and what the first of its kind has settled need not be asked again.

    Not to be asked while tracing, and no branch on a size before it either: what is traced holds for other calls too.

    Args:
        op:      its name.
        pattern: of its tensors, as `signature.matcher` reads it.
    """

    def __init__(self, op: str, pattern: str) -> None:
        self._op = op
        self._counted = (op, CUDA)
        self._pattern = pattern
        self._match: Match | None = None

    def find(self, *tensors: Any, asked: object = None) -> tuple[Any, tuple[Any, ...]] | None:
        """What `settle` was given for a call like this one, and its sizes behind one key; it then counts as served. Else None.

        Args:
            asked: what decides besides the tensors.
        """
        state = _known or _state()
        match = self._match
        # The backend: a call that was under way in another thread may have settled after another one was chosen.
        if match is None or state.backend != CUDA or _n_modes() or in_transform():
            return None
        sizes = match(*tensors)
        found = None if sizes is None else state.usual.get((self._op, asked, sizes[0]))
        if sizes is None or found is None or profiler._is_profiler_enabled:  # noqa: SLF001 - as in `region`
            return None
        if _records():
            for tensor in tensors:
                if tensor.requires_grad:
                    return None
        state.served[self._counted] += 1
        return found, sizes

    def settle(self, tensors: tuple[Any, ...], found: Any, *, asked: object = None) -> None:
        """Keep what serves calls like this one, until another backend is chosen or a kernel is given up."""
        match = self._match = self._match or matcher(self._pattern)
        sizes = match(*tensors)
        if sizes is not None:
            _state().usual[self._op, asked, sizes[0]] = found


def in_transform() -> bool:
    """Whether a transform of torch.func or a forward derivative is active: a kernel would see through it, or lose it."""
    return forward_ad._current_level >= 0 or _transforms() is not None  # noqa: SLF001


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether an op can be run on the spot: it is not traced, and no mode or subclass has to see it."""
    return not torch.compiler.is_compiling() and type(tensor) in PLAIN and _n_modes() == 0


def check_no_gradient(op: str, *tensors: torch.Tensor) -> None:
    """Raises LaunchError where gradients are recorded and a kernel without one may serve: it would cut the graph in silence."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors) and backend() == CUDA:
        raise LaunchError(
            f"{op} has no gradient, and an input requires one",
            hint="call it under torch.no_grad(), or let torch differentiate it: kserve.ops.set_backend('pytorch')",
        )
