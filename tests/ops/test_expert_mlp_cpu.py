"""The native engine: every instruction set that this machine has, in every format, against the reference."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import moestro
from moestro import Activation, ExpertWeights, Routing, reference
from moestro.errors import UnsupportedError
from moestro.formats import FORMATS, PackedTensor, SplitTensor, dequantize
from moestro.types import GPT_OSS_SWIGLU
from tolerances import assert_close, bit_equal

from . import problems
from .engines import RUNNING, STORED, STRATEGIES, check, every_isa, run, stored_weights
from .stored import apart, poison, sizes_for

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DENSE = [name for name in STORED if FORMATS[name].is_dense]


def problem(name, dtype=torch.float32, activation=GPT_OSS_SWIGLU, **sizes):
    sizes = sizes_for(name, **sizes)
    return torch.randn(sizes.num_tokens, sizes.hidden_size).to(dtype), sizes, stored_weights(name, sizes, activation)


@every_isa
@pytest.mark.parametrize("name", DENSE)
def test_sizes_around_the_vector_width(isa, name):
    w = isa.lanes
    widths = (1, 3, 7, w - 1, w, w + 1, 8 * w + 2)
    for i, (hidden, inner) in enumerate(itertools.product(widths, widths)):
        sizes = problems.Sizes((1, 3, 9)[i % 3], hidden, inner, 3, 2)
        weights = stored_weights(name, sizes, problems.ACTIVATIONS[i % 2], bool(i % 2))
        x = torch.randn(sizes.num_tokens, hidden).to(DTYPES[i % 3])
        check(isa, x, problems.routing(sizes, kind="full"), weights)


def packed_widths(name, lanes):
    """Widths that the format can store, on both sides of the vectors and of the blocks of 8 * lanes nibbles."""
    form = FORMATS[name]
    group = form.scaling.columns
    if form.per_item > 1:
        return [group * n for n in (1, 3, 4, 5) if group * n <= 400]
    return [1, 7, lanes - 1, lanes, lanes + 1, 127, 128, 129, 150, 256 + lanes + 1]


@every_isa
@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8", "fp8-e4m3-b128", "mxfp4", "int4-g32-zp"])
def test_rows_longer_than_what_stays_in_the_first_cache(isa, name):
    """Columns go in pieces then, of 512 or 1024: their sums go on, and a token has the bits it has among few."""
    hidden, intermediate = (2112, 1088) if FORMATS[name].per_item > 1 else (2051, 1030)
    sizes = problems.Sizes(13, hidden, intermediate, 2, 1)
    weights = stored_weights(name, sizes, problems.ACTIVATIONS[0])
    x, routing = torch.randn(13, hidden), Routing(torch.arange(13)[:, None] // 12, torch.ones(13, 1))
    check(isa, x, routing, weights)
    torch.use_deterministic_algorithms(True)
    few = Routing(routing.expert_ids[:8], routing.routing_weights[:8])
    alone = Routing(routing.expert_ids[:1], routing.routing_weights[:1])
    y = run(isa, x, routing, weights)
    assert bit_equal(run(isa, x[:8], few, weights), y[:8])
    assert bit_equal(run(isa, x[:1], alone, weights), y[:1])


@every_isa
@pytest.mark.parametrize("name", [name for name in STORED if name not in DENSE])
def test_packed_sizes_around_groups_and_blocks(isa, name):
    widths = packed_widths(name, isa.lanes)
    for i, hidden in enumerate(widths):
        sizes = problems.Sizes((1, 7, 2)[i % 3], hidden, widths[-1 - i], 3, 2)
        weights = stored_weights(name, sizes, problems.ACTIVATIONS[i % 2])
        x, routing = torch.randn(sizes.num_tokens, hidden).to(DTYPES[i % 3]), problems.routing(sizes, kind="full")
        check(isa, x, routing, weights)
        check(isa, x, routing, apart(weights))


@pytest.mark.usefixtures("either_mode")
@every_isa
@pytest.mark.parametrize("name", STORED)
def test_any_number_of_tokens(isa, name):
    for num_tokens, dtype in zip((0, 1, 2, 5, 7, 97, 200), itertools.cycle(DTYPES)):
        x, sizes, weights = problem(name, dtype, num_tokens=num_tokens, num_experts=5, top_k=3)
        check(isa, x, problems.routing(sizes), weights)
        check(isa, x, problems.routing(sizes, kind="skewed"), apart(weights))


@every_isa
@pytest.mark.parametrize("name", ["float32", "mxfp4"])
@pytest.mark.parametrize("strategy", ["auto", "all_experts"])
def test_forty_thousand_tokens(isa, name, strategy):
    """More than the workspace holds at once."""
    sizes = problems.Sizes(40_000, 32, 32, 3, 2)
    weights = stored_weights(name, sizes, Activation())
    check(isa, torch.randn(40_000, 32), problems.routing(sizes), weights, strategy)


@every_isa
@pytest.mark.parametrize("kind", problems.KINDS)
@pytest.mark.parametrize("weight_on", ["output", "input"])
def test_every_routing_and_strategy(isa, kind, weight_on):
    """Empty slots, experts nobody picks, one expert for all, an expert twice in a token."""
    for name, strategy in itertools.product(("float32", "int8", "int4-g32-zp"), STRATEGIES):
        x, sizes, weights = problem(name, num_tokens=30)
        routing = problems.routing(sizes, kind=kind, weight_on=weight_on)
        short = Routing(routing.expert_ids.int(), routing.routing_weights, weight_on)
        check(isa, x.bfloat16(), routing, weights, strategy)
        check(isa, x, short, apart(weights), strategy)


ACTIVATIONS = (
    *problems.ACTIVATIONS,
    *(Activation(kind, gated=gated) for kind in ("gelu", "relu2", "tanh", "sigmoid") for gated in (True, False)),
    *(Activation(kind, interleaved=True, limit=0.7, up_offset=-0.5) for kind in ("gelu-tanh", "relu", "identity")),
)


@every_isa
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: f"{a.kind}-{a.gated}-{a.interleaved}-{a.limit}")
def test_every_activation(isa, activation):
    for name, dtype in itertools.product(("bfloat16", "fp8-e4m3-b128", "mxfp4"), DTYPES):
        x, sizes, weights = problem(name, dtype, activation)
        biases = {"gate_up_bias": weights.gate_up_bias.to(dtype), "down_bias": weights.down_bias.to(DTYPES[-1])}
        for stored in (replace(weights, **biases), apart(replace(weights, gate_up_bias=None))):
            check(isa, 4 * x, problems.routing(sizes), stored)


@every_isa
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu-tanh", "relu", "relu2", "sigmoid", "tanh", "identity"])
def test_activations_of_numbers_far_out(isa, kind):
    far = torch.tensor([0.0, 1e-40, 1e-20, 1e-6, 1.0, 9.0, 20.0, 60.0, 88.0, 90.0, 1e3, 1e10, 1e19, torch.inf])
    x = torch.cat([far, -far, torch.tensor([torch.nan])])[:, None]
    routing = Routing(torch.zeros(len(x), 1, dtype=torch.long), torch.ones(len(x), 1))
    for activation in (Activation(kind, gated=False), Activation(kind, gated=False, limit=7.0)):
        weights = ExpertWeights.from_dense(torch.ones(1, 1, 1), torch.ones(1, 1, 1), activation=activation)
        y, expected = run(isa, x, routing, weights), reference.expert_mlp(x.double(), routing, weights)
        scale = x.abs().clamp(max=1.0)  # where the function all but vanishes, what it was made from
        for mine, theirs, one in zip(y, expected, scale, strict=True):
            assert_close(torch.cat([mine, one]), torch.cat([theirs, one.double()]), torch.float32)


@every_isa
@pytest.mark.parametrize("name", STORED)
def test_a_poisoned_expert_nobody_picks_is_never_seen(isa, name):
    x, sizes, _ = problem(name)
    weights = problems.weights(sizes, GPT_OSS_SWIGLU, torch.float32, bias=True).quantize(name)
    ids = torch.tensor([[0, 1], [1, 3], [3, -1]]).repeat(3, 1)
    routing = Routing(ids, torch.rand(9, 2).masked_fill(ids < 0, torch.nan))
    for stored in (weights, apart(weights)):
        clean = run(isa, x, routing, stored)
        poison(stored.gate_up, 2)
        poison(stored.down, 2)
        for strategy in STRATEGIES:
            assert torch.equal(run(isa, x, routing, stored, strategy), clean)
        assert run(isa, x, routing.with_ids(ids.masked_fill(ids == 0, 2)), stored).isnan().any()


def at_odd_address(t):
    """The same values, one byte off every alignment."""
    if t is None:
        return None
    buffer = bytearray(1) + bytearray(t.contiguous().view(torch.uint8).numpy().tobytes())
    return torch.frombuffer(buffer, dtype=t.dtype, offset=1).view(t.shape)


@pytest.mark.usefixtures("either_mode")
@every_isa
@pytest.mark.parametrize("name", STORED)
def test_misaligned_weights(isa, name):
    x, sizes, weights = problem(name)
    routing = problems.routing(sizes)
    moved = replace(weights, gate_up_bias=at_odd_address(weights.gate_up_bias))
    for field in ("gate_up", "down"):
        stored = getattr(weights, field)
        parts = (at_odd_address(t) for t in (stored.data, stored.scales, stored.zeros, stored.global_scales))
        data, *others = parts
        moved = replace(moved, **{field: PackedTensor(data, stored.format, *others)})
    assert moved.gate_up.data.data_ptr() % 2 or moved.gate_up.data[1].data_ptr() % 2
    for rows in (x, at_odd_address(x)):
        assert bit_equal(run(isa, rows, routing, moved), run(isa, x, routing, weights))


@pytest.mark.usefixtures("either_mode")
@every_isa
@pytest.mark.parametrize("name", STORED)
def test_strided_experts_rows_and_tokens(isa, name):
    """Views of larger tensors, in every dimension but the last, are read where they lie."""
    x, sizes, weights = problem(name)
    routing = problems.routing(sizes)

    def spread(t):
        if t is None or t.dim() < 3:
            return t
        wide = torch.full((2 * t.shape[0], t.shape[1] + 3, t.shape[2] + 5), 77.0).to(t.dtype)
        view = wide[1::2, 2:-1, 4:-1]
        return view.copy_(t)

    fields = {}
    for field in ("gate_up", "down"):
        stored = getattr(weights, field)
        parts = [spread(t) for t in (stored.data, stored.scales, stored.zeros)]
        fields[field] = PackedTensor(parts[0], stored.format, *parts[1:], stored.global_scales)
    biases = {
        "gate_up_bias": weights.gate_up_bias.t().contiguous().t(),
        "down_bias": torch.ones(1, 1).expand(4, sizes.hidden_size),
    }
    apart_x = torch.cat([x, x], 1)[:, : sizes.hidden_size]
    for rows in (x, apart_x, x.t().contiguous().t(), x[:1].expand(len(x), -1)):
        expected = run(
            isa,
            rows.clone(memory_format=torch.contiguous_format),
            routing,
            replace(weights, down_bias=torch.ones(4, sizes.hidden_size)),
        )
        assert bit_equal(run(isa, rows, routing, replace(weights, **fields, **biases)), expected)


@every_isa
@pytest.mark.parametrize("name", ["float32", "bfloat16", "mxfp4"])
def test_memory_mapped_weights(isa, name, tmp_path):
    x, sizes, weights = problem(name)
    path = tmp_path / "experts.bin"
    parts = [t for stored in (weights.gate_up, weights.down) for t in stored.tensors]
    path.write_bytes(b"head" + b"".join(t.view(torch.uint8).numpy().tobytes() for t in parts))
    mapped = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)[4:]
    pieces = mapped.split([t.nbytes for t in parts])
    parts = iter([piece.view(t.dtype).view(t.shape) for piece, t in zip(pieces, parts, strict=True)])
    gate_up, down = (
        PackedTensor(next(parts), s.format, *([next(parts)] if s.scales is not None else []))
        for s in (weights.gate_up, weights.down)
    )
    routing = problems.routing(sizes)
    assert bit_equal(run(isa, x, routing, replace(weights, gate_up=gate_up, down=down)), run(isa, x, routing, weights))


@every_isa
def test_weights_stored_the_other_way_round_are_left_to_torch(isa):
    sizes = problems.Sizes(5, 24, 20, 3, 2)
    x, routing = torch.randn(5, 24), problems.routing(sizes)
    for turned in (True, False):
        weights = problems.weights(sizes, Activation(), torch.float32, transposed=turned)
        if not turned:  # unstacked experts, one of them a view of every second row
            split = apart(weights)
            rows = split.down.matrices[1][0].data.repeat_interleave(2, 0)[::2]
            parts = [*split.down.matrices]
            parts[1] = (replace(parts[1][0], data=rows),)
            weights = replace(split, down=SplitTensor(tuple(parts)))
        with pytest.raises(UnsupportedError, match="contiguous"):
            run(isa, x, routing, weights)
        explained = moestro.explain(moestro.expert_mlp, x, routing, weights)
        assert explained.chosen == "torch"
        assert_close(moestro.expert_mlp(x, routing, weights), reference.expert_mlp(x, routing, weights))


@every_isa
def test_numbers_near_the_least(isa):
    """Subnormal weights, tokens and results count; nothing is flushed to zero."""
    sizes = problems.Sizes(9, 2 * isa.lanes + 1, isa.lanes + 3, 3, 2)
    base = problems.weights(sizes, Activation("identity", gated=False), torch.float32)
    routing, x = problems.routing(sizes, kind="full"), torch.randn(9, sizes.hidden_size)
    for dtype, small, scale in (
        (torch.float32, 1e-41, 1.0),
        (torch.bfloat16, 1e-39, 1.0),
        (torch.float16, 1e-6, 1e-36),
    ):
        gate_up = (base.gate_up.data * small).to(dtype)
        weights = ExpertWeights.from_dense(gate_up, base.down.data, activation=base.activation)
        big = 1e4 if dtype != torch.float16 else 1.0
        check(isa, x * big, routing, weights)
        y = run(isa, x * scale, routing, weights)
        assert ((y != 0) & (y.abs() < torch.finfo(torch.float32).tiny)).any()


@every_isa
def test_every_number_of_sixteen_bits_as_token_and_result(isa):
    weights = ExpertWeights.from_dense(
        torch.ones(1, 1, 1), torch.ones(1, 1, 1), activation=Activation("identity", gated=False)
    )
    routing = Routing(torch.zeros(1 << 16, 1, dtype=torch.long), torch.ones(1 << 16, 1))
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16)[:, None]
    for dtype in (torch.float16, torch.bfloat16):
        x = every.view(dtype)
        torch.testing.assert_close(run(isa, x, routing, weights), x, rtol=0, atol=0, equal_nan=True)
    x = every.int() * 65536 + torch.randint(0, 65536, every.shape, dtype=torch.int32)
    x = x.view(torch.float32)
    x[:4, 0] = torch.tensor([65519.99, 65520.0, 2.0**-25, 2.0**-25 * 1.001])
    x = x[torch.isfinite(x)][:, None]
    for dtype in (torch.float16, torch.bfloat16):  # rounded to nearest, ties to even
        ones = torch.ones(len(x), 1, dtype=dtype)
        y = run(isa, ones, Routing(routing.expert_ids[: len(x)], x), weights)
        assert torch.equal(y, x.to(dtype))


def first_column(data, name, scales, zeros=None):
    """Experts [E, N, K] whose rows are read as they are: what comes out is the first weight of each row."""
    experts, rows = data.shape[:2]
    down = PackedTensor(data, FORMATS[name], scales, zeros, torch.ones(experts) if name == "nvfp4" else None)
    size = down.shape[2]
    gate_up = torch.zeros(experts, size, rows)
    gate_up[:, 0, 0] = 1.0
    dense = ExpertWeights.from_dense(
        gate_up, torch.zeros(experts, rows, size), activation=Activation("identity", False)
    )
    x = torch.zeros(experts, rows)
    x[:, 0] = 1.0
    return x, Routing(torch.arange(experts)[:, None], torch.ones(experts, 1)), replace(dense, down=down)


@pytest.mark.usefixtures("either_mode")
@every_isa
@pytest.mark.parametrize("num_tokens", [1, 40], ids=["decoded in registers", "decoded in a panel"])
def test_every_code_of_weights_and_scales(isa, num_tokens):
    """Exactly: a code times a scale, rounded once."""
    byte = torch.arange(256, dtype=torch.uint8)
    codes = byte.view(1, 256, 1)
    vectors = torch.zeros(1, 256, 64, dtype=torch.uint8)  # which are read several at a time
    vectors[..., :1] = codes
    scale = torch.tensor([[[0.75]]])
    cases = [("fp8-e4m3-tensor", each.view(torch.float8_e4m3fn), scale, None) for each in (codes, vectors)]
    cases.append(("int8", codes.view(torch.int8), torch.full((1, 256, 1), 3.0), None))
    nibbles = torch.zeros(16, 256, 16, dtype=torch.uint8)
    nibbles[:, :, 0] = torch.arange(16, dtype=torch.uint8)[:, None]
    every_scale = byte.view(1, 256, 1).expand(16, -1, -1)
    halves = torch.arange(256 * 16, dtype=torch.int16).view(16, 256, 1) * 15  # zeros, subnormals and more
    zeros = torch.arange(16 * 256).remainder(16).to(torch.uint8).view(16, 256, 1)
    cases += [
        ("mxfp4", nibbles, every_scale, None),
        ("nvfp4", nibbles[..., :8], every_scale.view(torch.float8_e4m3fn), None),
        ("fp4-g32", nibbles, halves.view(torch.float16), None),
        ("fp4-g32", nibbles, halves.view(torch.bfloat16), None),
        ("int4-g32", nibbles, halves.view(torch.float16), None),
        ("int4-g32-zp", nibbles, halves.view(torch.float16), zeros),
    ]
    for name, data, scales, zero_points in cases:
        x, routing, weights = first_column(data, name, scales, zero_points)
        expected = dequantize(weights.down)[:, :, 0]
        x, ids = (t.repeat_interleave(num_tokens, 0) for t in (x, routing.expert_ids))
        y = run(isa, x, Routing(ids, torch.ones(ids.shape)), weights)
        found = y.view(-1, num_tokens, y.shape[1]).transpose(0, 1)
        for each in found:
            torch.testing.assert_close(each, expected, rtol=0, atol=0, equal_nan=True)


@every_isa
def test_slots_and_experts_at_their_ends(isa):
    for num_experts, top_k in ((1, 1), (300, 256), (4, 0)):
        sizes = problems.Sizes(3, 9, 5, num_experts, top_k)
        weights = problems.weights(sizes, Activation(), torch.float32)
        check(isa, torch.randn(3, 9), problems.routing(sizes, kind="full"), weights)
    none = problems.weights(problems.Sizes(0, 9, 5, 0, 2), Activation(), torch.float32)
    for num_tokens in (0, 2):
        nobody = Routing(torch.full((num_tokens, 2), -1), torch.zeros(num_tokens, 2))
        assert not run(isa, torch.randn(num_tokens, 9), nobody, none).any()
    many = Routing(torch.zeros(2, 257, dtype=torch.long), torch.zeros(2, 257))
    with pytest.raises(UnsupportedError, match="at most 256 slots a token, not 257"):
        run(isa, torch.randn(2, 9), many, weights)
    empty = ExpertWeights.from_dense(torch.zeros(2, 0, 9), torch.zeros(2, 9, 0), None, torch.randn(2, 9))
    for stored in (empty, apart(empty)):
        check(isa, torch.randn(2, 9), Routing(torch.tensor([[0], [1]]), torch.ones(2, 1)), stored)


@given(
    isa=st.sampled_from(RUNNING or [None]),
    sizes=problems.sizes(),
    name=st.sampled_from([name for name in STORED if FORMATS[name].per_item == 1]),
    activation=st.sampled_from(ACTIVATIONS),
    kind=st.sampled_from(problems.KINDS),
    bias=st.booleans(),
    split=st.booleans(),
    strategy=st.sampled_from(STRATEGIES),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=300)
@pytest.mark.skipif(not RUNNING, reason="no engine")
def test_any_layer_meets_the_reference(isa, sizes, name, activation, kind, bias, split, strategy, dtype, seed):
    torch.manual_seed(seed)
    weights = problems.weights(sizes, activation, torch.float32, bias=bias).quantize(name)
    x = torch.randn(sizes.num_tokens, sizes.hidden_size).to(dtype)
    check(isa, x, problems.routing(sizes, kind=kind), apart(weights) if split else weights, strategy)
