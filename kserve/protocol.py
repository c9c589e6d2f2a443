"""What client and daemon say to each other: paths, versions, and the shapes of requests and answers.

Plain JSON objects over HTTP/1.1 on a unix socket. `kserve/server/models.py` describes the same shapes to FastAPI; here they
are built and read without importing it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kserve.artifact import Manifest, manifest_from_json
from kserve.errors import KserveError, ProtocolMismatch, ServiceError, from_wire

# Raised when an old client and a new daemon could misunderstand each other.
PROTOCOL = 2

HEALTH = "/v1/health"
STATUS = "/v1/status"
KERNELS = "/v1/kernels"
RESOLVE = "/v1/resolve"
SOURCES = "/v1/sources"
BUILDS = "/v1/builds"
ARTIFACTS = "/v1/artifacts"
WHY = "/v1/why"
VERIFY = "/v1/verify"
PRUNE = "/v1/prune"
PINS = "/v1/pins"
QUARANTINE = "/v1/quarantine"
TUNINGS = "/v1/tunings"
SHUTDOWN = "/v1/shutdown"

# Where a kernel came from, the most expensive first: several variants are described by the worst of theirs.
ORIGINS = ("built", "joined", "remote", "disk", "memo")


class Resolved(NamedTuple):
    """One variant of a kernel as the service answered it.

    Fields:
        origin, seconds: where it came from; spent on it.
        tuned:           a tuning chose the values of its knobs.
        base:            what its tunings are filed under; empty for a kernel without knobs.
    """

    manifest: Manifest
    origin: str
    seconds: float
    tuned: bool = False
    base: str = ""


class Pending(NamedTuple):
    """A build that is not done yet: which, how long it has run, how many wait in front of it."""

    build: str
    seconds: float
    n_ahead: int


def kernel_request(
    name: str,
    *,
    files: Mapping[str, str],
    spec: Mapping[str, object],
    target: str,
    environment: Mapping[str, Any],
    build: bool = True,
    alias: Mapping[str, Any] | None = None,
    debug: str = "",
) -> dict[str, Any]:
    """One wanted kernel.

    Args:
        files:       relative name -> digest of the kernel.toml and every source; the bytes are sent only when asked for.
        spec:        axis -> value, as the caller gave them.
        environment: interpreter, PYTHONPATH and imported versions of the caller (`config.environment_of_process`).
        build:       False makes a miss an error.
        alias:       `request`, `stamps` and `variables` of the caller, so that the next one needs no daemon; None for none.
        debug:       which debug variant; empty for none.
    Returns: the request, to which two fields may be added. `knobs` has the `values` that the caller chose, the bucket of its
        `sizes` and its `device`; `generic`, when False, leaves out the variant without argument facts.
    """
    plain = {axis: value if isinstance(value, bool | int | str) else str(value) for axis, value in spec.items()}
    return {
        "name": name,
        "files": dict(files),
        "spec": plain,
        "target": target,
        "environment": dict(environment),
        "build": build,
        "alias": alias,
        **({"debug": debug} if debug else {}),
    }


def with_outside(request: dict[str, Any], outside: Mapping[str, Any]) -> dict[str, Any]:
    """The same for an extension: with the `roots` that it may read, and `digests` of the files in them that were looked at."""
    return {**request, "outside": outside}


def resolve_request(kernels: list[dict[str, Any]], *, client: str, version: str, wait_s: float) -> dict[str, Any]:
    """A whole resolve request.

    Args:
        client:  a random name of this process: it tells the caller whose build it was.
        wait_s:  how long the daemon may hold the answer back; a build that takes longer is answered as pending.
    """
    return {"protocol": PROTOCOL, "version": version, "client": client, "wait_s": wait_s, "kernels": kernels}


def read_result(plain: Mapping[str, Any]) -> list[Resolved] | Pending | KserveError:
    """One kernel's part of a resolve answer: its variants (declared facts first), or pending, or the error.

    Raises: CorruptArtifact for a manifest, ServiceError for anything else that cannot be read.
    """
    try:
        if "error" in plain:
            return from_wire(plain["error"])
        if "pending" in plain:
            return _pending(**plain["pending"])
        return [_resolved(**variant) for variant in plain["variants"]]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ServiceError(f"the service sent a result of another form: {error!r}") from None


def _pending(build: str, seconds: float, n_ahead: int) -> Pending:
    return Pending(str(build), float(seconds), int(n_ahead))


def _resolved(manifest: dict[str, Any], origin: str, seconds: float, *, tuned: bool = False, base: str = "") -> Resolved:
    return Resolved(manifest_from_json(manifest), ORIGINS[ORIGINS.index(origin)], float(seconds), bool(tuned), str(base))


def check_protocol(theirs: object, *, version: str, ours: str) -> None:
    """Raises ProtocolMismatch, naming both versions, unless the other side speaks this protocol."""
    if theirs is True or theirs != PROTOCOL:
        raise ProtocolMismatch(
            f"kserve {version} (protocol {theirs}) and kserve {ours} (protocol {PROTOCOL}) cannot talk to each other",
            hint="run the same release on both sides; `kserve down` ends the running daemon",
        )
