"""Answers in JSON: each is a document of the schema that was asked for, however likely the model finds other tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers import decoders as byte_decoders
from transformers import GenerationConfig, PreTrainedTokenizerFast

from endpoint import Endpoint
from heard import Heard
from moestro.errors import InvalidInputError, UnsupportedError
from moestro.hf.text_model import TextModel
from moestro.serve.engine import Engine
from moestro.serve.grammar import JsonGrammars
from moestro.serve.reasoning import HARMONY
from moestro.serve.request import Request
from moestro.serve.work import Work

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 10, "maximum": 99}, "kind": {"enum": ["red", "blue"]}},
    "required": ["n", "kind"],
    "additionalProperties": False,
}
MESSAGES = [{"role": "user", "content": "a"}]


def fits(value: Any) -> bool:
    """Whether a value is of SCHEMA."""
    return set(value) == {"n", "kind"} and 10 <= value["n"] <= 99 and value["kind"] in ("red", "blue")


def asked(schema: Any = SCHEMA) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 2, "seed": 3}, {"top_k": 1}])
def test_a_chat_answers_in_the_schema(endpoint: Endpoint, sampling: dict[str, Any]) -> None:
    body = {"messages": MESSAGES, "max_tokens": 200, "response_format": asked(), **sampling}
    status, answer = endpoint.post(CHAT, body)
    assert status == 200, answer
    text = answer["choices"][0]["message"]["content"]
    assert fits(json.loads(text))
    assert answer["choices"][0]["finish_reason"] == "stop"
    events = [json.loads(event) for event in endpoint.events(CHAT, body) if event != "[DONE]"]
    streamed = "".join(choice["delta"].get("content") or "" for e in events for choice in e["choices"])
    assert fits(json.loads(streamed))
    assert streamed == text or "seed" not in sampling


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1, "seed": 2}])
def test_a_grammar_comes_before_tokens_that_may_not_come_again(endpoint: Endpoint, sampling: dict[str, Any]) -> None:
    """Of sixteen equal words the later ones have no token that has not been there."""
    schema = {"type": "array", "items": {"const": True}, "minItems": 16, "maxItems": 16}
    body = {"messages": MESSAGES, "max_tokens": 400, "response_format": asked(schema), "no_repeat_ngram_size": 1}
    status, answer = endpoint.post(CHAT, {**body, **sampling})
    assert status == 200, answer
    assert json.loads(answer["choices"][0]["message"]["content"]) == [True] * 16


def test_responses_and_any_object(endpoint: Endpoint) -> None:
    body = {"input": "a", "max_output_tokens": 200, "text": {"format": {"type": "json_schema", "schema": SCHEMA}}}
    status, answer = endpoint.post(RESPONSES, {**body, "temperature": 1.5})
    assert status == 200, answer
    assert fits(json.loads(answer["output"][0]["content"][0]["text"]))
    body = {"messages": MESSAGES, "max_tokens": 6, "temperature": 2, "response_format": {"type": "json_object"}}
    for seed in range(4):
        choice = endpoint.post(CHAT, {**body, "seed": seed})[1]["choices"][0]
        assert choice["message"]["content"].lstrip().startswith("{")
        if choice["finish_reason"] == "stop":
            json.loads(choice["message"]["content"])


def test_the_openai_client_reads_it(endpoint: Endpoint) -> None:
    completion = endpoint.client().chat.completions.create(
        model="bundled", messages=MESSAGES, max_tokens=200, response_format=asked(), logprobs=True
    )
    assert fits(json.loads(completion.choices[0].message.content))
    assert len(completion.choices[0].logprobs.content) > 0


@pytest.mark.parametrize(
    "format",
    [
        {"type": "xml"},
        {"type": None},
        {"type": ["text"]},
        {},
        "json",
        {"type": "text", "schema": SCHEMA},
        {"type": "json_object", "name": "a"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {}},
        {"type": "json_schema", "json_schema": {"schema": "x"}},
        {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": "yes"}},
        {"type": "json_schema", "json_schema": {"schema": SCHEMA, "more": 1}},
        {"type": "json_schema", "json_schema": []},
        asked({"type": "no-such"}),
        asked({"$ref": "#/nowhere"}),
        asked({"type": "integer", "minimum": 3, "maximum": 2}),
        asked({"type": "string", "pattern": "("}),
        asked({"$ref": "#"}),
        asked({"type": "integer", "minimum": 10**400}),
        asked({"type": "integer", "multipleOf": 1570935}),
        asked({"allOf": [{"multipleOf": 9973}, {"items": [{"multipleOf": 0.9967}]}]}),
    ],
    ids=lambda given: json.dumps(given)[:60],
)
def test_what_is_no_format_is_refused(endpoint: Endpoint, format: Any) -> None:
    status, answer = endpoint.post(CHAT, {"messages": MESSAGES, "max_tokens": 4, "response_format": format})
    assert status == 400
    assert answer["error"]["message"].startswith("[serve] got ")


def test_a_schema_that_says_nothing_is_a_schema(endpoint: Endpoint) -> None:
    for format in (asked({}), {"type": "json_object", "schema": SCHEMA}):
        body = {"messages": MESSAGES, "max_tokens": 300, "temperature": 2, "seed": 1, "response_format": format}
        choice = endpoint.post(CHAT, body)[1]["choices"][0]
        if choice["finish_reason"] == "stop":
            json.loads(choice["message"]["content"])
        if format["type"] == "json_object":
            assert fits(json.loads(choice["message"]["content"]))
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(2000)}},
        {"type": "string", "pattern": "^(a{1000}){1000}$"},
    ],
    ids=["wide", "long"],
)
def test_a_limit_in_the_middle_is_an_error_and_no_document(endpoint: Endpoint, schema: dict[str, Any]) -> None:
    body = {"messages": MESSAGES, "max_tokens": 20, "temperature": 0, "response_format": asked(schema)}
    status, answer = endpoint.post(CHAT, body)
    assert status == 400
    assert "in the middle of an answer" in answer["error"]["message"]
    *_, last = endpoint.events(CHAT, body)
    assert json.loads(last) == answer


def test_tools_and_a_schema_are_refused(endpoint: Endpoint) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    body = {"messages": MESSAGES, "max_tokens": 4, "response_format": asked(), "tools": tools}
    status, answer = endpoint.post(CHAT, body)
    assert (status, answer["error"]["param"]) == (400, "tools")
    assert endpoint.post(RESPONSES, {"input": "a", "text": {"verbosity": "low"}})[0] == 400
    assert endpoint.post(RESPONSES, {"input": "a", "max_output_tokens": 1, "text": {}})[0] == 200


def test_requests_of_a_step_keep_to_grammars_of_their_own(text_model: TextModel) -> None:
    grammars = JsonGrammars(text_model.tokenizer, text_model.config.vocab_size, [])
    config = GenerationConfig(max_new_tokens=60, do_sample=True, temperature=3.0, eos_token_id=None)
    engine, wanted = Engine(text_model, batch=3), [{"enum": ["first"]}, None, {"enum": [12345]}]
    heard = []
    for n, schema in enumerate(wanted):
        grammar = None if schema is None else grammars.grammar(schema)
        heard.append(Heard())
        engine.submit(Request((5 + n, 6), config, seed=n, grammar=grammar), heard[-1])
    texts = [text_model.tokenizer.decode(each.wait().ids) for each in heard]
    engine.close()
    assert [json.loads(texts[0]), json.loads(texts[2])] == ["first", 12345]
    assert [each.ended.reason for each in heard] == ["stop", "length", "stop"]


class _TwoTokens:
    """A grammar by which 5 and 6 can come."""

    def restrict(self, logits: torch.Tensor) -> torch.Tensor:
        refused = torch.ones_like(logits, dtype=torch.bool)
        refused[:, 5:7] = False
        return logits.masked_fill(refused, -torch.inf)

    def accept(self, token: int) -> bool:
        return False


@pytest.mark.parametrize("how", [{"top_k": 1}, {"temperature": 1e-4}, {"do_sample": False}])
def test_a_token_that_a_grammar_needs_is_picked_as_asked(text_model: TextModel, how: dict[str, Any]) -> None:
    """Where both have been there: by the temperature and the like, without what forbids them."""
    strict = {"no_repeat_ngram_size": 1, "repetition_penalty": 2.0, "remove_invalid_values": True}
    config = GenerationConfig(max_new_tokens=4, eos_token_id=None, **{"do_sample": True, **strict, **how})
    logits = torch.zeros(text_model.config.vocab_size)
    logits[6], logits[7] = 1.0, 2.0
    for seed in range(8):
        work = Work(Request((5, 6), config, seed, grammar=_TwoTokens()), Heard(), 4)  # type: ignore[arg-type]
        work.begin(text_model.model)
        assert work.take(logits) is None
        assert work.last == 6


@pytest.fixture(scope="module")
def harmony() -> PreTrainedTokenizerFast:
    """A token a byte, and the marks."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: n for n, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = byte_decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|return|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|return|>")


