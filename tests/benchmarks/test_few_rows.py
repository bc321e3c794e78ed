"""`benchmarks/few_rows.py`: a row of weights costs something, and a set that is not there is refused."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

import few_rows
from moestro import formats
from moestro.ops import native
from tolerances import assert_close

pytestmark = pytest.mark.skipif(native.module is None, reason="the native engine is not there")


def test_every_format_and_number_of_tokens_has_a_line(monkeypatch):
    asked = []
    monkeypatch.setattr(few_rows, "row_seconds", lambda isa, *how: asked.append(how[:3]) or (10 + how[1] / 512) * 1e-9)
    result = CliRunner().invoke(few_rows.app, ["--formats", "int8,mxfp4", "--tokens", "1,3"])
    assert result.exit_code == 0, result.output
    assert asked == [(form, k, n) for form in ("int8", "mxfp4") for n in (1, 3) for k in few_rows.COLUMNS]
    assert result.output.count(" 1.0 ") == 4
    assert result.output.count(" 10.0 ") == 4


def test_rows_may_be_of_any_width(monkeypatch):
    asked = []
    monkeypatch.setattr(few_rows, "row_seconds", lambda isa, *how: asked.append(how[1]) or 1e-9)
    result = CliRunner().invoke(few_rows.app, ["--formats", "mxfp4", "--tokens", "1", "--columns", "544,2880"])
    assert result.exit_code == 0, result.output
    assert asked == [544, 2880]


def test_the_product_is_computed():
    best = next(isa for isa in native.ISAS if isa.runs_here and isa.multiplies_floats)
    x, weights = torch.randn(2, 512).bfloat16(), formats.quantize(0.02 * torch.randn(5, 512), "mxfp4")
    out = torch.empty(2, 5, dtype=torch.bfloat16)
    few_rows.product(few_rows.linear(best, weights), x, out)
    assert_close(out, x.float() @ formats.dequantize(weights).T, torch.bfloat16)


def test_a_set_that_is_not_here():
    result = CliRunner().invoke(few_rows.app, ["--set", "avx99"])
    assert result.exit_code == 2
    assert "avx99" in result.output
