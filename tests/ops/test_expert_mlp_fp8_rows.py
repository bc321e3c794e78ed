"""fp8-e4m3 inputs: what the definition says, plain torch and Triton against it, and what has no such rows."""

from __future__ import annotations

import importlib
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch

import moestro
from moestro import ExpertWeights, Routing, reference
from moestro.errors import UnsupportedError
from moestro.formats import dequantize
from moestro.tolerances import LOW_PRECISION_INPUT, relative_error, too_far
from moestro.types import GPT_OSS_SWIGLU
from tolerances import assert_close

from . import problems
from .engines import stored_weights
from .stored import apart, moved, sizes_for
from .triton_calls import why_unsupported

FORMATS = ("fp8-e4m3-tensor", "fp8-e4m3-channel", "fp8-e4m3-b128")


def layer(name: str, kind: str = "random", weight_on: str = "output"):
    sizes = sizes_for(name)
    stored = moved(stored_weights(name, sizes, GPT_OSS_SWIGLU), torch.get_default_device())
    weights = replace(stored, input_format="fp8-e4m3")
    return (
        torch.randn(sizes.num_tokens, sizes.hidden_size),
        problems.routing(sizes, kind=kind, weight_on=weight_on),
        weights,
    )


def test_rounded_rows_are_those_of_ml_dtypes():
    x = torch.randn(7, 300) * torch.tensor([1e-30, 1e-3, 1.0, 50.0, 1e30, 0.0, 1.0])[:, None]
    x[6, 5] = torch.inf
    values, scales = reference.round_rows_e4m3(x, 128)
    assert values.shape == x.shape
    assert scales.shape == (7, 3)
    for i, start in enumerate((0, 128, 256)):
        part = x[:, start : start + 128].numpy()
        steps = np.abs(part).max(1, keepdims=True) / np.float32(448)
        assert np.array_equal(np.where(np.isfinite(steps), steps, np.nan), scales[:, i, None].numpy(), equal_nan=True)
        with np.errstate(invalid="ignore"):
            codes = (part / np.where(steps > 0, steps, 1)).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
        finite = np.isfinite(steps[:, 0])
        assert np.array_equal(codes.astype(np.float32)[finite], values[:, start : start + 128].numpy()[finite])


@pytest.mark.parametrize("name", FORMATS)
def test_the_definition_is_the_product_of_what_was_rounded(name):
    x, _, weights = layer(name)
    matrix = dequantize(weights.gate_up)[1].double()
    columns = weights.gate_up.format.scaling.columns or x.shape[1]
    values, scales = reference.round_rows_e4m3(x, columns)
    rounded = values.double() * scales.double().repeat_interleave(columns, 1)[:, : x.shape[1]]
    assert_close(reference.product(x.double(), weights.gate_up, 1, "fp8-e4m3").float(), (rounded @ matrix.T).float())
    assert 0.005 < relative_error(rounded, x.double()) < LOW_PRECISION_INPUT


def close(actual: torch.Tensor, x, routing, weights: ExpertWeights) -> None:
    """Sums in another order may move a value between the products over the middle of two codes, a few in a thousand.

    Tensor cores add products of 8-bit floats in fewer bits. With sums off by 2^-13 of themselves 8 of 300 layers like
    these had a row that was off by more than a quarter of the bound, and none had one off by more than the bound.
    """
    expected = reference.expert_mlp(x, routing, weights)
    assert relative_error(actual.float(), expected) <= LOW_PRECISION_INPUT / 4
    found = too_far(actual.float(), expected, LOW_PRECISION_INPUT if actual.is_cuda else LOW_PRECISION_INPUT / 4)
    assert found is None, found


@pytest.mark.parametrize("strategy", ["grouped", "selective", "blockwise-5", "all_experts"])
@pytest.mark.parametrize("name", FORMATS)
def test_plain_torch(name, strategy):
    for weight_on in ("output", "input"):
        x, routing, weights = layer(name, weight_on=weight_on)
        with torch.no_grad(), moestro.use(implementation="torch"):
            for stored in (weights, apart(weights)):
                close(moestro.expert_mlp(x, routing, stored, strategy), x, routing, stored)
            low = moestro.expert_mlp(x.to(torch.bfloat16), routing, weights, strategy)
        assert low.dtype == torch.bfloat16
        close(low, x.to(torch.bfloat16), routing, weights)


