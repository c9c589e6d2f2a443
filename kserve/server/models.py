"""The shapes of `kserve/protocol.py` as FastAPI documents and checks them. The client never imports this file."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from kserve.build.planner import AliasWish, KernelRequest
from kserve.build.pool import Environment

Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Text = Annotated[str, StringConstraints(max_length=4096)]
# No parent folders, no absolute paths: the name becomes a path inside the staging directory.
FileName = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.+-]*(/[A-Za-z0-9_][A-Za-z0-9_.+-]*)*$", max_length=200)
]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class EnvironmentModel(_Model):
    """The caller's interpreter, its extra path, and the versions of torch and Triton it has imported."""

    python: Text
    python_path: list[Text] = Field(default=[], max_length=100)
    loaded: dict[Text, Text] = Field(default={}, max_length=10)


class AliasModel(_Model):
    """The digest of the client's request, and the stamps of the files it read: an alias is kept for the next client."""

    request: Digest
    stamps: dict[Text, Annotated[list[int], Field(max_length=4)]] = Field(max_length=5000)


class KernelModel(_Model):
    """One wanted kernel: `files` names every file of its folder by digest."""

    name: Text
    files: dict[FileName, Digest] = Field(max_length=1000)
    spec: dict[Text, bool | int | Text] = Field(default={}, max_length=100)
    target: Text
    environment: EnvironmentModel
    build: bool = True
    alias: AliasModel | None = None

    def to_request(self, *, may_alias: bool) -> KernelRequest:
        """The service's form of it; an alias is only taken from a client that runs as the daemon's own user."""
        environment = Environment(
            self.environment.python, tuple(self.environment.python_path), tuple(sorted(self.environment.loaded.items()))
        )
        alias = AliasWish(self.alias.request, self.alias.stamps) if self.alias and may_alias else None
        return KernelRequest(self.name, dict(self.files), dict(self.spec), self.target, environment, self.build, alias)


class ResolveModel(_Model):
    """Kernels to resolve; the answer is held back for at most `wait_s` seconds while they are built."""

    protocol: int
    version: Text
    client: Text
    wait_s: float = Field(ge=0, le=600)
    kernels: list[KernelModel] = Field(max_length=1000)


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
