"""Int8 inputs: how far results may be apart where a value between the products lies next to a rounding boundary."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from moestro import ExpertWeights, Routing, reference
from moestro.formats import FORMATS, INTEGERS
from tolerances import tolerance

INTEGER_FORMATS = [name for name, form in FORMATS.items() if form.element in INTEGERS]


def rounded(weights: ExpertWeights) -> ExpertWeights:
    """The same experts, with int8 inputs."""
    return replace(weights, input_format="int8")


def slack(x: Tensor, routing: Routing, weights: ExpertWeights) -> Tensor:
    """How much of each output [T, H] hangs on values between the products whose rounding float32 does not decide.

    Sums in another order move such a value by less than the tolerance of its row; where that may cross the middle
    between two integers, one unit of the row's scale may come or go, times the weight that meets it.
    """
    unsure = 127 * tolerance(torch.float32).worst
    found = torch.zeros(x.shape, dtype=torch.float64)
    for e in routing.expert_ids.unique().tolist():
        tokens, slots = (routing.expert_ids == e).nonzero(as_tuple=True)
        if e < 0 or len(tokens) == 0:
            continue
        w, on_input = routing.routing_weights[tokens, slots, None].double(), routing.weight_on == "input"
        rows = x[tokens].double()
        h = reference.product(rows * w if on_input else rows, weights.gate_up, e, "int8")
        if weights.gate_up_bias is not None:
            h = h + weights.gate_up_bias[e].double()
        a = reference.activate(h, weights.activation)
        s = a.abs().amax(1, keepdim=True) / 127
        near = ((a / s - (a / s).floor() - 0.5).abs() < unsure) & (s > 0)
        lost = (near.double() @ reference.matrix(weights.down, e, torch.float64).abs().T) * s
        found.index_add_(0, tokens, lost if on_input else lost * w.abs())
    return found


def assert_rounds(actual: Tensor, x: Tensor, routing: Routing, weights: ExpertWeights) -> None:
    """Fail unless a float32 result is that of the definition, up to float32 sums and `slack`."""
    assert actual.dtype == torch.float32
    expected = reference.expert_mlp(x.double(), routing, weights)
    finite = torch.isfinite(expected)
    assert torch.equal(torch.isfinite(actual), finite)
    assert torch.equal(actual[~finite].isnan(), expected[~finite].isnan())
    if finite.any():
        error = torch.where(finite, actual.double() - expected, 0.0).abs() - slack(x, routing, weights).nan_to_num()
        bound = float(expected[finite].abs().max()) * tolerance(torch.float32).worst
        assert float(error.max()) <= bound, f"{float(error.max()):.3g} over {bound:.3g}"
