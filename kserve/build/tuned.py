"""Which values a kernel's knobs get: the caller's, else those of a tuning for its device and sizes, else the defaults."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from kserve.build.plan import NO_CHOICE, Choice
from kserve.definition import Argument, Entry, KernelDef
from kserve.errors import InvalidSpec
from kserve.expression import Expression
from kserve.key import build_key, canonical_json
from kserve.knobs import Values, shown
from kserve.outline import FILE_NAME
from kserve.spec import normalise_spec
from kserve.store.artifacts import Artifacts
from kserve.target import Target
from kserve.toolchain.base import Fingerprint
from kserve.tuning import TUNING_SCHEMA, Device, Tuning, candidates, tuning_from_bytes

logger = logging.getLogger("kserve")


class KnobWish(NamedTuple):
    """What a request says about knobs.

    Fields:
        values: the caller's; where there are any, no tuning is looked for.
        sizes:  the bucket of what the kernel will be launched on; empty where the caller does not say.
        device: what it will run on; None where that is not known.
    """

    values: Values
    sizes: Mapping[str, int]
    device: Device | None = None


NO_WISH = KnobWish({}, {})


class Tunings:
    """The tunings of one store and its layers."""

    def __init__(self, artifacts: Artifacts) -> None:
        self._artifacts = artifacts

    def get(self, name: str) -> Tuning | None:
        """The tuning of that name; a damaged one is put aside, and is none."""
        content = self._artifacts.get(f"tuning/{name}")
        found = None if content is None else tuning_from_bytes(content)
        if content is not None and (found is None or found.name != name):
            logger.warning("quarantined record=tuning/%s error=damaged", name)
            self._artifacts.files.quarantine(f"tuning/{name}")
            return None
        return found

    def all(self, kernel: str = "") -> list[Tuning]:
        """All of them, or those of one kernel, newest first."""
        names = {*self._artifacts.files.keys("tuning"), *self._artifacts.layers.keys("tuning")}
        found = [tuning for name in names if (tuning := self.get(name)) is not None and kernel in ("", tuning.kernel)]
        return sorted(found, key=lambda tuning: -tuning.created_at)

    def publish(self, tuning: Tuning) -> None:
        """Keep it, in place of the one for the same kernel, device and sizes."""
        with self._artifacts.upkeep.publishing():
            if self._artifacts.put(f"tuning/{tuning.name}", tuning.to_bytes()):
                self._artifacts.upkeep.written([f"tuning/{tuning.name}"])
        logger.info(
            'tuned name=%s target=%s device="%s" knobs="%s"', tuning.kernel, tuning.target, tuning.device, shown(tuning.knobs)
        )

    def choose(self, definition: KernelDef, entry: Entry, *, spec: Mapping[str, Any], wish: KnobWish, base: str) -> Choice:
        """How the knobs of one build are chosen. Raises: InvalidSpec for sizes that the kernel does not have."""
        if not entry.knobs:
            return Choice(wish.values) if wish.values else NO_CHOICE
        for name in wish.sizes:
            entry.check_size(name)
        if wish.values:
            return Choice(wish.values, base)
        for name in candidates(base, wish.device, wish.sizes):
            tuning = self.get(name)
            if tuning is not None and _fits(definition, entry, spec, tuning.knobs):
                return Choice(tuning.knobs, base, is_tuned=True)
        return Choice({}, base)


def _fits(definition: KernelDef, entry: Entry, spec: Mapping[str, Any], values: Values) -> bool:
    """Whether the definition still allows these values."""
    try:
        definition.knob_values(entry, normalise_spec(entry.name, definition.axes, spec), values)
    except InvalidSpec as error:
        logger.warning("tuning passed over name=%s error=%s", entry.name, error.message)
        return False
    return True


def base_of(
    definition: KernelDef,
    entry: Entry,
    *,
    spec: Mapping[str, object],
    target: Target,
    fingerprint: Fingerprint,
    files: Mapping[str, str],
) -> str:
    """What tunings of this kernel are filed under: a hash of all that makes a build but the knobs.

    What follows from a knob counts as it is written, not by its value. Raises: InvalidSpec, UnsupportedTarget.
    """
    written: dict[str, object] = {
        "tuning": TUNING_SCHEMA,
        "entry": [entry.name, entry.function, *(_written(argument) for argument in entry.arguments)],
        "launch": [expression.text for expression in entry.launch.expressions()],
        "derived": {name: expression.text for name, expression in definition.derived.items()},
        "options": {
            name: option.text if isinstance(option, Expression) else option for name, option in definition.options.items()
        },
        "language": [definition.language, definition.sources[0]],
        "spec": normalise_spec(entry.name, definition.axes, spec),
        "target": str(definition.resolve_target(entry, target)),
        "toolchain": [fingerprint.name, fingerprint.version, fingerprint.files, fingerprint.options],
        "files": {name: digest for name, digest in files.items() if name != FILE_NAME},
    }
    return build_key({label: canonical_json(value) for label, value in written.items()})


def _written(argument: Argument) -> list[object]:
    return [part.text if isinstance(part, Expression) else part for part in argument]
