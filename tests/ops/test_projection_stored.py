"""A matrix stored in a format, by every implementation: against the formula, and rows that stay floats."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

import moestro
from moestro import formats
from moestro.errors import InvalidInputError, UnsupportedError
from moestro.formats import encode, quantize
from moestro.ops.projection import projection, reference
from moestro.tolerances import relative_error
from tolerances import assert_close, bit_equal

from .engines import RUNNING, TILED

ENGINES = [isa for isa in (*TILED, *RUNNING) if isa.multiplies_floats]
PACKED = [name for name, form in formats.FORMATS.items() if not form.is_dense]
every_engine = pytest.mark.parametrize("isa", ENGINES, ids=lambda isa: isa.name)


def dtypes(isa):
    return [torch.bfloat16] if isa.multiplies_bfloat16 else [torch.float32, torch.bfloat16, torch.float16]


def stored(form, rows, columns):
    unit = formats.FORMATS[form].row_unit
    return quantize(torch.randn(rows, max(columns // unit, 1) * unit), form)


@pytest.mark.unpoisoned
@every_engine
@pytest.mark.parametrize("form", PACKED)
def test_every_format_and_size(isa, form):
    sizes = itertools.product((1, 3, 16, 33, 65, 130), (1, 64, 300))
    for i, (rows, columns) in enumerate(sizes):
        for dtype in dtypes(isa):
            weight = stored(form, rows, columns)
            x = torch.randn((1, 2, 5, 11, 50, 97, 200)[i % 7], weight.shape[1]).to(dtype)
            bias = torch.randn(rows).to(dtype) if i % 2 else None
            with moestro.use(implementation=f"cpu-{isa.name}"):
                y = projection(x, weight, bias)
            assert_close(y, reference.projection(x, weight, bias), dtype)


@every_engine
@pytest.mark.parametrize("form", ["int8", "int4-g32", "mxfp4"])
def test_several_ranges_of_rows(isa, form):
    """A range has 64 rows where these are longer than 1 KiB, as they are in 4 bits too."""
    weight = stored(form, 165, 2112)
    for dtype, num_tokens in itertools.product(dtypes(isa), (1, 5, 50)):
        x = torch.randn(num_tokens, weight.shape[1]).to(dtype)
        with moestro.use(implementation=f"cpu-{isa.name}"):
            y = projection(x, weight)
        assert_close(y, reference.projection(x, weight, None), dtype)


@pytest.mark.unpoisoned
@every_engine
@pytest.mark.parametrize("form", ["int8", "int4-g32", "mxfp4"])
def test_rows_that_no_integers_hold_stay_floats(isa, form):
    """Among rows of 8-bit integers with a residual: zeros, one large value, NaN, infinity, subnormal values."""
    dtype, weight = dtypes(isa)[-1], stored(form, 41, 256)
    x = torch.randn(9, 256).to(dtype)
    x[1], x[3, 7], x[5] = 0, 30000, 1e-40
    wanted = reference.projection(x, weight, None)
    with moestro.use(implementation=f"cpu-{isa.name}"):
        assert_close(projection(x, weight), wanted, dtype)
        x[0, 3], x[8, 200] = torch.nan, torch.inf
        y = projection(x, weight)
        assert y[0].isnan().all()
        assert not y[8].isfinite().any()
        assert_close(y[1:8], wanted[1:8], dtype)
        for count in (1, 2, 6):
            assert_close(projection(x[1 : 1 + count], weight), wanted[1 : 1 + count], dtype)


@every_engine
@pytest.mark.parametrize("form", ["int8", "mxfp4"])
def test_deterministic_bits_are_those_of_any_batch(isa, form):
    dtype, weight = dtypes(isa)[-1], stored(form, 77, 320)
    x = torch.randn(150, 320).to(dtype)
    with moestro.use(implementation=f"cpu-{isa.name}"):
        whole = projection(x, weight)
        for threads, count in itertools.product((1, 2, 5), (1, 2, 3, 9, 33)):
            torch.set_num_threads(threads)
            assert bit_equal(projection(x[-count:], weight), whole[-count:])


@pytest.mark.skipif(not ENGINES, reason="there is no engine")
@pytest.mark.unpoisoned
def test_the_kernels_foreseen_are_those_that_run():
    for isa, form, rows in itertools.product(ENGINES, ("int8", "fp8-e4m3-channel"), (1, 5, 60, 100)):
        x, weight = torch.randn(rows, 64).to(dtypes(isa)[-1]), stored(form, 33, 64)
        with moestro.use(implementation=f"cpu-{isa.name}"):
            found = moestro.explain(projection, x, weight)
        assert sum(use.rows for use in found.kernels) == rows
        kernels = {use.kernel for use in found.kernels}
        assert "int8 residual dots" not in kernels or (isa.multiplies_int8_residual and form == "int8")
        assert "int16 dots" not in kernels or (isa.multiplies_int16 and form == "int8")


@pytest.mark.skipif(not ENGINES, reason="there is no engine")
@pytest.mark.parametrize("columns", [516, 517, 1024, 4096, 4100])
def test_the_largest_sums_of_integers(columns):
    """Rows and weights of one value each: every product has the same sign and the largest size."""
    weight = quantize(torch.full((5, columns), 0.5), "int8")
    for isa, value in itertools.product(ENGINES, (1.0, -1.0)):
        x = torch.full((3, columns), value, dtype=dtypes(isa)[-1])
        with moestro.use(implementation=f"cpu-{isa.name}"):
            y = projection(x, weight)
        assert relative_error(y, torch.full((3, 5), value * columns / 2)) < 0.004


@pytest.mark.skipif(not ENGINES, reason="there is no engine")
@pytest.mark.parametrize("form", ["bfloat16", "int8", "int4-g32", "fp8-e4m3-channel"])
def test_many_short_rows(form):
    """As many as meet weights at once, of so few columns that sums of lanes take most of the scratch."""
    for isa, columns in itertools.product(ENGINES, (16, 32, 64, 112, 128, 144)):
        if form == "int4-g32" and columns % 32:
            continue
        weight = torch.randn(37, columns).bfloat16() if form == "bfloat16" else stored(form, 37, columns)
        for dtype in [torch.bfloat16] if form == "bfloat16" else dtypes(isa):
            x = torch.randn(96, columns).to(dtype)
            with moestro.use(implementation=f"cpu-{isa.name}"):
                y = projection(x, weight)
            assert_close(y, reference.projection(x, weight, None), dtype)


def test_gradients_of_the_rows():
    weight = stored("int8", 7, 20)
    x = torch.randn(3, 20, dtype=torch.float64, requires_grad=True)
    for implementation in ("torch", "reference"):
        with moestro.use(implementation=implementation):
            assert torch.autograd.gradcheck(lambda x: projection(x, weight), (x,))


def test_transforms_of_the_rows():
    weight, bias = stored("int8", 7, 20), torch.randn(7)
    x, direction = torch.randn(3, 20), torch.randn(3, 20)
    matrix = formats.dequantize(weight, torch.float32)

    def y(x):
        return projection(x, weight, bias)

    assert_close(torch.func.vmap(y)(x), y(x), torch.float32)
    assert_close(torch.func.jvp(y, (x,), (direction,))[1], direction @ matrix.T, torch.float32)
    assert_close(torch.func.jacrev(y)(x[0]), matrix, torch.float32)
    assert_close(torch.func.grad(lambda x: y(x).sum())(x)[0], matrix.sum(0), torch.float32)


def test_what_does_not_fit_is_refused():
    weight, x = stored("int8", 3, 8), torch.randn(2, 8)
    stack = quantize(torch.randn(2, 3, 8), "int8")
    for arguments in ((x[:, 1:], weight), (x, weight, torch.randn(4)), (x.int(), weight), (x, stack)):
        with pytest.raises(InvalidInputError, match=r"\[projection\] got x"):
            projection(*arguments)
    if ENGINES:
        turned = formats.PackedTensor(weight.data.t().contiguous().t(), weight.format, weight.scales)
        with moestro.use(implementation="cpu-portable"), pytest.raises(UnsupportedError, match="not contiguous"):
            projection(x, turned)


@pytest.mark.parametrize("base", ["int4-g32", "int4-g32-zp"])
def test_groups_that_fill_no_tile_are_left_to_other_sets(base, monkeypatch):
    """As a format of groups of 16 would have them, which is a value away."""
    form = formats.FORMATS[base]
    assert form.scaling is not None
    form = replace(form, name="int4-g16", scaling=replace(form.scaling, columns=16))
    monkeypatch.setitem(formats.FORMATS, "int4-g16", form)
    monkeypatch.setitem(encode.CODECS, form, encode.CODECS[formats.FORMATS[base]])
    weight, x = quantize(torch.randn(33, 64), form), torch.randn(120, 64).bfloat16()
    with torch.no_grad():
        assert_close(projection(x, weight), reference.projection(x, weight, None), torch.bfloat16)
    for isa in TILED:
        with moestro.use(implementation=f"cpu-{isa.name}"), pytest.raises(UnsupportedError, match="groups of 32"):
            projection(x, weight)
    layer = moestro.ExpertWeights.from_dense(torch.randn(3, 64, 32), torch.randn(3, 32, 32)).quantize(form)
    rows, routing = torch.randn(90, 32).bfloat16(), moestro.Routing(torch.randint(0, 3, (90, 2)), torch.rand(90, 2))
    with torch.no_grad():
        y = moestro.expert_mlp(rows, routing, layer)
    assert_close(y, moestro.reference.expert_mlp(rows, routing, layer).bfloat16(), torch.bfloat16)
