"""The native engine's instruction sets, and one call forced on one of them."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

import moestro
from moestro import Activation, ExpertWeights, Routing, reference, settings
from moestro.formats import FORMATS
from moestro.ops import native
from moestro.ops.native import Isa
from tolerances import assert_close, bit_equal

from . import problems

MOST = 1 if settings.MASK_VARIABLE in os.environ else None
"""Where better sets are masked (tools/every_set.py), the best of those left: the others are tested without a mask."""

HERE = [isa for isa in native.ISAS if isa.runs_here]
RUNNING = [isa for isa in HERE if isa.multiplies_floats and not isa.multiplies_bfloat16][:MOST]
TILED = [isa for isa in HERE if isa.multiplies_bfloat16][:MOST]
ROUNDING = [isa for isa in HERE if isa.multiplies_int8][:MOST]
STORED = [name for name in FORMATS if name != "float64"]
STRATEGIES = ("grouped", "selective", "blockwise-1", "blockwise-5", "blockwise-96", "all_experts")

TESTS = Path(__file__).parents[1]
PACKAGE = Path(moestro.__file__).parents[1]

every_isa = pytest.mark.parametrize("isa", RUNNING, ids=lambda isa: isa.name)
every_tiled_isa = pytest.mark.parametrize("isa", TILED, ids=lambda isa: isa.name)
every_rounding_isa = pytest.mark.parametrize("isa", ROUNDING, ids=lambda isa: isa.name)
needs_engine = pytest.mark.skipif(native.module is None, reason=str(native.problem))


def run(isa: Isa, x: Tensor, routing: Routing, weights: ExpertWeights, strategy: str = "auto") -> Tensor:
    """What this instruction set computes; an error if it cannot."""
    with moestro.use(implementation=f"cpu-{isa.name}"):
        return moestro.expert_mlp(x, routing, weights, strategy)


@contextmanager
def default_mode() -> Iterator[None]:
    """PyTorch's default mode inside, where the number of rows may decide what multiplies them."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def check_tiles(isa: Isa, x: Tensor, routing: Routing, weights: ExpertWeights, strategy: str = "auto") -> Tensor:
    """What a set that multiplies bfloat16 computes, in the deterministic mode; in both modes close to the reference.

    Without a unit for tiles they are taken in the default mode only.
    """
    y, expected = run(isa, x, routing, weights, strategy), reference.expert_mlp(x, routing, weights)
    assert y.dtype == torch.bfloat16
    assert_close(y, expected, torch.bfloat16)
    with default_mode():
        assert_close(run(isa, x, routing, weights, strategy), expected, torch.bfloat16)
    return y


def check(isa: Isa, x: Tensor, routing: Routing, weights: ExpertWeights, strategy: str = "auto") -> Tensor:
    """`run` against the reference in float64, as close as float32 sums are; 16 bits are rounded to last.

    Where rows of 16 bits become integers, they are nearly so.
    """
    wide = run(isa, x.float(), routing, weights, strategy)
    assert_close(wide, reference.expert_mlp(x.double(), routing, weights), torch.float32)
    y = wide if x.dtype == torch.float32 else run(isa, x, routing, weights, strategy)
    if takes_integers(isa, x, weights):
        assert_close(y, wide, x.dtype)
    else:
        assert bit_equal(y, wide.to(x.dtype))
    return y


def takes_integers(isa: Isa, x: Tensor, weights: ExpertWeights) -> bool:
    """Whether rows of x that stand in no tile become two rows of 8-bit integers, or one of 16-bit ones."""
    elements = {weights.gate_up.format.element, weights.down.format.element}
    columns = max(weights.hidden_size, weights.intermediate_size)
    if x.dtype == torch.float32 or weights.input_format != "float" or torch.are_deterministic_algorithms_enabled():
        return False
    integers = elements <= set(native.INTEGERS)
    multiplies = isa.multiplies_int8_residual or isa.multiplies_int16
    return multiplies and integers and columns <= native.LIMITS["most_int8_columns"]


@functools.cache
def stored_weights(name: str, sizes: problems.Sizes, activation: Activation, bias: bool = True) -> ExpertWeights:
    """Random experts in a format, made once: nobody may write to them. What a test draws next does not depend on it."""
    with torch.random.fork_rng():
        torch.manual_seed(sizes.hidden_size)
        return problems.weights(sizes, activation, torch.float32, bias=bias).quantize(name)


def output(*arguments: str, timeout: int = 120) -> str:
    """What a Python process prints that is to end well, with moestro and the tests' modules to import."""
    path = os.pathsep.join((str(PACKAGE), str(TESTS)))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, timeout=timeout, env=environment
    )
    assert found.returncode == 0, f"{found.returncode}: {found.stderr[-3000:]}"
    return found.stdout
