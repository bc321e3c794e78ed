"""What is made of an answer: reasoning, calls of tools, characters over several tokens, and an error in its middle."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from endpoint import Endpoint
from moestro.errors import invalid_input
from moestro.serve.request import Ended, Request, Token
from moestro.serve.step_model import StepModel

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
QWEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls %}<tool_call>{{ c.function.name }} {{ c.function.arguments | tojson }}</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}{% for t in tools or [] %}{{ t.function.name }}\n{% endfor %}"
    "{% if reasoning_effort %}{{ reasoning_effort }}\n{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"town": "Zürich"}}\n</tool_call>'


@dataclass
class Scripted:
    """An engine that says what it was told to, token by token."""

    batch = 1
    reused = None
    kv_bytes: int | None = None
    token_bytes = 0
    tokens: list[int] = field(default_factory=list)
    reason: str = "stop"
    requests: list[Request] = field(default_factory=list)

    def submit(self, request: Request, listener: Any) -> Any:
        self.requests.append(request)
        threading.Thread(target=self._run, args=(request, listener)).start()
        return self

    def _run(self, request: Request, listener: Any) -> None:
        count, reason = 0, self.reason
        for token in self.tokens:
            count += 1
            if listener.token(Token(token, -0.5 if request.top_logprobs is not None else None)):
                reason = "stop"
                break
        error = RuntimeError('a "quoted"\nerror') if reason == "failed" else None
        listener.end(Ended(reason, len(request.prompt_ids), 0, count, 0.0, 0.1, 0.1, error))

    def cancel(self) -> None:
        """Too late."""


@pytest.fixture
def scripted(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Say what the engine of the endpoint is to answer."""
    engine = Scripted()
    tokenizer = endpoint.service.text_model.tokenizer
    monkeypatch.setattr(endpoint.service, "engine", engine)
    monkeypatch.setattr(tokenizer, "chat_template", QWEN)

    def script(text: str, reason: str = "stop") -> Scripted:
        engine.tokens, engine.reason = tokenizer.encode(text, add_special_tokens=False), reason
        return engine

    return script


def chat(endpoint: Endpoint, **more: Any) -> Any:
    status, answer = endpoint.post(CHAT, {"messages": [{"role": "user", "content": "a"}], **more})
    assert status == 200, answer
    return answer["choices"][0]


def chat_chunks(endpoint: Endpoint, **more: Any) -> list[Any]:
    events = endpoint.events(CHAT, {"messages": [{"role": "user", "content": "a"}], **more})
    assert events[-1] == "[DONE]"
    return [json.loads(event)["choices"][0] for event in events[:-1]]


def test_reasoning_and_calls(endpoint: Endpoint, scripted: Any) -> None:
    scripted(f"<think>\nHm 🙂.\n</think>\n\nLet me see.{CALL}")
    choice = chat(endpoint, tools=[TOOL])
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning_content"].strip() == "Hm 🙂."
    assert choice["message"]["content"].strip() == "Let me see."
    [call] = choice["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("weather", {"town": "Zürich"})
    chunks = chat_chunks(endpoint, tools=[TOOL])
    for name in ("content", "reasoning_content"):
        assert "".join(c["delta"].get(name) or "" for c in chunks) == choice["message"][name]
    [called] = [c["delta"]["tool_calls"][0] for c in chunks if c["delta"].get("tool_calls")]
    assert called["function"] == call["function"]
    assert chunks[-1]["finish_reason"] == "tool_calls"


def test_calls_in_responses(endpoint: Endpoint, scripted: Any) -> None:
    scripted(f"Let me see.{CALL}")
    flat = {"type": "function", **TOOL["function"]}
    answer = endpoint.post(RESPONSES, {"input": "a", "tools": [flat]})[1]
    assert [item["type"] for item in answer["output"]] == ["message", "function_call"]
    assert json.loads(answer["output"][1]["arguments"]) == {"town": "Zürich"}


def test_results_of_tools_reach_the_template(endpoint: Endpoint, scripted: Any) -> None:
    engine = scripted("Sunny.")
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Bern"}'}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "22 degrees"},
    ]
    assert endpoint.post(CHAT, {"messages": messages, "tools": [TOOL], "reasoning_effort": "low"})[0] == 200
    items = [
        messages[0],
        {"role": "assistant", "content": "I look."},
        {"type": "function_call", "call_id": "1", "name": "weather", "arguments": '{"town": "Bern"}'},
        {"type": "function_call_output", "call_id": "1", "output": "22 degrees"},
    ]
    tools = [{"type": "function", **TOOL["function"]}]
    body = {"input": items, "tools": tools, "reasoning": {"effort": "low"}}
    assert endpoint.post(RESPONSES, body)[0] == 200
    for request in engine.requests:
        prompt = endpoint.service.text_model.tokenizer.decode(request.prompt_ids)
        assert '<|im_start|>assistant\nI look.<tool_call>weather {"town": "Bern"}</tool_call>' in prompt
        assert "<|im_start|>tool\n22 degrees" in prompt
        assert prompt.endswith("weather\nlow\n<|im_start|>assistant\n")


