"""The routes under /v1."""

from __future__ import annotations

import asyncio
import math
import os
import time
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Path, Query, Request, Response
from fastapi.responses import JSONResponse

import kserve
from kserve import protocol
from kserve.artifact import Manifest
from kserve.catalog import every_entry
from kserve.errors import CorruptArtifact, NotBuilt, RequestError
from kserve.key import differences
from kserve.server import hot
from kserve.server.models import ErrorAnswer, ResolveModel
from kserve.service import KernelService
from kserve.store.verify import verify as verify_store

router = APIRouter(responses={"default": {"model": ErrorAnswer, "description": "An error; docs/errors.md lists the codes."}})
_SHORTEST_PREFIX = 6


async def _service(request: Request) -> KernelService:
    """A coroutine although it waits for nothing: FastAPI sends plain functions through a thread, 0.3 ms a request."""
    service: KernelService = request.app.state.service
    return service


Service = Annotated[KernelService, Depends(_service)]
KeyText = Annotated[str, Query(pattern=rf"^[0-9a-f]{{{_SHORTEST_PREFIX},64}}$")]
KeyPrefix = Annotated[str, Path(pattern=rf"^[0-9a-f]{{{_SHORTEST_PREFIX},64}}$")]


@router.get(protocol.HEALTH)
async def health() -> dict[str, Any]:
    """Alive, and which protocol it speaks."""
    return hot.health()


@router.get(protocol.STATUS)
async def status(request: Request, service: Service) -> dict[str, Any]:
    """Version, workers, queue, counters, store."""
    return {
        "version": kserve.__version__,
        "protocol": protocol.PROTOCOL,
        "pid": os.getpid(),
        "uptime_s": time.monotonic() - request.app.state.activity.started_at,
        "socket": str(service.settings.socket),
        "idle_s": service.settings.idle_s if math.isfinite(service.settings.idle_s) else None,
        "jobs": service.settings.jobs,
        "n_running": service.pool.n_running,
        "n_queued": service.pool.n_queued,
        "counters": dict(service.counters),
        "lifetime": service.lifetime(),
        "workers": service.pool.to_json(),
        "store": {
            "path": str(service.artifacts.files.root),
            **await asyncio.to_thread(_store_status, service),
        },
    }


def _store_status(service: KernelService) -> dict[str, Any]:
    artifacts, upkeep = service.artifacts, service.upkeep
    usage = upkeep.usage()
    return {
        "size_bytes": usage.size_bytes,
        "n_files": usage.n_files,
        "max_bytes": upkeep.bounds.max_bytes,
        "max_files": upkeep.bounds.max_files,
        "n_artifacts": usage.n_artifacts + artifacts.n_in_memory,
        "n_pinned": len(upkeep.pins()),
        "n_quarantined": artifacts.files.n_quarantined,
        "n_in_quarantine": len(artifacts.files.put_aside()),
        "layers": [str(store.root) for store in artifacts.layers.stores],
        "refused_layers": {str(root): why for root, why in artifacts.layers.refused.items()},
        "index": upkeep.index.stale or "sound",
        "degraded": artifacts.degraded or service.scratch.refused,
    }


@router.get(protocol.KERNELS)
async def kernels(service: Service) -> dict[str, Any]:
    """The kernels on the daemon's own search path."""
    return {
        "kernels": [
            {
                "name": entry.name,
                "language": definition.language,
                "summary": entry.summary,
                "axes": {axis.name: axis.allowed for axis in definition.axes.values()},
            }
            for _, definition, entry in every_entry(service.settings)
        ]
    }


@router.post(protocol.RESOLVE)
async def resolve(request: Request, _: ResolveModel, service: Service) -> JSONResponse:
    """Find or build kernels. Each result has `variants`, or `pending`, `missing` (sources to upload) or `error`."""
    # Encoded here: FastAPI would walk every manifest first, to find nothing it has to convert.
    return JSONResponse(await hot.resolve(service, await request.body(), uid=hot.uid_of(request.client)))


@router.post(protocol.SOURCES)
async def add_source(service: Service, request: Request) -> dict[str, Any]:
    """Upload one file, as the raw body."""
    return await hot.add_source(service, request.stream())


@router.get(protocol.BUILDS)
async def builds(service: Service, limit: Annotated[int, Query(ge=1, le=2000)] = 100) -> dict[str, Any]:
    """Running builds, then ended ones, newest first."""
    return {"builds": [lease.to_json() for lease in service.leases.all()[:limit]]}


