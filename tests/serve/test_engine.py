"""Requests on tiny models: each gives what it gives alone, however they share steps, and none disturbs another."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from transformers import GenerationConfig
from transformers.cache_utils import Cache

import zoo
from heard import Heard
from moestro.errors import InvalidInputError, UnsupportedError
from moestro.hf.text_model import TextModel
from moestro.serve import batch
from moestro.serve import engine as engine_module
from moestro.serve.engine import Engine
from moestro.serve.request import BusyError, Request

APART = ["qwen3_moe", "gpt_oss", "mixtral"]
JOINED = ["deepseek_v3", "jetmoe"]
WHOLE = ["qwen3_next", "doge", "granitemoehybrid"]
ALONE = ["llama4"]
"""Prompts are reused, and steps are not shared: its attention depends on more than the distance of two tokens."""
PROMPTS = ([7, 8, 9], list(range(4, 40)), [11] * 17, [5], [9, 30, 31, 32, 33, 34])


@pytest.fixture
def engine_of():
    made = []

    def make(architecture="qwen3_moe", context=None, **options):
        model = zoo.build(architecture).model if isinstance(architecture, str) else architecture
        text_model = TextModel("tiny", "tiny", _Config(context), None, model)
        made.append(Engine(text_model, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


class _Config:
    def __init__(self, context):
        self.max_position_embeddings = context

    def get_text_config(self):
        return self


def request(prompt, new_tokens=6, seed=None, top_logprobs=None, **settings):
    config = GenerationConfig(max_new_tokens=new_tokens, pad_token_id=0, **settings)
    return Request(tuple(prompt), config, seed, top_logprobs)


def all_of(engine, requests):
    """What listeners heard of requests that were submitted one right after the other."""
    heard = [Heard() for _ in requests]
    for each, listener in zip(requests, heard, strict=True):
        engine.submit(each, listener)
    return [listener.wait() for listener in heard]


def by_generate(model, each):
    """What Transformers' own loop gives."""
    ids = torch.tensor([each.prompt_ids])
    with torch.random.fork_rng():
        if each.seed is not None:
            torch.manual_seed(each.seed)
        found = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=each.config)
    return found[0, len(each.prompt_ids) :].tolist()