def test_a_call_that_is_no_json(endpoint: Endpoint, scripted: Any) -> None:
    scripted("<tool_call>\n{'name': weather\n</tool_call>")
    status, answer = endpoint.post(CHAT, {"messages": [{"role": "user", "content": "a"}], "tools": [TOOL]})
    assert (status, answer["error"]["code"]) == (500, "unreadable_answer")


def test_a_call_that_is_cut_off(endpoint: Endpoint, scripted: Any) -> None:
    scripted('<tool_call>\n{"name": "wea', "length")
    choice = chat(endpoint, tools=[TOOL])
    assert choice["finish_reason"] == "length"
    assert "tool_calls" not in choice["message"]


@pytest.mark.parametrize("text", ['<tool_call>{"name": "now"}', "<tool_call>[1]", "<tool_call>1"])
def test_a_call_that_ends_without_its_end(endpoint: Endpoint, scripted: Any, text: str) -> None:
    """Qwen3-MoE's response template, as Transformers has it."""
    body = {"messages": [{"role": "user", "content": "a"}], "tools": [TOOL]}
    scripted(text)
    status, answer = endpoint.post(CHAT, body)
    assert (status, answer["error"]["code"]) == (500, "unreadable_answer")
    assert json.loads(endpoint.events(CHAT, body)[-1]) == answer
    scripted(text + "</tool_call>")
    assert endpoint.post(CHAT, body)[0] == 500
    stopped = chat(endpoint, tools=[TOOL], stop=["</tool_call>"])
    assert stopped["finish_reason"] == "stop"
    assert "tool_calls" not in stopped["message"]


HARMONY = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|return|>")
MARKED = {
    "think": "<think>\nHm 🙂.</think>\n\nLet us STOP here.",
    "harmony": "<|channel|>analysis<|message|>Hm 🙂.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>Let us STOP here.<|return|>",
}


@pytest.mark.parametrize("kind", MARKED)
def test_reasoning_without_a_parser(
    endpoint: Endpoint, scripted: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    model = endpoint.service.text_model
    tokenizer = copy.deepcopy(model.tokenizer)
    tokenizer.chat_template = "{{ messages[0].content }}"
    engine = scripted("")
    if kind == "harmony":
        tokenizer.add_special_tokens({"additional_special_tokens": list(HARMONY)})
        ends = [0, tokenizer.convert_tokens_to_ids("<|return|>")]
        monkeypatch.setattr(model.model.generation_config, "eos_token_id", ends)
    monkeypatch.setattr(endpoint.service, "text_model", replace(model, tokenizer=tokenizer))
    engine.tokens = tokenizer.encode(MARKED[kind], add_special_tokens=False)
    for stops, content in (([], "Let us STOP here."), (["STOP", "Hm"], "Let us ")):
        message = chat(endpoint, stop=stops)["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm 🙂.", content)
        deltas = [chunk["delta"] for chunk in chat_chunks(endpoint, stop=stops)]
        assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "Hm 🙂."
        assert "".join(delta.get("content") or "" for delta in deltas) == content
    output = endpoint.post(RESPONSES, {"input": "a"})[1]["output"]
    assert [item["content"][0]["text"] for item in output] == ["Hm 🙂.", "Let us STOP here."]


TEXT = "naïve 🙂🙃 日本語 é — «ß»"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_characters_stay_whole(endpoint: Endpoint, scripted: Any, path: str) -> None:
    engine = scripted(TEXT)
    assert len(engine.tokens) > len(TEXT)
    asked = {CHAT: {"messages": [{"role": "user", "content": "a"}]}, COMPLETIONS: {"prompt": "a"}}
    body = asked.get(path, {"input": "a"})
    found = ""
    for event in endpoint.events(path, body):
        if event == "[DONE]":
            continue
        chunk = json.loads(event)
        if path == RESPONSES:
            piece = chunk["delta"] if chunk["type"] == "response.output_text.delta" else ""
        else:
            choice = chunk["choices"][0]
            piece = choice["delta"].get("content") if path == CHAT else choice["text"]
        assert "\ufffd" not in (piece or "")
        found += piece or ""
    assert found == TEXT


def test_stop_strings_before_the_parser(endpoint: Endpoint, scripted: Any) -> None:
    scripted(f"Let me see.{CALL}")
    choice = chat(endpoint, tools=[TOOL], stop=['"arguments"'])
    assert choice["message"]["content"] == "Let me see."
    assert "tool_calls" not in choice["message"]
    scripted("<think>a STOP b</think>c")
    assert chat(endpoint, stop="STOP")["message"]["reasoning_content"] == "a "


@pytest.mark.parametrize("reason", ["failed", "cancelled"])
def test_an_error_in_the_middle(endpoint: Endpoint, scripted: Any, reason: str) -> None:
    scripted("some text", reason)
    refused = {status: endpoint.counted("requests_refused_total", status=status) for status in ("500", "503")}
    bodies = {CHAT: {"messages": [{"role": "user", "content": "a"}]}, COMPLETIONS: {"prompt": "a"}}
    expected = 500 if reason == "failed" else 503
    for path, body in bodies.items():
        status, answer = endpoint.post(path, body)
        assert (status, answer["error"]["type"]) == (expected, "server_error")
        *pieces, last = [json.loads(event) for event in endpoint.events(path, body)]
        assert last == answer
        assert len(pieces) >= 1
    status, answer = endpoint.post(RESPONSES, {"input": "a"})
    assert status == expected
    events = [json.loads(event) for event in endpoint.events(RESPONSES, {"input": "a"})]
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    assert events[-2]["message"] == answer["error"]["message"]
    for status, before in refused.items():  # they were accepted, and failed later
        assert endpoint.counted("requests_refused_total", status=status) == before


def test_an_error_of_the_engine_reaches_the_client(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: StepModel, ids: Any, caches: Any) -> Any:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(StepModel, "step", fail)
        status, answer = endpoint.post(COMPLETIONS, {"prompt": "a", "max_tokens": 4})
        assert status == 500
        assert "RuntimeError" in answer["error"]["message"]
        assert "no memory" not in answer["error"]["message"]
    assert endpoint.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1})[0] == 200


