"""`moestro serve` as a process: what it prints, how it ends, and that it starts again after it was killed."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from typer.testing import CliRunner, Result

from endpoint import Endpoint, serving
from moestro.cli import app
from moestro.cli.serve import read_keys
from moestro.errors import InvalidInputError
from moestro.serve.service import Limits, Service

FOUR_PARTS = re.compile(r"\[\w[\w. ]*\] got .+; needs .+\. .+\.")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["serve", *arguments])


@contextmanager
def process(*arguments: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], Endpoint, str]]:
    """The command, an endpoint where it listens, and what it printed."""
    command = [sys.executable, "-m", "moestro", "serve", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env={**os.environ, **environment}, **pipes) as running:
        try:
            lines = running.stdout.readline() + running.stdout.readline()
            found = re.match(r"http://127\.0\.0\.1:(\d+)/v1 serves", lines)
            assert found, lines + running.stderr.read()
            yield running, Endpoint(None, int(found[1])), lines
        finally:
            running.kill()


def test_it_is_killed_and_starts_again_and_ends() -> None:
    long = {"prompt": "a", "max_tokens": 900, "stream": True, "temperature": 1}
    with process("--port", "0", "--name", "small") as (first, endpoint, lines):
        assert "serves small: " in lines
        assert "expert layers by " in lines
        curl = lines.splitlines()[1]
        answer = json.loads(subprocess.run(["bash", "-c", f"{curl} -sS"], capture_output=True, check=True).stdout)
        assert answer["model"] == "small"
        assert 1 <= answer["usage"]["completion_tokens"] <= 32
        first.kill()
        first.wait()
    with process("--port", str(endpoint.port), "--grace", "0.1", MOESTRO_API_KEY="k") as (second, endpoint, lines):
        assert "Bearer" in lines
        assert endpoint.post("/v1/completions", long)[0] == 401
        body = json.dumps(long).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer k\r\nContent-Type: application/json\r\n"
        )
        with socket.create_connection(("127.0.0.1", endpoint.port), timeout=60) as connection:
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            received = connection.recv(65536)
            second.send_signal(signal.SIGTERM)
            received += b"".join(iter(lambda: connection.recv(65536), b""))
        assert received.startswith(b"HTTP/1.1 200 ")
        # Within the grace it may have ended by itself; else its client is told.
        assert b"data: [DONE]" in received or b'"code": "cancelled"' in received
        assert second.wait(60) == 0
        assert second.stderr.read() == ""


def test_experts_within_a_budget_are_told_of() -> None:
    with process("--port", "0", "--memory", "2MB", "--prefetch", "--verbose") as (running, endpoint, lines):
        assert "experts bfloat16, read as needed" in lines
        line = r"experts in 2\.0 MB of .+: \d+ slots, policy expected, .+ beside the experts, "
        assert running.stdout is not None
        assert re.match(line, running.stdout.readline())
        assert endpoint.post("/v1/completions", {"prompt": "a", "max_tokens": 4})[0] == 200
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == 0
        assert running.stderr is not None
        *told, last = running.stderr.read().splitlines()
    hits = r"generation [\d.]+% of [\d,]+ lookups hit, .+ read, [\d.]+ s waited for"
    assert re.fullmatch(hits, last)
    assert [bool(re.fullmatch(f"experts so far: {hits}", line)) for line in sorted(told)] == [False, True]


def test_a_second_signal_ends_at_once(endpoint: Endpoint) -> None:
    """However long the grace, and with a request that runs."""
    service = Service(endpoint.service.text_model, endpoint.service.engine, "small", Limits(grace=600))
    with serving(service) as second, socket.create_connection(("127.0.0.1", second.port), timeout=60) as connection:
        body = b'{"prompt": "a", "max_tokens": 1000000, "stream": true}'
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        second.until("requests_running", 1)
        second.server.handle_exit(signal.SIGINT, None)
        assert not second.server.force_exit
        second.server.handle_exit(signal.SIGINT, None)
        second.thread.join(60)
        assert not second.thread.is_alive()


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = run("--port", str(taken.getsockname()[1]))
    assert (result.exit_code, result.stdout) == (2, "")
    assert FOUR_PARTS.fullmatch(result.stderr.strip())


@pytest.mark.parametrize(
    "arguments",
    [
        ["--host", "no.such.host.invalid"],
        ["--max-body", "much"],
        ["--prefix-memory", "-1"],
        ["--prefix-memory", "nan"],
        ["--kv-memory", "much"],
        ["--grace", "inf"],
        ["--api-key", ""],
        ["--api-key", "a,,b"],
        ["--port", "0", "/no/such/folder"],
        ["--port", "0", "--dtype", "int8"],
        ["--port", "0", "--format", "no-such"],
        ["--port", "0", "--memory", "much"],
        ["--port", "0", "--memory", "1kB"],
        ["--port", "0", "--prefetch"],
        ["--port", "0", "--device-memory", "1GB"],
        ["--port", "0", "--memory", "1GB", "--device-memory", "1GB"],
        ["--port", "0", "--memory", "1GB", "--format", "mxfp4"],
        ["--port", "0", "--memory", "1GB", "--strategy", "all_experts"],
    ],
    ids=" ".join,
)
def test_what_cannot_be_served_is_one_line(arguments: list[str]) -> None:
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert FOUR_PARTS.fullmatch(result.stderr.strip()), result.stderr


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    result = run()
    assert result.exit_code == 2
    assert 'pip install "moestro[serve]"' in result.stderr


def test_keys_of_an_option_and_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOESTRO_API_KEY", raising=False)
    assert read_keys(None) == []
    monkeypatch.setenv("MOESTRO_API_KEY", "a, b")
    assert read_keys(None) == ["a", "b"]
    assert read_keys("c") == ["c"]
    monkeypatch.setenv("MOESTRO_API_KEY", "")
    assert read_keys("c") == ["c"]
    with pytest.raises(InvalidInputError, match="empty"):
        read_keys(None)
