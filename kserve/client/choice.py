"""Which values of its knobs a kernel gets here: those of the wish, of environment variables, of a tuning for this device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kserve.alias import Signpost
from kserve.client.loader import driver
from kserve.errors import LoadError
from kserve.target import parse_target

if TYPE_CHECKING:
    from kserve.client.direct import Wanted
    from kserve.tuning import Device


def named_values(
    own: Mapping[str, int], variables: Mapping[str, list[str]], environment: Mapping[str, str]
) -> tuple[dict[str, Any], str]:
    """Values that the wish itself or the environment names, and which of them did; None for a text that is no number."""
    if own or not variables:
        return dict(own), "asked for" if own else ""
    from kserve.knobs import overrides_in

    found = overrides_in(variables, environment)
    by = ", ".join(dict.fromkeys(override.variable for override in found.values()))
    return {knob: override.value for knob, override in found.items()}, by


def values_at(
    signpost: Signpost, wish: Wanted, environment: Mapping[str, str], read: Callable[[str], bytes | None]
) -> tuple[dict[str, int] | None, str]:
    """The values chosen for knobs, none where all have their defaults, and by whom; None, and why that is left to the daemon.

    Args:
        read: gives a record of the stores.
    """
    from kserve.tuning import candidates, tuning_from_bytes

    values, by = named_values(wish.knobs, signpost.variables, environment)
    if None in values.values() or not set(wish.sizes) <= set(signpost.sizes):
        return None, "a knob or a size is not what it may be"
    if values:
        return values, by
    for name in candidates(signpost.base, device_for(wish.target), wish.sizes):
        content = read(f"tuning/{name}")
        if content is not None:
            tuning = tuning_from_bytes(content)
            return (None, "its tuning is damaged") if tuning is None else (tuning.knobs, "tuned")
    return {}, ""


def device_for(target: str) -> Device | None:
    """The kind of the current device; None where there is none, or it does not run that target."""
    try:
        found = driver()
        device = found.current_device()
        fits = parse_target(target).runs_on(found.target_of(device).capability)
        return found.kind_of(device) if fits else None
    except LoadError:
        return None
