"""Attention of one query in every implementation: against the formula, the same bits on any number of threads and in
any batch, and what is refused."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

import moestro
from moestro.errors import InvalidInputError, UnsupportedError
from moestro.ops.attention import ATTENTION, attention, reference
from tolerances import assert_close, bit_equal

from .engines import RUNNING, TILED

ENGINES = [isa for isa in (*TILED, *RUNNING) if isa.multiplies_floats]
every_engine = pytest.mark.parametrize("isa", ENGINES, ids=lambda isa: isa.name)
CHUNK = 256
"""Keys that the engine takes at once."""


def dtypes(isa):
    return [torch.bfloat16] if isa.multiplies_bfloat16 else [torch.float32, torch.bfloat16, torch.float16]


def forced(isa):
    return moestro.use(implementation=f"cpu-{isa.name}")


def problem(dtype, batch=2, heads=6, groups=2, num_keys=9, columns=20, wide=20):
    """Query, key, value, and a mask that leaves some keys out."""
    query = torch.randn(batch, heads, columns).to(dtype)
    key, value = torch.randn(batch, groups, num_keys, columns), torch.randn(batch, groups, num_keys, wide)
    mask = torch.zeros(batch, num_keys, dtype=dtype).masked_fill(
        torch.rand(batch, num_keys) < 0.3, torch.finfo(dtype).min
    )
    return query, key.to(dtype), value.to(dtype), mask


@every_engine
@given(data=st.data())
def test_the_formula(isa, data):
    dtype = data.draw(st.sampled_from(dtypes(isa)))
    groups, per_group = data.draw(st.integers(1, 3)), data.draw(st.sampled_from((1, 2, 3, 4, 5, 7, 8, 13)))
    num_keys = data.draw(st.sampled_from((1, 2, 3, 4, 5, 17, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3)))
    columns, wide = (data.draw(st.sampled_from((1, 7, 8, 15, 16, 33, 64, 80))) for _ in range(2))
    query, key, value, mask = problem(dtype, 2, groups * per_group, groups, num_keys, columns, wide)
    mask = mask if data.draw(st.booleans()) else None
    sinks = torch.randn(groups * per_group) if data.draw(st.booleans()) else None
    with forced(isa), torch.no_grad():
        found = attention(query, key, value, 0.3, mask, sinks)
    assert_close(found, reference.attention(query, key, value, 0.3, mask, sinks), dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_formula_is_pytorchs(dtype):
    query, key, value, mask = problem(dtype)
    wanted = F.scaled_dot_product_attention(
        query.double()[:, :, None],
        key.double(),
        value.double(),
        mask.double()[:, None, None],
        scale=0.3,
        enable_gqa=True,
    )
    for implementation in ("torch", "reference"):
        with moestro.use(implementation=implementation):
            assert_close(attention(query, key, value, 0.3, mask), wanted[:, :, 0].to(dtype), dtype)


@every_engine
def test_sinks_take_a_share(isa):
    """A sink that is far above all logits leaves nothing to values, one far below all of it."""
    query, key, value, _ = problem(dtypes(isa)[-1])
    with forced(isa):
        without = attention(query, key, value, 0.3)
        assert not attention(query, key, value, 0.3, None, torch.full((6,), 1e4)).any()
        assert_close(attention(query, key, value, 0.3, None, torch.full((6,), -1e4)), without)
        assert bit_equal(attention(query, key, value, 0.3, None, torch.full((6,), -torch.inf)), without)


@every_engine
def test_the_same_bits_alone_in_any_batch_and_on_any_number_of_threads(isa):
    query, key, value, mask = problem(dtypes(isa)[-1], 7, 6, 2, 3 * CHUNK + 5, 40, 24)
    with forced(isa):
        whole = attention(query, key, value, 0.2, mask)
        for num_threads, first in itertools.product((1, 2, 5), (0, 3, 6)):
            torch.set_num_threads(num_threads)
            some = slice(first, None)
            assert bit_equal(attention(query[some], key[some], value[some], 0.2, mask[some]), whole[some])


@every_engine
def test_keys_as_caches_hold_them(isa):
    """A view of a longer buffer, and one whose heads stand inside its tokens; nothing is read beyond."""
    dtype = dtypes(isa)[-1]
    query, key, value, _ = problem(dtype, num_keys=11)
    long = torch.full((2, 2, 40, 21), torch.nan, dtype=dtype)
    long[:, :, 5:16, 1:] = key
    inside = torch.full((2, 12, 3, 20), torch.nan, dtype=dtype)
    inside[:, :11, :2] = value.transpose(1, 2)
    with forced(isa):
        wanted = attention(query, key, value, 0.3)
        views = long[:, :, 5:16, 1:], inside[:, :11, :2].transpose(1, 2)
        assert bit_equal(attention(query, *views, 0.3), wanted)
        assert bit_equal(attention(query[:, :, None].expand(-1, -1, 3, -1)[:, :, 1], *views, 0.3), wanted)
        with pytest.raises(UnsupportedError, match="it reads rows, and those of a tensor are not contiguous"):
            attention(query, key.transpose(2, 3).contiguous().transpose(2, 3), value, 0.3)


@every_engine
def test_what_is_not_finite_stays_where_it_is(isa):
    query, key, value, mask = problem(dtypes(isa)[-1], num_keys=CHUNK + 20)
    with forced(isa):
        clean = attention(query, key, value, 0.3, mask)
        key[0, 1, 2, 3] = torch.nan
        found = attention(query, key, value, 0.3, mask)
        assert found[0, 3:].isnan().all()
        assert bit_equal(found[1:], clean[1:])
        assert bit_equal(found[0, :3], clean[0, :3])
        mask[:] = -torch.inf
        mask[:, CHUNK + 3] = 0
        assert_close(attention(query, value, value, 0.3, mask), value[:, :, CHUNK + 3].repeat_interleave(3, 1))


@pytest.mark.parametrize("implementation", [i.name for i in ATTENTION.implementations])
def test_where_nothing_is_seen_there_are_zeros(implementation):
    """Also the gradients of it; with a sink it takes all, unless it is -inf too."""
    isa = next((isa for isa in ENGINES if implementation == f"cpu-{isa.name}"), None)
    if implementation.startswith("cpu-") and isa is None:
        pytest.skip("does not run here")
    query, key, value, mask = problem(dtypes(isa)[-1] if isa else torch.float32, num_keys=CHUNK + 4)
    mask[0] = -torch.inf
    with moestro.use(implementation=implementation):
        for sinks in (None, torch.full((6,), -torch.inf), torch.zeros(6)):
            found = attention(query, key, value, 0.3, mask, sinks)
            assert not found[0].any()
            assert_close(found[1:], attention(query[1:], key[1:], value[1:], 0.3, mask[1:], sinks))
        if not implementation.startswith("cpu-"):
            attention(query.requires_grad_(), key, value, 0.3, mask).sum().backward()
            assert not query.grad[0].any()
            assert query.grad[1].isfinite().all()


@pytest.mark.parametrize("implementation", ["torch", "reference"])
def test_logits_beyond_float16(implementation):
    query, key, value, _ = problem(torch.float16, columns=64)
    query, key = query * 60, key * 400
    with moestro.use(implementation=implementation):
        found = attention(query, key, value, 1e-3)
    assert_close(found, reference.attention(*(t.double() for t in (query, key, value)), 1e-3, None, None).half())


@every_engine
def test_what_a_call_left_in_the_workspace_meets_nothing(isa):
    """Rows of queries that fill no vector stand beside zeros, whatever stood there before."""
    dtype = dtypes(isa)[-1]
    torch.set_num_threads(1)
    dirty, (query, key, value, _) = problem(dtype, columns=16), problem(dtype, columns=7)
    with forced(isa):
        assert attention(dirty[0] * torch.nan, *dirty[1:3], 0.3).isnan().all()
        assert_close(attention(query, key, value, 0.3), reference.attention(query, key, value, 0.3, None, None), dtype)


@every_engine
def test_no_sequence(isa):
    query, key, value, mask = problem(dtypes(isa)[-1], batch=0)
    with forced(isa):
        assert attention(query, key, value, 0.3, mask).shape == (0, 6, 20)


@pytest.mark.parametrize("implementation", [i.name for i in ATTENTION.implementations])
def test_gradients_are_those_of_the_formula(implementation):
    query, key, value, _ = (t.requires_grad_() for t in problem(torch.float64))
    with moestro.use(implementation=implementation):
        if implementation.startswith("cpu-"):
            with pytest.raises(UnsupportedError):
                attention(query, key, value, 0.3)
            return
        assert torch.autograd.gradcheck(
            lambda *a: attention(*a, 0.3, None, torch.zeros(6).double()), (query, key, value)
        )


@pytest.mark.skipif(not ENGINES, reason="there is no engine")
def test_what_is_chosen_grows_with_no_step(monkeypatch):
    """A prepared call serves every number of keys; what decides otherwise is looked at in every call."""
    query, key, value, _ = problem(torch.bfloat16, num_keys=30)
    best = f"cpu-{ENGINES[0].name}"
    assert moestro.explain(attention, query, key, value, 0.3).chosen == best
    attention(query, key, value, 0.3)
    with monkeypatch.context() as patch:
        patch.setattr("moestro.ops.dispatch._first", None)
        for n in (1, 17, 30):
            wanted = reference.attention(query, key[:, :, :n], value[:, :, :n], 0.3, None, None)
            assert_close(attention(query, key[:, :, :n], value[:, :, :n], 0.3), wanted)
    assert moestro.explain(attention, query.clone().requires_grad_(), key, value, 0.3).chosen == "torch"
    assert moestro.explain(attention, *(t.double() for t in (query, key, value)), 0.3).chosen == "torch"
    with pytest.raises(InvalidInputError):
        attention(query, key[:, :, :7], value, 0.3)


def test_what_does_not_fit_is_refused():
    query, key, value, mask = problem(torch.float32)
    for arguments in (
        (query[:, :5], key, value, 0.3),
        (query, key[:1], value, 0.3),
        (query, key, value[:, :, 1:], 0.3),
        (query, key.bfloat16(), value, 0.3),
        (query, key[..., 1:], value, 0.3),
        (query, key[:, :, :0], value[:, :, :0], 0.3),
        (query[:, :, None], key, value, 0.3),
        (query, key, value, 0.3, mask[:, 1:]),
        (query, key, value, 0.3, mask > 0),
        (query, key, value, 0.3, None, torch.zeros(5)),
        (query.int(), key.int(), value.int(), 0.3),
    ):
        with pytest.raises(InvalidInputError, match=r"\[attention\] got query"):
            attention(*arguments)


@pytest.mark.skipif(not ENGINES, reason="there is no engine")
def test_storage_that_was_made_smaller_is_not_read():
    query, key, value, _ = problem(torch.bfloat16)
    attention(query, key, value, 0.3)
    key.untyped_storage().resize_(8)
    with forced(ENGINES[0]), pytest.raises(UnsupportedError, match="made smaller"):
        attention(query, key, value, 0.3)
