"""A router for few tokens in one call of the engine, with every instruction set: logits of its matrix bit by bit,
experts and weights by PyTorch's softmax, sigmoid and order."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moestro.ops import native
from moestro.ops.projection.cpu import linear
from tolerances import assert_close, bit_equal

from .engines import HERE
from .steps import HIDDEN, dtypes, every_engine, matrix, multiplied, product, spread

WEIGHTS = (torch.float32, torch.bfloat16, torch.float16)
WAYS = (("softmax", True, False), ("softmax", False, False), ("softmax", False, True), ("sigmoid", False, False),
        ("sigmoid", False, True), ("sigmoid", True, True))  # fmt: skip
"""The score, whether experts are chosen by logits and scored among themselves, whether weights then add up to one."""
IDS, POISON = -77, -7.0


@dataclass(frozen=True)
class Router:
    matrix: tuple[Tensor, Tensor | None]
    top_k: int
    way: tuple[str, bool, bool] = WAYS[0]
    scale: float = 1.0

    def linear(self, isa, dtype):
        return linear(isa, dtype, *self.matrix)

    def arguments(self, isa, dtype):
        score, on_logits, renormalize = self.way
        router = native.engine().Router(
            score=native.SCORES[score], select_on_logits=on_logits, renormalize=renormalize, epsilon=0.0, floor=0.0,
            scale=self.scale, logit_scale=1.0,
        )  # fmt: skip
        return {"isa": isa.index, "logits": self.linear(isa, dtype), "router": router, "top_k": self.top_k}

    def run(self, isa, x, weights_dtype=torch.float32, num_threads=1):
        """Whether it gave a routing, the logits, ids and weights; nothing beside these is written."""
        made = native.engine().RoutingStep(**self.arguments(isa, x.dtype))
        tokens, experts = len(x), len(self.matrix[0])
        logits = torch.full((tokens + 2, experts), POISON, dtype=x.dtype)
        ids = torch.full((tokens + 2, self.top_k), IDS)
        weights = torch.full((tokens + 2, self.top_k), POISON, dtype=weights_dtype)
        to = (logits[1:].data_ptr(), ids[1:].data_ptr(), weights[1:].data_ptr(), native.FLOATS[weights_dtype])
        good = made.run(num_threads, tokens, x.data_ptr(), x.stride(0), *to)
        for each, poison in ((logits, POISON), (ids, IDS), (weights, POISON)):
            assert (each[[0, -1]] == poison).all()
        return good, logits[1:-1], ids[1:-1], weights[1:-1]

    def chosen(self, logits):
        """Ids and weights by PyTorch; of equal scores the larger index comes first."""
        score, on_logits, renormalize = self.way
        wide = logits.double()
        scored = wide.softmax(-1) if score == "softmax" else wide.sigmoid()
        order = (wide if on_logits else scored).flip(1).argsort(dim=1, descending=True, stable=True)
        ids = logits.shape[1] - 1 - order[:, : self.top_k]
        weights = scored.gather(1, ids)
        if on_logits and score == "softmax":
            weights = wide.gather(1, ids).softmax(-1)
        if renormalize:
            weights = weights / weights.sum(1, keepdim=True)
        return ids, weights * self.scale


def router(dtype, experts, top_k, way=WAYS[0], biased=True, scale=1.0):
    return Router(matrix(None, dtype, experts, HIDDEN, biased), top_k, way, scale)


@pytest.mark.unpoisoned
@every_engine
@given(data=st.data())
def test_experts_and_weights_are_those_of_the_logits(isa, data):
    def pick(*values):
        return data.draw(st.sampled_from(values))

    dtype, experts, tokens = pick(*dtypes(isa)), pick(1, 2, 7, 32, 33, 128), pick(1, 2, 3, 5, 17)
    top_k = data.draw(st.integers(1, min(experts, 40)))
    parameters = router(dtype, experts, top_k, pick(*WAYS), pick(False, True), pick(1.0, 2.5))
    torch.use_deterministic_algorithms(pick(False, True))
    x, weights_dtype = spread(torch.randn(tokens, HIDDEN).to(dtype)), pick(*WEIGHTS)
    good, logits, ids, weights = parameters.run(isa, x, weights_dtype, pick(1, 2, 3))
    assert good
    assert bit_equal(logits, multiplied(parameters.linear(isa, dtype), x, experts))
    assert_close(logits, product(parameters.matrix, x))
    wanted, own = parameters.chosen(logits)
    assert torch.equal(ids, wanted)
    assert_close(weights, own.to(weights_dtype))


@every_engine
@pytest.mark.parametrize("way", WAYS)
def test_of_equal_logits_the_last_experts_are_chosen(isa, way):
    """Rows of a matrix that are the same three times over, and a token of zeros, where all are equal."""
    dtype = dtypes(isa)[-1]
    weight = (torch.randn(4, HIDDEN) / 8).to(dtype).repeat(3, 1)
    x = torch.cat((torch.randn(2, HIDDEN), torch.zeros(1, HIDDEN))).to(dtype)
    parameters = Router((weight, None), 5, way)
    good, logits, ids, weights = parameters.run(isa, x)
    assert good
    wanted, own = parameters.chosen(logits)
    assert torch.equal(ids, wanted)
    assert ids[2].tolist() == [11, 10, 9, 8, 7]
    assert_close(weights, own.float())


@every_engine
def test_the_same_bits_alone_in_any_batch_and_on_any_number_of_threads(isa):
    dtype = dtypes(isa)[-1]
    parameters, x = router(dtype, 64, 6), torch.randn(40, HIDDEN).to(dtype)
    whole = parameters.run(isa, x)
    for num_threads, some in itertools.product((1, 2, 3), (slice(0, 1), slice(7, 30), slice(0, 40))):
        found = parameters.run(isa, x[some], num_threads=num_threads)
        for mine, part in zip(found[1:], whole[1:], strict=True):
            assert bit_equal(mine.float(), part[some].float())


@every_engine
@pytest.mark.parametrize("way", WAYS)
def test_logits_that_no_router_takes_are_said_so(isa, way):
    """NaN in any token; +infinity only where scores do not add up to one. Logits are written all the same."""
    for dtype in dtypes(isa):
        parameters, clean = router(dtype, 33, 4, way), torch.randn(5, HIDDEN).to(dtype)
        assert parameters.run(isa, clean)[0]
        for token, num_threads in itertools.product((0, 2, 4), (1, 2)):
            x = clean.clone()
            x[token, 3] = torch.nan
            good, logits, *_ = parameters.run(isa, x, num_threads=num_threads)
            assert good is False
            assert logits[token].isnan().all()
            assert logits.isnan().sum() == 33
        for bias, taken in ((torch.inf, way[0] == "sigmoid"), (-torch.inf, True)):
            weight, biases = parameters.matrix[0], torch.zeros(33, dtype=dtype)
            biases[7] = bias
            good, _, ids, weights = Router((weight, biases), 4, way).run(isa, clean)
            assert good is taken
            if good:
                assert (ids == 7).sum() == (5 if bias > 0 else 0)
                assert weights.isfinite().all()


@every_engine
def test_slots_without_an_expert_are_empty(isa):
    dtype = dtypes(isa)[-1]
    biases = torch.full((8,), -torch.inf, dtype=dtype)
    biases[[2, 5]] = 0.0
    good, _, ids, weights = Router((torch.randn(8, HIDDEN).to(dtype), biases), 3).run(
        isa, torch.ones(1, HIDDEN).to(dtype)
    )
    assert good
    assert sorted(ids[0].tolist()) == [-1, 2, 5]
    assert ids[0, 2] == -1
    assert weights[0, 2] == 0
    assert_close(weights.sum(1), torch.ones(1))


@every_engine
def test_arguments_that_do_not_fit_are_refused(isa):
    dtype = dtypes(isa)[-1]
    parameters = router(dtype, 8, 3)
    fixed, make = parameters.arguments(isa, dtype), native.engine().RoutingStep
    none = native.engine().Stored(
        element=native.ELEMENTS["bfloat16"], scale=native.SCALES["none"], rows=0, columns=HIDDEN, row_stride=0,
        base=(0, 0, 0, 0),
    )  # fmt: skip
    code = native.FLOATS[torch.bfloat16]
    without = native.engine().Linear(
        isa=isa.index, weights=none, bias=None, x_dtype=code, out_dtype=code, same_bits=False
    )
    for wrong in (
        *({"top_k": k} for k in (0, -1, 9, 1 << 40, -(1 << 62))),
        {"logits": without},
        *({"isa": n} for n in (-1, len(native.ISAS), 1 << 40)),
        *({"isa": other.index} for other in HERE if not other.multiplies_floats),
    ):
        with pytest.raises(ValueError, match=r"k out of range|lacks|no floats"):
            make(**fixed | wrong)
    with pytest.raises(TypeError):
        make(**fixed | {"logits": None})
    made, x = make(**fixed), torch.randn(2, HIDDEN).to(dtype)
    room = torch.zeros(3, 64, dtype=torch.int64)
    logits, ids, weights = (row.data_ptr() for row in room)
    good = {"threads": 1, "tokens": 2, "x": x.data_ptr(), "stride": HIDDEN}
    good |= {"logits": logits, "ids": ids, "weights": weights, "dtype": 0}
    assert made.run(*good.values())
    for wrong in (
        *({"threads": n} for n in (0, -1, 1 << 31, 1 << 40)),
        *({"tokens": n} for n in (0, -1, 1 << 24, 1 << 62)),
        *({name: 0} for name in ("x", "logits", "ids", "weights")),
        *({"dtype": n} for n in (-1, 3, 100)),
    ):
        with pytest.raises(ValueError, match=r"out of range|no address|a dtype other"):
            made.run(*(good | wrong).values())
