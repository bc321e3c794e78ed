"""The endpoints: paths, and what is answered where a request fails."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from moestro.serve import fields
from moestro.serve.guard import Guard
from moestro.serve.handlers import HANDLERS, accepted, check_model
from moestro.serve.metrics import CONTENT_TYPE
from moestro.serve.problem import ApiError, answered, refused
from moestro.serve.service import Service

PATHS = {"/v1/chat/completions": "chat", "/v1/completions": "completions", "/v1/responses": "responses"}

_logger = logging.getLogger("moestro.serve")


def make_app(service: Service, keys: Sequence[str] = ()) -> ASGIApp:
    """The ASGI application of a service; with keys, nothing but /health answers without one of them."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    for path, endpoint in PATHS.items():
        app.add_api_route(path, _route(service, endpoint), methods=["POST"])
    app.add_api_route("/health", _health(service), methods=["GET"])
    app.add_api_route("/metrics", _metrics(service), methods=["GET"])
    app.add_api_route("/v1/models", _models(service), methods=["GET"])
    app.add_api_route("/load_model", _load_model(service), methods=["POST"])
    app.add_api_route("/v1/models/{name:path}", _one_model(service), methods=["GET"])
    _handle_errors(app, service)
    return Guard(app, service, keys)


def _route(service: Service, endpoint: str) -> Callable[[Request], Awaitable[Any]]:
    handler, prefix = HANDLERS[endpoint]

    async def respond(request: Request) -> Any:
        asked = fields.read(endpoint, parse(await request.body()))
        return await handler(service, asked, request).respond(prefix)

    return respond


def parse(body: bytes) -> Any:
    """A body as JSON in UTF-8, which has neither NaN nor halves of characters.

    Raises:
        ApiError: it is none.
    """
    try:
        found = json.loads(body.decode(), parse_constant=_no_constant)
        json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        why = str(error).partition(":")[0] or type(error).__name__
        raise refused(None, got=f"a body that is no JSON ({why[:80]})", needs="JSON", fix="Mend it.") from None
    return found


def _no_constant(name: str) -> None:
    raise refused(None, got=f"a body with {name}", needs="JSON, which has none", fix="Leave it out.")


def _health(service: Service) -> Callable[[], Awaitable[JSONResponse]]:
    async def health() -> JSONResponse:
        return JSONResponse(service.health())

    return health


def _metrics(service: Service) -> Callable[[], Awaitable[Response]]:
    async def metrics() -> Response:
        return Response(service.metrics.text, media_type=CONTENT_TYPE)

    return metrics


def _models(service: Service) -> Callable[[], Awaitable[JSONResponse]]:
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [service.describe()]})

    return models


def _load_model(service: Service) -> Callable[[Request], Awaitable[Response]]:
    """What `transformers chat` asks for before it begins; here nothing is ever loaded."""

    async def load_model(request: Request) -> Response:
        body = fields.mapping("body", parse(await request.body()))
        check_model(service, body.get("model"))
        ready = json.dumps({"status": "ready", "model": service.name, "cached": True})
        return Response(f"data: {ready}\n\n", media_type="text/event-stream")

    return load_model


def _one_model(service: Service) -> Callable[[str], Awaitable[JSONResponse]]:
    async def one_model(name: str) -> JSONResponse:
        check_model(service, name)
        return JSONResponse(service.describe())

    return one_model


def _handle_errors(app: FastAPI, service: Service) -> None:
    async def by_us(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ApiError)
        if not accepted(request):  # else it is counted by how it ended
            service.metrics.refused(error.status)
        return JSONResponse(error.body, error.status, error.headers)

    async def by_framework(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        status = error.status_code if error.status_code in (404, 405) else 400
        got = f"{request.method[:20]} {request.url.path[:100]}" if status in (404, 405) else str(error.detail)
        fix = f"The endpoints are {', '.join(PATHS)}, /v1/models, /metrics and /health."
        problem = answered(status, got=got, fix=fix)
        service.metrics.refused(status)
        return JSONResponse(problem.body, status, dict(error.headers or {}))

    async def unforeseen(request: Request, error: Exception) -> JSONResponse:
        _logger.error("%s %s", request.method, request.url.path, exc_info=error)
        got = f"an error of its own, {type(error).__name__}"
        problem = answered(500, got=got, fix="Look at the server's messages.", code="failed")
        return JSONResponse(problem.body, 500)

    app.add_exception_handler(ApiError, by_us)
    app.add_exception_handler(HTTPException, by_framework)
    app.add_exception_handler(Exception, unforeseen)
