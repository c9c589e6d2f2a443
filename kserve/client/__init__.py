"""The client: `get_kernel` and its memo.

A second call with the same spec is one dictionary lookup, keyed by the current device. Behind it are `direct.py`, which reads
the store's files, and `resolve.py`, which asks the daemon and is imported when that is needed: http.client and tomllib cost
more than the rest of the client.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kserve.client.launch import Kernel
from kserve.client.loader import driver
from kserve.errors import InvalidSpec, LoadError, UnsupportedTarget

__all__ = ["Kernel", "forget", "get_kernel", "get_kernels"]

_memo: dict[Any, tuple[Kernel, list[type]]] = {}


def get_kernel(
    name: str,
    *,
    target: str | None = None,
    sizes: Mapping[str, int] | None = None,
    timeout_s: float | None = None,
    debug: str | None = None,
    **spec: Any,
) -> Kernel:
    """The kernel of that name for that spec, ready to launch.

    Args:
        name:      an entry of the catalog (`kserve kernels` lists them).
        target:    such as `cuda:sm_90`; left out, the current device's.
        sizes:     integer arguments and about what they will be, such as {"rows": 10_000}: picks the tuning for that bucket.
        timeout_s: how long to wait for a build; the build itself goes on.
        debug:     a variant for tools: `lineinfo`, `device` (no optimisation) or `sanitize`; its bytes name source files of
                   this machine.
        spec:      a value for each axis without a default.
    Returns:
        A Kernel. Nothing is compiled, read or sent when this process asked for the same before.
    Raises:
        UnknownKernel, InvalidSpec, UnsupportedTarget: the wish; BuildError: the build; ServiceError: the daemon;
        LoadError: the driver.
    """
    try:
        place: Any = (name, debug, target or driver().current_device(), *spec.items())
        if sizes:
            place = (*place, tuple(_bucket(sizes).items()))
        found = _memo.get(place)
        # True, 1 and 1.0 are one key of a dictionary, and three different wishes.
        if found is not None and found[1] == [*map(type, spec.values())]:
            return found[0]
    except (TypeError, LoadError):  # an unhashable value, or no driver: the long road names it
        place = None
    kernel = _resolve([(name, spec)], target, timeout_s, debug=debug, sizes=sizes)[0]
    if place is not None:
        _memo[place] = (kernel.as_memo(), [*map(type, spec.values())])
    return kernel


def get_kernels(
    wanted: list[tuple[str, dict[str, Any]]], *, target: str | None = None, timeout_s: float | None = None
) -> list[Kernel]:
    """Several kernels in one round trip; what is missing is built in parallel.

    Args:
        wanted: (name, spec) of each.
    Returns:
        Kernels, in the same order. Raises as `get_kernel`, for the first one that fails.
    """
    try:
        device = target or driver().current_device()
        places: list[Any] = [(name, None, device, *spec.items()) for name, spec in wanted]
        known = [_memo.get(place) for place in places]
    except (TypeError, LoadError):  # as in `get_kernel`
        return _resolve(wanted, target, timeout_s)
    types = [[*map(type, spec.values())] for _, spec in wanted]
    if all(found is not None and found[1] == types[position] for position, found in enumerate(known)):
        return [found[0] for found in known if found is not None]
    kernels = _resolve(wanted, target, timeout_s)
    _memo.update((place, (kernel.as_memo(), of)) for place, kernel, of in zip(places, kernels, types, strict=True))
    return kernels


def _bucket(sizes: Mapping[str, int]) -> dict[str, int]:
    from kserve.tuning import bucket_of

    return bucket_of(sizes)


def _resolve(
    wanted: list[tuple[str, dict[str, Any]]],
    target: str | None,
    timeout_s: float | None,
    *,
    debug: str | None = None,
    sizes: Mapping[str, int] | None = None,
) -> list[Kernel]:
    from kserve.client.direct import Wanted, resolve

    if not wanted:
        return []
    for name, _ in wanted:
        if not isinstance(name, str) or not isinstance(target, str | None):
            raise InvalidSpec(f"a kernel's name and target are texts, not {name!r} and {target!r}")
    if target is None:
        try:
            found = driver()
        except LoadError as error:
            names = ", ".join(name for name, _ in wanted)
            raise UnsupportedTarget(
                f"{names} has no target: {error.message}", hint="name one: get_kernel(…, target='cuda:sm_90')"
            ) from None
        target = str(found.target_of(found.current_device()))
    bucket = _bucket(sizes) if sizes else {}
    return resolve([Wanted(name, target, spec, debug or "", sizes=bucket) for name, spec in wanted], timeout_s=timeout_s)


def forget() -> None:
    """Drop the memo and the connection: the next get_kernel reads settings and asks the daemon again."""
    import sys

    from kserve.client.local import leave

    _memo.clear()
    leave()
    asked = sys.modules.get("kserve.client.resolve")
    if asked is not None:
        asked.disconnect()
