"""The endpoints as clients meet them: texts are Transformers' own, streamed or not, and so is what is told of them."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from endpoint import Endpoint
from moestro.hf.text_model import TextModel, quiet_transformers
from moestro.tolerances import LOW_PRECISION_INPUT, too_far

NAME = "bundled"
PROMPT, MESSAGE = "# Copyright", "with open(path) as f:"
"""Whose likeliest tokens are ahead by 0.37 and more, with a penalty, too: two ways to round logits in bfloat16 differ
by less, and a prompt whose first tokens are in the cache is rounded in another way."""
MESSAGES = [{"role": "user", "content": MESSAGE}]
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES, "max_tokens": 24},
    COMPLETIONS: {"prompt": PROMPT, "max_tokens": 24},
    RESPONSES: {"input": MESSAGE, "max_output_tokens": 24},
}


def expected_text(text_model: TextModel, path: str, **how: Any) -> str:
    """What Transformers' own loop generates."""
    tokenizer = text_model.tokenizer
    if path == COMPLETIONS:
        inputs = tokenizer(PROMPT, return_tensors="pt")
    else:
        inputs = tokenizer.apply_chat_template(
            MESSAGES, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
    with torch.random.fork_rng(), quiet_transformers():
        torch.manual_seed(how.pop("seed", 0))
        ids = text_model.model.generate(**inputs, max_new_tokens=24, pad_token_id=0, **how)
    return tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def text_of(path: str, answer: Any) -> str:
    if path == RESPONSES:
        return answer["output"][0]["content"][0]["text"]
    choice = answer["choices"][0]
    return choice["message"]["content"] if path == CHAT else choice["text"]


def streamed(endpoint: Endpoint, path: str, body: dict[str, Any]) -> tuple[list[str], Any]:
    """The pieces of text, and the last event that says how it ended."""
    events = endpoint.events(path, body)
    if path == RESPONSES:
        chunks = [json.loads(event) for event in events]
        return [c["delta"] for c in chunks if c["type"] == "response.output_text.delta"], chunks[-1]["response"]
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [choice["finish_reason"] for choice in choices if choice.get("finish_reason")] != []
    pieces = [choice["delta"].get("content") if path == CHAT else choice["text"] for choice in choices]
    return [piece for piece in pieces if piece], choices[-1]


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("how", [{"temperature": 0}, {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "seed": 5}])
def test_texts_are_those_of_transformers(endpoint: Endpoint, text_model: TextModel, path: str, how: dict) -> None:
    asked = {**how, "do_sample": True} if how["temperature"] else {"do_sample": False}
    expected = expected_text(text_model, path, **asked)
    status, answer = endpoint.post(path, {**ASKED[path], **how})
    assert status == 200, answer
    pieces, _ = streamed(endpoint, path, {**ASKED[path], **how})
    assert text_of(path, answer) == "".join(pieces) == expected
    assert len(pieces) > 1


def test_a_seed_is_of_its_own_request(endpoint: Endpoint) -> None:
    body = {**ASKED[COMPLETIONS], "temperature": 1, "seed": 3}
    first = endpoint.post(COMPLETIONS, body)[1]["choices"][0]["text"]
    other = endpoint.post(COMPLETIONS, {**body, "seed": 4})[1]["choices"][0]["text"]
    assert first == endpoint.post(COMPLETIONS, body)[1]["choices"][0]["text"]
    assert first != other


def test_the_openai_client(endpoint: Endpoint) -> None:
    with endpoint.client() as client:
        chat = client.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=8, temperature=0)
        stream = client.chat.completions.create(
            model=NAME,
            messages=MESSAGES,
            max_tokens=8,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == chat.choices[0].message.content
        assert chunks[-1].usage.completion_tokens == chat.usage.completion_tokens == 8
        assert [c.usage for c in chunks[:-1]] == [None] * (len(chunks) - 1)
        completion = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=8, temperature=0)
        stream = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=8, temperature=0, stream=True)
        assert "".join(c.choices[0].text for c in stream) == completion.choices[0].text
        response = client.responses.create(model=NAME, input=MESSAGE, max_output_tokens=8, temperature=0)
        assert response.output_text == chat.choices[0].message.content
        assert response.incomplete_details.reason == "max_output_tokens"
        with client.responses.stream(model=NAME, input=MESSAGE, max_output_tokens=8, temperature=0) as events:
            assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == response.output_text
        assert [model.id for model in client.models.list()] == [NAME]
        assert client.models.retrieve(NAME).id == NAME


