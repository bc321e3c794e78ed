"""What is no request, or one that cannot be served: JSON with a reason and the right status, and never 500."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from endpoint import Endpoint, serving
from moestro.hf.text_model import TextModel
from moestro.serve.engine import Engine
from moestro.serve.fields import FIELDS
from moestro.serve.service import Limits, Service

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
VALID: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    COMPLETIONS: {"prompt": "a", "max_tokens": 1},
    RESPONSES: {"input": "a", "max_output_tokens": 1},
}
ENDPOINTS = {"chat": CHAT, "completions": COMPLETIONS, "responses": RESPONSES}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
USER = {"role": "user", "content": "a"}
REASONING = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}

EVERYWHERE = [
    ("temperature", value) for value in ("1", True, -1, 1e-9, [], {}, 101, 10**400)
] + [
    ("top_p", 0), ("top_p", 1.1), ("top_p", "x"), ("top_k", -1), ("top_k", 1.5), ("top_k", 10**30),
    ("min_p", 2), ("min_p", -0.1), ("repetition_penalty", 0), ("repetition_penalty", 1e300), ("seed", -1),
    ("no_repeat_ngram_size", -1), ("no_repeat_ngram_size", 65), ("no_repeat_ngram_size", 1.5),
    ("no_repeat_ngram_size", "2"),
    ("seed", 2**63), ("seed", 1.0), ("seed", "7"), ("stream", 1), ("stream", "true"), ("model", 3), ("user", []),
    ("generation_config", {}), ("generation_config", "{"), ("generation_config", '{"num_beams": 4}'),
    ("generation_config", '{"temperature": "x"}'), ("generation_config", "[" * 10**4), ("no_such_field", 1),
]  # fmt: skip
OF_TEXT = [
    ("n", 2), ("n", 0), ("n", True), ("n", "1"), ("presence_penalty", 0.5), ("frequency_penalty", -1),
    ("frequency_penalty", "0"), ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", 2**31),
    ("max_tokens", "5"), ("stop", ""), ("stop", [""]), ("stop", [1]), ("stop", {}), ("stop", ["a"] * 17),
    ("stream_options", True), ("stream_options", {"x": 1}), ("stream_options", {"include_usage": 1}),
    ("logit_bias", {"x": 1}), ("logit_bias", {"1": 101}), ("logit_bias", {"1": True}), ("logit_bias", []),
    ("logit_bias", {"99999999": 1}), ("logit_bias", {"-1": 1}),
]  # fmt: skip
OF_MESSAGES = [
    ("store", True), ("metadata", 1), ("tools", [TOOL]), ("tools", {}), ("tools", [{"type": "web_search"}]),
    ("tools", [1]), ("tool_choice", "required"), ("tool_choice", TOOL), ("parallel_tool_calls", "x"),
    ("chat_template_kwargs", []), ("chat_template_kwargs", {"chat_template": "{{ 1 }}"}),
    ("chat_template_kwargs", {"tokenize": False}), ("chat_template_kwargs", {"messages": []}),
    ("chat_template_kwargs", {"load_audio_from_video": True}),
]  # fmt: skip
ONLY = {
    CHAT: [
        ("response_format", {"type": "xml"}), ("logprobs", 1), ("top_logprobs", 1), ("top_logprobs", 21),
        ("max_completion_tokens", 0), ("reasoning_effort", "high"), ("audio", {}), ("functions", []),
        ("modalities", ["audio"]), ("messages", []), ("messages", {}), ("messages", "hi"), ("messages", [1]),
        ("messages", [{}]), ("messages", [{"role": "user"}]), ("messages", [{"role": "king", "content": "a"}]),
        ("messages", [{"role": [], "content": "a"}]), ("messages", [{"role": "user", "content": 1}]),
        ("messages", [{"role": "user", "content": [1]}]), ("messages", [{"role": "user", "content": "a", "x": 1}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        ("messages", [{"role": "user", "content": [{"type": "text"}]}]),
        ("messages", [{"role": "tool", "content": "a", "tool_call_id": "1"}]),
        ("messages", [{"role": "assistant", "tool_calls": [CALL]}]),
        ("messages", [{"role": "assistant", "tool_calls": {}}]),
        ("messages", [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]}]),
    ],
    COMPLETIONS: [
        ("prompt", ""), ("prompt", []), ("prompt", [1, 2]), ("prompt", ["a", "b"]), ("prompt", 1), ("prompt", {}),
        ("echo", True), ("best_of", 2), ("suffix", "b"), ("logprobs", True), ("logprobs", 21), ("logprobs", -1),
    ],
    RESPONSES: [
        ("input", []), ("input", ""), ("input", 1), ("input", [1]), ("input", [{}]), ("max_output_tokens", 0),
        ("input", [{"role": "user", "content": "a"}, {"type": "item_reference", "id": "x"}]),
        ("input", [{"role": "user", "content": "a"}, {"type": "function_call", "name": "f"}]),
        ("input", [{"role": "assistant", "content": "a", "tool_calls": [CALL]}]),
        ("input", [{"role": "assistant", "content": "a", "reasoning_content": "b"}]),
        ("input", [{"role": "user", "content": "a", "name": "b"}]), ("input", [USER, REASONING]),
        ("input", [USER, REASONING, USER, {"role": "assistant", "content": "b"}]), ("input", [USER, REASONING, 1]),
        ("input", [{"type": "input_image", "image_url": "x"}]), ("instructions", 1), ("background", True),
        ("previous_response_id", "x"), ("text", {"format": {"type": "xml"}}), ("truncation", "auto"),
        ("include", ["x"]), ("reasoning", {"summary": "auto"}), ("reasoning", {"effort": "high"}),
        ("top_logprobs", 1), ("conversation", "x"), ("prompt", {}),
    ],
}  # fmt: skip
BAD = [
    (path, field, value)
    for path in VALID
    for field, value in [
        *EVERYWHERE, *(OF_TEXT if path != RESPONSES else []), *(OF_MESSAGES if path != COMPLETIONS else []), *ONLY[path]
    ]
]  # fmt: skip


def test_fields_that_say_two_things(endpoint: Endpoint) -> None:
    for changed, named in [
        ({"max_completion_tokens": 2}, "max_completion_tokens"),
        ({"generation_config": '{"do_sample": false}', "temperature": 0.5}, "temperature"),
        ({"generation_config": '{"do_sample": false, "top_k": 3}'}, "top_k"),
    ]:
        status, answer = endpoint.post(CHAT, {**VALID[CHAT], **changed})
        check_error(status, answer, 400)
        assert answer["error"]["param"] == named


def test_two_system_messages(endpoint: Endpoint) -> None:
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    status, answer = endpoint.post(RESPONSES, {**VALID[RESPONSES], "input": messages, "instructions": "c"})
    assert (status, answer["error"]["param"]) == (400, "instructions")


def check_error(status: int, answer: Any, expected: int | None = None) -> None:
    assert expected is None or status == expected, answer
    assert 400 <= status < 500, answer
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"].startswith("[serve] got ")
    assert "; needs " in error["message"]


def test_fields_that_are_refused(endpoint: Endpoint) -> None:
    for path, field, value in BAD:
        status, answer = endpoint.post(path, {**VALID[path], field: value})
        check_error(status, answer, 400)
        named = answer["error"]["param"] or ""
        same = {"tools": "messages", "messages": "tool"}.get(field, field)
        assert named.startswith(field) or same in named or named in ("reasoning_effort", "logit_bias"), (field, answer)


ACCEPTED = [
    (CHAT, {"n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "user": "u", "metadata": {"a": "b"}}),
    (CHAT, {"store": False, "tool_choice": "auto", "parallel_tool_calls": True, "response_format": {"type": "text"}}),
    (CHAT, {"tools": [TOOL], "tool_choice": "none"}),
    (CHAT, {"temperature": None, "stop": None, "stream": None, "logprobs": False, "model": "bundled"}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}], "name": "b"}]}),
    (CHAT, {"max_completion_tokens": 1, "min_p": 0.1, "top_k": 0, "repetition_penalty": 1.1, "seed": 2**63 - 1}),
    (CHAT, {"generation_config": '{"do_sample": true, "max_new_tokens": 9, "transformers_version": "5"}'}),
    (COMPLETIONS, {"prompt": ["a"], "echo": False, "best_of": 1, "logit_bias": {"5": -100}, "logprobs": 0}),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}], "store": False}),
    (RESPONSES, {"input": [{"type": "input_text", "text": "a"}], "instructions": "b", "truncation": "disabled"}),
    (RESPONSES, {"input": [USER, REASONING, {"role": "assistant", "content": "b", "id": "1", "status": "completed"}]}),
    (RESPONSES, {"text": {"format": {"type": "text"}}, "include": [], "background": False, "metadata": {}}),
]


def test_fields_that_are_served_or_ask_for_nothing_else(endpoint: Endpoint) -> None:
    for path, changed in ACCEPTED:
        status, answer = endpoint.post(path, {**VALID[path], **changed})
        assert status == 200, (changed, answer)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=40)
@given(data=st.data())
def test_any_json_is_answered_in_json(endpoint: Endpoint, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(FIELDS)))
    fields = st.sampled_from(sorted(FIELDS[name])) | st.text(max_size=8)
    body = {**VALID[ENDPOINTS[name]], **data.draw(st.dictionaries(fields, JSON, max_size=2)), "stream": False}
    length = "max_output_tokens" if name == "responses" else "max_tokens"
    body[length] = data.draw(st.just(1) | JSON)
    if body[length] is None:
        body[length] = 1
    status, answer = endpoint.post(ENDPOINTS[name], body)
    if status != 200:
        check_error(status, answer)


BODIES = {
    "nothing": b"",
    "text": b"hello",
    "half": b'{"prompt": "a"',
    "a list": b"[]",
    "a number": b"1",
    "null": b"null",
    "NaN": b'{"prompt": "a", "temperature": NaN}',
    "infinity": b'{"prompt": "a", "temperature": -Infinity}',
    "beyond floats": b'{"prompt": "a", "temperature": 1e999}',
    "many digits": b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
    "deep": b'{"prompt": ' + b"[" * 30000 + b"]" * 30000 + b"}",
    "no UTF-8": b'{"prompt": "\xff\xfe"}',
    "half a character": b'{"prompt": "\\ud800"}',
    "half a name": b'{"\\udfff": 1, "prompt": "a"}',
    "UTF-16": '{"prompt": "a", "max_tokens": 1}'.encode("utf-16"),
    "UTF-16 without a mark": '{"prompt": "a", "max_tokens": 1}'.encode("utf-16-le"),
    "half a character in bytes": b'{"prompt": "\xed\xa0\x80"}',
    "half a name in bytes": b'{"\xed\xa0\x80": 1, "prompt": "a"}',
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_bodies_that_are_no_request(endpoint: Endpoint, body: bytes) -> None:
    status, answer = endpoint.post(COMPLETIONS, body)
    check_error(status, answer, 400)


@pytest.mark.parametrize("depth", [100, 600, 800, 950])
def test_tools_in_depth(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    template = "{{ messages[0].content }}{{ tools | tojson }}"
    monkeypatch.setattr(endpoint.service.text_model.tokenizer, "chat_template", template)
    nested = '{"a": ' * depth + "{}" + "}" * depth  # as text: how deep json.dumps goes depends on its caller
    tool = {"type": "function", "function": {"name": "f", "parameters": 0}}

    def body(**options: Any) -> bytes:
        return (
            json.dumps({**VALID[CHAT], "tools": [tool], **options})
            .replace('"parameters": 0', f'"parameters": {nested}')
            .encode()
        )

    check_error(*endpoint.post(CHAT, body(top_k=-1)), 400)
    status, answer = endpoint.post(CHAT, body())
    if status != 200 or depth == 950:
        assert depth > 100
        check_error(status, answer, 400)


def test_paths_methods_and_kinds(endpoint: Endpoint) -> None:
    for method, path, expected in [
        ("GET", "/", 404), ("GET", "/docs", 404), ("GET", "/openapi.json", 404), ("POST", "/reset", 404),
        ("POST", "/load_model", 404), ("POST", "/v1/audio/transcriptions", 404), ("GET", "/v1/models/", 404),
        ("GET", CHAT, 405), ("DELETE", COMPLETIONS, 405), ("POST", "/v1/models", 405), ("PUT", "/metrics", 405),
        ("GET", "/v1/" + "x" * 2000, 404), ("GET", "/%00", 404),
    ]:  # fmt: skip
        status, headers, text = endpoint.ask(method, path, {} if method == "POST" else None)
        check_error(status, json.loads(text), expected)
        assert (status != 405) or headers["allow"]
    for headers in [{"Content_Type": "text/plain"}, {"Content_Type": ""}, {"Content_Encoding": "gzip"}]:
        check_error(*endpoint.post(COMPLETIONS, VALID[COMPLETIONS], **headers), 415)
    check_error(*endpoint.post(CHAT, {**VALID[CHAT], "model": "another"}), 404)
    assert endpoint.post(CHAT, VALID[CHAT], Content_Type="Application/JSON; charset=utf-8")[0] == 200


def test_bodies_that_are_too_large(endpoint: Endpoint) -> None:
    most = endpoint.service.limits.max_body
    body = json.dumps({"prompt": "a", "max_tokens": 1, "user": ""}).encode()
    fits = body.replace(b'"user": "', b'"user": "' + b"a" * (most - len(body)))
    assert len(fits) == most
    assert endpoint.post(COMPLETIONS, fits)[0] == 200
    check_error(*endpoint.post(COMPLETIONS, fits + b" "), 413)
    chunks = b"".join(b"%x\r\n%b\r\n" % (1000, b"a" * 1000) for _ in range(most // 1000 + 1)) + b"0\r\n\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    answer = endpoint.raw(head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks)
    assert answer.startswith(b"HTTP/1.1 413 ")
    answer = endpoint.raw(head + b"Content-Length: 99999999999\r\n\r\n")  # none of it is waited for
    assert answer.startswith(b"HTTP/1.1 413 ")


NO_HTTP = [
    b"\x00\x01\x02\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a" * 99999,
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
]


@pytest.mark.parametrize("data", NO_HTTP, ids=range(len(NO_HTTP)))
def test_what_is_no_http(endpoint: Endpoint, data: bytes) -> None:
    head, _, body = endpoint.raw(data).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    check_error(400, json.loads(body), 400)


def test_clients_that_are_slow(endpoint: Endpoint) -> None:
    """Half of the headers or half of a body hold up nobody; the latter's client is told, and both are closed."""
    hasty = Service(endpoint.service.text_model, endpoint.service.engine, "bundled", Limits(body_seconds=0.05))
    with serving(hasty) as short, socket.create_connection(("127.0.0.1", short.port)) as idle:
        idle.sendall(b"POST /v1/completions HTTP/1.1\r\nHost:")
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        answer = short.raw(head + b"Content-Length: 100\r\n\r\n{")
        assert answer.startswith(b"HTTP/1.1 408 ")
        check_error(408, json.loads(answer.partition(b"\r\n\r\n")[2]), 408)
        assert short.post(COMPLETIONS, VALID[COMPLETIONS])[0] == 200
        idle.settimeout(60)
        assert idle.recv(1) == b""
        assert short.raw(b"") == b""
        with socket.create_connection(("127.0.0.1", short.port), timeout=60) as twice:
            twice.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert twice.recv(65536).startswith(b"HTTP/1.1 200 ")
            twice.sendall(b"GET /health HTTP/1.1\r\nHost:")
            assert b"HTTP" not in b"".join(iter(lambda: twice.recv(65536), b""))
        with socket.create_connection(("127.0.0.1", short.port), timeout=60) as used:
            body = json.dumps({**VALID[COMPLETIONS], "stream": True, "max_tokens": 300, "temperature": 1}).encode()
            used.sendall(head + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            assert b"[DONE]" in b"".join(iter(lambda: used.recv(65536), b""))


def test_keys(endpoint: Endpoint) -> None:
    with serving(endpoint.service, "one", "zwei-ü") as locked:
        for path in (CHAT, COMPLETIONS, RESPONSES):
            check_error(*locked.post(path, VALID[path]), 401)
            for given in ("Bearer two", "Bearer", "Bearer ", "one", "Basic one", "Bearer one,zwei", "Bearer ONE"):
                check_error(*locked.post(path, b"not read", Authorization=given), 401)
            assert locked.post(path, VALID[path], Authorization="Bearer one")[0] == 200
        for path in ("/metrics", "/v1/models", "/v1/models/bundled", "/nothing", "/health/", "/health/../metrics"):
            status, headers, text = locked.ask("GET", path)
            check_error(status, json.loads(text), 401)
            assert headers["www-authenticate"] == "Bearer"
        assert locked.ask("GET", "/health")[0] == 200
        assert locked.ask("GET", "/metrics", Authorization="bearer  one")[0] == 200
        assert locked.ask("GET", "/metrics", Authorization="Bearer zwei-ü".encode())[0] == 200
        with locked.client("one") as client:
            assert client.models.list().data
    endpoint.service.stopping = False


def test_a_full_queue(text_model: TextModel) -> None:
    """One request runs, none may wait: the next is told when to come again, and served once the first has gone."""
    service = Service(text_model, Engine(text_model, max_waiting=0), "bundled", Limits())
    try:
        with serving(service) as busy, busy.client() as client:
            running = client.completions.create(
                model="bundled", prompt="a", max_tokens=1000, stream=True, logit_bias={"0": -100}
            )
            next(iter(running))
            status, headers, text = busy.ask("POST", COMPLETIONS, VALID[COMPLETIONS])
            check_error(status, json.loads(text), 429)
            assert json.loads(text)["error"]["type"] == "rate_limit_error"
            assert int(headers["retry-after"]) >= 1
            running.close()
            busy.until("requests_total", 1, reason="cancelled")
            assert busy.post(COMPLETIONS, VALID[COMPLETIONS])[0] == 200
    finally:
        service.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", VALID)
def test_a_client_that_goes_cancels(
    endpoint: Endpoint, path: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint.service.text_model.model.generation_config, "eos_token_id", None)
    before = endpoint.counted("requests_total", reason="cancelled")
    length = "max_output_tokens" if path == RESPONSES else "max_tokens"
    body = json.dumps({**VALID[path], length: 900, "stream": stream, "temperature": 1}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", endpoint.port)) as connection:
        connection.sendall(head.encode() + body)
        endpoint.until("requests_running", 1)
    endpoint.until("requests_total", before + 1, reason="cancelled")
