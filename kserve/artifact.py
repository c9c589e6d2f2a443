"""Artifact: what one build gives. A manifest (launch contract, resources, key components) and a payload (the binary).

The launch contract holds everything a launcher needs, so a process that has manifest and payload needs neither the sources
nor the definition.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple

from kserve.errors import CorruptArtifact
from kserve.key import sealed, unsealed
from kserve.spec import is_plain_name

MANIFEST_SCHEMA = 1
# The two variants of one kernel: compiled for the declared facts about its arguments, and for none.
DECLARED, GENERIC = "declared", "generic"
# Builds for tools that show sources or check accesses; their bytes name files of the machine they were built on.
DEBUGS = ("lineinfo", "device", "sanitize")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Param(NamedTuple):
    """One parameter of the binary, in order.

    Fields:
        kind:   `pointer`, a scalar (`i32`, `f32`, …), `struct`, `tensor_map`, or `scratch` (allocated by the launcher).
        offset, size_bytes: where it lies in the parameter block, from the binary's own table.
        align, divisible_by: facts this binary was compiled for; 0 for none.
    """

    name: str
    kind: str
    dtype: str
    offset: int
    size_bytes: int
    mutated: bool = False
    nullable: bool = False
    contiguous: bool = True
    align: int = 0
    divisible_by: int = 0


class Contract(NamedTuple):
    """What a launcher must know.

    Fields:
        format:         `cubin`, `hsaco`, `so` for a library, `object` for a part of one.
        constants:      spec, derived axes and constexprs, by name: the values expressions may use.
        grid, block, shared_bytes: expressions over integer parameters and constants; grid in programs, block in threads.
        scratch_bytes:  per block, for each `scratch` parameter in order.
        minimum_driver: the oldest driver, as cuDriverGetVersion counts (13000 is 13.0); 0 for none.
        knobs:          those of the constants that are knobs.
        tuned:          names in `grid` that follow from a knob: a caller's own grid has to follow them too.
        needs:          what a process must have to load a library: `torch`, `python`, `cxx`, `codes`, `libraries`, `glibc`, …
    """

    symbol: str
    format: str
    params: tuple[Param, ...]
    constants: dict[str, Any]
    grid: tuple[str, ...]
    block: tuple[str, ...]
    shared_bytes: str = "0"
    scratch_bytes: tuple[int, ...] = ()
    minimum_driver: int = 0
    knobs: tuple[str, ...] = ()
    tuned: tuple[str, ...] = ()
    needs: Mapping[str, str] = {}


class Manifest(NamedTuple):
    """The facts of one artifact.

    Fields:
        key, digest: hash of what went in; hash of the payload.
        variant:     DECLARED or GENERIC.
        resources:   registers (a thread), shared_bytes (static), spill_bytes and stack_bytes (a thread).
        components:  every component of the key, label -> text.
        attachments: further records of this build, such as the PTX: kind -> digest.
        closed_world: the build could read nothing but its declared files.
        seconds, created_at: of the build; seconds since 1970.
        reason:      why it had to be built.
    """

    key: str
    digest: str
    size_bytes: int
    name: str
    language: str
    target: str
    spec: dict[str, Any]
    variant: str
    contract: Contract
    resources: dict[str, int]
    components: Mapping[str, str]
    attachments: Mapping[str, str]
    closed_world: bool
    seconds: float
    created_at: float
    reason: str = ""

    @property
    def debug(self) -> str:
        """Which debug variant it is; empty for none."""
        return self.components.get("debug", "")

    def to_json(self) -> dict[str, Any]:
        whole = {"components": dict(self.components), "attachments": dict(self.attachments)}
        return {**self._asdict(), **whole, "contract": contract_to_json(self.contract), "schema": MANIFEST_SCHEMA}

    def to_bytes(self) -> bytes:
        """Canonical JSON with a hash over itself: a manifest that was damaged says so."""
        return sealed(self.to_json())


class Deferred(Mapping[str, str]):
    """A part of a manifest that is read when somebody looks into it.

    Args:
        read: gives the whole part. What it raises, the look raises.
    """

    def __init__(self, read: Callable[[], Mapping[str, str]]) -> None:
        self._read = read

    def __getitem__(self, label: str) -> str:
        return self._read()[label]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())

    def __repr__(self) -> str:
        return repr(dict(self._read()))


def compact(manifest: Manifest) -> list[Any]:
    """A manifest as one short list: all that a launch needs, without components and attachments. `from_compact` reads it."""
    return list(manifest._replace(components={}, attachments={}))


# What the positions of a compact manifest mean: other releases have other ones.
COMPACT_FORM = ",".join((*Manifest._fields, *Contract._fields, *Param._fields))


def from_compact(found: list[Any], read: Callable[[str], Manifest]) -> Manifest:
    """The manifest in a compact list.

    Args:
        read: gives the whole manifest of a key, when a part is wanted that the list lacks.
    Raises: CorruptArtifact when it has another form.
    """
    try:
        manifest = Manifest(*found)
        contract = Contract(*manifest.contract)
        contract = contract._replace(
            params=tuple(Param(*param) for param in contract.params),
            grid=tuple(contract.grid),
            block=tuple(contract.block),
            scratch_bytes=tuple(contract.scratch_bytes),
            knobs=tuple(contract.knobs),
            tuned=tuple(contract.tuned),
        )
        manifest = manifest._replace(contract=contract)
        _check_names(manifest.contract)
        _check_types(manifest)
    except (TypeError, AttributeError) as error:
        raise CorruptArtifact(f"compact manifest cannot be read: {error}") from None
    key = manifest.key
    return manifest._replace(
        components=Deferred(lambda: read(key).components), attachments=Deferred(lambda: read(key).attachments)
    )


class Artifact(NamedTuple):
    """Both together: a manifest and the bytes its digest names."""

    manifest: Manifest
    payload: bytes

    @property
    def digest(self) -> str:
        return self.manifest.digest


class LaterArtifact:
    """An artifact whose parts are read, and verified, when somebody looks at them.

    Args:
        digest: of its payload.
        read:   gives the artifact. What it raises, the look raises.
    """

    def __init__(self, digest: str, read: Callable[[], Artifact]) -> None:
        self.digest = digest
        self._read = read

    @cached_property
    def _artifact(self) -> Artifact:
        return self._read()

    @property
    def manifest(self) -> Manifest:
        return self._artifact.manifest

    @property
    def payload(self) -> bytes:
        return self._artifact.payload


def contract_to_json(contract: Contract) -> dict[str, Any]:
    """The contract as plain JSON values."""
    return {**contract._asdict(), "params": [param._asdict() for param in contract.params]}


def contract_from_json(plain: dict[str, Any]) -> Contract:
    """The contract in a decoded JSON object.

    Raises: CorruptArtifact for a name no launch code may hold; KeyError, TypeError for another shape.
    """
    fields = {**plain, "params": tuple(Param(**param) for param in plain["params"])}
    for field in ("grid", "block", "scratch_bytes", "knobs", "tuned"):
        value = plain.get(field, ()) if field in ("knobs", "tuned") else plain[field]  # an older one has no knobs
        if not isinstance(value, list | tuple):  # a text would become its characters
            raise TypeError(f"{field} is {value!r}")
        fields[field] = tuple(value)
    contract = Contract(**fields)
    _check_names(contract)
    return contract


def _check_names(contract: Contract) -> None:
    """Raises CorruptArtifact for a name that launch code must not hold."""
    names = [*contract.constants, *(param.name for param in contract.params)]
    if not all(is_plain_name(name) for name in names):
        raise CorruptArtifact(f"contract of {contract.symbol} has a name that is no identifier", facts={"names": str(names)})


def manifest_from_json(plain: dict[str, Any]) -> Manifest:
    """The manifest in a decoded JSON object.

    Raises: CorruptArtifact when a field is missing, unknown, of another type or of another schema.
    """
    try:
        fields = {name: value for name, value in plain.items() if name not in ("schema", "self_sha256")}
        if plain["schema"] != MANIFEST_SCHEMA:
            raise CorruptArtifact(f"manifest has schema {plain['schema']!r}, this version reads {MANIFEST_SCHEMA}")
        manifest = Manifest(**{**fields, "contract": contract_from_json(fields["contract"])})
        _check_types(manifest)
        return manifest
    except (KeyError, TypeError, AttributeError) as error:
        raise CorruptArtifact(f"manifest cannot be read: {error}") from None


# Types of the fields in order: one comparison tells them all.
_PARAM_TYPES = (str, str, str, int, int, bool, bool, bool, int, int)
_MANIFEST_TYPES = (str, str, int, str, str, str, dict, str, Contract, dict)


def _check_types(manifest: Manifest) -> None:
    """Raises TypeError for a value of another type, or a digest that names no record. Quick: a client runs it at every hit."""
    contract = manifest.contract
    for param in contract.params:
        if tuple(map(type, param)) != _PARAM_TYPES:
            raise TypeError(f"a parameter has a value of another type: {param!r}")
    if tuple(map(type, manifest))[: len(_MANIFEST_TYPES)] != _MANIFEST_TYPES:
        raise TypeError(f"a field has another type: {manifest!r}")
    labelled = (*manifest.components.items(), *manifest.attachments.items(), *contract.needs.items())
    texts = [contract.symbol, contract.format, contract.shared_bytes, *contract.grid, *contract.block, manifest.reason]
    texts += [*contract.knobs, *contract.tuned, *(text for pair in labelled for text in pair)]
    for allowed, found in (
        ({str}, texts),
        ({int}, [contract.minimum_driver, *contract.scratch_bytes, *manifest.resources.values()]),
        ({bool}, [manifest.closed_world]),
        ({int, float}, [manifest.seconds, manifest.created_at]),
        ({bool, int, str}, [*manifest.spec.values(), *contract.constants.values()]),
    ):
        if not set(map(type, found)) <= allowed:
            raise TypeError(f"a value is no {' or '.join(sorted(kind.__name__ for kind in allowed))}: {found!r}")
    if not all(map(_DIGEST.fullmatch, (manifest.key, manifest.digest, *manifest.attachments.values()))):
        raise TypeError("a digest is not 64 hex digits")


def manifest_from_bytes(content: bytes, *, key: str) -> Manifest:
    """Read and check a stored manifest.

    Raises: CorruptArtifact when it is damaged, or belongs to another key.
    """
    plain = unsealed(content)
    if plain is None:
        raise CorruptArtifact(f"manifest of {key[:12]} is damaged: it does not match its own hash")
    manifest = manifest_from_json(plain)
    if manifest.key != key:
        raise CorruptArtifact(f"manifest under {key[:12]} belongs to {manifest.key[:12]}")
    return manifest
