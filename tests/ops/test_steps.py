"""Attention of one new token in two calls of the engine, with every instruction set: bit by bit what its parts give,
and as close to plain PyTorch as they are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import moestro
from moestro.ops.attention import attention
from tolerances import assert_close, bit_equal

from .steps import (
    CHUNK,
    FORMS,
    HIDDEN,
    NOWHERE,
    SCALE,
    WIDE,
    angles,
    attend,
    dtypes,
    engine_normalised,
    every_engine,
    module,
    multiplied,
    normalised,
    places,
    product,
    project,
    row_place,
    seen,
    spread,
    weighed,
)  # fmt: skip


@pytest.mark.unpoisoned
@every_engine
@given(data=st.data())
def test_what_comes_before_the_cache(isa, data):
    def pick(*values):
        return data.draw(st.sampled_from(values))

    dtype, size, groups, per_group = pick(*dtypes(isa)), pick(8, 16, 20, 64), pick(1, 2, 3), pick(1, 2, 3, 8)
    shape, batch = (groups * per_group, groups, size), pick(1, 2, 3, 4, 5)
    normed, around = pick(None, "head", "heads"), pick(False, True)
    parameters = module(dtype, shape, pick(*FORMS), pick(False, True), normed, around=around)
    turn = angles(dtype, pick(1, batch), pick(0, 2, 6, size // 4 * 2, size), pick(False, True))
    x, num_threads = spread(torch.randn(batch, HIDDEN).to(dtype)), pick(1, 2)
    torch.use_deterministic_algorithms(pick(False, True))  # int8 rows with a residual are multiplied in one mode only
    (keys, key_row), (values, value_row) = places(batch, groups, size, dtype)
    to = row_place(key_row) if pick(True, False) else NOWHERE, row_place(value_row)
    found = project(parameters.engine(isa), parameters, x, turn, to, num_threads)

    before = parameters.around[0]
    own_x = engine_normalised(parameters.norm(isa, before), HIDDEN, x) if around else x
    # Bit by bit what its parts give, but that a zero has no sign.
    for i, (part, made) in enumerate(zip(found, parameters.linears(isa), strict=False)):
        own = multiplied(made, own_x, part[0].numel())
        norm = parameters.norms[i] if i < 2 else None
        if norm is not None:
            own = engine_normalised(parameters.norm(isa, norm), len(norm), own)
        own = own.view(part.shape)
        assert torch.equal(part, own if i == 2 else turn.turn(own))
    # As close to PyTorch as the parts are.
    for i, part in enumerate(found):
        own = normalised(parameters.norms[i] if i < 2 else None, product(parameters.matrices[i], normalised(before, x)))
        own = own.view(part.shape)
        assert_close(part, own if i == 2 else turn.turn(own))
    for kept, row, part, place in ((keys, key_row, found[1], to[0]), (values, value_row, found[2], to[1])):
        assert place == NOWHERE or torch.equal(row, part)
        row.fill_(torch.nan)
        assert kept.isnan().all()


@pytest.mark.unpoisoned
@every_engine
@given(data=st.data())
def test_what_comes_after_the_cache(isa, data):
    def pick(*values):
        return data.draw(st.sampled_from(values))

    dtype, size, groups, per_group = pick(*dtypes(isa)), pick(8, 16, 20, 64), pick(1, 2, 3), pick(1, 2, 3, 8)
    heads, batch, num_keys = groups * per_group, pick(1, 2, 3, 4, 5), pick(1, 2, 5, 17, CHUNK, CHUNK + 1, 2 * CHUNK + 3)
    has_sinks, around = pick(False, True), pick(False, True)
    parameters = module(dtype, (heads, groups, size), pick(*FORMS), pick(False, True), None, has_sinks, around)
    if parameters.sinks is not None and pick(False, True):
        parameters = replace(parameters, sinks=parameters.sinks.float())
    torch.use_deterministic_algorithms(pick(False, True))
    query = torch.randn(batch, heads, size).to(dtype)
    key, value, mask = seen(dtype, batch, groups, num_keys, size)
    mask = pick(None, mask)
    residual = pick(None, torch.randn(batch, WIDE).to(dtype))
    found = attend(parameters.engine(isa), query, key, value, mask, pick(1, 2), residual, around)
    found, after = found if around else (found, None)

    sinks = None if parameters.sinks is None else parameters.sinks.float()
    with moestro.use(implementation=f"cpu-{isa.name}"):
        y = attention(query, key, value, SCALE, mask, sinks).view(batch, -1)
    own = multiplied(parameters.linears(isa)[3], y, WIDE)
    own = own if residual is None else residual + own
    assert bit_equal(found, own)
    norm = parameters.around[1]
    assert after is None or bit_equal(after, engine_normalised(parameters.norm(isa, norm), WIDE, own))
    y = weighed(query, key, value, mask, sinks).view(batch, -1)
    wanted = product(parameters.matrices[3], y)
    wanted = wanted if residual is None else residual + wanted
    assert_close(found, wanted)
    if after is not None:
        assert_close(after, normalised(norm, wanted))


@every_engine
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_after_one_another(isa, dtype):
    """Each step writes its row of a cache and reads all that have been written, as a model decodes."""
    if dtype not in dtypes(isa):
        pytest.skip("another dtype than it multiplies")
    parameters = module(dtype, (6, 2, 16), normed="head", sinks=True)
    made = parameters.engine(isa)
    keys, values = (torch.full((3, 2, 7, 16), torch.nan, dtype=dtype) for _ in range(2))
    for t in range(7):
        x, turn = torch.randn(3, HIDDEN).to(dtype), angles(dtype, 3, 16, True)
        to = tuple(row_place(cache[:, :, t]) for cache in (keys, values))
        query = project(made, parameters, x, turn, to)[0]
        found = attend(made, query, keys[:, :, : t + 1], values[:, :, : t + 1], None)
        wanted = turn.turn(normalised(parameters.norms[0], product(parameters.matrices[0], x).view(3, 6, 16)))
        y = weighed(wanted, keys[:, :, : t + 1], values[:, :, : t + 1], None, parameters.sinks)
        assert_close(found, product(parameters.matrices[3], y.reshape(3, -1)))
        assert keys[:, :, t + 1 :].isnan().all()
        assert values[:, :, : t + 1].isfinite().all()


@every_engine
def test_the_same_bits_alone_in_any_batch_and_on_any_number_of_threads(isa):
    dtype = dtypes(isa)[-1]
    parameters = module(dtype, (6, 2, 64), "int8", normed="heads", sinks=True)
    made, x, turn = parameters.engine(isa), torch.randn(5, HIDDEN).to(dtype), angles(dtype, 5, 64, False)
    key, value, mask = seen(dtype, 5, 2, CHUNK + 5, 64)
    whole = project(made, parameters, x, turn)
    y = attend(made, whole[0], key, value, mask)
    for num_threads in (1, 2, 3):
        for some in (slice(0, 1), slice(2, 5), slice(0, 5)):
            own = replace(turn, cos=turn.cos[some], sin=turn.sin[some])
            parts = project(made, parameters, x[some], own, num_threads=num_threads)
            for mine, part in zip(parts, whole, strict=True):
                assert bit_equal(mine, part[some])
            assert bit_equal(attend(made, parts[0], key[some], value[some], mask[some], num_threads), y[some])


@every_engine
def test_what_is_not_finite_stays_in_its_sequence(isa):
    dtype = dtypes(isa)[-1]
    parameters = module(dtype, (4, 2, 16), normed="head")
    made, x, turn = parameters.engine(isa), torch.randn(3, HIDDEN).to(dtype), angles(dtype, 1, 16, False)
    key, value, mask = seen(dtype, 3, 2, 20, 16)
    clean = project(made, parameters, x, turn)
    y = attend(made, clean[0], key, value, mask)
    x[1, 5] = torch.nan
    found = project(made, parameters, x, turn)
    after = attend(made, found[0], key, value, mask)
    for mine, part in zip((*found, after), (*clean, y), strict=True):
        assert mine[1].isnan().all()
        assert bit_equal(mine[[0, 2]], part[[0, 2]])
