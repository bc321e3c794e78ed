"""Top-k: every implementation against the definition, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import moestro
from moestro import reference
from moestro.errors import InvalidInputError, UnsupportedError
from moestro.ops.topk import TOPK, plain, tuning
from tolerances import bit_equal

IMPLEMENTATIONS = tuple(i.name for i in TOPK.implementations)
SPECIAL = (0.0, -0.0, torch.inf, -torch.inf, 1.0, -1.0, 2.0**-130, -(2.0**-130), 3e38, -3e38)


def by_definition(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Sort by (value, index) in plain Python, largest first."""
    rows = [sorted(range(len(r)), key=lambda i, r=r: (r[i], i), reverse=True)[:k] for r in scores.tolist()]
    return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), k)


def check(scores, k):
    expected = by_definition(scores, k)
    for implementation in IMPLEMENTATIONS:
        with moestro.use(implementation=implementation):
            values, indices = moestro.topk(scores, k)
        assert torch.equal(indices, expected), implementation
        assert bit_equal(values, scores.gather(-1, expected))


@given(
    num_tokens=st.integers(0, 6),
    num_experts=st.integers(1, 40),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
    source=st.sampled_from(("normal", "ties", "special")),
    data=st.data(),
)
def test_every_implementation_is_the_definition(num_tokens, num_experts, dtype, source, data):
    k = data.draw(st.integers(1, num_experts))
    torch.manual_seed(data.draw(st.integers(0, 999)))
    scores = torch.randn(num_tokens, num_experts)
    if source == "ties":
        scores = scores.round()
    elif source == "special":
        scores = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), (num_tokens, num_experts))]
    check(scores.to(dtype), k)


def test_float64():
    scores = torch.tensor([[1.0, 1.0 + 2**-50, 1.0, 1.0 - 2**-53]], dtype=torch.float64)
    assert moestro.topk(scores, 4)[1].tolist() == [[1, 2, 0, 3]]
    with moestro.use(implementation="branchless"), pytest.raises(UnsupportedError, match="float64"):
        moestro.topk(scores, 2)


def test_equal_scores_go_to_the_larger_index():
    assert moestro.topk(torch.tensor([[3.0, 1.0, 3.0, -0.0, 0.0]]), 4)[1].tolist() == [[2, 0, 1, 4]]
    assert moestro.topk(torch.zeros(1, 300), 3)[1].tolist() == [[299, 298, 297]]


def test_every_bfloat16_value_in_order():
    """All finite bfloat16 numbers in one row: the packed order is the numeric order."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    values = bits.view(torch.bfloat16)
    values = values[torch.isfinite(values)][None]
    top = moestro.topk(values, values.shape[1])[0].double()
    assert (top[:, :-1] >= top[:, 1:]).all()


def test_words_are_the_published_packing():
    """bf16 score in the high half, index in the low half, negative words XOR 0x7fff0000."""
    scores = torch.tensor([[1.5, -2.0, 0.25]], dtype=torch.bfloat16)
    raw = (scores.view(torch.int16).int() << 16) | torch.arange(3, dtype=torch.int32)
    assert torch.equal(plain.pack(scores), torch.where(raw < 0, raw ^ 0x7FFF0000, raw))
    assert plain.unpack_index(plain.pack(scores)).tolist() == [[0, 1, 2]]


def test_ranking_refuses_what_would_not_fit():
    assert tuning.rank_fits(1024, 256)
    assert not tuning.rank_fits(1025, 256)
    with moestro.use(implementation="branchless"), pytest.raises(UnsupportedError, match="branchless: T"):
        moestro.topk(torch.zeros(1025, 256), 2)


@pytest.mark.parametrize("implementation", ["torch", "branchless"])
def test_compiles_whole_and_exports_with_any_number_of_tokens(implementation):
    class TopK(torch.nn.Module):
        def forward(self, scores):
            return moestro.topk(scores, 3)

    with moestro.use(implementation=implementation):
        tokens = {0: torch.export.Dim("num_tokens")}
        exported = torch.export.export(TopK(), (torch.randn(5, 9),), dynamic_shapes=(tokens,)).module()
        compiled = torch.compile(TopK(), fullgraph=True, dynamic=True, backend="aot_eager")
        for num_tokens in (2, 31):
            scores = torch.randn(num_tokens, 9)
            for run in (exported, compiled):
                values, indices = run(scores)
                assert torch.equal(indices, reference.topk(scores, 3))
                assert torch.equal(values, scores.gather(-1, indices))


@pytest.mark.parametrize(
    ("scores", "k", "text"),
    [
        (torch.tensor([[1.0, torch.nan]]), 1, "NaN"),
        (torch.zeros(2, 3), 4, "k=4 with 3 experts"),
        (torch.zeros(2, 3), 0, "k=0"),
        (torch.zeros(3), 1, r"scores \[3\]"),
        (torch.zeros(2, 3, dtype=torch.int64), 1, "int64"),
        (torch.zeros(1, 70_000), 1, "65536"),
    ],
)
def test_bad_input(scores, k, text):
    with pytest.raises(InvalidInputError, match=text):
        moestro.topk(scores, k)