def test_settings_reach_the_engine(endpoint: Endpoint, scripted: Any) -> None:
    engine = scripted("a")
    own = endpoint.service.text_model.model.generation_config

    def config(**body: Any) -> Any:
        chat(endpoint, **body)
        return engine.requests[-1].config

    assert config().do_sample == bool(own.do_sample)
    assert config(temperature=0, top_p=0.5).do_sample is False
    for body in ({"temperature": 0.5}, {"temperature": 1}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}):
        found = config(**body)
        assert found.do_sample is True
        assert {name: getattr(found, name) for name in body} == body
    assert config(max_tokens=7).max_new_tokens == config(max_completion_tokens=7, max_tokens=7).max_new_tokens == 7
    assert config().max_new_tokens == endpoint.service.limits.max_new_tokens
    assert config(generation_config='{"top_k": 5, "do_sample": false}', temperature=0).do_sample is False
    assert config(logit_bias={"7": -3}).sequence_bias == {(7,): -3.0}
    assert config(repetition_penalty=1.5).repetition_penalty == 1.5
    assert config(no_repeat_ngram_size=3).no_repeat_ngram_size == 3
    chat(endpoint, seed=9, logprobs=True, top_logprobs=2)
    assert (engine.requests[-1].seed, engine.requests[-1].top_logprobs) == (9, 2)
    assert own.max_new_tokens != 7


def test_a_length_that_memory_allows(endpoint: Endpoint, scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a request does not say is no more than --kv-memory holds; what it says is refused by that name."""
    engine = scripted("a")
    engine.kv_bytes, engine.token_bytes = 1000, 10

    def length(**body: Any) -> tuple[int, int]:
        assert endpoint.post(COMPLETIONS, {"prompt": "a b c", **body})[0] == 200
        return len(engine.requests[-1].prompt_ids), engine.requests[-1].config.max_new_tokens

    prompt_tokens, new_tokens = length()
    assert prompt_tokens + new_tokens == 100
    assert length(max_tokens=500)[1] == 500
    engine.kv_bytes = 1
    assert length()[1] == 1

    told = invalid_input("serve", got="12 tokens", needs="at most 10", fix="Raise kv_bytes, of a server --kv-memory.")

    def submit(request: Request, listener: Any) -> Any:
        raise told

    monkeypatch.setattr(engine, "submit", submit)
    status, answer = endpoint.post(COMPLETIONS, {"prompt": "a"})
    assert (status, answer["error"]["message"]) == (400, str(told))


def test_template_variables(endpoint: Endpoint, scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = scripted("a")
    tokenizer = endpoint.service.text_model.tokenizer
    template = "{{ raise_exception('No ' + word) if word else messages[0].content }}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    chat(endpoint)
    assert tokenizer.decode(engine.requests[-1].prompt_ids) == "a"
    body = {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"word": "way"}}
    status, answer = endpoint.post(CHAT, body)
    assert (status, "No way" in answer["error"]["message"]) == (400, True)
    monkeypatch.setattr(tokenizer, "chat_template", None)
    assert endpoint.post(CHAT, body)[0] == 400
