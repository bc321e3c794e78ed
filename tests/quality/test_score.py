"""Every measure of quality against its definition: sums by hand, loops over lists, sets."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moestro.errors import InvalidInputError
from moestro.quality import score as quality
from moestro.quality.report import Row
from moestro.quality.score import Tally, changed_choices, likelihood, nearest_rank, score, windows
from tolerances import assert_close

INF, NAN = float("inf"), float("nan")


@given(st.integers(0, 70), st.integers(1, 20))
def test_windows_score_every_token_but_the_first_once(num_tokens: int, context: int) -> None:
    scored = []
    for read, predicted in windows(torch.arange(num_tokens), context):
        assert 0 < read.numel() <= context
        assert 0 < predicted.numel() <= read.numel()
        assert read.tolist() == list(range(int(read[0]), int(predicted[-1])))  # up to the token before the last
        assert read[0] == 0 or predicted[0] - read[0] >= context // 2
        scored += predicted.tolist()
    assert scored == list(range(1, num_tokens))


def test_windows_by_hand() -> None:
    assert [(read.tolist(), predicted.tolist()) for read, predicted in windows(torch.arange(8), 4)] == [
        ([0, 1, 2, 3], [1, 2, 3, 4]),
        ([2, 3, 4, 5], [5, 6]),
        ([4, 5, 6], [7]),
    ]
    assert [read.tolist() for read, _ in windows(torch.arange(5), 4)] == [[0, 1, 2, 3]]


def test_scores_by_hand() -> None:
    """Probabilities of 1/2, 1/4, 1/4 by the baseline, and of 1/4, 1/2, 1/4 and of thirds by the model."""
    baseline = torch.tensor([[2.0, 1.0, 1.0], [2.0, 1.0, 1.0]]).log() + 5.0
    logits = torch.tensor([[1.0, 2.0, 1.0], [1.0, 1.0, 1.0]]).log() - 3.0
    found = score(logits, baseline, torch.tensor([0, 2]))
    double = {"dtype": torch.float64}
    assert_close(found.nats, torch.tensor([math.log(4), math.log(3)], **double), torch.float32)
    assert_close(found.baseline_nats, torch.tensor([math.log(2), math.log(4)], **double), torch.float32)
    second = 0.5 * math.log(0.5 * 3) + 2 * 0.25 * math.log(0.25 * 3)
    assert_close(found.divergence, torch.tensor([0.25 * math.log(2), second], **double), torch.float32)
    assert found.agrees.tolist() == [False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scores_are_those_of_loops_however_they_are_cut(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, baseline = (3 * torch.randn(7, 11)).to(dtype), (3 * torch.randn(7, 11)).to(dtype)
    targets = torch.randint(11, (7,))
    whole = score(logits, baseline, targets)
    monkeypatch.setattr(quality, "CHUNK_ITEMS", 25)
    cut = score(logits, baseline, targets)
    for name in ("nats", "baseline_nats", "divergence", "agrees"):
        assert torch.equal(getattr(whole, name), getattr(cut, name))
    for t in range(7):
        q, p = (probabilities(values[t].tolist()) for values in (logits, baseline))
        kl = math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
        expected = [-math.log(q[targets[t]]), -math.log(p[targets[t]]), kl]
        actual = [float(values[t]) for values in (whole.nats, whole.baseline_nats, whole.divergence)]
        assert_close(torch.tensor(actual, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64))
        assert bool(whole.agrees[t]) == (q.index(max(q)) == p.index(max(p)))


def probabilities(logits: list[float]) -> list[float]:
    total = math.fsum(math.exp(value) for value in logits)
    return [math.exp(value) / total for value in logits]


def test_equal_predictions_diverge_by_nothing() -> None:
    logits = 20 * torch.randn(50, 97)
    found = score(logits, logits.clone(), torch.zeros(50, dtype=torch.int64))
    assert found.divergence.abs().max() == 0
    assert found.agrees.all()
    assert torch.equal(found.nats, found.baseline_nats)


def test_an_impossible_token_is_no_error() -> None:
    baseline = torch.tensor([[0.0, 0.0, -INF]])
    assert float(score(baseline, baseline, torch.tensor([0])).divergence) == 0.0
    assert float(score(torch.zeros(1, 3), baseline, torch.tensor([0])).divergence) == pytest.approx(math.log(1.5))
    assert float(score(baseline, torch.zeros(1, 3), torch.tensor([0])).divergence) == INF


@pytest.mark.parametrize("values", [[NAN, 0.0], [INF, 0.0], [-INF, -INF]])
def test_predictions_that_are_not_finite_are_refused(values: list[float]) -> None:
    bad, good, target = torch.tensor([[0.0, 0.0], values]), torch.zeros(2, 2), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(InvalidInputError, match="got logits with NaN or infinity"):
        score(bad, good, target)
    with pytest.raises(InvalidInputError, match="got baseline logits with NaN or infinity"):
        score(good, bad, target)


def test_changed_choices_by_hand() -> None:
    baseline = torch.tensor([[3, 1], [0, 2], [5, -1], [-1, -1]])
    assert changed_choices(baseline, baseline) == (0, 5)
    assert changed_choices(torch.tensor([[1, 3], [2, 4], [-1, 5], [7, 8]]), baseline) == (1, 5)
    assert changed_choices(torch.full((4, 2), -1), baseline) == (5, 5)


@given(st.integers(0, 9), st.integers(1, 4), st.integers(0, 10**6))
def test_changed_choices_are_those_of_sets(num_tokens: int, top_k: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    one, other = (torch.rand(num_tokens, 6, generator=generator).topk(top_k).indices - 1 for _ in range(2))
    sets = [(set(a) - {-1}, set(b) - {-1}) for a, b in zip(one.tolist(), other.tolist(), strict=True)]
    assert changed_choices(one, other) == (sum(len(b - a) for a, b in sets), sum(len(b) for _, b in sets))


def test_nearest_rank() -> None:
    values = torch.tensor([5.0, 1.0, 4.0, 2.0, 3.0])
    assert [nearest_rank(values, share) for share in (0.0, 0.2, 0.21, 0.6, 0.99, 1.0)] == [1, 1, 2, 3, 5, 5]
    assert nearest_rank(torch.arange(1, 201).float(), 0.99) == 198
    assert nearest_rank(torch.tensor([7.0]), 0.99) == 7


def test_likelihood_by_hand() -> None:
    found = likelihood(torch.full((4,), 5 * math.log(2), dtype=torch.float64), num_bytes=10)
    assert found == pytest.approx({"bits_per_byte": 2.0, "bits_per_token": 5.0, "perplexity": 32.0})
    assert math.isfinite(likelihood(torch.tensor([1e6]), 1)["perplexity"])


def test_a_tally_of_two_windows_by_hand() -> None:
    tally = Tally(("first", "second", "idle"))
    sure, even = torch.tensor([[0.0, -INF]]), torch.zeros(1, 2)
    tally.scores += [score(even, sure, torch.tensor([0])), score(sure, sure, torch.tensor([0]))]
    none = torch.tensor([[-1]]), torch.tensor([[-1]])
    tally.add_layer(
        0,
        (torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 0.0]])),
        (torch.tensor([[0, 1]]), torch.tensor([[1, 2]])),
    )
    tally.add_layer(
        0,
        (torch.tensor([[1.0, 6.0]]), torch.tensor([[1.0, 10.0]])),
        (torch.tensor([[0, 1]]), torch.tensor([[1, 0]])),
    )
    tally.add_layer(1, (torch.zeros(1, 2), torch.zeros(1, 2)), none)
    tally.add_layer(2, (torch.ones(1, 2), torch.zeros(1, 2)), none)
    own, found = tally.rows(Row("bfloat16"), Row("mxfp4", "mse"), num_bytes=4)
    assert (found.format, found.search, found.status) == ("mxfp4", "mse", "ok")
    assert (found.bits_per_byte, found.bits_per_token) == (pytest.approx(1 / 4), pytest.approx(1 / 2))
    assert (own.format, own.bits_per_byte, own.kl_mean) == ("bfloat16", 0.0, None)
    assert found.change == 0.0  # of nothing
    assert found.kl_mean == pytest.approx(math.log(2) / 2)
    assert found.kl_p99 == pytest.approx(math.log(2))
    assert found.top1_agreement == 1.0
    assert [layer.path for layer in found.layers] == ["first", "second", "idle"]
    assert found.layers[0].error == pytest.approx(math.sqrt(25 / 101))
    assert [layer.error for layer in found.layers[1:]] == [0.0, INF]
    assert [layer.changed for layer in found.layers] == [0.25, 0.0, 0.0]
    assert found.routing_changed == pytest.approx(0.25 / 3)
    assert found.expert_error == INF


def test_the_change_of_bits_is_of_the_baselines() -> None:
    tally = Tally(())
    baseline, even = torch.tensor([[3.0, 1.0]]).log(), torch.zeros(1, 2)
    tally.scores.append(score(even, baseline, torch.tensor([0])))
    own, found = tally.rows(Row("float32"), Row("mxfp4"), num_bytes=1)
    assert found.change == pytest.approx(found.bits_per_byte / own.bits_per_byte - 1)
    assert found.change == pytest.approx(math.log(2) / math.log(4 / 3) - 1)
