"""The table of kernels: what a plan says is what runs, and ids are read once, whatever is written to them meanwhile."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import moestro
from kernel_table import kernel_table
from moestro import Activation, Routing
from moestro.ops import dispatch, native

from . import problems
from .engines import TESTS, needs_engine, run, stored_weights
from .rounding import INTEGER_FORMATS
from .stored import apart as unstacked

pytestmark = needs_engine

FORMATS = ("float32", "float16", "bfloat16", "int8", "int4-g32", "mxfp4", "nvfp4", "fp8-e4m3-b128")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ISAS = [isa for isa in native.ISAS if isa.runs_here]
TOKENS = (1, 3, 7, 30, 200)


@pytest.fixture
def counted():
    """The engine's counters, on while a test runs."""
    native.module.count_kernels(True)
    yield lambda: dict(native.module.kernel_counts())
    native.module.count_kernels(False)


class Watched:
    """A prepared call that keeps the plans of what it runs."""

    plans: list

    def __init__(self, prepared):
        self.prepared = prepared

    def __getattr__(self, name):
        return getattr(self.prepared, name)

    def run(self, num_threads, num_tokens, x, stride, ids, weights, out):
        Watched.plans += self.prepared.plan(num_threads, num_tokens, ids)
        self.prepared.run(num_threads, num_tokens, x, stride, ids, weights, out)


class Engine:
    def __init__(self, module):
        self.module = module

    def __getattr__(self, name):
        return getattr(self.module, name)

    def ExpertMlp(self, **arguments):
        return Watched(self.module.ExpertMlp(**arguments))


@pytest.fixture
def planned(monkeypatch):
    """What was planned of all calls of a test: {(projection, kernel): units}."""
    Watched.plans = []
    dispatch._KEPT.clear()
    monkeypatch.setattr(native, "module", Engine(native.module))

    def found():
        totals: dict[tuple[str, str], int] = {}
        for record in Watched.plans:
            key = record.projection, record.kernel
            totals[key] = totals.get(key, 0) + record.units
        return totals

    yield found
    dispatch._KEPT.clear()


def weights_for(name, int8_input, are_unstacked):
    sizes = problems.Sizes(8, 128, 128, 4, 2)
    stacked = stored_weights(name, sizes, Activation())
    found = moestro.ExpertWeights(
        stacked.gate_up, stacked.down, stacked.gate_up_bias, stacked.down_bias, stacked.activation,
        input_format="int8" if int8_input else "float",
    )  # fmt: skip
    return unstacked(found) if are_unstacked else found


@pytest.mark.parametrize("are_unstacked", [False, True], ids=["stacked", "unstacked"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
def test_what_ran_is_what_was_planned(isa, name, are_unstacked, counted, planned):
    if isa.multiplies_bfloat16 and name in ("float32", "float16"):
        pytest.skip("it multiplies bfloat16")
    inputs = [isa.multiplies_floats, isa.multiplies_int8 and name in INTEGER_FORMATS]
    if not any(inputs):
        pytest.skip("it multiplies int8 only")
    for int8_input in (False, True):
        if not inputs[int8_input]:
            continue
        weights = weights_for(name, int8_input, are_unstacked)
        for dtype in (torch.bfloat16,) if isa.multiplies_bfloat16 else DTYPES:
            for deterministic in (False, True):
                torch.use_deterministic_algorithms(deterministic)
                for num_tokens in TOKENS:
                    x = torch.randn(num_tokens, 128).to(dtype)
                    routing = problems.routing(problems.Sizes(num_tokens, 128, 128, 4, 2), kind="full")
                    run(isa, x, routing, weights)
    assert planned() == counted()
    assert planned()


def test_the_table_chooses_by_rows(counted):
    """A few rows of the table, as numbers that a reader can check."""
    if "avx512-vnni" not in {isa.name for isa in ISAS}:
        pytest.skip("the rows are those of avx512-vnni")
    isa = next(isa for isa in ISAS if isa.name == "avx512-vnni")
    one = problems.Sizes(1, 128, 128, 1, 1)
    weights = stored_weights("mxfp4", one, Activation())
    seen = {}
    torch.use_deterministic_algorithms(False)
    for num_tokens, dtype in ((4, torch.float32), (5, torch.float32), (7, torch.float32), (7, torch.bfloat16)):
        native.module.count_kernels(True)
        routing = Routing(torch.zeros(num_tokens, 1, dtype=torch.long), torch.ones(num_tokens, 1))
        run(isa, torch.randn(num_tokens, 128).to(dtype), routing, weights)
        seen[num_tokens, dtype] = {kernel for _, kernel in counted()}
    assert seen == {
        (4, torch.float32): {"group-scaled dots"},
        (5, torch.float32): {"decoded dots"},
        (7, torch.float32): {"eight-row dots"},
        (7, torch.bfloat16): {"int8 residual dots"},
    }


def test_the_page_has_the_table():
    """`python tools/kernel_table.py` prints what docs/reference/engine.md has."""
    if native.ISAS[0].name != "amx":
        pytest.skip("the page has the instruction sets of x86-64 with AMX")
    assert kernel_table() in (TESTS.parent / "docs" / "reference" / "engine.md").read_text()


def linear_of(isa: native.Isa, weight: torch.Tensor, x_dtype: torch.dtype) -> Any:
    """A linear module of the engine, not one of moestro.projection, which takes x in the dtype of its weights; of
    weights in int8 there is one scale a row, in bfloat16."""
    rows, columns = weight.shape
    stored = native.module.Stored(
        element=native.ELEMENTS[str(weight.dtype).removeprefix("torch.")],
        scale=native.SCALES["bfloat16"] if weight.dtype == torch.int8 else 0,
        rows=rows, columns=columns, row_stride=columns * weight.element_size(), scale_row_stride=2,
        base=(weight.data_ptr(), weight.data_ptr(), 0, 0),
    )  # fmt: skip
    code = native.FLOATS[x_dtype]
    return native.module.Linear(isa=isa.index, weights=stored, bias=None, x_dtype=code, out_dtype=code, same_bits=False)


def test_linear_has_a_plan_too(counted):
    for isa in ISAS:
        if not isa.multiplies_floats:
            continue
        dtype = torch.bfloat16 if isa.multiplies_bfloat16 else torch.float32
        for num_tokens in (1, 100, 200):
            native.module.count_kernels(True)
            weight, x = torch.randn(70, 33).to(dtype), torch.randn(num_tokens, 33).to(dtype)
            linear = linear_of(isa, weight, dtype)
            out = torch.empty(num_tokens, 70, dtype=dtype)
            linear.run(2, num_tokens, x.data_ptr(), 33, out.data_ptr())
            plan = {(r.projection, r.kernel): r.units for r in linear.plan(2, num_tokens)}
            assert plan == dict(counted())
            assert sum(r.rows for r in linear.plan(2, num_tokens)) == num_tokens


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8])
def test_few_rows_decode_weights_in_registers(dtype):
    sets = [isa for isa in native.module.isas() if isa.runs_here and isa.multiplies_floats]
    weight = torch.ones(70, 33, dtype=dtype)
    for isa in sets:
        if isa.multiplies_bfloat16:
            continue
        linear = linear_of(isa, weight, torch.float32)
        most = isa.direct_tokens if dtype == torch.int8 else isa.direct_16_bit_tokens
        chosen = {rows: {each.kernel for each in linear.plan(2, rows)} for rows in (1, most, most + 1)}
        assert chosen == {1: {"direct dots"}, most: {"direct dots"}, most + 1: {"decoded dots"}}
    assert any(not isa.multiplies_bfloat16 for isa in sets)


