"""Tunings: the values of a kernel's knobs that won on one kind of device for one bucket of sizes, and the evidence for them.

A tuning is a record of the store like any other, named by what it is for: the kernel with its sources, spec, target and
toolchain (the base, which the daemon computes), the device's facts, the bucket. Every client of that device reads the same one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kserve.errors import InvalidSpec
from kserve.key import canonical_json, digest_of, sealed, unsealed
from kserve.knobs import KNOB_NAME
from kserve.spec import INTEGER_BITS, NAME, is_bool, is_plain_name

TUNING_SCHEMA = 1
MOST_ROWS = 1000


class Device(NamedTuple):
    """What makes devices one kind.

    Fields:
        name, mig: as the driver says it; the profile of a MIG instance, such as 1g.5gb, or nothing.
    """

    name: str
    sm_count: int
    l2_bytes: int
    mig: str = ""

    def __str__(self) -> str:
        return f"{self.name}, {self.sm_count} SMs, {self.l2_bytes >> 20} MiB L2"


class Tuning(NamedTuple):
    """A winner and its evidence.

    Fields:
        base:    of the kernel it was found for.
        sizes:   the bucket it serves; empty for every size.
        knobs:   every knob with the winning value.
        rows:    one configuration each (`measure.sweep.Row`, as JSON).
    """

    base: str
    kernel: str
    spec: dict[str, Any]
    target: str
    device: Device
    sizes: dict[str, int]
    knobs: dict[str, int]
    rows: list[dict[str, Any]]
    toolchain: str
    version: str
    created_at: float

    @property
    def name(self) -> str:
        """The hex part of its record's name."""
        return tuning_name(self.base, self.device, self.sizes)

    def to_json(self) -> dict[str, Any]:
        return {**self._asdict(), "device": self.device._asdict()}

    def to_bytes(self) -> bytes:
        return sealed({**self.to_json(), "schema": TUNING_SCHEMA})


def tuning_name(base: str, device: Device, sizes: Mapping[str, int]) -> str:
    """The hex part of the name of the record for that device and bucket."""
    return digest_of(canonical_json([TUNING_SCHEMA, base, list(device), dict(sizes)]).encode())


def candidates(base: str, device: Device | None, sizes: Mapping[str, int]) -> list[str]:
    """The names under which a tuning for a wish may lie: that of its bucket, then that for every size."""
    if device is None or not base:
        return []
    return [tuning_name(base, device, one) for one in ([sizes, {}] if sizes else [{}])]


def bucket_of(sizes: Mapping[str, Any]) -> dict[str, int]:
    """The bucket of these sizes: each rounded up to a power of two.

    Raises: InvalidSpec for a name that is none, or a size that is no positive whole number.
    """
    if not isinstance(sizes, Mapping) or not all(map(_is_size, sizes.items())):
        raise InvalidSpec(
            f"sizes cannot be {sizes!r:.200}", facts={"allowed": "names of integer arguments, with numbers from 1"}
        )
    return {name: 1 << (int(sizes[name]) - 1).bit_length() for name in sorted(sizes)}


def _is_size(item: tuple[object, Any]) -> bool:
    name, size = item
    is_whole = hasattr(size, "__index__") and not is_bool(size)
    return is_plain_name(name) and is_whole and int(size) > 0 and int(size).bit_length() < INTEGER_BITS


def tuning_from_bytes(content: bytes) -> Tuning | None:
    """The stored tuning; None when it is damaged or of another schema."""
    plain = unsealed(content)
    return None if plain is None or plain.pop("schema", None) != TUNING_SCHEMA else tuning_from_json(plain)


def tuning_from_json(plain: Mapping[str, Any]) -> Tuning | None:
    """The tuning in a decoded JSON object; None when it has another form."""
    try:
        found = Tuning(**{**plain, "device": Device(**plain["device"])})
    except (TypeError, KeyError):
        return None
    return found if _is_of_form(found) else None


def _is_of_form(found: Tuning) -> bool:
    texts = (found.base, found.kernel, found.target, found.toolchain, found.version, found.device.name, found.device.mig)
    tables = (found.spec, found.sizes, found.knobs)
    if not all(isinstance(text, str) for text in texts) or not all(isinstance(one, dict) for one in tables):
        return False
    numbers = (found.device.sm_count, found.device.l2_bytes, *found.sizes.values(), *found.knobs.values())
    rows = found.rows if isinstance(found.rows, list) and len(found.rows) <= MOST_ROWS else [None]
    return (
        set(map(type, numbers)) <= {int}
        and isinstance(found.created_at, int | float)
        and all(isinstance(row, dict) for row in rows)
        and bool(found.knobs)
        and all(KNOB_NAME.fullmatch(name) for name in found.knobs)
        and all(NAME.fullmatch(name) for name in found.sizes)
    )