def walk(grammar: Any, ids: list[int], vocabulary: int) -> int:
    """How many tokens of a text a grammar allows in turn."""
    for n, token in enumerate(ids):
        if not torch.isfinite(grammar.restrict(torch.zeros(1, vocabulary))[0, token]):
            return n
        grammar.accept(token)
    return len(ids)


def test_reasoning_comes_before_the_document(harmony: PreTrainedTokenizerFast) -> None:
    width = len(harmony) + 7
    grammars = JsonGrammars(harmony, width, [harmony.eos_token_id])

    def allowed(text: str, lead: str = HARMONY.lead) -> bool:
        ids = harmony(text)["input_ids"]
        return walk(grammars.grammar(SCHEMA, lead), ids, width) == len(ids)

    final = '<|channel|>final<|message|>{"n": 12, "kind": "red"}<|return|>'
    assert allowed(final)
    assert allowed("<|channel|>analysis<|message|>{Hm\n🙂}<|end|><|start|>assistant" + final)
    assert not allowed('{"n": 12')
    assert not allowed("<|channel|>final<|message|>Hm")
    assert not allowed("<|channel|>analysis<|message|>Hm<|return|>")
    assert allowed('{"n": 12, "kind": "red"}<|return|>', lead="")
    logits = grammars.grammar(SCHEMA).restrict(torch.zeros(1, width))
    assert not torch.isfinite(logits[0, len(harmony) :]).any()


