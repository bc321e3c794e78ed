"""A request's keys and values against Transformers' own cache, and what is kept of earlier requests."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from moestro.serve.cache import GrowingLayer, Prefixes, RequestCache

SIZES = st.lists(st.integers(1, 300), min_size=1, max_size=6)
PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=12)


def states(length, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, 2, length, 4, generator=generator), torch.randn(1, 2, length, 3, generator=generator)


def filled(ids):
    """A cache of two layers, whose keys are the tokens themselves."""
    layers = [GrowingLayer(), GrowingLayer(window=3)]
    for layer in layers:
        keys = torch.tensor(ids, dtype=torch.float32)[None, None, :, None].expand(1, 2, -1, 4)
        layer.update(keys, keys)
    return RequestCache(layers)


@given(SIZES, st.none() | st.integers(2, 40))
def test_a_growing_layer_shows_what_transformers_own_layer_shows(sizes, window):
    ours, theirs = GrowingLayer(window), DynamicLayer() if window is None else DynamicSlidingWindowLayer(window)
    for seed, size in enumerate(sizes):
        assert ours.get_mask_sizes(size) == theirs.get_mask_sizes(size)
        given_states = states(size, seed)
        for found, expected in zip(ours.update(*given_states), theirs.update(*given_states), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert ours.get_seq_length() == theirs.get_seq_length()


@given(SIZES, st.data())
def test_the_first_tokens_are_a_copy_that_goes_on_by_itself(sizes, data):
    layer, single = GrowingLayer(5), GrowingLayer(5)
    for seed, size in enumerate(sizes):
        layer.update(*states(size, seed))
    count = data.draw(st.integers(1, layer.get_seq_length()))
    copy = layer.first(count)
    single.update(layer.keys[..., :count, :], layer.values[..., :count, :])
    before = layer.keys[..., : layer.length, :].clone()
    for found, expected in zip(copy.update(*states(7, 99)), single.update(*states(7, 99)), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(layer.keys[..., : layer.length, :], before, rtol=0, atol=0)


@given(PROMPTS)
def test_the_longest_beginning_of_a_prompt_is_found(prompts):
    prefixes = Prefixes(1 << 30)
    for kept, prompt in enumerate(prompts):
        longest = max((common(prompt[:-1], other) for other in prompts[:kept]), default=0)
        found = prefixes.find(prompt)
        assert (0 if found is None else found.get_seq_length()) == longest
        if found is not None:
            assert found.layers[0].keys[0, 0, :longest, 0].tolist() == prompt[:longest]
        prefixes.keep(prompt, filled(prompt))
    assert prefixes.lookups == len(prompts)


@given(PROMPTS, st.integers(0, 4))
def test_what_is_kept_stays_within_its_bytes_and_no_entry_begins_another(prompts, budget):
    one = filled([0] * 9).num_bytes
    prefixes = Prefixes(budget * one)
    for prompt in prompts:
        prefixes.keep(prompt, filled(prompt))
        assert prefixes.num_bytes <= budget * one
    kept = [prefix.ids.tolist() for prefix in prefixes._kept]
    assert all(a is b or common(a, b) < len(a) for a in kept for b in kept)
    if budget:
        assert any(common(prompts[-1], ids) == len(prompts[-1]) for ids in kept)


def test_what_was_used_least_lately_is_forgotten_first():
    prefixes = Prefixes(2 * filled([0]).num_bytes)
    prefixes.keep([1], filled([1]))
    prefixes.keep([2], filled([2]))
    assert prefixes.find([1, 0]) is not None
    prefixes.keep([3], filled([3]))
    assert [prefixes.find([token, 0]) is not None for token in (1, 2, 3)] == [True, False, True]


def common(one, other):
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_a_shared_beginning_does_not_make_an_old_entry_new():
    prefixes = Prefixes(3 * filled([0, 0]).num_bytes)
    for token in (1, 2, 3):
        prefixes.keep([9, token], filled([9, token]))
    assert prefixes.find([9, 7, 7]).get_seq_length() == 1
    prefixes.keep([4], filled([4]))
    assert [prefixes.find([9, token, 0]).get_seq_length() for token in (1, 2, 3)] == [1, 2, 2]
