"""A projection in every implementation: against the formula, bit by bit in any batch, and what is left to PyTorch."""

from __future__ import annotations

import itertools

import pytest
import torch

import moestro
from moestro.errors import InvalidInputError, UnsupportedError
from moestro.ops.projection import PROJECTION, measured, projection, reference
from tolerances import assert_close, bit_equal

from .engines import RUNNING, TILED

ENGINES = [isa for isa in (*TILED, *RUNNING) if isa.multiplies_floats]
every_engine = pytest.mark.parametrize("isa", ENGINES, ids=lambda isa: isa.name)


def dtypes(isa):
    return [torch.bfloat16] if isa.multiplies_bfloat16 else [torch.float32, torch.bfloat16, torch.float16]


def forced(isa):
    return moestro.use(implementation=f"cpu-{isa.name}")


@every_engine
def test_sizes_around_vectors_and_tiles(isa):
    widths = (1, 3, 7, isa.lanes - 1, isa.lanes, isa.lanes + 1, 33, 8 * isa.lanes + 2)
    for i, (rows, columns) in enumerate(itertools.product((1, 2, 15, 16, 17, 31, 33, 65, 200), widths)):
        for dtype in dtypes(isa):
            x, weight = (
                torch.randn((1, 2, 5, 17, 97, 200)[i % 6], columns).to(dtype),
                torch.randn(rows, columns).to(dtype),
            )
            bias = torch.randn(rows).to(dtype) if i % 2 else None
            with forced(isa):
                y = projection(x, weight, bias)
            assert_close(y, reference.projection(x, weight, bias), dtype)


@every_engine
def test_several_ranges_of_rows(isa):
    """A range has 64 rows where these are longer than 1 KiB."""
    for dtype, rows, num_tokens in itertools.product(dtypes(isa), (129, 165), (1, 5, 50)):
        x, weight = torch.randn(num_tokens, 2112).to(dtype), torch.randn(rows, 2112).to(dtype)
        with forced(isa):
            y = projection(x, weight)
        assert_close(y, reference.projection(x, weight, None), dtype)


@every_engine
def test_the_same_bits_alone_in_any_batch_and_on_any_number_of_threads(isa):
    dtype = dtypes(isa)[-1]
    x, weight = torch.randn(150, 300).to(dtype), torch.randn(417, 300).to(dtype)
    with forced(isa):
        whole = projection(x, weight)
        for num_threads, count in itertools.product((1, 2, 5), (1, 2, 3, 9, 33)):
            torch.set_num_threads(num_threads)
            assert bit_equal(projection(x[-count:], weight), whole[-count:])


@every_engine
def test_views_nan_and_nothing(isa):
    dtype = dtypes(isa)[-1]
    wide, tall = torch.randn(4, 5, 90).to(dtype), torch.randn(50, 91).to(dtype)
    x, weight = wide[:, 1:3, 7:77], tall[::2, 3:73]
    with forced(isa):
        clean = projection(x, weight)
        assert_close(clean, reference.projection(x.reshape(-1, 70), weight, None).view(4, 2, 25), dtype)
        x[1, 1, 5] = torch.nan
        y = projection(x, weight)
        assert y[1, 1].isnan().all()
        assert bit_equal(y[[0, 2, 3]], clean[[0, 2, 3]])
        assert projection(x[:0], weight).shape == (0, 2, 25)
        assert projection(x, weight[:0]).shape == (4, 2, 0)
        assert not projection(x[..., :0], weight[:, :0]).any()
        with pytest.raises(UnsupportedError, match="it reads rows, and those of the weight are not contiguous"):
            projection(x, weight.t().contiguous().t())


@pytest.mark.parametrize("implementation", [i.name for i in PROJECTION.implementations])
def test_gradients_are_those_of_the_formula(implementation):
    x = torch.randn(3, 20, requires_grad=True, dtype=torch.float64)
    weight = torch.randn(7, 20, requires_grad=True, dtype=torch.float64)
    if implementation.startswith("cpu-"):
        with moestro.use(implementation=implementation), pytest.raises(UnsupportedError):
            projection(x, weight)
        return
    with moestro.use(implementation=implementation):
        assert torch.autograd.gradcheck(projection, (x, weight))


@pytest.mark.skipif(not ENGINES, reason="there is no engine")
def test_what_is_chosen(monkeypatch):
    monkeypatch.setattr(measured, "most_rows", lambda *_: 32)
    x, weight = torch.randn(33, 64).bfloat16(), torch.randn(9, 64).bfloat16()

    def chosen(x, weight):
        return moestro.explain(projection, x, weight).chosen

    best = f"cpu-{ENGINES[0].name}"
    assert chosen(x, weight) == best  # tests ask for deterministic algorithms
    torch.use_deterministic_algorithms(False)
    assert chosen(x, weight) == "torch"
    assert chosen(x[:1], weight) == best
    assert chosen(x[:1].float(), weight.float()) == "torch"
    assert chosen(x[:1], weight.clone().requires_grad_()) == "torch"


def test_what_does_not_fit_is_refused():
    x, weight = torch.randn(2, 8), torch.randn(3, 8)
    for arguments in (
        (x, weight[:, 1:]),
        (x, weight.bfloat16()),
        (x, weight, torch.randn(4)),
        (x, weight[0]),
        (x.int(), weight.int()),
    ):
        with pytest.raises(InvalidInputError, match=r"\[projection\] got x"):
            projection(*arguments)
