"""Which values of its knobs a kernel gets here: those of the wish, of environment variables, of a tuning for this device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kserve.alias import Signpost
from kserve.client.loader import driver
from kserve.errors import LoadError
from kserve.target import parse_target

if TYPE_CHECKING:
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


def tuned_values(signpost: Signpost, target: str, sizes: Mapping[str, int], read: Callable[[str], bytes | None]) -> Any:
    """The values of the tuning for the current device and these sizes; empty for none, None where it is damaged."""
    from kserve.tuning import candidates, tuning_from_bytes

    for name in candidates(signpost.base, device_for(target), sizes):
        content = read(f"tuning/{name}")
        if content is not None:
            tuning = tuning_from_bytes(content)
            return None if tuning is None else tuning.knobs
    return {}


def device_for(target: str) -> Device | None:
    """The kind of the current device; None where there is none, or it does not run that target."""
    try:
        found = driver()
        device = found.current_device()
        fits = parse_target(target).runs_on(found.target_of(device).capability)
        return found.kind_of(device) if fits else None
    except LoadError:
        return None
