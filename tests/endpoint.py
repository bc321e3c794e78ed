"""An endpoint in a thread, and what a client asks of it."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import openai

from moestro.hf.text_model import quiet_transformers
from moestro.serve.server import Server, listen
from moestro.serve.service import Service

PATIENCE = 60


@dataclass
class Endpoint:
    """A server that runs in a thread."""

    service: Service
    port: int
    server: Any = None
    thread: Any = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the answer to one request; a body that is not bytes is sent as JSON."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        sent = {"Content-Type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            connection.request(method, path, data, sent)
            answer = connection.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        status, _, text = self.ask("POST", path, body, **headers)
        return status, json.loads(text)

    def events(self, path: str, body: Any) -> list[str]:
        """What each event of a stream holds."""
        status, headers, text = self.ask("POST", path, {**body, "stream": True})
        assert status == 200, text
        assert headers["content-type"].startswith("text/event-stream")
        assert text.endswith(b"\n\n")
        return [event.removeprefix("data: ") for event in text.decode().split("\n\n")[:-1]]

    def raw(self, data: bytes) -> bytes:
        """All that comes back for these bytes, until the server closes."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE) as connection:
            connection.sendall(data)
            return b"".join(iter(lambda: connection.recv(65536), b""))

    def counted(self, name: str, **labels: str) -> float:
        return self.service.metrics.registry.get_sample_value(f"moestro_{name}", labels) or 0.0

    def until(self, name: str, value: float, **labels: str) -> None:
        """Wait until so much was counted."""
        end = time.monotonic() + PATIENCE
        while self.counted(name, **labels) < value:
            assert time.monotonic() < end, f"{name} stays {self.counted(name, **labels)}"
            time.sleep(0.01)


@contextmanager
def serving(service: Service, *keys: str) -> Iterator[Endpoint]:
    """A server of this service, until the block ends."""
    server, address = Server(service, keys), listen("127.0.0.1", 0)
    port = address.getsockname()[1]
    thread = threading.Thread(target=server.run, kwargs={"sockets": [address]})
    with quiet_transformers():
        thread.start()
        end = time.monotonic() + PATIENCE
        while not server.started:
            assert thread.is_alive()
            assert time.monotonic() < end
            time.sleep(0.01)
        try:
            yield Endpoint(service, port, server, thread)
        finally:
            server.stop()
            thread.join(PATIENCE)
            assert not thread.is_alive()