leaves = st.sampled_from([{"type": "boolean"}, {"type": "integer"}, {"type": "null"}, {"const": "a b"}])
schemas = st.dictionaries(st.sampled_from("abcde"), leaves, min_size=1, max_size=3).map(
    lambda held: {"type": "object", "properties": held, "required": sorted(held), "additionalProperties": False}
)
VALUES: dict[str, Callable[[Any], bool]] = {
    "boolean": lambda v: isinstance(v, bool),
    "integer": lambda v: isinstance(v, int) and not isinstance(v, bool),
    "null": lambda v: v is None,
}


@settings(max_examples=30, deadline=None)
@given(schema=schemas, seed=st.integers(0, 2**31))
def test_a_random_walk_ends_in_a_document(harmony: PreTrainedTokenizerFast, schema: dict[str, Any], seed: int) -> None:
    grammars = JsonGrammars(harmony, len(harmony), [harmony.eos_token_id])
    grammar, chance, ids = grammars.grammar(schema), torch.Generator().manual_seed(seed), []
    for _ in range(500):
        allowed = grammar.restrict(torch.zeros(1, len(harmony)))[0].isfinite().nonzero()[:, 0]
        ids.append(int(allowed[torch.randint(len(allowed), (1,), generator=chance)]))
        if grammar.accept(ids[-1]):
            break
    else:
        return
    found = json.loads(harmony.decode(ids, skip_special_tokens=True))
    assert sorted(found) == schema["required"]
    for name, one in schema["properties"].items():
        assert VALUES[one["type"]](found[name]) if "type" in one else found[name] == one["const"]


def test_a_slow_tokenizer_and_a_schema_that_is_none(harmony: PreTrainedTokenizerFast) -> None:
    with pytest.raises(UnsupportedError, match="fast tokenizer"):
        JsonGrammars(object(), 10, [])
    with pytest.raises(UnsupportedError, match="llguidance says"):
        JsonGrammars(harmony, len(harmony) - 1, [])
    beyond = JsonGrammars(harmony, len(harmony) + 9, [len(harmony) + 3])  # an end token that the tokenizer has not
    assert beyond.grammar({"const": 1}).restrict(torch.zeros(1, len(harmony) + 9)).isfinite().any()
    with pytest.raises(InvalidInputError, match="llguidance says"):
        JsonGrammars(harmony, len(harmony), [1]).grammar({"type": 3})
