"""Instruction sets that multiply tiles of bfloat16: against the reference, and bit by bit whatever the batch."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

import moestro
from moestro import Activation, ExpertWeights, Routing
from moestro.errors import UnsupportedError
from moestro.formats import FORMATS, PackedTensor, SplitTensor
from moestro.ops.expert_mlp import crossover
from moestro.types import GPT_OSS_SWIGLU
from tolerances import bit_equal

from . import problems
from .engines import STRATEGIES, check_tiles, default_mode, every_tiled_isa, run, stored_weights
from .stored import apart, poison

WIDTHS = (1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 66, 130)
TOKENS = (1, 2, 15, 16, 17, 31, 32, 33, 95, 96, 97, 200)
SIZES = problems.Sizes(50, 98, 75, 4, 2)


def problem(sizes=SIZES, activation=GPT_OSS_SWIGLU):
    x = torch.randn(sizes.num_tokens, sizes.hidden_size).bfloat16()
    return x, stored_weights("bfloat16", sizes, activation)


@every_tiled_isa
def test_sizes_around_tiles(isa):
    for i, (hidden, inner) in enumerate(itertools.product(WIDTHS, WIDTHS)):
        sizes = problems.Sizes(TOKENS[i % 6], hidden, inner, 3, 2)
        x, weights = problem(sizes, problems.ACTIVATIONS[i % 3])
        routing = problems.routing(sizes, kind="full")
        y = check_tiles(isa, x, routing, weights)
        if not weights.activation.interleaved:
            assert bit_equal(run(isa, x, routing, apart(weights)), y)


@every_tiled_isa
@pytest.mark.parametrize("num_tokens", [0, *TOKENS])
def test_any_number_of_tokens_and_any_routing(isa, num_tokens):
    sizes = replace(SIZES, num_tokens=num_tokens)
    x, weights = problem(sizes)
    for kind, weight_on in itertools.product(problems.KINDS, ("output", "input")):
        routing = problems.routing(sizes, kind=kind, weight_on=weight_on)
        y = check_tiles(isa, x, routing, weights)
        short = Routing(routing.expert_ids.int(), routing.routing_weights, weight_on)
        for strategy in STRATEGIES:
            assert bit_equal(run(isa, x, short, weights, strategy), y)


@every_tiled_isa
@pytest.mark.parametrize("activation", problems.ACTIVATIONS, ids=lambda a: f"{a.kind}-{a.gated}-{a.limit}")
def test_every_activation(isa, activation):
    x, weights = problem(activation=activation)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        biases = {"gate_up_bias": weights.gate_up_bias.to(dtype), "down_bias": weights.down_bias.to(dtype)}
        check_tiles(isa, 3 * x, problems.routing(SIZES), replace(weights, **biases))


@every_tiled_isa
@pytest.mark.parametrize("name", ["bfloat16", "mxfp4", "int4-g32", "fp8-e4m3-b128"])
def test_the_bits_of_a_token_do_not_depend_on_how_full_the_last_tile_is(isa, name, monkeypatch):
    monkeypatch.setattr(crossover, "wide_rows", lambda *_: 1)
    sizes = problems.Sizes(120, 320, 160, 1, 1)
    x, weights = torch.randn(120, 320).bfloat16(), stored_weights(name, sizes, GPT_OSS_SWIGLU)
    routing = problems.routing(sizes, kind="full")
    with default_mode(), moestro.use(implementation=f"cpu-{isa.name}"):
        whole = moestro.expert_mlp(x, routing, weights)
        for count in (*range(1, 50), 96, 97, 104, 105):
            few = x[:count], Routing(routing.expert_ids[:count], routing.routing_weights[:count]), weights
            assert bit_equal(moestro.expert_mlp(*few), whole[:count])
            assert {use.kernel for use in moestro.explain(moestro.expert_mlp, *few).kernels} == {"bfloat16 tiles"}


@every_tiled_isa
def test_the_same_bits_alone_in_any_batch_and_on_any_number_of_threads(isa):
    sizes = problems.Sizes(211, 320, 203, 6, 3)
    x, weights = problem(sizes)
    routing = problems.routing(sizes, kind="duplicates")
    whole = run(isa, x, routing, weights)

    def alike(rows, strategy="auto"):
        few = Routing(routing.expert_ids[rows], routing.routing_weights[rows])
        assert bit_equal(run(isa, x[rows], few, weights, strategy), whole[rows])

    for row in (0, 15, 16, 100, 210):
        alike(slice(row, row + 1))
    for num_threads, strategy in itertools.product((1, 2, 3, 5), STRATEGIES):
        torch.set_num_threads(num_threads)
        alike(torch.randperm(211))
        alike(torch.randint(0, 211, (37,)), strategy)


@every_tiled_isa
def test_forty_thousand_tokens(isa):
    sizes = problems.Sizes(40_000, 33, 18, 3, 2)
    x, weights = problem(sizes)
    routing = problems.routing(sizes)
    y = check_tiles(isa, x, routing, weights)
    assert bit_equal(run(isa, x[-1:], Routing(routing.expert_ids[-1:], routing.routing_weights[-1:]), weights), y[-1:])


@every_tiled_isa
def test_poison_and_infinity_stay_where_they_are(isa):
    x, _ = problem()
    weights = problems.weights(SIZES, Activation(), torch.bfloat16, bias=True)
    ids = torch.tensor([[0, 1], [1, 3]]).repeat(25, 1)
    routing = Routing(ids, torch.rand(50, 2))
    clean = run(isa, x, routing, weights)
    poison(weights.gate_up, 2)
    poison(weights.down, 2)
    x[7], x[40, 3] = torch.nan, torch.inf
    for stored, strategy in itertools.product((weights, apart(weights)), STRATEGIES):
        y = run(isa, x, routing, stored, strategy)
        others = [row for row in range(50) if row not in (7, 40)]
        assert bit_equal(y[others], clean[others])
        assert y[7].isnan().all()


@every_tiled_isa
def test_strided_and_misaligned(isa):
    x, weights = problem()
    routing = problems.routing(SIZES)
    expected = run(isa, x, routing, weights)

    def spread(stored):
        wide = torch.full((stored.shape[0] * 2, stored.shape[1] + 3, stored.shape[2] + 5), torch.nan).bfloat16()
        view = wide[1::2, 2:-1, 4:-1].copy_(stored.data)
        return PackedTensor(view, FORMATS["bfloat16"])

    def moved(stored):
        buffer = bytearray(1) + bytearray(stored.data.view(torch.uint8).numpy().tobytes())
        return PackedTensor(torch.frombuffer(buffer, dtype=torch.bfloat16, offset=1).view(stored.shape), stored.format)

    for change in (spread, moved):
        other = replace(weights, gate_up=change(weights.gate_up), down=change(weights.down))
        for rows in (x, torch.cat([x, x], 1)[:, : x.shape[1]], x.t().contiguous().t()):
            assert bit_equal(run(isa, rows, routing, other), expected)


@every_tiled_isa
def test_ends(isa):
    for num_experts, top_k in ((1, 1), (300, 256), (4, 0)):
        sizes = problems.Sizes(3, 9, 5, num_experts, top_k)
        check_tiles(isa, problem(sizes)[0], problems.routing(sizes, kind="full"), problem(sizes, Activation())[1])
    none = ExpertWeights.from_dense(*(torch.zeros(0, n, k).bfloat16() for n, k in ((10, 9), (9, 5))))
    assert not run(isa, torch.ones(2, 9).bfloat16(), Routing(torch.full((2, 2), -1), torch.zeros(2, 2)), none).any()
    empty = ExpertWeights.from_dense(*(torch.zeros(2, n, k).bfloat16() for n, k in ((0, 9), (9, 0))))
    empty = replace(empty, down_bias=torch.randn(2, 9))
    check_tiles(isa, torch.ones(2, 9).bfloat16(), Routing(torch.tensor([[0], [1]]), torch.ones(2, 1)), empty)


@every_tiled_isa
def test_other_dtypes_are_refused(isa):
    x, weights = problem()
    routing = problems.routing(SIZES)
    for rows in (x.float(), x.half()):
        with pytest.raises(UnsupportedError, match="it multiplies bfloat16, and x is of torch"):
            run(isa, rows, routing, weights)
    with pytest.raises(UnsupportedError, match="it multiplies bfloat16, and gate_up is stored as float32"):
        run(isa, x, routing, stored_weights("float32", SIZES, Activation()))


@every_tiled_isa
def test_matrices_that_end_inside_a_tile_are_refused(isa):
    x, weights = problem()
    routing = problems.routing(SIZES)
    with pytest.raises(UnsupportedError, match="it multiplies 16 rows at a time, and the matrices of gate_up may end"):
        run(isa, x, routing, apart(weights))  # gate and up alternate
    cut = SplitTensor(tuple((m.rows(0, 49), m.rows(49, 98)) for m in (weights.down[e] for e in range(4))))
    with pytest.raises(UnsupportedError, match="the matrices of down may end"):
        run(isa, x, routing, replace(weights, down=cut))
