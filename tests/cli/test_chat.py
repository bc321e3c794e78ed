"""`moestro chat`: turns, commands, Ctrl-C on a terminal, and endpoints that answer and that do not."""

from __future__ import annotations

import io
import json
import os
import re
import select
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from moestro.cli import app
from moestro.cli import chat as command
from moestro.cli.screen import read
from moestro.errors import InvalidInputError
from moestro.hf import MoestroConfig
from moestro.hf.generate import Sampling, encode, generate
from moestro.hf.text_model import bundled_folder, load_text_model
from moestro.serve.partners import LocalModel, Usage

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and m.content == 'refuse' %}{{ raise_exception('no') }}{% endif %}"
    "# {{ m.role }}\n{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}# assistant\ndef {% endif %}"
)
ONE_LINE = re.compile(r"\[\w[\w. ]*\] got .+; needs .+\. .+\.?")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with a chat template."""
    found = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(bundled_folder(), found)
    (found / "chat_template.jinja").write_text(TEMPLATE)
    return found


@pytest.fixture(scope="module")
def text_model(folder: Path) -> Any:
    return load_text_model(folder)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch, text_model: Any) -> None:
    """Commands take the model that is loaded already."""
    monkeypatch.setattr("moestro.hf.text_model.load_text_model", lambda *args: text_model)


def chat(*arguments: str, says: str = "") -> Result:
    return CliRunner().invoke(app, ["chat", *arguments], input=says)


def refused(result: Result, says: str) -> None:
    assert result.exit_code == 2, result.output
    line = result.stderr.splitlines()[-1]
    assert ONE_LINE.fullmatch(line), line
    assert says in line


def expected(text_model: Any, *said: str, system: str | None = None, new_tokens: int = 12) -> str:
    """What the library answers to these messages, the first of the user."""
    roles = ["user", "assistant"] * len(said)
    messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return generate(text_model, messages, Sampling(new_tokens, do_sample=False)).text


GREEDY = ("--no-do-sample", "--max-new-tokens", "12")


def test_within_a_memory_budget(folder: Path, text_model: Any) -> None:
    result = chat(str(folder), *GREEDY, "--memory", "2MB", says="def a\n/stats\n")
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{expected(text_model, 'def a')}\n"
    held, read = result.stderr.splitlines()[-2:]
    assert held.startswith("experts in 2.0 MB of ")
    assert re.search(r"lookups hit, .+ read, [\d.]+ s waited for$", read)


def test_earlier_turns_leave_room_for_slots_that_are_not_filled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moestro.serve.partners.available_bytes", lambda: 10_000_000)
    for memory, budget in (("2MB", 4_000_000), (None, 5_000_000)):
        model = load_text_model(folder, format=MoestroConfig(memory=memory))
        with closing(LocalModel(model, Sampling())) as partner:
            assert budget <= partner._engine.prefixes.budget < budget + 100_000


@pytest.mark.usefixtures("loaded")
def test_turns_stand_in_the_history(text_model: Any) -> None:
    result = chat("x", *GREEDY, "--system", "short", says="def a\n\n/system\nwhy?\n")
    assert result.exit_code == 0, result.output
    first = expected(text_model, "def a", system="short")
    second = expected(text_model, "def a", first, "why?", system="short")
    assert result.stdout == f"{first}\n{second}\n"
    notes = result.stderr.splitlines()
    assert "System prompt: short" in notes
    assert [bool(re.search(r"\d+ tokens; [\d.]+ tokens/s; first after .* context \d+ of 1024", n)) for n in notes] == [
        True,
        False,
        True,
    ]
    assert "reused" not in notes[0]
    assert re.search(r"\d\d+ reused", notes[2]), "the turns before are computed once"


@pytest.mark.usefixtures("loaded")
def test_commands(text_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.Session, "interactive", True)
    path = tmp_path / "chat.json"
    said = ["/help", "/retry", "/nothing x", "def a", "/system brief", "/retry", f"/save {path}", "/reset", "why?"]
    said += [f"/load {path}", f"/save {path}2", f"/load {tmp_path}/none", "/save", "/system -", "/stats", "/quit", "no"]
    result = chat("x", *GREEDY, says="\n".join(said))
    assert result.exit_code == 0, result.output
    one, retried = expected(text_model, "def a"), expected(text_model, "def a", system="brief")
    assert result.stdout == "".join(
        f"{text}\n" for text in (one, retried, expected(text_model, "why?", system="brief"))
    )
    messages = [("system", "brief"), ("user", "def a"), ("assistant", retried)]
    assert json.loads(path.read_text()) == [{"role": role, "content": text} for role, text in messages]
    assert Path(f"{path}2").read_bytes() == path.read_bytes()
    for word in command.COMMANDS:
        assert f"{word}{command.COMMANDS[word].argument} " in result.stderr
    for note in ("got /retry;", "got /nothing;", "Loaded 2 messages", "No such file", "got no file;", "prompt: none"):
        assert note in result.stderr
    assert re.search(r": 3 answers, 36 tokens, [\d.]+ tokens/s", result.stderr)


@pytest.mark.usefixtures("loaded")
def test_several_lines_are_one_message(text_model: Any) -> None:
    result = chat("x", *GREEDY, says='"""def a\n/help\n"""\n """b"""\n')
    first = expected(text_model, "def a\n/help")
    assert result.stdout == f"{first}\n{expected(text_model, 'def a' + chr(10) + '/help', first, 'b')}\n"


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_what_is_typed_is_utf_8(monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    for typed, text in (("é🙂\n".encode(), "é🙂"), (b"\xff\n", None)):
        stdin = io.TextIOWrapper(io.BytesIO(typed), encoding=encoding, errors="surrogateescape")
        monkeypatch.setattr("sys.stdin", stdin)
        if text is None:
            with pytest.raises(InvalidInputError, match="bytes that are no text"):
                read(interactive=False)
        else:
            assert read(interactive=False) == text


@pytest.mark.usefixtures("loaded")
def test_a_message_that_fills_the_context(text_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(chat("x", says="a b " * 2000), "the context of")
    monkeypatch.setattr(command.Session, "interactive", True)
    result = chat("x", *GREEDY, says="a b " * 2000 + "\ndef a\n")
    assert "begin anew with /reset" in result.stderr
    assert result.stdout == expected(text_model, "def a") + "\n", "what was refused is no part of the history"


@pytest.mark.usefixtures("loaded")
def test_the_context_runs_full() -> None:
    result = chat("x", "--no-do-sample", says="a " * 950)
    assert re.search(r"context 1024 of 1024.*the context is full: keep the chat with /save", result.stderr)


@pytest.mark.usefixtures("loaded")
def test_stop_strings_and_seeds(text_model: Any) -> None:
    text = expected(text_model, "def a")
    assert chat("x", *GREEDY, "--stop", text[4:7], says="def a\n").stdout == text.split(text[4:7])[0] + "\n"
    sampled = ("x", "--do-sample", "--seed", "3", "--max-new-tokens", "12")
    one, again = (chat(*sampled, says="def a\n/retry\n").stdout for _ in range(2))
    assert one == again
    seeded = [
        generate(text_model, [{"role": "user", "content": "def a"}], Sampling(12, True, seed=seed)).text
        for seed in (3, 4)
    ]
    assert one == "".join(f"{text}\n" for text in seeded)


def test_an_answer_that_is_left_keeps_what_was_said(text_model: Any) -> None:
    messages = [{"role": "user", "content": "def a"}]
    with closing(LocalModel(text_model, Sampling(max_new_tokens=200, do_sample=False))) as partner:
        usage = Usage()
        pieces = partner.answer(messages, usage)
        first = next(pieces)
        pieces.close()
        assert usage.reason == "interrupted"
        assert usage.prompt_tokens == len(encode("", text_model.tokenizer, messages))
        assert 1 <= usage.new_tokens < 200
        again = "".join(piece.text for piece in partner.answer(messages, Usage()))
    assert again.startswith(first.text)


def test_a_template_from_a_file(text_model: Any, tmp_path: Path) -> None:
    path = tmp_path / "template"
    refused(chat(), "no chat template")
    refused(chat("--template", str(path)), "(No such file or directory)")
    path.write_text("{% for m in %}")
    refused(chat("--template", str(path)), "messages of user (")
    path.write_text(TEMPLATE)
    refused(chat("--template", str(path), "--system", "refuse"), "messages of system, user (no)")
    result = chat("--template", str(path), *GREEDY, says="def a\n")
    assert result.stdout == expected(text_model, "def a") + "\n"


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "needs a file of messages in JSON"),
        ("[" * 100_000, "needs a file of messages in JSON"),
        ("{}", "dict in the place of messages"),
        ('["x"]', "no text in message 1"),
        ('[{"role": "user"}]', "no text in message 1"),
        ('[{"role": "tool", "content": "x"}]', "role 'tool' in message 1"),
        ('[{"role": "user", "content": "x"}, {"role": "system", "content": "x"}]', "role 'system' in message 2"),
        ('[{"role": "user", "content": "\\ud800"}]', "no text in message 1"),
    ],
)
def test_a_file_that_holds_no_chat(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "chat.json").write_text(text)
    refused(chat("x", says=f"/load {tmp_path}/chat.json\n"), says)


@pytest.mark.usefixtures("loaded")
def test_a_save_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "chat.json"
    path.write_text("before")

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("moestro.serve.conversation.os.fsync", full)
    refused(chat("x", says=f"/save {path}\n"), "(No space left on device)")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_ctrl_c_ends_the_answer_and_not_the_chat(folder: Path, tmp_path: Path) -> None:
    """On a terminal, with an answer that would not end by itself."""
    endless = tmp_path / "endless"
    shutil.copytree(folder, endless)
    for name, changes in (
        ("config.json", {"max_position_embeddings": 10**6}),
        ("generation_config.json", {"eos_token_id": 4095}),
    ):
        values = json.loads((endless / name).read_text())
        (endless / name).write_text(json.dumps({**values, **changes}))
    path = tmp_path / "chat.json"
    with Terminal("chat", str(endless), "--no-do-sample", "--max-new-tokens", "100000") as terminal:
        terminal.expect("> ")
        terminal.type("def a\n")
        terminal.expect("(")
        terminal.type("\x03")
        terminal.expect("stopped by Ctrl-C")
        terminal.type(f"/save {path}\n")
        for said, typed in (
            ("Saved 2 messages", "half a line\x03"),
            ("Ctrl-C once more", "/stats\n"),
            ("1 answers", "\x03"),
            ("Ctrl-C once more", "\x03"),
        ):
            terminal.expect(said)
            terminal.expect("> ")  # before it, nobody reads what is typed
            terminal.wait_until_it_reads()
            terminal.type(typed)
        assert terminal.process.wait(60) in (0, 130)  # 130 where the second comes while the first is still answered
    user, assistant = json.loads(path.read_text())
    assert user == {"role": "user", "content": "def a"}
    assert "(" in assistant["content"]


class Terminal:
    """The command on a pseudo-terminal."""

    def __init__(self, *arguments: str) -> None:
        import pty

        self._ours, theirs = pty.openpty()
        code = [sys.executable, "-m", "moestro", *arguments]
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "24"}
        self.process = subprocess.Popen(
            code,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment,
            start_new_session=True,
            preexec_fn=_own_terminal,
        )
        os.close(theirs)
        self._seen = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def expect(self, text: str) -> None:
        """Read until this has come; what came up to it is not looked at again."""
        end = time.monotonic() + 60
        while text not in self._seen:
            assert select.select([self._ours], [], [], max(0.0, end - time.monotonic()))[0], self._seen
            self._seen += os.read(self._ours, 65536).decode(errors="replace")
        self._seen = self._seen.partition(text)[2]

    def wait_until_it_reads(self) -> None:
        """Until its main thread sleeps: a signal between the prompt and the read would not end the read."""
        status = Path(f"/proc/{self.process.pid}/status")
        if not status.exists():  # no Linux
            time.sleep(1.0)
            return
        end, before = time.monotonic() + 60, ""
        while time.monotonic() < end:
            now = status.read_text()
            if "State:\tS" in now and now == before:
                return
            before = now
            time.sleep(0.1)
        raise AssertionError("it never waits")


def _own_terminal() -> None:
    """So that Ctrl-C, typed there, reaches the process as a signal, also where its parent ignores it."""
    import fcntl
    import signal
    import termios

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Served:
    """What the endpoint of these tests was asked, and what it answers next."""

    def __init__(self) -> None:
        self.asked: list[dict] = []
        self.keys: list[str | None] = []
        self.events: list[str] = []
        self.status = 200


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, Served]]:
    served = Served()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send("application/json", json.dumps({"object": "list", "data": [{"id": "first"}, {"id": "second"}]}))

        def do_POST(self) -> None:
            served.keys.append(self.headers["Authorization"])
            served.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self._send("text/event-stream", "".join(f"data: {event}\n\n" for event in served.events))

        def _send(self, kind: str, body: str) -> None:
            self.send_response(served.status)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", served
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def endpoint(address: tuple[str, Served]) -> tuple[str, Served]:
    address[1].__init__()  # type: ignore[misc]
    return address


def event(reason: str | None = None, **delta: str) -> str:
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    return json.dumps({"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]})


USED = json.dumps(
    {
        **json.loads(event()),
        "choices": [],
        "usage": {
            "prompt_tokens": 7,
            "completion_tokens": 3,
            "total_tokens": 10,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
    }
)


def test_an_endpoint(endpoint: tuple[str, Served]) -> None:
    url, served = endpoint
    served.events = [event(reasoning_content="hm"), event(content="Hel"), event("length", content="lo"), USED, "[DONE]"]
    options = ("--temperature", "0.5", "--top-k", "4", "--stop", "x", "--max-new-tokens", "9", "--api-key", "secret")
    result = chat("--url", url, *options, "--system", "s", says="hi\nagain\n")
    assert result.exit_code == 0, result.output
    assert result.stdout == "Hello\nHello\n"
    assert "hm" in result.stderr
    assert "3 tokens" in result.stderr
    assert "context 10, 4 reused; cut off at --max-new-tokens" in result.stderr
    assert served.keys == ["Bearer secret"] * 2
    one, two = served.asked
    rest = {"model": "first", "max_tokens": 9, "temperature": 0.5, "stop": ["x"], "top_k": 4}
    assert {**one, **rest} == one
    contents = [("system", "s"), ("user", "hi"), ("assistant", "Hello"), ("user", "again")]
    assert two["messages"] == [{"role": role, "content": text} for role, text in contents]
    assert one["messages"] == two["messages"][:2]


def test_a_retry_that_fails_leaves_the_answer(
    endpoint: tuple[str, Served], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url, served = endpoint
    served.events = [event("stop", content="x")]
    monkeypatch.setattr(command.Session, "interactive", True)
    saved = tmp_path / "chat.json"
    lines = iter(["hi", "/retry", f"/save {saved}", "/quit"])

    def read(interactive: bool) -> str:
        line = next(lines)
        served.status = 500 if line == "/retry" else 200
        return line

    monkeypatch.setattr("moestro.cli.chat.read", read)
    result = chat("--url", url)
    assert "500" in result.stderr
    assert [message["content"] for message in json.loads(saved.read_text())] == ["hi", "x"]


def test_the_key_of_the_environment(endpoint: tuple[str, Served], monkeypatch: pytest.MonkeyPatch) -> None:
    url, served = endpoint
    served.events = [event("stop", content="x")]
    monkeypatch.setenv("MOESTRO_API_KEY", "of the environment, another")
    chat("--url", f"{url}/v1", "--model", "second", "--no-do-sample", says="hi\n")
    assert served.keys == ["Bearer of the environment"]
    assert (served.asked[0]["model"], served.asked[0]["temperature"]) == ("second", 0)


@pytest.mark.parametrize(
    ("status", "events", "says"),
    [
        (401, [], "401"),
        (500, [], "500"),
        (200, ["{"], "needs an endpoint of OpenAI's protocol"),
        (200, [event(content="part"), json.dumps({"error": {"message": "lost it"}})], "lost it"),
        (200, ['{"choices": 5}'], "needs an endpoint of OpenAI's protocol"),
    ],
)
def test_an_endpoint_that_fails(endpoint: tuple[str, Served], status: int, events: list[str], says: str) -> None:
    url, served = endpoint
    served.status, served.events = status, events
    refused(chat("--url", url, "--model", "m", says="hi\n"), says)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--url", "ftp://x"), "--url 'ftp://x'"),
        (("--url", "http://127.0.0.1:1"), "http://127.0.0.1:1/v1 ("),
        (("model", "--url", "http://127.0.0.1:1"), "--url with a model to load"),
        (("--url", "http://127.0.0.1:1", "--dtype", "float32"), "--url with a model to load"),
        (("--url", "http://127.0.0.1:1", "--memory", "8GB", "--device-memory", "1GB"), "--url with a model to load"),
        (("--url", "http://127.0.0.1:1", "--format", "mxfp4"), "--url with a model to load"),
        (("--url", "http://127.0.0.1:1", "--projections", "torch"), "--url with a model to load"),
        (("--url", "http://127.0.0.1:1", "--do-sample"), "--do-sample with --url"),
        (("--model", "m"), "without --url"),
        (("--temperature", "-1"), "temperature=-1.0"),
    ],
)
def test_what_cannot_be(arguments: tuple[str, ...], says: str) -> None:
    refused(chat(*arguments), says)


def test_without_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    refused(chat("--url", "http://127.0.0.1:1"), 'pip install "moestro[serve]"')
