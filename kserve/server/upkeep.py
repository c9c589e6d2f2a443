"""The routes that change what the store keeps: prune, pins, quarantine."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import APIRouter

from kserve import protocol
from kserve.artifact import Manifest
from kserve.server.models import ErrorAnswer, KeysModel, PinModel, PruneModel
from kserve.server.routes import Service, find
from kserve.service import KernelService

router = APIRouter(responses={"default": {"model": ErrorAnswer, "description": "An error; docs/errors.md lists the codes."}})


@router.post(protocol.PRUNE)
async def prune(body: PruneModel, service: Service) -> dict[str, Any]:
    """Remove artifacts by key, kernel, target or age; without any of these, only what the bounds and nobody's name ask for."""
    return await asyncio.to_thread(_prune, service, body)


def _prune(service: KernelService, body: PruneModel) -> dict[str, Any]:
    upkeep = service.upkeep
    if body.dry_run:
        found, pins = _selected(service, body), upkeep.pins()
        keys, pinned = [key for key in found if key not in pins], [key for key in found if key in pins]
        return {"dry_run": True, "keys": keys, "pinned": pinned, "n_unnamed": 0, "freed_bytes": 0}
    collected = upkeep.collect()
    pruned = upkeep.prune(_selected(service, body))
    return {
        "dry_run": False,
        "keys": [*collected.keys, *pruned.keys],
        "pinned": pruned.pinned,
        "n_unnamed": collected.n_unnamed + pruned.n_unnamed,
        "freed_bytes": collected.freed_bytes + pruned.freed_bytes,
    }


def _selected(service: KernelService, body: PruneModel) -> list[str]:
    """Keys that fit every condition of the request, none when it has none; only this store's own, never a layer's."""
    if not body.selects:
        return []
    own = {key: stat.st_mtime for key, stat in service.upkeep.files.stats("manifest")}
    named = {find(service, key).key for key in body.keys} if body.keys else set(own)
    used_before = time.time() - body.unused_s
    old = sorted(key for key in named & set(own) if own[key] <= used_before)
    if not body.name and not body.target:
        return old
    return [key for key in old if _fits(service.artifacts.manifest(key), body)]


def _fits(manifest: Manifest | None, body: PruneModel) -> bool:
    return manifest is not None and body.name in ("", manifest.name) and body.target in ("", manifest.target)


@router.get(protocol.PINS)
async def pins(service: Service) -> dict[str, Any]:
    """The keys that are never evicted, with who wants that."""
    return {"pins": await asyncio.to_thread(_pins, service)}


def _pins(service: KernelService) -> dict[str, str]:
    notes = {key: service.artifacts.get(f"pin/{key}") for key in sorted(service.upkeep.pins())}
    return {key: note.decode(errors="replace") for key, note in notes.items() if note is not None}


@router.post(protocol.PINS)
async def pin(body: PinModel, service: Service) -> dict[str, Any]:
    """Never evict these artifacts."""
    keys = [find(service, key).key for key in body.keys]
    await asyncio.to_thread(service.upkeep.pin, keys, body.note)
    return {"pinned": keys}


@router.post(protocol.PINS + "/remove")
async def unpin(body: KeysModel, service: Service) -> dict[str, Any]:
    """Let these artifacts be evicted again."""
    pinned = service.upkeep.pins()
    keys = [key for prefix in body.keys for key in sorted(pinned) if key.startswith(prefix)]
    await asyncio.to_thread(service.upkeep.unpin, keys)
    return {"unpinned": keys}


@router.get(protocol.QUARANTINE)
async def quarantine(service: Service) -> dict[str, Any]:
    """What was put aside: file name, size, when."""
    found = await asyncio.to_thread(service.upkeep.files.put_aside)
    return {"files": [{"name": path.name, "size_bytes": stat.st_size, "put_aside_at": stat.st_ctime} for path, stat in found]}


@router.post(protocol.QUARANTINE + "/purge")
async def purge(service: Service) -> dict[str, Any]:
    """Remove what was put aside."""
    n_files, freed = await asyncio.to_thread(service.upkeep.purge_quarantine)
    return {"n_files": n_files, "freed_bytes": freed}
