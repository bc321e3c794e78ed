"""Clients of all kinds at one endpoint for some minutes: no stream may be mixed or lost, no error may be unclear.

python benchmarks/soak.py                              moestro serve with the bundled model, 8 clients, 5 minutes
python benchmarks/soak.py --minutes 1 --batch 4        shorter, and four requests in a step

Most requests stream or not, with prompts and answers of mixed lengths; each is asked once alone first, and must get
the same text every time. One in ten goes away in the middle, one in twenty is malformed: bodies, types, sizes, headers,
keys, or a client that sends its request slowly. Then the server is killed, and started again at the same port. The
report counts what came back, and how much memory the server took; the exit code is 1 where anything was wrong.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KEY = "a-key-of-the-soak"
CLIENTS = 8
CANCELLED, MALFORMED = 0.10, 0.05
WARM_UP = 0.2
"""The part of the time after which memory should be flat."""
FLAT = 50e6
"""Bytes that resident memory may grow by after that."""
WORDS = ("def", "return", "self", "class", "for", "in", "range", "import", "os", "(n):", "x", "=", "+", "1", "\n    ")
AUTH = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}


@dataclass
class Found:
    """What all clients found, and what was wrong."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    tokens: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, kind: str, tokens: int = 0) -> None:
        with self.lock:
            self.counts[kind] += 1
            self.tokens += tokens

    def fail(self, what: str) -> None:
        with self.lock:
            self.wrong.append(what)


@dataclass(frozen=True)
class Case:
    """A request, and the text that it gets when it is alone."""

    body: dict[str, Any]
    text: str


def body_of(number: int) -> dict[str, Any]:
    """A request of this number: always the same."""
    chance = random.Random(number)
    prompt = " ".join(chance.choices(WORDS, k=chance.choice((1, 5, 20, 100))))
    sampled = {"temperature": 0.8, "seed": number} if number % 2 else {"temperature": 0}
    return {"prompt": prompt, "max_tokens": chance.choice((1, 4, 16, 64)), **sampled}


def connect(port: int) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", port, timeout=120)


def ask(port: int, body: dict[str, Any], pieces: int | None = None) -> tuple[str, int]:
    """The text of a completion, streamed or not, and its tokens; with `pieces`, the client goes after so many."""
    connection = connect(port)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), AUTH)
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"{answer.status} {answer.read()!r}")
        if not body.get("stream"):
            found = json.loads(answer.read())
            return found["choices"][0]["text"], found["usage"]["completion_tokens"]
        text, tokens, done, seen = "", 0, False, 0
        for line in answer:
            if line == b"data: [DONE]\n":
                done = True
            elif line.startswith(b"data: "):
                event = json.loads(line[6:])
                text += "".join(choice["text"] for choice in event["choices"])
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
                seen += 1
                if seen == pieces:
                    return text, 0
        if not done and pieces is None:
            raise RuntimeError("a stream without [DONE]")
        return text, tokens
    finally:
        connection.close()


