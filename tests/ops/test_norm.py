"""The engine's norm of rows with every instruction set: against the formula, bit by bit where no sum is rounded."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from moestro.ops import native
from tolerances import assert_close, bit_equal

from .engines import needs_engine
from .steps import every_engine

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COLUMNS = (1, 3, 15, 16, 17, 63, 127, 2880)
"""Off every width of a vector, and one so long that its rows are worth a team of threads."""
KINDS = tuple(itertools.product((0.0, 1.0), (False, True)))
POISON = -7.0


@dataclass(frozen=True)
class Norm:
    """(weight + offset) * x / sqrt(mean of x^2 + epsilon), by the engine and by plain PyTorch."""

    weight: Tensor
    epsilon: float = 1e-5
    offset: float = 0.0
    rounds_twice: bool = False

    def engine(self, isa):
        return native.engine().Norm(
            isa=isa.index, weight=native.array(self.weight), columns=len(self.weight), epsilon=self.epsilon,
            offset=self.offset, rounds_twice=self.rounds_twice,
        )  # fmt: skip

    def run(self, isa, x, num_threads=1):
        """The rows of x that lie anywhere; what stands after the output stays."""
        out = torch.full((len(x) + 1, len(self.weight)), POISON, dtype=x.dtype)
        self.engine(isa).run(num_threads, len(x), x.data_ptr(), x.stride(0), native.FLOATS[x.dtype], out.data_ptr())
        assert (out[-1] == POISON).all()
        return out[:-1]

    def formula(self, x, dtype):
        """With sums and products of a dtype, and what is stored in that of x.

        PyTorch's own root of float32 is off by a bit; that of float64 becomes the nearest float32.
        """
        wide = x.to(dtype)
        epsilon = torch.tensor(self.epsilon, dtype=torch.float32).to(dtype)
        root = (wide.square().sum(1, keepdim=True) / x.shape[1] + epsilon).double().sqrt().to(dtype)
        y = wide * (1 / root.double()).to(dtype)
        y = y.to(x.dtype).to(dtype) if self.rounds_twice else y
        return (y * (self.weight.to(dtype) + self.offset)).to(x.dtype)


def strided(x):
    """The same rows, with NaN between them."""
    wide = torch.full((len(x) + 1, x.shape[1] + 5), torch.nan, dtype=x.dtype)
    wide[:-1, 2:-3] = x
    return wide[:-1, 2:-3]


def weight_of(columns, dtype):
    return (torch.rand(columns) + 0.5).to(dtype)


@every_engine
@pytest.mark.parametrize("columns", COLUMNS)
def test_every_bit_where_no_sum_is_rounded(isa, columns):
    """Squares of small integers add up exactly in any order; what comes after is one operation at a time."""
    rows = itertools.cycle((0, 1, 5, 70, 2))
    for dtype, weight_dtype, (offset, rounds_twice) in itertools.product(DTYPES, DTYPES, KINDS):
        norm = Norm(weight_of(columns, weight_dtype), 1e-3, offset, rounds_twice)
        x = torch.randint(1, 9, (next(rows), columns)).to(dtype) * (-1) ** torch.randint(2, (1, columns))
        wanted = norm.formula(x, torch.float32)
        for given in (x, strided(x)):
            assert bit_equal(norm.run(isa, given), wanted)


@every_engine
@pytest.mark.parametrize("columns", COLUMNS)
def test_rows_of_any_size(isa, columns):
    """One row so small that epsilon is all there is, and one whose squares add up to much."""
    for dtype, (offset, rounds_twice) in itertools.product(DTYPES, KINDS):
        norm = Norm(weight_of(columns, torch.float32), 1e-6, offset, rounds_twice)
        x = (torch.randn(4, columns) * torch.tensor([[1e-4], [0.1], [1.0], [100.0]])).to(dtype)
        for found, row in zip(norm.run(isa, strided(x)), x, strict=True):
            assert_close(found, norm.formula(row[None], torch.float64)[0])


@every_engine
def test_what_is_rounded_twice_has_other_bits(isa):
    x = torch.randint(1, 9, (5, 127)).bfloat16()
    norm = Norm(weight_of(127, torch.float32), 1e-3)
    assert not bit_equal(norm.run(isa, x), replace(norm, rounds_twice=True).run(isa, x))
    assert bit_equal(norm.run(isa, x.float()), replace(norm, rounds_twice=True).run(isa, x.float()))


@every_engine
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [17, 2880])
def test_the_same_bits_in_place_alone_and_on_any_number_of_threads(isa, dtype, columns):
    for rounds_twice in (False, True):
        norm, x = Norm(weight_of(columns, dtype), rounds_twice=rounds_twice), torch.randn(70, columns).to(dtype)
        whole = norm.run(isa, x)
        for num_threads in (2, 3, 100):
            assert bit_equal(norm.run(isa, x, num_threads), whole)
            assert bit_equal(norm.run(isa, strided(x), num_threads), whole)
        for first, last in ((0, 1), (3, 5), (69, 70)):
            assert bit_equal(norm.run(isa, x[first:last]), whole[first:last])
        for num_threads in (1, 3):
            rows = x.clone()
            address = rows.data_ptr()
            norm.engine(isa).run(num_threads, 70, address, columns, native.FLOATS[dtype], address)
            assert bit_equal(rows, whole)


@every_engine
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_stays_in_its_row(isa, dtype):
    x, norm = torch.randn(6, 63).to(dtype), Norm(weight_of(63, torch.bfloat16))
    clean = norm.run(isa, x)
    x[1, 7], x[3, 62], x[4, 0] = torch.nan, torch.inf, -torch.inf
    for rounds_twice in (False, True):
        found = replace(norm, rounds_twice=rounds_twice).run(isa, x)
        assert found[1].isnan().all()
        assert found[3, 62].isnan()
        assert found[4, 0].isnan()
        assert not found[3, :62].any()
        assert not found[4, 1:].any()
        if not rounds_twice:
            assert bit_equal(found[[0, 2, 5]], clean[[0, 2, 5]])


@every_engine
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_zeros(isa, dtype):
    """Epsilon keeps them zeros; without one they are NaN, as 0 / 0 is."""
    x = torch.zeros(3, 17, dtype=dtype)
    for offset, rounds_twice in KINDS:
        norm = Norm(weight_of(17, dtype), 1e-6, offset, rounds_twice)
        assert not norm.run(isa, x).any()
        assert replace(norm, epsilon=0.0).run(isa, x).isnan().all()


@every_engine
def test_what_a_longer_call_left_in_the_workspace_meets_nothing(isa):
    long, short = Norm(torch.full((64,), torch.nan)), Norm(weight_of(17, torch.float32), 1e-3)
    assert long.run(isa, torch.full((2, 64), torch.nan)).isnan().all()
    x = torch.randint(1, 9, (2, 17)).float()
    assert bit_equal(short.run(isa, x), short.formula(x, torch.float32))


@every_engine
def test_arguments_that_do_not_fit_are_refused(isa):
    weight, x = weight_of(16, torch.float32), torch.randn(2, 16)
    room = torch.empty(2, 16)
    address, out = x.data_ptr(), room.data_ptr()
    fixed = {"isa": isa.index, "weight": native.array(weight), "columns": 16}
    fixed |= {"epsilon": 1e-6, "offset": 0.0, "rounds_twice": False}
    made = native.engine().Norm(**fixed)
    made.run(1, 0, 0, 16, 0, 0)
    for wrong in (
        *({"columns": n} for n in (0, -1, -(1 << 62), 1 << 31, 1 << 62)),
        *({"isa": n} for n in (-1, len(native.ISAS), 1 << 40)),
        {"weight": native.engine().Array(0, 0, 0)},
    ):
        with pytest.raises(ValueError, match=r"out of range|no address|lacks"):
            native.engine().Norm(**fixed | wrong)
    for arguments in (
        *((n, 2, address, 16, 0, out) for n in (0, -1, 1 << 31, 1 << 40)),
        *((1, n, address, 16, 0, out) for n in (-1, -(1 << 62), 1 << 36, 1 << 62)),
        (1, 2, 0, 16, 0, out),
        (1, 2, address, 16, 0, 0),
        *((1, 2, address, 16, code, out) for code in (-1, 3, 100)),
    ):
        with pytest.raises(ValueError, match=r"out of range|no address|a dtype other"):
            made.run(*arguments)


@needs_engine
@pytest.mark.parametrize("kind", ["Norm", "AttentionStep", "RoutingStep"])
def test_nothing_is_made_of_no_arguments(kind):
    with pytest.raises(TypeError):
        getattr(native.engine(), kind)()
