"""The native engine's promise: a token's bits depend on its own row and its experts, and on nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro import Activation, Routing
from moestro.formats import FORMATS
from moestro.types import GPT_OSS_SWIGLU
from tolerances import bit_equal

from . import problems
from .engines import RUNNING, STORED, STRATEGIES, every_isa, run, stored_weights
from .stored import apart

TOKENS = 211
THREADS = (1, 2, 3, 5)


def layer(name, num_tokens=TOKENS, num_experts=6, top_k=3):
    """Experts large enough that their rows are cut into several ranges, of sizes off the vectors where a format can."""
    form = FORMATS[name]
    hidden, inner = (256, 384) if form.per_item > 1 else (250, 203)
    sizes = problems.Sizes(num_tokens, hidden, inner, num_experts, top_k)
    return sizes, stored_weights(name, sizes, GPT_OSS_SWIGLU), torch.randn(num_tokens, hidden)


def some(routing, rows):
    return Routing(routing.expert_ids[rows], routing.routing_weights[rows], routing.weight_on)


@every_isa
@pytest.mark.parametrize("name", STORED)
def test_alone_in_any_batch_and_permuted(isa, name):
    sizes, weights, x = layer(name)
    routing = problems.routing(sizes, kind="duplicates")
    whole = run(isa, x, routing, weights)
    for row in (0, 1, 96, 107, TOKENS - 1):
        one = slice(row, row + 1)
        assert bit_equal(run(isa, x[one], some(routing, one), weights), whole[one])
    for size in (2, 3, 4, 5, 6, 7, 8, 17, 97):
        few = slice(5, 5 + size)
        assert bit_equal(run(isa, x[few], some(routing, few), weights), whole[few])
    order = torch.randperm(TOKENS)
    assert bit_equal(run(isa, x[order], some(routing, order), weights), whole[order])
    assert bit_equal(run(isa, x, routing, apart(weights)), whole)


@every_isa
@pytest.mark.parametrize("name", STORED)
def test_whatever_the_strategy_and_the_threads(isa, name):
    sizes, weights, x = layer(name, num_tokens=40)
    routing = problems.routing(sizes, kind="duplicates")
    whole = run(isa, x, routing, weights, "grouped")
    for strategy in STRATEGIES:
        assert bit_equal(run(isa, x, routing, weights, strategy), whole), strategy
    for num_threads in THREADS:
        torch.set_num_threads(num_threads)
        for strategy in ("grouped", "blockwise-5", "all_experts"):
            assert bit_equal(run(isa, x, routing, weights, strategy), whole), (num_threads, strategy)
        assert bit_equal(run(isa, x[:1], some(routing, slice(0, 1)), weights), whole[:1]), num_threads


@every_isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("weight_on", ["output", "input"])
@pytest.mark.parametrize("hidden", [256, 250], ids=["whole vectors", "not"])
def test_every_dtype_of_tokens(isa, dtype, weight_on, hidden):
    """Rows of float32 that fill whole vectors are read where they lie, others from a copy."""
    sizes = problems.Sizes(TOKENS, hidden, 203, 6, 3)
    weights = stored_weights("bfloat16", sizes, Activation())
    routing, x = problems.routing(sizes, kind="random", weight_on=weight_on), torch.randn(TOKENS, hidden).to(dtype)
    whole = run(isa, x, routing, weights)
    order = torch.randperm(TOKENS)[:100]
    for strategy, num_threads in zip(STRATEGIES, (1, 2, 3, 5, 2, 3), strict=True):
        torch.set_num_threads(num_threads)
        assert bit_equal(run(isa, x[order], some(routing, order), weights, strategy), whole[order])


@every_isa
def test_beyond_the_workspace(isa):
    """A call that is computed in pieces gives what its pieces give; the last of them is short."""
    sizes = problems.Sizes(100_000, 16, 16, 4, 3)
    weights = stored_weights("bfloat16", sizes, Activation())
    routing, x = problems.routing(sizes, kind="random"), torch.randn(100_000, 16)
    whole = run(isa, x, routing, weights)
    for rows in (slice(0, 1), slice(99_999, 100_000), slice(20_000, 30_000)):
        assert bit_equal(run(isa, x[rows], some(routing, rows), weights), whole[rows])


@every_isa
def test_another_tokens_numbers_change_nothing(isa):
    """NaN and infinity in one row stay in it."""
    sizes, weights, x = layer("mxfp4", num_tokens=20)
    routing = problems.routing(sizes, kind="full")
    clean = run(isa, x, routing, weights)
    x[3], x[7, 5] = torch.nan, torch.inf
    y = run(isa, x, routing, weights)
    others = [row for row in range(20) if row not in (3, 7)]
    assert bit_equal(y[others], clean[others])
    assert y[3].isnan().all()


@given(
    isa=st.sampled_from(RUNNING or [None]),
    name=st.sampled_from(STORED),
    kind=st.sampled_from(problems.KINDS),
    weight_on=st.sampled_from(("output", "input")),
    strategies=st.tuples(st.sampled_from(STRATEGIES), st.sampled_from(STRATEGIES)),
    num_threads=st.sampled_from(THREADS),
    rows=st.lists(st.integers(0, 39), min_size=1, max_size=40),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=200)
@pytest.mark.skipif(not RUNNING, reason="no engine")
def test_any_choice_of_rows(isa, name, kind, weight_on, strategies, num_threads, rows, seed):
    sizes, weights, x = layer(name, num_tokens=40)
    torch.manual_seed(seed)
    routing, x = problems.routing(sizes, kind=kind, weight_on=weight_on), torch.randn(x.shape)
    torch.set_num_threads(1)
    whole = run(isa, x, routing, weights, strategies[0])
    torch.set_num_threads(num_threads)
    picked = torch.tensor(rows)
    assert bit_equal(run(isa, x[picked], some(routing, picked), weights, strategies[1]), whole[picked])
