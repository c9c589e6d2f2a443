"""The routes for tunings: what won on which device, with its evidence."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query

from kserve import protocol
from kserve.errors import NotBuilt
from kserve.server.models import ErrorAnswer, TuningModel
from kserve.server.routes import Service
from kserve.tuning import Tuning, tuning_from_json

router = APIRouter(responses={"default": {"model": ErrorAnswer, "description": "An error; docs/errors.md lists the codes."}})
TuningName = Annotated[str, Path(pattern=r"^[0-9a-f]{64}$")]


@router.get(protocol.TUNINGS)
async def tunings(service: Service, name: Annotated[str, Query(max_length=100)] = "") -> dict[str, Any]:
    """Every tuning of the store and its layers, or one kernel's, newest first."""
    found = await asyncio.to_thread(service.planner.tunings.all, name)
    return {"tunings": [_named(tuning) for tuning in found]}


@router.get(protocol.TUNINGS + "/{name}")
async def one_tuning(name: TuningName, service: Service) -> dict[str, Any]:
    """One tuning by its name."""
    found = await asyncio.to_thread(service.planner.tunings.get, name)
    if found is None:
        raise NotBuilt(f"there is no tuning {name[:12]}")
    return _named(found)


@router.post(protocol.TUNINGS)
async def publish(service: Service, body: TuningModel) -> dict[str, Any]:
    """Keep a tuning, in place of the one for the same kernel, device and sizes."""
    found = tuning_from_json(body.model_dump())
    assert found is not None, "the model allows no more than the reader"
    await asyncio.to_thread(service.planner.tunings.publish, found)
    return {"name": found.name}


@router.post(protocol.TUNINGS + "/{name}/remove")
async def remove(name: TuningName, service: Service) -> dict[str, Any]:
    """Forget a tuning: its kernel has the default values again. One of a layer stays."""
    await asyncio.to_thread(service.upkeep.discard, f"tuning/{name}")
    return {"name": name}


def _named(tuning: Tuning) -> dict[str, Any]:
    return {"name": tuning.name, **tuning.to_json()}