def test_curl(endpoint: Endpoint) -> None:
    command = ["curl", "-sS", "--fail", f"{endpoint.url}{COMPLETIONS}", "-H", "Content-Type: application/json"]
    run = subprocess.run(
        [*command, "-d", json.dumps(ASKED[COMPLETIONS])], capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(run.stdout)["usage"]["completion_tokens"] == 24


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@settings(max_examples=8)
@given(data=st.data())
def test_stop_strings_over_tokens(endpoint: Endpoint, path: str, data: st.DataObject) -> None:
    body = {**ASKED[path], "temperature": 0}
    whole = text_of(path, endpoint.post(path, body)[1])
    start = data.draw(st.integers(1, len(whole) - 6))
    stop = whole[start : start + data.draw(st.integers(1, 6))]
    asked = {**body, "stop": data.draw(st.sampled_from([stop, [stop], ["no such text", stop]]))}
    answer = endpoint.post(path, asked)[1]
    pieces, last = streamed(endpoint, path, asked)
    assert text_of(path, answer) == "".join(pieces) == whole[: whole.index(stop)]
    assert answer["choices"][0]["finish_reason"] == last["finish_reason"] == "stop"


def test_two_choices_of_length(endpoint: Endpoint) -> None:
    """What a request asks for counts, then what the server says, and the context in any case."""
    context = endpoint.service.text_model.context
    assert endpoint.post(COMPLETIONS, {"prompt": "a", "max_tokens": 3})[1]["usage"]["completion_tokens"] == 3
    body = {"prompt": "a b " * 500, "max_tokens": 10**6, "temperature": 0}
    usage = endpoint.post(COMPLETIONS, body)[1]["usage"]
    assert usage["total_tokens"] == context


@pytest.mark.parametrize("path", ASKED)
def test_a_prompt_that_is_too_long(endpoint: Endpoint, path: str) -> None:
    long = "word " * 3000
    changed = {CHAT: {"messages": [{"role": "user", "content": long}]}, COMPLETIONS: {"prompt": long}}
    status, answer = endpoint.post(path, {**ASKED[path], **changed.get(path, {"input": long})})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert "the context of bundled" in answer["error"]["message"]


def test_logprobs_are_the_models_own(endpoint: Endpoint, text_model: TextModel) -> None:
    """Not what a penalty makes of them."""
    how = {"repetition_penalty": 1.2}
    body = {**ASKED[COMPLETIONS], **how, "prompt": PROMPT, "temperature": 0, "logprobs": 2}
    choice = endpoint.post(COMPLETIONS, body)[1]["choices"][0]
    told = choice["logprobs"]
    assert "".join(told["tokens"]) == choice["text"]
    assert told["text_offset"] == [sum(map(len, told["tokens"][:i])) for i in range(len(told["tokens"]))]
    prompt = text_model.tokenizer(PROMPT, return_tensors="pt")
    with torch.no_grad(), quiet_transformers():
        ids = text_model.model.generate(**prompt, max_new_tokens=24, do_sample=False, pad_token_id=0, **how)
        logits = text_model.model(ids).logits[0, prompt["input_ids"].shape[1] - 1 : -1]
    expected = logits.float().log_softmax(-1)
    own = expected.gather(1, ids[0, prompt["input_ids"].shape[1] :, None]).flatten()
    assert too_far(torch.tensor(told["token_logprobs"])[None], own[None], LOW_PRECISION_INPUT) is None
    likely = torch.tensor([list(top.values()) for top in told["top_logprobs"]])
    assert too_far(likely.flatten()[None], expected.topk(2).values.flatten()[None], LOW_PRECISION_INPUT) is None


def test_logprobs_of_chat(endpoint: Endpoint) -> None:
    body = {**ASKED[CHAT], "temperature": 0, "logprobs": True, "top_logprobs": 1}
    choice = endpoint.post(CHAT, body)[1]["choices"][0]
    told = choice["logprobs"]["content"]
    assert b"".join(bytes(one["bytes"]) for one in told).decode() == choice["message"]["content"]
    assert [one["top_logprobs"][0]["logprob"] for one in told] == [one["logprob"] for one in told]  # greedy
    chunks = [json.loads(event) for event in endpoint.events(CHAT, body)[:-1]]
    parts = [choice.get("logprobs") for chunk in chunks for choice in chunk["choices"]]
    assert [one["token"] for part in parts if part for one in part["content"]] == [one["token"] for one in told]
    assert endpoint.post(CHAT, ASKED[CHAT])[1]["choices"][0].get("logprobs") is None


def test_a_repeated_beginning_is_not_computed_again(endpoint: Endpoint) -> None:
    body = {"prompt": "class Unheard: " + "x = 1\n" * 40, "max_tokens": 2, "temperature": 0}
    first, again = (endpoint.post(COMPLETIONS, body)[1] for _ in range(2))
    assert first["choices"] == again["choices"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == again["usage"]["prompt_tokens"] - 1


def test_metrics_can_be_read_and_count(endpoint: Endpoint) -> None:
    def read() -> dict[str, float]:
        status, headers, text = endpoint.ask("GET", "/metrics")
        assert (status, headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
        families = text_string_to_metric_families(text.decode())
        return {f"{s.name}{sorted(s.labels.values())}": s.value for family in families for s in family.samples}

    before = read()
    usage = endpoint.post(COMPLETIONS, {**ASKED[COMPLETIONS], "seed": 0})[1]["usage"]
    endpoint.post(COMPLETIONS, {"prompt": PROMPT, "n": 2})
    after = read()
    assert after["moestro_prompt_tokens_total[]"] - before["moestro_prompt_tokens_total[]"] == usage["prompt_tokens"]
    assert after["moestro_generated_tokens_total[]"] - before["moestro_generated_tokens_total[]"] == 24
    assert after["moestro_requests_total['length']"] - before.get("moestro_requests_total['length']", 0) == 1
    assert after["moestro_requests_refused_total['400']"] > before.get("moestro_requests_refused_total['400']", 0)
    assert after["moestro_requests_running[]"] == after["moestro_requests_waiting[]"] == 0
    assert after["moestro_expert_imbalance[]"] >= 1
    assert after["moestro_resident_bytes[]"] > 1 << 20
    for name in ("tokens_per_second", "time_to_first_token_seconds"):
        assert after[f"moestro_{name}_count[]"] == before[f"moestro_{name}_count[]"] + 1
    assert after["moestro_prefix_cache_lookups_total[]"] >= after["moestro_prefix_cache_hits_total[]"]


def test_models_and_health(endpoint: Endpoint) -> None:
    listed = json.loads(endpoint.ask("GET", "/v1/models")[2])
    assert [(m["id"], m["max_model_len"]) for m in listed["data"]] == [(NAME, endpoint.service.text_model.context)]
    assert endpoint.ask("GET", "/health")[0] == 200
    for path in ("/v1/models/another", "/v1/models/a%2Fb"):
        assert endpoint.ask("GET", path)[0] == 404


def test_the_chat_of_transformers(endpoint: Endpoint, tmp_path: Any) -> None:
    before = endpoint.counted("generated_tokens_total")
    command = ["transformers", "chat", NAME, f"{endpoint.url}/v1", "max_new_tokens=5", "do_sample=False"]
    run = subprocess.run(
        command,
        input="hi\nn\n!exit\n",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "0"},  # its client takes every address for the hub's
    )
    assert run.returncode == 0, run.stderr
    assert f"<{NAME}>:" in run.stdout
    assert endpoint.counted("generated_tokens_total") == before + 5


def test_whole_numbers_are_taken_as_others(endpoint: Endpoint) -> None:
    for name, value in {"temperature": 1, "top_p": 1, "min_p": 0, "repetition_penalty": 2}.items():
        bodies = [{**ASKED[COMPLETIONS], "seed": 4, name: kind(value)} for kind in (int, float)]
        found = [endpoint.post(COMPLETIONS, body) for body in bodies]
        assert [status for status, _ in found] == [200, 200], found
        assert len({answer["choices"][0]["text"] for _, answer in found}) == 1