def test_nothing_is_counted_while_nobody_counts():
    native.module.count_kernels(False)
    run(ISAS[-1], torch.randn(2, 128), problems.routing(problems.Sizes(2, 128, 128, 4, 2), kind="full"),
        weights_for("float32", False, False))  # fmt: skip
    assert native.module.kernel_counts() == {}


@pytest.mark.parametrize("are_64_bit", [True, False])
def test_ids_that_another_thread_writes_are_never_followed(are_64_bit):
    """Random numbers are written while calls run: each id names an expert or an empty slot, when it was read."""
    num_tokens, num_experts, hidden = 64, 4, 32
    weight = torch.randn(num_experts, hidden, hidden)
    stored = native.module.Stored(
        element=0, scale=0, rows=hidden, columns=hidden, row_stride=4 * hidden, base=(weight.data_ptr(), 0, 0, 0),
        step=(4 * hidden * hidden, 0, 0, 0),
    )  # fmt: skip
    kind = native.ACTIVATIONS["silu"]
    experts = native.module.ExpertMlp(
        isa=next(i for i in ISAS if i.multiplies_floats and not i.multiplies_bfloat16).index,
        gate_up=stored, down=stored, gate_up_bias=None, down_bias=None,
        activation=native.module.Activation(kind, False, False, 1.0, None, 0.0),
        num_experts=num_experts, top_k=2, x_dtype=0, out_dtype=0, ids_are_64_bit=are_64_bit,
    )  # fmt: skip
    x, w = torch.randn(num_tokens, hidden), torch.ones(num_tokens, 2)
    ids = torch.zeros(num_tokens, 2, dtype=torch.int64 if are_64_bit else torch.int32)
    out = torch.empty(num_tokens, hidden)
    stop = threading.Event()

    def write():
        good, bad = torch.zeros_like(ids), torch.full_like(ids, 1 << 30)
        while not stop.is_set():
            ids.copy_(bad)
            ids.copy_(good)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(3000):
            experts.run(2, num_tokens, x.data_ptr(), hidden, ids.data_ptr(), w.data_ptr(), out.data_ptr())
            assert bool(torch.isfinite(out).all())
    finally:
        stop.set()
        writer.join()


def test_an_expert_without_weights_is_an_error_before_anything_is_computed():
    hidden = 32
    weight = torch.randn(hidden, hidden)
    isa = next(i for i in ISAS if i.multiplies_floats and not i.multiplies_bfloat16)
    stored = native.module.Stored(
        element=0, scale=0, rows=hidden, columns=hidden, row_stride=4 * hidden, base=(0, 0, 0, 0)
    )
    stored.use_table(num_experts=3, num_blocks=1, experts=[0], matrices=[(weight.data_ptr(), 0, 0, 0)])
    experts = native.module.ExpertMlp(
        isa=isa.index, gate_up=stored, down=stored, gate_up_bias=None, down_bias=None,
        activation=native.module.Activation(0, False, False, 1.0, None, 0.0), num_experts=3, top_k=1, x_dtype=0,
        out_dtype=0, ids_are_64_bit=True,
    )  # fmt: skip
    x, w, out = torch.randn(4, hidden), torch.ones(4, 1), torch.full((4, hidden), 7.0)
    for wrong, message in ((2, "expert 2 has no weights in the table"), (5, None), (-4, None)):
        out.fill_(7.0)
        ids = torch.tensor([[0], [0], [0], [wrong]])
        arguments = (1, 4, x.data_ptr(), hidden, ids.data_ptr(), w.data_ptr(), out.data_ptr())
        if message is None:
            experts.run(*arguments)
            assert bool((out[3] == 0).all())
        else:
            with pytest.raises(ValueError, match=message):
                experts.run(*arguments)
            assert bool((out == 7).all())
