"""The routes that look into one artifact: contract, occupancy, instructions, SASS."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response

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


class Disassembly:
    """SASS of a service's artifacts, one disassembler at a time: it takes a core, and nobody waits for it but who looks.

    The instruction mix of many binaries and the text of the last one are remembered.
    """

    def __init__(self, service: KernelService) -> None:
        self._service = service
        self._one = asyncio.Lock()
        self._last = ("", "")
        self._mixes: dict[str, dict[str, int]] = {}

    async def sass(self, manifest: Manifest) -> str:
        """The text. Raises: BuildError where it cannot be had, CorruptArtifact, StoreError."""
        async with self._one:
            if self._last[0] != manifest.digest:
                self._last = (manifest.digest, await self._disassembled(manifest))
            return self._last[1]

    async def mix(self, manifest: Manifest) -> dict[str, int]:
        """How many instructions of each class. Raises as `sass`."""
        if manifest.digest not in self._mixes:
            found = await asyncio.to_thread(instruction_mix, await self.sass(manifest))
            remember(self._mixes, manifest.digest, found)
        return self._mixes[manifest.digest]

    async def _disassembled(self, manifest: Manifest) -> str:
        if manifest.contract.format != "cubin":
            raise BuildError(
                f"not available for {manifest.target}: nvdisasm reads cubins, this is a {manifest.contract.format}"
            )
        tool = find_disassembler()
        content = await asyncio.to_thread(self._service.artifacts.payload, manifest)
        if content is None:
            raise CorruptArtifact(
                f"payload of {manifest.key[:12]} was damaged and is put aside", hint="ask for the kernel again"
            )
        staging = await asyncio.to_thread(self._service.scratch.stage, {"payload.cubin": content})
        try:
            return await disassemble(tool, staging.root / "src" / "payload.cubin", lines=bool(manifest.debug))
        finally:
            await asyncio.to_thread(staging.remove)


async def _disassembly(request: Request) -> Disassembly:
    found: Disassembly = request.app.state.disassembly
    return found


Looks = Annotated[Disassembly, Depends(_disassembly)]


@router.get(protocol.ARTIFACTS + "/{key}")
async def one_artifact(
    key: KeyPrefix,
    service: Service,
    looks: Looks,
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
        facts["instructions"] = await _instructions(looks, manifest)
    return {"manifest": manifest.to_json(), "attachments": texts, "facts": facts}


@router.get(protocol.ARTIFACTS + "/{key}/sass", response_class=Response)
async def sass(key: KeyPrefix, service: Service, looks: Looks) -> Response:
    """The machine code as nvdisasm prints it, with source lines for a debug variant."""
    return Response(await looks.sass(find(service, key)), media_type="text/plain; charset=utf-8")


def _occupancy(manifest: Manifest) -> dict[str, Any]:
    found = occupancy_of(manifest)
    return {**found._asdict(), "percent": found.percent} if isinstance(found, Occupancy) else {"unavailable": found}


async def _instructions(looks: Disassembly, manifest: Manifest) -> dict[str, Any]:
    try:
        return dict(await looks.mix(manifest))
    except BuildError as error:
        return {"unavailable": error.message, **({"hint": error.hint} if error.hint else {})}
