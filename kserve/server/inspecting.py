"""The routes that look into one artifact: contract, occupancy, instructions, SASS."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from kserve import protocol
from kserve.artifact import Manifest
from kserve.errors import BuildError, CorruptArtifact
from kserve.occupancy import Occupancy, occupancy_of
from kserve.server.models import ErrorAnswer
from kserve.server.routes import KeyPrefix, Service, find
from kserve.service import KernelService
from kserve.store.artifacts import remember
from kserve.toolchain.disassembler import disassemble, find_disassembler
from kserve.toolchain.sass import instruction_mix

router = APIRouter(responses={"default": {"model": ErrorAnswer, "description": "An error; docs/errors.md lists the codes."}})
# One at a time: a disassembler takes a core, and nobody waits for it but who looks.
_one = asyncio.Lock()
_mixes: dict[str, dict[str, int]] = {}


@router.get(protocol.ARTIFACTS + "/{key}")
async def one_artifact(
    key: KeyPrefix,
    service: Service,
    instructions: Annotated[bool, Query()] = False,  # noqa: FBT002 - a query parameter has a name
) -> dict[str, Any]:
    """One artifact by its key, or the beginning of it: manifest with key components and launch contract, occupancy, log, PTX.

    With `instructions` also how many of each class its code has; the first look at a binary takes a disassembler's time. A fact
    that cannot be had is `{"unavailable": why}`.
    """
    manifest = find(service, key)
    texts = {kind: service.artifacts.attachment(manifest, kind) for kind in sorted(manifest.attachments)}
    facts: dict[str, Any] = {"occupancy": _occupancy(manifest)}
    if instructions:
        facts["instructions"] = await _instructions(service, manifest)
    return {"manifest": manifest.to_json(), "attachments": texts, "facts": facts}


@router.get(protocol.ARTIFACTS + "/{key}/sass", response_class=Response)
async def sass(key: KeyPrefix, service: Service) -> Response:
    """The machine code as nvdisasm prints it, with source lines for a debug variant."""
    return Response(await _sass(service, find(service, key)), media_type="text/plain; charset=utf-8")


def _occupancy(manifest: Manifest) -> dict[str, Any]:
    found = occupancy_of(manifest)
    return {**found._asdict(), "percent": found.percent} if isinstance(found, Occupancy) else {"unavailable": found}


async def _instructions(service: KernelService, manifest: Manifest) -> dict[str, Any]:
    found = _mixes.get(manifest.digest)
    if found is None:
        try:
            text = await _sass(service, manifest)
        except BuildError as error:
            return {"unavailable": error.message, **({"hint": error.hint} if error.hint else {})}
        found = await asyncio.to_thread(instruction_mix, text)
        remember(_mixes, manifest.digest, found)
    return dict(found)


async def _sass(service: KernelService, manifest: Manifest) -> str:
    """Raises: BuildError where it cannot be had."""
    if manifest.contract.format != "cubin":
        raise BuildError(f"not available for {manifest.target}: nvdisasm reads cubins, this is a {manifest.contract.format}")
    tool = find_disassembler()
    content = await asyncio.to_thread(service.artifacts.payload, manifest)
    if content is None:
        raise CorruptArtifact(f"payload of {manifest.key[:12]} was damaged and is put aside", hint="ask for the kernel again")
    async with _one:
        staging = await asyncio.to_thread(service.scratch.stage, {"payload.cubin": content})
        try:
            return await disassemble(tool, staging.root / "src" / "payload.cubin", lines=bool(manifest.debug))
        finally:
            await asyncio.to_thread(staging.remove)
