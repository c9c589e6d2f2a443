"""The FastAPI application: routes, and the one JSON shape of an error."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

import kserve
from kserve.errors import KserveError, RequestError
from kserve.server import inspecting, routes, tunings, upkeep
from kserve.server.hot import Activity
from kserve.service import KernelService


def create_app(service: KernelService, activity: Activity, *, stop: Callable[[], None]) -> FastAPI:
    """The application over a service.

    Args:
        stop: called when a client asks the daemon to end.
    """

    app = FastAPI(title="kserve", version=kserve.__version__, docs_url=None, redoc_url=None)
    app.state.service = service
    app.state.stop = stop
    app.state.activity = activity
    app.state.disassembly = inspecting.Disassembly(service)
    for part in (routes, inspecting, upkeep, tunings):
        app.include_router(part.router)
    app.add_exception_handler(KserveError, _known_error)
    app.add_exception_handler(RequestValidationError, _invalid_body)
    app.add_exception_handler(HTTPException, _http_error)

    app.add_exception_handler(Exception, _unexpected)
    return app


def _answer(error: KserveError, status: int | None = None) -> JSONResponse:
    return JSONResponse({"error": error.to_wire()}, status_code=status or error.http_status)


async def _known_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, KserveError)
    return _answer(error)


async def _unexpected(request: Request, error: Exception) -> Response:
    """The edge: whatever was missed below has one shape; the server logs its traceback."""
    return _answer(KserveError(f"the daemon failed on {request.method} {request.url.path}: {error!r}"))


async def _invalid_body(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    problems = {".".join(str(part) for part in item["loc"]): str(item["msg"]) for item in error.errors()}
    return _answer(RequestError("the request does not have the documented form", facts=problems))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _answer(RequestError(f"{request.method} {request.url.path}: {error.detail}"), error.status_code)