@pytest.mark.parametrize("architecture", APART + JOINED + WHOLE + ALONE)
def test_requests_give_what_transformers_gives(engine_of, architecture):
    engine = engine_of(architecture)
    sampled = {"do_sample": True, "temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.2}
    requests = [request(prompt) for prompt in PROMPTS[:3]] + [request(PROMPTS[3], seed=5, **sampled)]
    for each, heard in zip(requests, all_of(engine, requests), strict=True):
        assert heard.ids == by_generate(engine.text_model.model, each)
        assert heard.ended.reason == ("length" if len(heard.ids) == 6 else "stop")
        assert (heard.ended.prompt_tokens, heard.ended.new_tokens) == (len(each.prompt_ids), len(heard.ids))


@pytest.mark.parametrize("architecture", APART + JOINED)
def test_requests_that_share_steps_give_what_they_give_alone(engine_of, architecture):
    alone, together = engine_of(architecture, prefix_bytes=0), engine_of(architecture, batch=3)
    settings = [
        {},
        {"do_sample": True, "temperature": 1.5},
        {"repetition_penalty": 3.0},
        {"do_sample": True, "top_k": 2},
    ]
    requests = [request(prompt, 4 + 3 * n, seed=n, **settings[n % len(settings)]) for n, prompt in enumerate(PROMPTS)]
    expected = [heard.ids for each in requests for heard in all_of(alone, [each])]
    assert [heard.ids for heard in all_of(together, requests)] == expected
    assert len({tuple(ids) for ids in expected}) == len(expected)


@pytest.mark.parametrize("architecture", WHOLE + ALONE)
def test_a_batch_is_refused_in_words_where_keys_cannot_be_shared(engine_of, architecture):
    with pytest.raises(UnsupportedError, match=r"\[serve\] got a batch .*with .*; needs .* Run requests one by one"):
        engine_of(architecture, batch=2)


def test_a_model_with_a_cache_of_its_own_is_refused(engine_of):
    with pytest.raises(UnsupportedError, match=r"\[serve\] got MiniMaxForCausalLM .*cache of its own"):
        engine_of("minimax")


def test_a_model_that_computes_something_else_together_is_refused(engine_of, monkeypatch):
    right = batch.step

    def swapped(model, caches, ids, gather, **kwargs):
        for cache in caches:
            for layer in cache.layers:
                layer.keys = layer.keys.flip(-1)
        return right(model, caches, ids, gather, **kwargs)

    monkeypatch.setattr(batch, "step", swapped)
    with pytest.raises(UnsupportedError, match="relative error"):
        engine_of(batch=2)


@pytest.mark.parametrize("architecture", APART + JOINED + ALONE)
def test_a_prompt_pays_once_for_what_an_earlier_one_began_with(engine_of, architecture):
    engine, fresh = engine_of(architecture), engine_of(architecture, prefix_bytes=0)
    first, answer = list(range(4, 44)), all_of(engine, [request(range(4, 44))])[0].ids
    prompts = [first + answer + [50, 51], [*first[:20], 60], first, [70, *first]]
    found = all_of(engine, [request(prompt) for prompt in prompts])
    assert [heard.ended.cached_tokens for heard in found] == [len(first) + len(answer) - 1, 20, len(first) - 1, 0]
    assert [heard.ids for heard in found] == [heard.ids for heard in all_of(fresh, [request(p) for p in prompts])]
    assert (engine.prefixes.hits, fresh.prefixes.hits, fresh.prefixes.num_bytes) == (3, 0, 0)


def test_a_seed_asks_for_all_tokens_to_be_computed(engine_of):
    engine = engine_of()
    found = [all_of(engine, [request(PROMPTS[1], seed=3, do_sample=True)])[0] for _ in range(3)]
    assert [heard.ended.cached_tokens for heard in found] == [0, 0, 0]
    assert found[0].ids == found[1].ids == found[2].ids


def test_a_long_prompt_is_computed_in_parts_while_others_step(engine_of, monkeypatch):
    monkeypatch.setattr(engine_module, "CHUNK", 8)
    engine, alone = engine_of("gpt_oss", batch=2), engine_of("gpt_oss", prefix_bytes=0)
    requests = [request(PROMPTS[0], 20), request(list(range(4, 60)), 5)]
    assert [heard.ids for heard in all_of(engine, requests)] == [
        heard.ids for each in requests for heard in all_of(alone, [each])
    ]


def test_prompts_are_read_in_the_step_of_others(engine_of, monkeypatch):
    counts, right, gate = [], batch.step, threading.Event()

    def counted(model, caches, ids, *args, **kwargs):
        counts.append([len(tokens) for tokens in ids])
        return right(model, caches, ids, *args, **kwargs)

    monkeypatch.setattr(batch, "step", counted)
    monkeypatch.setattr(engine_module, "CHUNK", 24)
    engine, alone = engine_of("gpt_oss", batch=3), engine_of("gpt_oss", prefix_bytes=0)
    requests = [request(PROMPTS[0], 6), request(range(4, 34), 3), request(range(30, 40), 3)]
    counts.clear()
    heard = [Heard(gate=gate), Heard(), Heard()]
    engine.submit(requests[0], heard[0])
    assert heard[0].begun.wait(60)
    for each, listener in zip(requests[1:], heard[1:], strict=True):
        engine.submit(each, listener)
    gate.set()
    expected = [listener.ids for each in requests for listener in all_of(alone, [each])]
    assert [listener.wait().ids for listener in heard] == expected
    assert counts[:2] == [[1, 24], [1, 6, 10]]


def test_an_end_token_and_a_listener_end_a_request(engine_of):
    engine = engine_of()
    ids = all_of(engine, [request(PROMPTS[1], 8)])[0].ids
    heard = all_of(engine, [request(PROMPTS[1], 8, eos_token_id=[90, ids[2]])])[0]
    assert (heard.ended.reason, heard.ids) == ("stop", ids[: ids.index(ids[2]) + 1])
    listener = Heard(stop_after=2)
    engine.submit(request(PROMPTS[1], 8), listener)
    assert (listener.wait().ended.reason, listener.ids) == ("stop", ids[:2])


def test_logprobs_are_the_models_own(engine_of):
    engine = engine_of()
    heard = all_of(engine, [request(PROMPTS[1], 3, seed=1, top_logprobs=4, do_sample=True, temperature=0.1)])[0]
    ids = torch.tensor([[*PROMPTS[1], *heard.ids]])
    with torch.no_grad():
        expected = engine.text_model.model(ids).logits[0].log_softmax(-1)
    for n, token in enumerate(heard.tokens):
        row = expected[len(PROMPTS[1]) - 1 + n]
        assert token.logprob == pytest.approx(float(row[token.id]), rel=1e-3)
        assert [top for top, _ in token.top] == row.topk(4).indices.tolist()
    none, own = (all_of(engine, [request([4], 1, top_logprobs=k)])[0].tokens[0] for k in (None, 0))
    assert (none.logprob, none.top, own.top) == (None, (), ())
    assert own.logprob is not None


def test_requests_are_cancelled_while_they_wait_and_while_they_run(engine_of):
    engine, gate = engine_of(), threading.Event()
    running, waiting = Heard(gate=gate), Heard()
    ticket = engine.submit(request(PROMPTS[0], 50), running)
    assert running.begun.wait(60)
    other = engine.submit(request(PROMPTS[0], 50), waiting)
    assert (engine.running, engine.waiting) == (1, 1)
    other.cancel()
    ticket.cancel()
    gate.set()
    assert (waiting.wait().ended.reason, waiting.ids) == ("cancelled", [])
    assert running.wait().ended.reason == "cancelled"
    assert len(running.ids) == 1
    ticket.cancel()
    assert all_of(engine, [request(PROMPTS[0])])[0].ended.reason == "length"
    assert (engine.running, engine.waiting) == (0, 0)


def test_no_more_requests_wait_than_may(engine_of):
    engine, gate = engine_of(max_waiting=1), threading.Event()
    listeners = [Heard(gate=gate), Heard()]
    engine.submit(request(PROMPTS[0]), listeners[0])
    assert listeners[0].begun.wait(60)
    engine.submit(request(PROMPTS[0]), listeners[1])
    with pytest.raises(BusyError):
        engine.submit(request(PROMPTS[0]), Heard())
    gate.set()
    assert [listener.wait().ended.reason for listener in listeners] == ["length", "length"]


def test_closing_cancels_all(engine_of):
    engine, gate = engine_of(), threading.Event()
    listeners = [Heard(gate=gate), Heard()]
    for listener in listeners:
        engine.submit(request(PROMPTS[0], 50), listener)
    assert listeners[0].begun.wait(60)
    threading.Timer(0.01, gate.set).start()
    engine.close()
    assert [listener.ended.reason for listener in listeners] == ["cancelled", "cancelled"]
    with pytest.raises(BusyError):
        engine.submit(request(PROMPTS[0]), Heard())


@pytest.mark.parametrize("batch", [1, 2])
def test_an_error_ends_only_the_requests_that_it_met(engine_of, batch):
    engine = engine_of(batch=batch)
    failing, other = Heard(fail=True), Heard()
    engine.submit(request(PROMPTS[0]), failing)
    engine.submit(request(PROMPTS[1]), other)
    assert (failing.wait().ended.reason, str(failing.ended.error)) == ("failed", "a listener that fails")
    assert (other.wait().ended.reason, len(other.ids)) == ("length", 6)


def test_a_model_that_asks_for_the_length_of_all_caches_takes_no_step(engine_of):
    """Llama 4's layers without rotary embeddings do, to scale attention beyond so many tokens."""
    model = zoo.build("llama4").model
    model.config.layer_types = ["full_attention"] * len(model.config.layer_types)
    for module in model.modules():
        if hasattr(module, "attn_temperature_tuning"):
            module.attn_temperature_tuning, module.use_rope = True, False
    with pytest.raises(UnsupportedError, match="asks for the one length of several"):
        engine_of(model, batch=2)


def test_a_request_that_has_ended_holds_no_keys(engine_of):
    class Watching(Heard):
        def token(self, token):
            self.cache = weakref.ref(engine._running[0].cache)
            return super().token(token)

    engine, heard = engine_of(prefix_bytes=0), Watching()
    gc.disable()
    try:
        ticket = engine.submit(request(PROMPTS[1]), heard)
        heard.wait()
        assert all_of(engine, [request(PROMPTS[0])])[0].ended.reason == "length"
        assert heard.cache() is None
        assert ticket._work.cache is None
    finally:
        gc.enable()


def test_a_listener_that_fails_at_its_end_is_logged_and_the_engine_goes_on(engine_of, logged):
    class Failing(Heard):
        def end(self, ended):
            super().end(ended)
            raise ValueError("at the end")

    engine, failing = engine_of(), Failing()
    engine.submit(request(PROMPTS[0]), failing)
    failing.wait()
    assert all_of(engine, [request(PROMPTS[0])])[0].ended.reason == "length"
    assert "a listener failed at the end of its request" in logged.getvalue()


def test_a_model_that_fails_ends_its_requests_and_serves_the_next(engine_of, monkeypatch):
    engine = engine_of()
    monkeypatch.setattr(Cache, "update", lambda *args, **kwargs: 1 / 0)
    failed = all_of(engine, [request(PROMPTS[0])])[0].ended
    assert (failed.reason, type(failed.error), failed.new_tokens) == ("failed", ZeroDivisionError, 0)
    monkeypatch.undo()
    assert all_of(engine, [request(PROMPTS[0])])[0].ended.reason == "length"


def test_logits_that_are_not_finite_fail_in_words(engine_of):
    model = zoo.build("qwen3_moe").model
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    engine = engine_of(model)
    ended = all_of(engine, [request(PROMPTS[0], do_sample=True)])[0].ended
    assert (ended.reason, type(ended.error)) == ("failed", InvalidInputError)


def test_new_tokens_stop_at_the_context_and_a_full_one_is_refused(engine_of):
    engine = engine_of(context=8)
    heard = all_of(engine, [request([4] * 6, 50)])[0]
    assert (heard.ended.reason, heard.ended.new_tokens) == ("length", 2)
    for prompt in ([4] * 8, []):
        with pytest.raises(InvalidInputError, match=r"\[serve\] got a prompt of \d tokens; needs at least one"):
            engine.submit(request(prompt), Heard())


@pytest.mark.parametrize("ids", [[4, -1], [10**6, 4]])
def test_ids_that_are_no_tokens_are_refused(engine_of, ids):
    with pytest.raises(InvalidInputError, match="ids that are no tokens"):
        engine_of(batch=2).submit(request(ids), Heard())


def test_searches_over_several_sequences_are_refused(engine_of):
    with pytest.raises(InvalidInputError, match="beam"):
        engine_of().submit(request([4], num_beams=4), Heard())


def test_keys_and_values_stay_within_their_bytes(engine_of):
    token = engine_of()._model.token_bytes
    engine, seen = engine_of(batch=4, kv_bytes=40 * token, prefix_bytes=0), []

    class Watching(Heard):
        def token(self, token):
            seen.append((engine.running, sum(work.cache.num_bytes for work in engine._running if work.cache)))
            return super().token(token)

    listeners = [Watching() for _ in range(6)]
    for n, listener in enumerate(listeners):
        engine.submit(request([4 + n] * 8, 6), listener)
    assert {listener.wait().ended.reason for listener in listeners} <= {"length", "stop"}
    assert max(running for running, _ in seen) == 2
    assert max(size for _, size in seen) <= 40 * token
    with pytest.raises(InvalidInputError, match=r"got 30 tokens and 11 new ones; needs at most 40 together"):
        engine.submit(request([4] * 30, 11), Heard())


@pytest.mark.parametrize("options", [{"kv_bytes": -1}, {"batch": 0}, {"max_waiting": -1}, {"prefix_bytes": -1}])
def test_sizes_below_the_least_are_refused(engine_of, options):
    with pytest.raises(InvalidInputError, match=r"\[serve\]"):
        engine_of(**options)