def test_what_has_no_such_rows_says_so():
    x, routing, weights = layer("fp8-e4m3-channel")
    with pytest.raises(UnsupportedError, match="weights that are 8-bit floats"):
        replace(weights.quantize("bfloat16", input_format="float"), input_format="fp8-e4m3")
    with torch.no_grad():
        explained = moestro.explain(moestro.expert_mlp, x, routing, weights)
    assert "input format fp8-e4m3" in explained.weights
    reasons = {c.name: c.reason for c in explained.candidates}
    assert reasons["torch"] is None
    assert all(reason for name, reason in reasons.items() if name.startswith("cpu-"))


def test_in_a_graph():
    x, routing, weights = layer("fp8-e4m3-b128")
    experts = moestro.Experts.from_weights(weights).requires_grad_(False)
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, routing), moestro.expert_mlp(x, routing, weights))


@pytest.fixture
def device(triton_device: torch.device):
    torch.set_default_device(triton_device)
    yield triton_device
    torch.set_default_device(None)


@pytest.mark.parametrize("name", [*FORMATS, "int8"])
def test_triton_rounds_rows_as_defined(device, name):
    to = "int8" if name == "int8" else "fp8-e4m3"
    columns = moestro.formats.FORMATS[name].scaling.columns
    x = torch.randn(11, 1100) * torch.cat([torch.logspace(-30, 37, 9), torch.tensor([1e-37, 448 * 2.0**-62])])[:, None]
    x[3] = 0.0
    x[4, 7], x[5, 1000], x[6, 3] = torch.inf, torch.nan, -torch.inf
    low = x.to(torch.bfloat16)
    low[9] = 0.0  # Triton's interpreter takes small bfloat16 for that
    for rows in (x, low, x[:, ::1][:7]):
        rounding = importlib.import_module("moestro.ops.triton_rows").Rounding(to, 1100, columns, rows)
        codes, scales = (rows.new_empty(n, dtype=dtype).view(len(rows), -1) for n, dtype in rounding.sizes(len(rows)))
        numbers = rounding.size, rounding.count, rounding.parts
        rounding.launch(len(rows) * rounding.parts, rows, rows.stride(0), codes, scales, *numbers)
        if to == "int8":
            values, expected = reference.round_rows(rows)
            assert torch.equal(codes.float(), values)
        else:
            values, expected = reference.round_rows_e4m3(rows, columns or 1100)
            assert torch.equal(codes.view(torch.float8_e4m3fn).float(), values)
        torch.testing.assert_close(scales, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", [*FORMATS, "int8"])
def test_triton(device, name):
    for kind, weight_on, strategy in (("random", "output", "grouped"), ("skewed", "input", "selective")):
        x, routing, weights = layer("fp8-e4m3-channel" if name == "int8" else name, kind, weight_on)
        if name == "int8":
            weights = weights.quantize("int8", input_format="int8")
        with torch.no_grad():
            assert moestro.explain(moestro.expert_mlp, x, routing, weights).chosen == "triton"
            close(moestro.expert_mlp(x, routing, weights, strategy), x, routing, weights)
            low = x.to(torch.bfloat16)
            close(moestro.expert_mlp(low, routing, weights, strategy), low, routing, weights)


def test_triton_takes_as_many_integers_as_a_sum_holds(device):
    least = 132_104
    for columns, taken in ((least, True), (least + 1, False)):
        down = torch.zeros(1, 2, columns).to(device)
        weights = ExpertWeights.from_dense(torch.zeros(1, columns, 2), down, activation=moestro.Activation(gated=False))
        reason = why_unsupported(
            torch.zeros(1, 2),
            Routing(torch.zeros(1, 1).long(), torch.ones(1, 1)),
            weights.quantize("int8", input_format="int8"),
        )
        assert (reason is None) is taken
        assert taken or "within 32 bits up to 132104 columns, not 132105" in reason


def test_triton_has_integers_of_eight_bits_only(device):
    four = stored_weights("int4-g32", sizes_for("int4-g32"), GPT_OSS_SWIGLU)
    x = torch.randn(sizes_for("int4-g32").num_tokens, four.hidden_size)
    with torch.no_grad(), pytest.raises(UnsupportedError, match="by weights stored as int8"):
        moestro.expert_mlp(x, problems.routing(sizes_for("int4-g32")), replace(four, input_format="int8"))