def malformed(port: int, chance: random.Random) -> tuple[int, set[int], bytes]:
    """Send what is wrong in some way: the status, those that are right for it, and the body."""
    path, headers = "/v1/completions", dict(AUTH)
    body: Any = {"prompt": "x", "max_tokens": 4}
    kind = chance.randrange(9)
    right = {400}
    if kind == 0:
        body = chance.choice((b"{", b"\xff\xfe", b"null", b"[]", b'{"prompt": NaN}', b"{" * 2000))
    elif kind == 1:
        name = chance.choice(("max_tokens", "temperature", "top_p", "seed", "stop", "stream", "prompt"))
        body[name] = chance.choice(({}, "x" if name not in ("stop", "prompt") else 3, -1.5, 1e300))
    elif kind == 2:
        body["n"] = 2
    elif kind == 3:
        headers["Authorization"], right = chance.choice(("Bearer no", "Basic x", "")), {401}
    elif kind == 4:
        body, right = b" " * (5 << 20), {413}
    elif kind == 5:
        path, right = "/v1/nothing", {404}
    elif kind == 6:
        body["model"], right = "another", {404}
    elif kind == 7:
        body["prompt"] = "word " * 20_000
    else:
        return slow(port)
    connection = connect(port)
    try:
        connection.request("POST", path, body if isinstance(body, bytes) else json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, right, answer.read()
    except (BrokenPipeError, ConnectionResetError):
        if kind == 4:  # the server need not read the rest of what is too large
            return 413, right, b'{"error": {"message": "connection closed"}}'
        raise
    finally:
        connection.close()


def slow(port: int) -> tuple[int, set[int], bytes]:
    """A request that comes byte by byte, whose client then reads as slowly."""
    content = json.dumps({"prompt": "def", "max_tokens": 4}).encode()
    headers = {"Host": "x", **AUTH, "Content-Length": str(len(content))}
    head = "\r\n".join(("POST /v1/completions HTTP/1.1", *(f"{k}: {v}" for k, v in headers.items()), "", ""))
    with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
        for start in range(0, len(head), 16):
            connection.sendall(head.encode()[start : start + 16])
            time.sleep(0.01)
        for byte in content:
            connection.sendall(bytes([byte]))
            time.sleep(0.005)
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        return answer.status, {200}, answer.read()


def client(number: int, port: int, cases: list[Case], until: float, found: Found) -> None:
    """One client, until its time is up."""
    chance = random.Random(1000 + number)
    while time.monotonic() < until:
        case, way = chance.choice(cases), chance.random()
        try:
            if way < MALFORMED:
                status, right, body = malformed(port, chance)
                message = json.loads(body) if status != 200 else {"error": {"message": "none"}}
                if status not in right or not message["error"]["message"]:
                    found.fail(f"malformed: {status}, not {right}: {body[:200]!r}")
                found.add(f"malformed, {status}")
            elif way < MALFORMED + CANCELLED:
                ask(port, {**case.body, "stream": True, "max_tokens": 200}, pieces=chance.randint(1, 4))
                found.add("went away")
            else:
                stream = chance.random() < 0.7
                options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
                text, tokens = ask(port, {**case.body, **options})
                if text != case.text:
                    found.fail(f"another text of {case.body}: {text!r}, alone {case.text!r}")
                found.add("streamed" if stream else "whole", tokens)
        except (OSError, RuntimeError, ValueError, KeyError, http.client.HTTPException) as error:
            found.fail(f"{type(error).__name__}: {error}")


def resident(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def start(port: int, options: list[str]) -> subprocess.Popen[str]:
    """A server that answers /health."""
    command = [sys.executable, "-m", "moestro", "serve", "--port", str(port), "--api-key", KEY, *options]
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said, text=True)
        for _ in range(600):
            if process.poll() is not None:
                said.seek(0)
                raise SystemExit(f"the server did not start: {said.read()}")
            try:
                connection = connect(port)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return process
            except OSError:
                time.sleep(0.1)
    raise SystemExit("the server did not answer in a minute")


def closed_without_key(port: int) -> list[str]:
    """Paths that answer without the key, but for /health."""
    found = []
    for method, path in (
        ("GET", "/metrics"),
        ("GET", "/v1/models"),
        ("POST", "/v1/completions"),
        ("POST", "/load_model"),
    ):
        connection = connect(port)
        connection.request(method, path)
        if connection.getresponse().status != 401:
            found.append(path)
        connection.close()
    return found


def watch(pid: int, until: float, seen: list[int]) -> None:
    while time.monotonic() < until:
        seen.append(resident(pid))
        time.sleep(0.5)


def soak(port: int, pid: int, minutes: float) -> tuple[Found, list[int]]:
    """All clients at once; what they found, and the memory over time."""
    cases = [Case(body, ask(port, body)[0]) for body in map(body_of, range(40))]
    found, memory = Found(), []
    until = time.monotonic() + 60 * minutes
    work: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
        (client, (number, port, cases, until, found)) for number in range(CLIENTS)
    ]
    threads = [threading.Thread(target=f, args=a) for f, a in [*work, (watch, (pid, until, memory))]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found, memory


def main() -> None:
    """Run what the module says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--batch", type=int, default=1)
    arguments = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # In float32 a step of several requests picks the tokens that each picks alone.
    options = ["--batch", str(arguments.batch), "--dtype", "float32", "--prefix-memory", "16MB"]
    process = start(port, options)
    try:
        found, memory = soak(port, process.pid, arguments.minutes)
        found.wrong += [f"{path} answers without a key" for path in closed_without_key(port)]
        settled = memory[int(WARM_UP * len(memory)) :]
        grown = max(settled) - settled[0]
        if grown > FLAT:
            found.wrong.append(f"memory grew by {grown / 1e6:.0f} MB")
        process.kill()
        process.wait()
        process = start(port, options)
        ask(port, body_of(0))
        process.terminate()
        if (code := process.wait(30)) != 0:
            found.wrong.append(f"exit code {code} after SIGTERM")
    finally:
        process.kill()
    print(f"{CLIENTS} clients, {arguments.minutes:g} minutes, --batch {arguments.batch}")
    for kind, count in sorted(found.counts.items()):
        print(f"  {kind}: {count}")
    print(f"  tokens: {found.tokens}, {found.tokens / 60 / arguments.minutes:.1f} a second")
    print(f"  resident: {settled[0] / 1e6:.0f} MB, at most {grown / 1e6:.1f} MB more later")
    print(f"  wrong: {len(found.wrong)}")
    for what in found.wrong[:10]:
        print(f"    {what}")
    raise SystemExit(bool(found.wrong))


if __name__ == "__main__":
    main()
