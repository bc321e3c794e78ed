"""Keys and values that are appended in place, against Transformers' own cache."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache, GenerationConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from hf.checkpoints import Checkpoints
from moestro.hf import load
from moestro.hf.cache import SPARE, AppendingLayer, AppendingWindow, appending_cache

STEPS = st.one_of(
    st.tuples(st.just("append"), st.sampled_from([1, 1, 2, SPARE - 1, SPARE, SPARE + 1])),
    st.tuples(st.just("crop"), st.integers(1, 5)),
    st.tuples(st.just("select"), st.lists(st.integers(0, 1), min_size=2, max_size=2)),
    st.tuples(st.just("repeat"), st.just(2)),
    st.tuples(st.just("reset"), st.none()),
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


def states(batch, length, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 2, length, 4, generator=generator), torch.randn(batch, 2, length, 3, generator=generator)


@given(st.lists(STEPS, min_size=1, max_size=8))
def test_a_layer_is_what_transformers_own_is(steps):
    """After anything that a generation does with a layer."""
    ours, theirs, batch = AppendingLayer(), DynamicLayer(), 2
    for seed, (what, value) in enumerate((("append", 3), *steps)):
        length = theirs.get_seq_length()
        if what == "append":
            given_states = states(batch, value, seed)
            for found, expected in zip(ours.update(*given_states), theirs.update(*given_states), strict=True):
                torch.testing.assert_close(found, expected, rtol=0, atol=0)
        elif what == "reset":
            ours.reset(), theirs.reset()
        elif length > 5 and what == "crop":
            ours.crop(-value), theirs.crop(-value)
        elif length and what == "select":
            ours.batch_select_indices(torch.tensor(value)), theirs.batch_select_indices(torch.tensor(value))
            batch = 2
        elif length and what == "repeat" and batch < 8:
            ours.batch_repeat_interleave(value), theirs.batch_repeat_interleave(value)
            batch *= value
        assert ours.get_seq_length() == theirs.get_seq_length()
        assert ours.get_mask_sizes(1) == theirs.get_mask_sizes(1)


@given(
    st.lists(st.one_of(STEPS, *[st.tuples(st.just("append"), st.just(1))] * 4), min_size=1, max_size=12),
    st.sampled_from([1, 2, 3, 8, SPARE + 40]),
    st.booleans(),
    st.booleans(),
)
def test_a_window_is_what_transformers_own_is(steps, size, alike, records):
    """Token by token and many at once, before and behind the end of a window."""
    ours, theirs, batch = AppendingWindow(size), DynamicSlidingWindowLayer(size), 2
    for each in (ours, theirs):
        if records:
            each.activate_past_recording()
    for seed, (what, value) in enumerate((("append", 3), *steps)):
        length = theirs.get_seq_length()
        if what == "append":
            keys, values = states(batch, value, seed)
            given_states = keys, keys + 1 if alike else values
            for found, expected in zip(ours.update(*given_states), theirs.update(*given_states), strict=True):
                torch.testing.assert_close(found, expected, rtol=0, atol=0)
            for found, expected in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
                torch.testing.assert_close(found, expected, rtol=0, atol=0)
        elif what == "reset":
            ours.reset(), theirs.reset()
        elif 5 < length < size and what == "crop":
            ours.crop(-value), theirs.crop(-value)
        elif length and what == "select":
            ours.batch_select_indices(torch.tensor(value)), theirs.batch_select_indices(torch.tensor(value))
            batch = 2
        elif length and what == "repeat" and batch < 8:
            ours.batch_repeat_interleave(value), theirs.batch_repeat_interleave(value)
            batch *= value
        assert ours.get_seq_length() == theirs.get_seq_length()
        assert ours.get_mask_sizes(1) == theirs.get_mask_sizes(1)


def test_a_window_moves_through_memory():
    ours, theirs = AppendingWindow(4), DynamicSlidingWindowLayer(4)
    given_out = []
    for seed, length in enumerate((6, *[1] * (2 * SPARE + 9))):
        keys, values = states(1, length, seed)[0], states(1, length, seed + 9999)[0]
        found, expected = ours.update(keys, values), theirs.update(keys, values)
        for mine, other in (*zip(found, expected, strict=True), (ours.keys, theirs.keys), (ours.values, theirs.values)):
            torch.testing.assert_close(mine, other, rtol=0, atol=0)
        given_out.append((found[0], expected[0].clone()))
        assert ours.get_seq_length() == theirs.get_seq_length()
    for mine, other in given_out:  # what was given out stays what it was
        torch.testing.assert_close(mine, other, rtol=0, atol=0)
    addresses = {layer.untyped_storage().data_ptr() for layer, _ in given_out[1:]}
    assert len(addresses) == 3
    room = ours.room((1, 2, 4), torch.float32)
    assert room is not None
    assert ours.room((2, 2, 4), torch.float32) is ours.room((1, 2, 5), torch.float32) is None
    assert ours.room((1, 2, 4), torch.bfloat16) is None
    for (address, *apart), states_now in zip(room, (ours.keys, ours.values), strict=True):
        assert address == states_now[:, :, -1].data_ptr() + 4 * states_now.stride(2)
        assert tuple(apart) == states_now.stride()[:2]
    ours.keys = ours.keys.clone()
    assert ours.room((1, 2, 4), torch.float32) is None


def with_room():
    layer = AppendingLayer()
    for seed, length in enumerate((5, 1)):
        keys = states(1, length, seed)[0]
        layer.update(keys, keys + 1)
    assert layer.room(*ASKED) is not None
    layer.take()
    return layer


ASKED = (1, 2, 4), torch.float32


def test_states_that_lie_elsewhere_have_no_room():
    layer = with_room()
    assert layer.room(*ASKED) is not None
    layer.keys.data = layer.keys.clone()
    assert layer.room(*ASKED) is None
    layer = pickle.loads(pickle.dumps(with_room()))
    keys, length = layer.keys.mul_(2).clone(), layer.keys.shape[-2]
    assert layer.room(*ASKED) is None
    layer.update(*[states(1, 1, 9)[0]] * 2)
    torch.testing.assert_close(layer.keys[..., :length, :], keys, rtol=0, atol=0)


def test_memories_of_several_lengths_have_room():
    layer = with_room()
    layer.keys = layer.keys.clone()
    assert layer.room(*ASKED) is None
    layer.update(*[states(1, 1, 9)[0]] * 2)
    assert len({memory.shape[-2] for memory in layer._memory}) == 2
    assert layer.room(*ASKED) is not None


def test_a_token_is_written_behind_those_before_it():
    layer = AppendingLayer()
    keys, values = layer.update(*states(1, 5, 0))
    for seed in range(1, SPARE + 1):
        layer.update(*states(1, 1, seed))
    assert (layer.keys.data_ptr(), layer.values.data_ptr()) == (keys.data_ptr(), values.data_ptr())
    layer.update(*states(1, 1, 0))
    assert layer.keys.data_ptr() != keys.data_ptr()
    assert keys.shape[-2] == 5  # what was given out stays what it was
    torch.testing.assert_close(layer.keys[..., :5, :], keys, rtol=0, atol=0)


def test_a_cache_of_inference_mode_is_written_outside_of_it():
    """As a chat that begins in it may go on."""
    ours, theirs = AppendingLayer(), DynamicLayer()
    with torch.inference_mode():
        for seed in range(2):
            ours.update(*states(1, 3, seed)), theirs.update(*states(1, 3, seed))
    with torch.no_grad():
        expected = theirs.update(*states(1, 1, 2))
        for found, each in zip(ours.update(*states(1, 1, 2)), expected, strict=True):
            torch.testing.assert_close(found, each, rtol=0, atol=0)
    assert not ours.keys.is_inference()


def test_a_model_that_names_the_usual_cache_generates(made):
    """Transformers refuses a cache of ours beside a name of its own."""
    model, ids = load(made.folder("olmoe")), torch.arange(3, 9)[None]
    asked = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(ids, **asked)
    model.generation_config.cache_implementation = "dynamic"
    found = model.generate(ids, **asked, **appending_cache(model, model.generation_config))
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("like", ["olmoe", "gpt-oss-20b", "deepseek-v3"])
def test_generation_is_the_same(made, like):
    model = load(made.folder(like))
    ids = torch.arange(3, 24)[None]
    given_arguments = appending_cache(model, model.generation_config)
    kinds = {type(layer) for layer in given_arguments["past_key_values"].layers}
    assert kinds == ({AppendingLayer, AppendingWindow} if like == "gpt-oss-20b" else {AppendingLayer})
    asked = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    asked["attention_mask"] = torch.ones_like(ids)
    for beams in ({}, {"num_beams": 2}):
        expected = model.generate(ids, **asked, **beams)
        found = model.generate(ids, **asked, **beams, **appending_cache(model, model.generation_config))
        assert found.tolist() == expected.tolist()


def model_of(name="ModelForCausalLM", layers=2, **config):
    text = SimpleNamespace(num_hidden_layers=layers, **config)
    text.get_text_config = lambda decoder: text
    return type(name, (), {"config": text, "_supports_default_dynamic_cache": lambda self: True})()


@pytest.mark.parametrize("asked", [{"cache_implementation": "static"}, {"use_cache": False}])
def test_a_generation_that_asks_for_another_cache_has_it(asked):
    assert appending_cache(model_of(), GenerationConfig(**asked)) == {}


def test_models_that_keep_something_else(monkeypatch):
    monkeypatch.setattr("moestro.hf.cache.DynamicCache", lambda config: SimpleNamespace(layers=[DynamicLayer()]))
    assert appending_cache(model_of(), GenerationConfig())
    assert appending_cache(model_of("MambaForCausalLM"), GenerationConfig()) == {}
    assert appending_cache(model_of(is_encoder_decoder=True), GenerationConfig()) == {}
    window = DynamicCache(None)
    window.layers = [DynamicSlidingWindowLayer(4)]
    monkeypatch.setattr("moestro.hf.cache.DynamicCache", lambda config: window)
    (layer,) = appending_cache(model_of(), GenerationConfig())["past_key_values"].layers
    assert (type(layer), layer.sliding_window) == (AppendingWindow, 4)
    monkeypatch.setattr("moestro.hf.cache.DynamicCache", lambda config: SimpleNamespace(layers=[object()]))
    assert appending_cache(model_of(), GenerationConfig()) == {}
