"""What stands before every request: keys, the size and the kind of its body, and the time it may take to come."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moestro.serve.problem import ApiError, answered
from moestro.serve.service import Service

OPEN = ("/health",)
"""What answers without a key."""
_DRAINED = 16
"""So many times the largest body is read and thrown away, so that a client that sends too much reads why not."""


class Guard:
    """An ASGI application in front of another. Nothing of a body is read before the key was seen.

    Args:
        app: what answers requests that pass.
        service: whose limits count.
        keys: of which a request needs one; none for all requests.
    """

    def __init__(self, app: ASGIApp, service: Service, keys: Sequence[str] = ()) -> None:
        self._app = app
        self._service = service
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it."""
        if scope["type"] != "http" or scope["path"] in OPEN:
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope)
            replayed = await self._read(scope, receive) if scope["method"] == "POST" else receive
        except ApiError as error:
            self._service.metrics.refused(error.status)
            await JSONResponse(error.body, error.status, error.headers)(scope, receive, send)
        except _GoneError:
            return
        else:
            await self._app(scope, replayed, send)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if self._keys and not self._opens(headers.get("authorization", "")):
            got = "a request without a key that opens this server"
            fix = "Send it in the header Authorization: Bearer KEY."
            raise answered(401, got=got, fix=fix, code="invalid_api_key", WWW_Authenticate="Bearer")
        if self._service.stopping:
            got = "a request while the server stops"
            raise answered(503, got=got, fix="Send it again later.", code="stopping", Retry_After="10")

    def _opens(self, header: str) -> bool:
        scheme, _, key = header.partition(" ")
        given = key.strip().encode("latin-1", "replace")
        same = [hmac.compare_digest(given, wanted) for wanted in self._keys]  # all, so that time tells nothing
        return scheme.lower() == "bearer" and any(same)

    async def _read(self, scope: Scope, receive: Receive) -> Receive:
        """The whole body, and a `receive` that begins with it."""
        headers, limits = Headers(scope=scope), self._service.limits
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        encoding = headers.get("content-encoding", "identity").lower()
        body, too_long = bytearray(), int(headers.get("content-length", 0)) > _DRAINED * limits.max_body
        deadline = asyncio.get_running_loop().time() + limits.body_seconds
        size, more = 0, not too_long
        while more:
            message = await self._next(receive, deadline)
            more = message.get("more_body", False)
            size += len(message.get("body", b""))
            if size <= limits.max_body:
                body += message.get("body", b"")
            too_long = size > limits.max_body
            more = more and size <= _DRAINED * limits.max_body
        if too_long:
            fix = "Send less, or start the server with a larger --max-body."
            raise answered(413, got=f"a body of more than {limits.max_body} bytes", fix=fix, code="body_too_large")
        if kind != "application/json" or encoding != "identity":
            got = f"a body of content type {kind[:80] or 'none'}, encoded as {encoding[:20]}"
            raise answered(415, got=got, fix="Send JSON, with the header Content-Type: application/json.")
        return _replay(bytes(body), receive)

    async def _next(self, receive: Receive, deadline: float) -> Message:
        try:
            async with asyncio.timeout_at(deadline):
                message = await receive()
        except TimeoutError:
            got = f"a body that has not come in {self._service.limits.body_seconds:g} s"
            raise answered(408, got=got, fix="Send it faster.", Connection="close") from None
        if message["type"] == "http.disconnect":
            raise _GoneError
        return message


class _GoneError(Exception):
    """The client has gone."""


def _replay(body: bytes, receive: Receive) -> Receive:
    sent = False

    async def replayed() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed
