"""The hot road: what every client asks, answered without FastAPI. Everything else goes to the full application.

The full application is imported when it is first needed, or in a quiet moment: a daemon that a client has started answers that
client's first request half a second earlier. Its routes for the same paths call the functions below, so there is one answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

import kserve
from kserve import protocol
from kserve.build.includes import MissingIncludes
from kserve.build.planner import MissingSources
from kserve.errors import KserveError, RequestError, ServiceError
from kserve.protocol import Pending
from kserve.server.reading import check_object, read_resolve
from kserve.service import Answer, KernelService

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger("kserve")
_LARGEST_SOURCE_BYTES = 4 << 20
_LARGEST_BODY_BYTES = 32 << 20
_IMPORT_AGAIN_S = 60.0


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
        stop:     called when a client asks the daemon to end.
    """

    def __init__(
        self, service: KernelService, activity: Activity, full: Callable[[], ASGIApp], *, stop: Callable[[], None]
    ) -> None:
        self._service = service
        self.activity = activity
        self._make_full, self._stop = full, stop
        self._full: asyncio.Task[ASGIApp] | None = None
        self._complaint, self._again_at = "", 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        self.activity.n_open += 1
        try:
            answer = self._answer_for(scope, receive)
            if answer is None:
                await self._pass_on(scope, receive, send)
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
            case "POST", protocol.SHUTDOWN:
                return self._shut_down(receive)
        return None

    async def _shut_down(self, receive: Receive) -> dict[str, Any]:
        check_object(await whole(_chunks(receive), most=_LARGEST_BODY_BYTES))
        return shut_down(self._stop)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the full application answer; what it raises before it has said anything is answered here."""
        has_begun = False

        async def noted(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await (await self.full())(scope, receive, noted)
        except Exception as error:
            if has_begun:  # answered, and raised for the server's log
                raise
            await _reply(send, *_refused(scope, error))

    async def _resolve(self, scope: Scope, receive: Receive) -> dict[str, Any]:
        content = await whole(_chunks(receive), most=_LARGEST_BODY_BYTES)
        return await resolve(self._service, content, uid=uid_of(scope.get("client")))

    async def _add_source(self, receive: Receive) -> dict[str, Any]:
        return await add_source(self._service, _chunks(receive))

    async def full(self) -> ASGIApp:
        """The full application, imported in a thread the first time, and again each time until that succeeds.

        Raises: ServiceError when it cannot be imported.
        """
        if self._full is None:
            self._full = asyncio.create_task(asyncio.to_thread(self._imported))
            self._full.add_done_callback(self._forget_failure)
        return await asyncio.shield(self._full)

    async def prepare(self) -> None:
        """The same in a quiet moment; an import that has failed is not tried again for a minute."""
        if time.monotonic() >= self._again_at:
            with contextlib.suppress(ServiceError):  # it is in the log, and in the answer to whoever asks
                await self.full()

    def _imported(self) -> ASGIApp:
        importlib.invalidate_caches()  # what was installed since the last attempt counts
        try:
            return self._make_full()
        except Exception as error:
            self._again_at = time.monotonic() + _IMPORT_AGAIN_S
            complaint = f"the daemon cannot import its HTTP application: {error}"
            if complaint != self._complaint:
                self._complaint = complaint
                logger.error("unusable application python=%s error=%s", sys.executable, error)  # noqa: TRY400 - one line
            hint = f"{sys.executable} -m pip install --force-reinstall 'kserve-jit[daemon]'; the daemon needs no restart"
            raise ServiceError(complaint, hint=hint) from error

    def _forget_failure(self, task: asyncio.Task[ASGIApp]) -> None:
        if task.cancelled() or task.exception() is not None:
            self._full = None


async def _now(plain: dict[str, Any]) -> dict[str, Any]:
    return plain


async def _settled(scope: Scope, answer: Awaitable[dict[str, Any]]) -> tuple[int, bytes]:
    """HTTP status and content of an answer."""
    try:
        return 200, _content(await answer)
    except Exception as error:  # noqa: BLE001 - the edge
        return _refused(scope, error)


def _refused(scope: Scope, error: Exception) -> tuple[int, bytes]:
    """An error has the one shape, and what was missed below is logged."""
    if isinstance(error, KserveError):
        return error.http_status, _content({"error": error.to_wire()})
    logger.error("failed method=%s path=%s", scope["method"], scope["path"], exc_info=error)
    return 500, _content({"error": KserveError(f"the daemon failed on {scope['method']} {scope['path']}: {error!r}").to_wire()})


def _content(plain: dict[str, Any]) -> bytes:
    return json.dumps(plain, separators=(",", ":")).encode()


async def _reply(send: Send, status: int, content: bytes) -> None:
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


def shut_down(stop: Callable[[], None]) -> dict[str, Any]:
    """End the daemon, running builds included."""
    stop()
    return {"status": "stopping", "pid": os.getpid()}


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
