"""The shapes of `kserve/protocol.py` as FastAPI documents and checks them (`reading.py` checks the same without it)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from kserve.knobs import KNOB_NAME
from kserve.protocol import PROTOCOL
from kserve.server.reading import (
    DIGEST,
    FILE_NAME,
    LONGEST_NAME,
    LONGEST_TEXT,
    LONGEST_WAIT_S,
    MOST_FILES,
    MOST_KERNELS,
    MOST_KNOBS,
    MOST_ROOTS,
    MOST_STAMPS,
    USES,
)
from kserve.spec import NAME
from kserve.tuning import MOST_ROWS

Digest = Annotated[str, StringConstraints(pattern=DIGEST)]
Text = Annotated[str, StringConstraints(max_length=LONGEST_TEXT)]
FileName = Annotated[str, StringConstraints(pattern=FILE_NAME, max_length=LONGEST_NAME)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ErrorModel(_Model):
    """An error: its stable code, what failed and why, further facts, the next step."""

    code: str
    message: str
    facts: dict[str, str]
    hint: str | None


class ErrorAnswer(_Model):
    """The one shape of an error, whatever its status."""

    error: ErrorModel


class EnvironmentModel(_Model):
    """The caller's interpreter, its extra path, the versions of torch and Triton it has imported, the CUDA toolkit it names."""

    python: Text
    python_path: list[Text] = Field(default=[], max_length=100)
    loaded: dict[Text, Text] = Field(default={}, max_length=10)
    cuda_home: Text = ""


class AliasModel(_Model):
    """The digest of the client's request, and the stamps of the files it read: an alias is kept for the next client."""

    request: Digest
    stamps: dict[Text, Annotated[list[int], Field(max_length=4)]] = Field(max_length=MOST_STAMPS)
    variables: dict[Text, Annotated[list[Text], Field(max_length=MOST_KNOBS)]] = Field(default={}, max_length=MOST_KNOBS)


class DeviceModel(_Model):
    """What a kernel will run on: the driver's name for it, multiprocessors, L2 cache, MIG profile."""

    name: Text
    sm_count: int
    l2_bytes: int
    mig: Text


class KnobsModel(_Model):
    """Values of knobs that the caller chose, the bucket of its sizes, its device: by the last two a tuning is found."""

    values: dict[Text, int] = Field(default={}, max_length=MOST_KNOBS)
    sizes: dict[Text, int] = Field(default={}, max_length=MOST_KNOBS)
    device: DeviceModel | None = None


class RootModel(_Model):
    """A directory or file that an extension may read; `use` says how, `identity` names the package it belongs to."""

    path: Annotated[str, StringConstraints(pattern=r"^/", max_length=LONGEST_TEXT)]
    use: Annotated[str, StringConstraints(pattern=USES, max_length=LONGEST_TEXT)]
    identity: Text


class OutsideModel(_Model):
    """What an extension may read besides its files, and the digests of what the caller has looked at of it."""

    roots: list[RootModel] = Field(max_length=MOST_ROOTS)
    digests: dict[Text, Annotated[str, StringConstraints(pattern=r"^(?:[0-9a-f]{64})?$")]] = Field(max_length=MOST_STAMPS)


class KernelModel(_Model):
    """One wanted kernel: `files` names every file of its folder by digest."""

    name: Text
    files: dict[FileName, Digest] = Field(max_length=MOST_FILES, json_schema_extra={"additionalProperties": False})
    spec: dict[Text, bool | int | Text] = Field(default={}, max_length=100)
    target: Text
    environment: EnvironmentModel
    build: bool = True
    debug: Literal["", "lineinfo", "device", "sanitize"] = ""
    alias: AliasModel | None = None
    knobs: KnobsModel | None = None
    generic: bool = True
    outside: OutsideModel | None = None


class ResolveModel(_Model):
    """Kernels to resolve; the answer is held back for at most `wait_s` seconds while they are built."""

    protocol: int = Field(json_schema_extra={"const": PROTOCOL})  # any other is answered in words, not as a malformed request
    version: Text
    client: Text
    wait_s: float = Field(ge=0, le=LONGEST_WAIT_S)
    kernels: list[KernelModel] = Field(max_length=MOST_KERNELS)


Finite = Annotated[float, Field(allow_inf_nan=False)]
Bounds = Annotated[list[Finite], Field(min_length=3, max_length=3)]
KnobName = Annotated[str, StringConstraints(pattern=f"^{KNOB_NAME.pattern}$")]
SizeName = Annotated[str, StringConstraints(pattern=f"^{NAME.pattern}$")]
_CLOSED: dict[str, Any] = {"additionalProperties": False}


class RowModel(_Model):
    """One configuration of a sweep and what became of it; `us` and `ratio` are a median and its bounds."""

    knobs: dict[KnobName, int] = Field(max_length=MOST_KNOBS, json_schema_extra=_CLOSED)
    state: Text
    reason: Text = ""
    us: Bounds | None = None
    ratio: Bounds | None = None
    resources: dict[Text, int] = Field(default={}, max_length=100)
    digest: Text = ""
    at: Finite = 0.0


class TuningModel(_Model):
    """The values of a kernel's knobs that won on one kind of device for one bucket of sizes, and the evidence."""

    base: Digest
    kernel: Text
    spec: dict[Text, bool | int | Text] = Field(max_length=100)
    target: Text
    device: DeviceModel
    sizes: dict[SizeName, int] = Field(max_length=MOST_KNOBS, json_schema_extra=_CLOSED)
    knobs: dict[KnobName, int] = Field(min_length=1, max_length=MOST_KNOBS, json_schema_extra=_CLOSED)
    rows: list[RowModel] = Field(max_length=MOST_ROWS)
    toolchain: Text
    version: Text
    created_at: Finite


KeyPrefix = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{6,64}$")]


class KeysModel(_Model):
    """Artifacts, by their keys or the beginnings of them."""

    keys: list[KeyPrefix] = Field(min_length=1, max_length=10_000)


class PinModel(KeysModel):
    """Artifacts to keep, and who wants that."""

    note: Text = "by hand"


class PruneModel(_Model):
    """Which artifacts to remove: those that fit every condition that is given; `all` where none is."""

    keys: list[KeyPrefix] = Field(default=[], max_length=10_000)
    name: Text = ""
    target: Text = ""
    unused_s: float = Field(default=0.0, ge=0, le=1e10)
    all: bool = False
    dry_run: bool = False

    @property
    def selects(self) -> bool:
        return bool(self.all or self.keys or self.name or self.target or self.unused_s)