@router.get(protocol.BUILDS + "/{build_id}")
async def one_build(build_id: str, service: Service) -> dict[str, Any]:
    """One build with its log so far."""
    lease = service.leases.find(build_id)
    if lease is None:
        raise NotBuilt(f"there is no build {build_id!r}: the daemon remembers the last ones only")
    return {**lease.to_json(), "log": lease.log()}


@router.get(protocol.ARTIFACTS)
async def artifacts(
    service: Service,
    name: Annotated[str, Query(max_length=100)] = "",
    target: Annotated[str, Query(max_length=100)] = "",
) -> dict[str, Any]:
    """Every artifact in the store, newest first."""
    return {"artifacts": await asyncio.to_thread(_listed, service, name, target)}


def _listed(service: KernelService, name: str, target: str) -> list[dict[str, Any]]:
    pinned = service.upkeep.pins()
    found = [
        {**_summary(manifest), "pinned": manifest.key in pinned}
        for manifest in service.artifacts.manifests()
        if name in ("", manifest.name) and target in ("", manifest.target)
    ]
    return sorted(found, key=lambda row: -row["created_at"])


def _summary(manifest: Manifest) -> dict[str, Any]:
    plain = manifest.to_json()
    left_out = ("components", "contract", "attachments")
    return {**{field: value for field, value in plain.items() if field not in left_out}, "debug": manifest.debug}


@router.get(protocol.ARTIFACTS + "/{key}/payload", response_class=Response)
async def payload(key: KeyPrefix, service: Service) -> Response:
    """The verified binary."""
    manifest = find(service, key)
    content = service.artifacts.payload(manifest)
    if content is None:
        raise CorruptArtifact(f"payload of {key[:12]} was damaged and is put aside", hint="ask for the kernel again")
    return Response(content, media_type="application/octet-stream", headers={"x-kserve-digest": manifest.digest})


def find(service: KernelService, prefix: str) -> Manifest:
    """The one artifact whose key begins so. Raises: NotBuilt, RequestError when there are several."""
    keys = [prefix] if len(prefix) == 64 else service.artifacts.keys(prefix)
    if len(keys) > 1:
        raise RequestError(f"{len(keys)} artifacts begin with {prefix!r}", facts={"keys": ", ".join(sorted(keys)[:5])})
    manifest = service.artifacts.manifest(keys[0]) if keys else None
    if manifest is None:
        raise NotBuilt(f"no artifact has a key that begins with {prefix!r}", hint="kserve cache ls lists them")
    return manifest


@router.get(protocol.WHY)
async def why(service: Service, key: KeyText, other: KeyText | None = None) -> dict[str, Any]:
    """Why a key is not another: the components that differ. Without `other` the nearest artifact of the same kernel."""
    manifest = find(service, key)
    against = find(service, other).key if other else None
    if against is None:
        near = service.artifacts.reasons.nearest(manifest.key, manifest.name, manifest.variant, manifest.components)
        against = near[0] if near else None
    known = service.artifacts.manifest(against) if against else None
    changed = differences(known.components, manifest.components) if known else []
    return {"key": manifest.key, "other": against, "reason": manifest.reason, "differences": changed}


@router.post(protocol.VERIFY)
async def verify(
    service: Service,
    sample: Annotated[int | None, Query(ge=1, le=10**9)] = None,
    rebuild: Annotated[bool, Query()] = False,  # noqa: FBT002 - a query parameter has a name
) -> dict[str, Any]:
    """Read every record, or a sample, against its digest; what is damaged is put aside and built again when asked for.

    With `rebuild` the artifacts, or a sample of them, are built again and compared; the answer then has `n_rebuilt`,
    `differing`, `failed` and `skipped`.
    """
    found = await asyncio.to_thread(verify_store, service.artifacts.files, sample=sample)
    for name in found.damaged:
        service.artifacts.reasons.lose(name.partition("/")[2], "quarantined: digest mismatch")
    return {**found._asdict(), **((await service.rebuild(sample=sample)).to_json() if rebuild else {})}


@router.post(protocol.SHUTDOWN)
async def shutdown(request: Request, _: Annotated[dict[str, Any] | None, Body()] = None) -> dict[str, Any]:
    """End the daemon, running builds included."""
    return hot.shut_down(request.app.state.stop)
