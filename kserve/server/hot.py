"""The hot road: what every client asks, answered without FastAPI. Everything else goes to the full application.

The full application is imported when it is first needed, or in a quiet moment: a daemon that a client has started answers that
client's first request half a second earlier. Its routes for the same paths call the functions below, so there is one answer.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

import kserve
from kserve import protocol
from kserve.build.includes import MissingIncludes
from kserve.build.planner import MissingSources
from kserve.errors import KserveError, RequestError
from kserve.protocol import Pending
from kserve.server.reading import read_resolve
from kserve.service import Answer, KernelService

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

logger = logging.getLogger("kserve")
_LARGEST_SOURCE_BYTES = 4 << 20
_LARGEST_BODY_BYTES = 32 << 20


class Activity:
    """How busy the daemon is: requests under way, and when the last one went."""

    def __init__(self) -> None:
        self.started_at = time.monotonic()
        self.n_open = 0
        self.last_request = time.monotonic()


class HotRoad:
    """The ASGI application of a daemon.

    Args:
        activity: kept true by every request.
        full:     makes the full application.
    """

    def __init__(self, service: KernelService, activity: Activity, full: Callable[[], ASGIApp]) -> None:
        self._service = service
        self.activity = activity
        self._make_full = full
        self._full: asyncio.Task[ASGIApp] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        self.activity.n_open += 1
        try:
            answer = self._answer_for(scope, receive)
            if answer is None:
                await (await self.full())(scope, receive, send)
            else:
                await _reply(send, *await _settled(scope, answer))
        finally:
            self.activity.n_open -= 1
            self.activity.last_request = time.monotonic()

    def _answer_for(self, scope: Scope, receive: Receive) -> Awaitable[dict[str, Any]] | None:
        match scope["method"], scope["path"]:
            case "GET", protocol.HEALTH:
                return _now(health())
            case "POST", protocol.RESOLVE:
                return self._resolve(scope, receive)
            case "POST", protocol.SOURCES:
                return self._add_source(receive)
        return None

    async def _resolve(self, scope: Scope, receive: Receive) -> dict[str, Any]:
        content = await whole(_chunks(receive), most=_LARGEST_BODY_BYTES)
        return await resolve(self._service, content, uid=uid_of(scope.get("client")))

    async def _add_source(self, receive: Receive) -> dict[str, Any]:
        return await add_source(self._service, _chunks(receive))

    async def full(self) -> ASGIApp:
        """The full application, imported in a thread the first time."""
        if self._full is None:
            self._full = asyncio.create_task(asyncio.to_thread(self._make_full))
        return await asyncio.shield(self._full)


async def _now(plain: dict[str, Any]) -> dict[str, Any]:
    return plain


async def _settled(scope: Scope, answer: Awaitable[dict[str, Any]]) -> tuple[int, dict[str, Any]]:
    """HTTP status and JSON of an answer: an error has the one shape, and what was missed below is logged."""
    try:
        return 200, await answer
    except KserveError as error:
        return error.http_status, {"error": error.to_wire()}
    except Exception as error:  # the edge
        logger.exception("failed method=%s path=%s", scope["method"], scope["path"])
        return 500, {"error": KserveError(f"the daemon failed on {scope['method']} {scope['path']}: {error!r}").to_wire()}


async def _reply(send: Send, status: int, plain: dict[str, Any]) -> None:
    content = json.dumps(plain, separators=(",", ":")).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})


async def _chunks(receive: Receive) -> AsyncIterator[bytes]:
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RequestError("the client went away before it had sent the whole body")
        yield message.get("body", b"")
        more = message.get("more_body", False)


async def whole(chunks: AsyncIterator[bytes], *, most: int) -> bytes:
    """A whole body. Raises: RequestError when it is larger than `most` bytes."""
    content = bytearray()
    async for chunk in chunks:
        content += chunk
        if len(content) > most:
            raise RequestError(f"a request's body is larger than {most} bytes")
    return bytes(content)


def uid_of(client: Any) -> int | None:
    """The uid behind a connection, where `daemon.PeerCheckedProtocol` has noted it."""
    return client[1] if client and client[0] == "uid" else None


def health() -> dict[str, Any]:
    """Alive, and which protocol it speaks."""
    return {"status": "ok", "protocol": protocol.PROTOCOL, "version": kserve.__version__, "pid": os.getpid()}


async def resolve(service: KernelService, content: bytes, *, uid: int | None) -> dict[str, Any]:
    """Find or build kernels. Raises: RequestError, ProtocolMismatch; what is wrong with one kernel is in its result."""
    request = read_resolve(content, may_alias=uid == os.getuid())
    protocol.check_protocol(request.protocol, version=request.version, ours=kserve.__version__)
    asked = []
    for kernel in request.kernels:
        asked.append(asyncio.create_task(service.resolve(kernel, client=request.client, wait_s=request.wait_s)))
        await asyncio.sleep(0)  # the first builds begin while the last kernels of a large batch are still being planned
    answers = await asyncio.gather(*asked, return_exceptions=True)
    return {"results": [_result(answer) for answer in answers]}


def _result(answer: Answer | BaseException) -> dict[str, Any]:
    if isinstance(answer, KserveError):
        return {"error": answer.to_wire()}
    if isinstance(answer, BaseException):
        raise answer
    if isinstance(answer, MissingSources):
        return {"missing": answer.digests}
    if isinstance(answer, MissingIncludes):
        return {"includes": answer.names}
    if isinstance(answer, Pending):
        return {"pending": answer._asdict()}
    return {"variants": [{**found._asdict(), "manifest": found.manifest.to_json()} for found in answer]}


async def add_source(service: KernelService, chunks: AsyncIterator[bytes]) -> dict[str, Any]:
    """Keep one uploaded file."""
    content = await whole(chunks, most=_LARGEST_SOURCE_BYTES)
    return {"digest": await asyncio.to_thread(service.artifacts.add_source, content)}
