"""The HTTP server: a socket, signals, and how it comes to an end."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Sequence
from types import FrameType

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from moestro.errors import invalid_input
from moestro.serve.app import make_app
from moestro.serve.problem import answered
from moestro.serve.request import OPERATION
from moestro.serve.service import Limits, Service

CONNECTIONS = 512
"""Open at once; a request on one more is answered with 503."""
_AFTER_GRACE = 5
"""Seconds in which requests that were cancelled tell their clients so."""


def listen(host: str, port: int) -> socket.socket:
    """A socket at an address, before a model is loaded for it; port 0 is any that is free.

    Raises:
        InvalidInputError: the address cannot be had.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
        except OSError:
            found.close()
            raise
    except (OSError, OverflowError, UnicodeError) as error:
        raise invalid_input(
            OPERATION,
            got=f"the address {host} port {port} ({getattr(error, 'strerror', None) or error})",
            needs="an address of this machine and a free port",
            fix="Pick another with --host and --port; port 0 finds one.",
        ) from None
    return found


class _Protocol(H11Protocol):
    """HTTP that cannot be read is refused in JSON too, and a connection on which no request comes is closed."""

    patience = Limits.body_seconds
    """Seconds until the headers of a request have come."""
    _watched: object = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(self.patience, self._close_after, None)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        last = self.cycle
        if last is not None and last.response_complete and last is not self._watched:  # half of another request
            self._watched = last
            self.loop.call_later(self.patience, self._close_after, last)

    def _close_after(self, last: object) -> None:
        """Close where no other request has come."""
        if self.cycle is last:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        body = json.dumps(answered(400, got="what is no HTTP", fix="Send a request of HTTP/1.1.").body).encode()
        head = "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()


class Server(uvicorn.Server):
    """Serves a service until it is told to stop, by `stop` or by SIGINT or SIGTERM.

    Requests that run may then end for the grace of the service's limits, after which they are cancelled. A second
    signal ends at once.

    Args:
        service: what answers.
        keys: as for `make_app`.
        verbose: tell each request on stderr.
    """

    def __init__(self, service: Service, keys: Sequence[str] = (), verbose: bool = False) -> None:
        super().__init__(
            uvicorn.Config(
                make_app(service, keys),
                http=type("Protocol", (_Protocol,), {"patience": service.limits.body_seconds}),
                limit_concurrency=CONNECTIONS,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=verbose,
                server_header=False,
                timeout_graceful_shutdown=int(service.limits.grace) + _AFTER_GRACE,
            )
        )
        self._service = service
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # errors are told by the app
        if verbose:
            for name in ("uvicorn.access", "moestro.serve"):
                logger = logging.getLogger(name)
                logger.setLevel(logging.INFO)
                logger.addHandler(logging.StreamHandler())

    def stop(self) -> None:
        """Take no more requests and end, from any thread."""
        self._service.stopping = True
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """What a signal does."""
        self.force_exit = self.should_exit
        self.stop()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let requests end."""
        timer = asyncio.get_running_loop().call_later(self._service.limits.grace, self._service.cancel_all)
        await super().shutdown(sockets)
        timer.cancel()
