"""What kernels assert of values. A GPU carries out assertions that end its use; the interpreter, asked to, raises."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import moestro
from moestro.ops import gpu, gpu_checks, topk
from moestro.ops.topk import plain
from moestro.routing import Scoring, route, triton

interpreter = pytest.importorskip("triton.runtime.interpreter")
pytestmark = pytest.mark.skipif(not gpu.interpreted(), reason="an assertion on the device ends its use")


@pytest.fixture(autouse=True)
def asserting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter drops assertions unless it is told that somebody is looking for errors."""
    options = replace(interpreter.interpreter_builder.options, debug=True, sanitize_overflow=True)
    monkeypatch.setattr(interpreter.interpreter_builder, "options", options)


def refused(text: str) -> object:
    from triton.runtime.errors import InterpreterError

    return pytest.raises(InterpreterError, match=text)


IDS = torch.tensor([[0, 3, -1], [2, 2, 1]])
WEIGHTS = torch.tensor([[1.0, -2.0, torch.nan], [0.0, 3e38, 1.0]])


def test_what_a_routing_may_hold() -> None:
    gpu_checks.launch(IDS, WEIGHTS, 4)
    gpu_checks.launch(IDS.int(), None, 4)
    gpu_checks.launch(IDS[:0], WEIGHTS[:0], 4)
    gpu_checks.launch(torch.full((3000, 1), -1), torch.full((3000, 1), torch.inf), 1)


@pytest.mark.parametrize("bad", [4, -2, 1 << 40, -(1 << 40)])
def test_ids_out_of_range(bad: int) -> None:
    for place in (0, 1500, 2999):
        ids = torch.zeros(3000, dtype=torch.long)
        ids[place] = bad
        with refused("expert_ids must lie in -1..num_experts-1"):
            gpu_checks.launch(ids.view(1000, 3), None, 4)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_weights_of_used_slots_are_finite(bad: float) -> None:
    with refused("routing_weights must be finite"):
        gpu_checks.launch(IDS, WEIGHTS.masked_fill(IDS == 1, bad), 4)


def test_tensors_on_the_cpu_are_checked_there() -> None:
    assert not gpu_checks.check(IDS, WEIGHTS, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_score_that_is_nan(dtype: torch.dtype, sign: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "refuse_nan", lambda scores: None)
    scores = torch.randn(5, 33).to(dtype)
    scores[4, 32] = sign * torch.inf
    with moestro.use(implementation="triton"):
        topk.run(scores, 2)
        scores[4, 32] = torch.tensor(torch.nan).copysign(torch.tensor(sign))
        with refused("scores must not be NaN"):
            topk.run(scores, 2)


@pytest.mark.parametrize(
    ("logit", "scoring", "bias", "text"),
    [
        (torch.nan, Scoring(), 0.0, "logits must not be NaN or"),
        (torch.inf, Scoring(), 0.0, "logits must not be NaN or"),
        (torch.nan, Scoring("sigmoid"), 0.0, "logits must not be NaN"),
        (0.0, Scoring(), torch.nan, "correction bias must be finite"),
        (0.0, Scoring(), torch.inf, "correction bias must be finite"),
        (3e38, Scoring(logit_scale=9.0), 0.0, "scores plus correction must not be NaN"),
        (torch.inf, Scoring("sigmoid"), 0.0, None),
        (-torch.inf, Scoring(), 0.0, None),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_what_no_router_takes(
    logit: float, scoring: Scoring, bias: float, text: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "_good", lambda *given: True)
    logits, correction = torch.randn(5, 9), torch.zeros(9)
    logits[4, 8], correction[8] = logit, bias
    with moestro.use(implementation="triton"):
        if text is None:
            route(logits, 2, scoring, correction)
            return
        with refused(text):
            route(logits, 2, scoring, correction)
