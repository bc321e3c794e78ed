"""The primitive over experts that are packed or unstacked, against the reference, in every format and strategy."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import moestro
from moestro import Activation, ExpertWeights, Routing, machine, reference
from moestro.errors import InvalidInputError, UnsupportedError
from moestro.formats import FORMATS, PackedTensor, SplitTensor, dense, quantize
from moestro.ops.expert_mlp import matmul as mm
from moestro.ops.expert_mlp import plain, tuning
from moestro.ops.expert_mlp.stored import joined, panels, product, transposed_product
from moestro.types import GPT_OSS_SWIGLU
from tolerances import assert_close, bit_equal

from . import problems
from .stored import PACKED, apart, dequantized, poison, sizes_for

pytestmark = pytest.mark.usefixtures("plain_torch")

STRATEGIES = ("grouped", "selective", "all_experts", "blockwise-4", "auto")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.fixture(autouse=True)
def small_panels(monkeypatch):
    """Panels of 24 rows, so that every matrix takes several and the last is cut off."""
    monkeypatch.setattr(tuning, "panel_rows", lambda size, x: 24)


def problem(name, dtype=torch.float32, activation=GPT_OSS_SWIGLU, **sizes):
    sizes = sizes_for(name, **sizes)
    weights = problems.weights(sizes, activation, torch.float32, bias=True).quantize(name)
    return torch.randn(sizes.num_tokens, sizes.hidden_size).to(dtype), sizes, weights


def check(x, routing, weights, strategy="auto"):
    y = moestro.expert_mlp(x, routing, weights, strategy)
    assert y.dtype == x.dtype
    assert_close(y, reference.expert_mlp(x, routing, weights), x.dtype)


@pytest.mark.parametrize("name", FORMATS)
def test_the_reference_reads_stored_experts_as_the_numbers_they_stand_for(name):
    x, sizes, weights = problem(name)
    routing = problems.routing(sizes)
    expected = reference.expert_mlp(x, routing, dequantized(weights, torch.float64))
    for stored in (weights, apart(weights)):
        wide = reference.expert_mlp(x.double(), routing, stored)
        assert bit_equal(wide, expected)
        assert_close(reference.expert_mlp(x, routing, stored).double(), wide, torch.float32)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_and_strategy_meets_the_reference(name, strategy):
    turn = list(FORMATS).index(name) + STRATEGIES.index(strategy)
    for number, kind in enumerate(problems.KINDS):
        x, sizes, weights = problem(name)
        routing = problems.routing(sizes, kind=kind, weight_on=("output", "input")[(turn + number) % 2])
        check(x, routing, weights, strategy)
        check(x, routing, apart(weights), strategy)


@pytest.mark.parametrize("native", [True, False], ids=["bfloat16 instructions", "none"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["mxfp4", "int8", "fp8-e4m3-b128", "int4-g32-zp", "nvfp4", "bfloat16", "float32"])
def test_every_dtype_of_rows_and_any_number_of_them(monkeypatch, name, dtype, native):
    monkeypatch.setattr(tuning, "multiplies_bfloat16", lambda: native)
    monkeypatch.setattr(tuning, "SMALL_BYTES", 0)
    for num_tokens in (0, 1, 3, 40, 150, 400):
        x, sizes, weights = problem(name, dtype, num_tokens=num_tokens, num_experts=2, top_k=1)
        routing = problems.routing(sizes, kind="full")
        check(x, routing, weights)
        check(x, routing, apart(weights))


@pytest.mark.parametrize(
    ("first", "last"), [("mxfp4", "bfloat16"), ("bfloat16", "int8"), ("fp8-e4m3-b128", "int4-g32")]
)
@pytest.mark.parametrize("biases", [torch.float32, torch.bfloat16], ids=str)
def test_projections_of_different_formats(first, last, biases):
    sizes = problems.Sizes(9, 96, 64, 4, 2)
    base = problems.weights(sizes, Activation(), torch.float32, bias=True)
    mixed = ExpertWeights(
        base.quantize(first).gate_up, base.quantize(last).down, base.gate_up_bias.to(biases), base.down_bias.to(biases)
    )
    routing = problems.routing(sizes)
    for dtype, strategy in itertools.product(DTYPES, STRATEGIES):
        x = torch.randn(9, 96).to(dtype)
        check(x, routing, mixed, strategy)
        check(x, routing, apart(mixed), strategy)
        check(x.requires_grad_(), routing, mixed, strategy)


@pytest.mark.parametrize("name", ["mxfp4", "int8"])
def test_norms_and_functions_of_packed_experts(name):
    norm = problem(name)[2]
    norm = replace(norm, output_norm=lambda y: y / y.norm(dim=-1, keepdim=True))
    size = norm.intermediate_size
    own = replace(norm, output_norm=None, activation=Activation("custom", function=lambda z: z[..., :size].sin()))
    x, sizes, _ = problem(name)
    for weights, strategy in itertools.product((norm, own), STRATEGIES):
        check(x, problems.routing(sizes), weights, strategy)
        with torch.no_grad():
            check(x, problems.routing(sizes), weights, strategy)


@pytest.mark.parametrize("name", FORMATS)
def test_a_poisoned_expert_nobody_picks_is_never_read(name):
    x, _, weights = problem(name)
    ids = torch.tensor([[0, 1], [1, 3], [3, -1]]).repeat(3, 1)
    for stored in (weights, apart(weights)):
        poison(stored.gate_up, 2)
        poison(stored.down, 2)
        for strategy in STRATEGIES:
            assert torch.isfinite(moestro.expert_mlp(x, Routing(ids, torch.rand(9, 2)), stored, strategy)).all()


def test_memory_mapped_and_strided_data(tmp_path):
    x, sizes, weights = problem("mxfp4")
    gate_up, down = weights.gate_up, weights.down
    path = tmp_path / "experts.bin"
    path.write_bytes(b"head" + gate_up.data.numpy().tobytes() + gate_up.scales.numpy().tobytes())
    mapped = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)[4:]
    data, scales = mapped.split([gate_up.data.numel(), gate_up.scales.numel()])
    wide = torch.zeros(*down.shape[:2], down.data.shape[2] * 2, dtype=torch.uint8)
    wide[..., ::2] = down.data
    strided = replace(
        weights,
        gate_up=PackedTensor(data.view_as(gate_up.data), gate_up.format, scales.view_as(gate_up.scales)),
        down=PackedTensor(wide[..., ::2], down.format, down.scales.transpose(0, 1).contiguous().transpose(0, 1)),
    )
    routing = problems.routing(sizes)
    for strategy in STRATEGIES:
        y = moestro.expert_mlp(x, routing, strided, strategy)
        assert bit_equal(y, moestro.expert_mlp(x, routing, weights, strategy))


def neighbours(*shapes):
    """Matrices that follow one another in one buffer, and that buffer."""
    flat = torch.randn(sum(a * b for a, b in shapes))
    parts = flat.split([a * b for a, b in shapes])
    return [dense(part.view(shape)) for part, shape in zip(parts, shapes, strict=True)], flat


def test_neighbours_in_memory_are_one_matrix():
    (gate, up), flat = neighbours((5, 8), (5, 8))
    (whole,) = joined((gate, up))
    assert whole.shape == (10, 8)
    assert whole.data.data_ptr() == flat.data_ptr()
    assert bit_equal(whole.data, flat.view(10, 8))
    elsewhere = dense(up.data.clone())
    narrow = dense(torch.randn(5, 16)[:, ::2])
    for blocks in ((up, gate), (gate, elsewhere), (gate, gate), (narrow, up), (gate, up, gate)):
        assert joined(blocks) is blocks
    packed = quantize(torch.randn(4, 32), "mxfp4")
    pair = (packed.rows(0, 2), packed.rows(2, 4))
    assert joined(pair) is pair


def test_neighbours_give_what_matrices_apart_give():
    sizes = problems.Sizes(30, 24, 20, 3, 2)
    weights = apart(problems.weights(sizes, Activation(), torch.float32))
    together = []
    for gate, up in weights.gate_up.matrices:
        near, flat = neighbours((20, 24), (20, 24))
        flat.copy_(torch.cat([gate.data.flatten(), up.data.flatten()]))
        together.append(tuple(near))
    near = replace(weights, gate_up=SplitTensor(tuple(together)))
    x, routing = torch.randn(30, 24), problems.routing(sizes)
    for strategy in STRATEGIES:
        check(x, routing, near, strategy)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("num_rows", [1, 5, 30, 200])
def test_products_by_panels(name, num_rows):
    sizes = sizes_for(name)
    matrix = quantize(torch.randn(61, sizes.hidden_size), name)
    blocks = (matrix, quantize(torch.randn(61, sizes.hidden_size), name))
    wide = torch.cat([dequantized_matrix(block) for block in blocks])
    x, grad = torch.randn(num_rows, sizes.hidden_size), torch.randn(num_rows, 122)
    assert_close(product(x, blocks), (x.double() @ wide.T).float())
    assert_close(transposed_product(grad, blocks), (grad.double() @ wide).float())
    ends = [(start, stop) for start, stop, _ in panels(matrix, x)]
    assert [start for start, _ in ends[1:]] == [stop for _, stop in ends[:-1]]
    assert ends[-1][1] == 61


def dequantized_matrix(block):
    return moestro.formats.dequantize(block, torch.float64)


def test_panels_fit_caches_and_scales(monkeypatch):
    monkeypatch.undo()
    for dtype, size in itertools.product((torch.float32, torch.bfloat16), (64, 2880, 7168)):
        rows = torch.empty(1, 1, dtype=dtype)
        assert 16 <= tuning.panel_rows(size, rows) * size * dtype.itemsize <= 2 << 20
    assert tuning.panel_rows(1 << 22, torch.empty(1, 1)) == 16
    assert tuning.panel_rows(4096, torch.empty(1, 1, device="meta")) == 4096
    matrix = quantize(torch.randn(300, 2880), "fp8-e4m3-b128")
    assert [start for start, _, _ in panels(matrix, torch.empty(1, 1))] == [0, 128, 256]


def test_few_rows_of_bfloat16_meet_float32_panels():
    ways = {n: (tuning.panel_dtype(n, torch.bfloat16), tuning.choose_panel_way(n, torch.float32)) for n in (1, 16, 24)}
    assert ways[1] == (torch.float32, mm.Way.VECTOR)
    assert ways[16] == (torch.float32, mm.Way.COLUMNS)
    assert ways[24][0] == torch.bfloat16
    assert tuning.panel_dtype(1, torch.float64) == torch.float64


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that any operation allocates."""

    def __init__(self):
        super().__init__()
        self.nbytes, self.by = 0, None

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in tensors_of((args, kwargs))}
        for tensor in tensors_of(out):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known and storage.nbytes() > self.nbytes:
                self.nbytes, self.by = storage.nbytes(), function
        return out


def tensors_of(value):
    return [t for t in torch.utils._pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize(
    ("name", "gradient"), [*((n, False) for n in FORMATS), *((n, True) for n in ("mxfp4", "int8", "nvfp4", "bfloat16"))]
)
def test_no_tensor_as_large_as_a_quarter_of_a_matrix_is_made(monkeypatch, name, gradient):
    """Experts of 512 x 256 and 256 x 256 in panels of 48 rows; 128 rows share scales in b128."""
    monkeypatch.setattr(tuning, "panel_rows", lambda size, x: 48)
    monkeypatch.setattr(mm, "panel_height", lambda num_rows, size: 48)
    monkeypatch.setattr(tuning, "SMALL_BYTES", 0)
    sizes = problems.Sizes(6, 256, 256, 2, 2)
    base = problems.weights(sizes, Activation(), torch.float32)
    weights = base.quantize(name)
    bound = 256 * 256 * 4 // (1 if name == "fp8-e4m3-b128" else 4)
    routing = problems.routing(sizes, kind="full")
    for stored, strategy in itertools.product((weights, apart(weights)), ("grouped", "selective", "all_experts")):
        if gradient and stored is weights and FORMATS[name].is_dense:
            continue  # autograd's own matmul; nothing of it is dequantised
        x = torch.randn(6, 256).requires_grad_(gradient)
        with Largest() as largest:
            y = moestro.expert_mlp(x, routing, stored, strategy)
            if gradient:
                y.sum().backward()
        assert largest.nbytes <= bound, f"{largest.by} of {largest.nbytes} bytes ({strategy})"


PEAK = """
import re, torch, moestro
from pathlib import Path
from moestro import ExpertWeights, Routing
from moestro.formats import FORMATS, PackedTensor

def kib(name):
    return int(re.search(name + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

def layer(e, h, i):
    parts = [PackedTensor(torch.full((e, n, k // 2), 0x21, dtype=torch.uint8), FORMATS["mxfp4"],
                          torch.full((e, n, k // 32), 120, dtype=torch.uint8)) for n, k in ((2 * i, h), (h, i))]
    return ExpertWeights(*parts)

def call(weights):
    h = weights.hidden_size
    routing = Routing(torch.arange(4).repeat(8, 1), torch.full((8, 4), 0.25))
    return moestro.expert_mlp(torch.ones(8, h), routing, weights)

with torch.no_grad():
    call(layer(4, 512, 512))
    weights = layer(4, 2048, 2048)
    Path("/proc/self/clear_refs").write_text("5")
    before = kib("VmRSS")
    call(weights)
    print(kib("VmHWM") - before)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="the kernel's peak of resident memory")
def test_peak_memory_of_a_process():
    """Four experts of 50 MB in float32, 6.7 MB as stored: computing with all of them takes a few panels."""
    run = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=False, timeout=240)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 12 * 1024


@pytest.mark.parametrize("name", PACKED)
def test_sizes_follow_from_bits(monkeypatch, name):
    x, sizes, weights = problem(name)
    each = (*weights.gate_up.tensors, *weights.down.tensors, weights.gate_up_bias, weights.down_bias)
    assert weights.bytes_per_expert == sum(t[0].nbytes for t in each)
    copies = apart(weights)
    repeated = sum(t.nbytes for t in copies.gate_up.tensors) - weights.gate_up.nbytes  # scales of a whole matrix
    assert copies.bytes_per_expert == weights.bytes_per_expert + repeated // 4
    assert not tuning.dense_stack(weights.gate_up)
    assert tuning.batch_rows(weights.gate_up) == 32
    seen = []
    monkeypatch.setattr(machine, "roof", lambda *a: machine.Roof(1.0, 40.0))
    monkeypatch.setattr("moestro.ops.expert_mlp.plain.choose_block_size", lambda *a: seen.append(a[-1]) or 16)
    check(x, problems.routing(sizes), weights, "blockwise")
    assert plain.measured_block_size(x, problems.routing(sizes), weights) == 16
    assert seen == [FORMATS[name].bits / 8] * 2


def test_what_cannot_be_honoured_is_refused_in_words():
    x, sizes, weights = problem("fp8-e4m3-channel")
    routing = problems.routing(sizes)
    own = replace(FORMATS["int8"], name="int8-of-mine")
    foreign = replace(weights, gate_up=replace(problem("int8")[2].gate_up, format=own))
    with pytest.raises(UnsupportedError, match="gate_up is stored as int8-of-mine"):
        moestro.expert_mlp(x, routing, foreign)
    other = replace(foreign, gate_up=replace(foreign.gate_up, format=replace(own, name="mxfp4")))
    with pytest.raises(UnsupportedError, match="gate_up is stored as mxfp4"):
        moestro.expert_mlp(x, routing, other)
    trained = replace(weights, down=replace(weights.down, scales=weights.down.scales.clone().requires_grad_()))
    with pytest.raises(UnsupportedError, match="a tensor of down requires a gradient"):
        moestro.expert_mlp(x, routing, trained)
    with torch.no_grad():
        check(x, routing, trained)
    with pytest.raises(InvalidInputError, match="float8_e4m3fn"):
        moestro.expert_mlp(x.to(torch.float8_e4m3fn), routing, weights)
    meta = [PackedTensor(p.data.to("meta"), p.format, p.scales.to("meta")) for p in (weights.gate_up, weights.down)]
    routed = Routing(routing.expert_ids.to("meta"), routing.routing_weights.to("meta"))
    with pytest.raises(UnsupportedError, match="meta tensors hold no values"):
        moestro.ops.expert_mlp.run(x.to("meta"), routed, ExpertWeights(*meta, activation=GPT_OSS_SWIGLU))


@pytest.mark.parametrize("implementation", ["torch", "reference"])
def test_explain_says_how_experts_are_stored_and_read(implementation):
    x, sizes, weights = problem("mxfp4")
    with moestro.use(implementation=implementation):
        text = str(moestro.explain(moestro.expert_mlp, x, problems.routing(sizes), apart(weights)))
    reading = {"torch": "a panel of rows", "reference": "a whole expert"}[implementation]
    stored = f"mxfp4 (unstacked): {weights.bytes_per_expert:,} bytes an expert"
    assert f"  weights {stored}, dequantised {reading} at a time" in text
    plain_weights = dequantized(weights, torch.bfloat16)
    assert "dequantised" not in str(moestro.explain(moestro.expert_mlp, x, problems.routing(sizes), plain_weights))


def test_the_same_call_gives_the_same_bits():
    x, sizes, weights = problem("mxfp4", torch.bfloat16, num_tokens=60)
    routing = problems.routing(sizes)
    for strategy in STRATEGIES:
        first, again = (moestro.expert_mlp(x, routing, weights, strategy) for _ in range(2))
        assert bit_equal(first, again)
    before = [t.clone() for t in weights.tensors]
    plain.grouped(x, routing, weights)
    assert all(bit_equal(a, b) for a, b in zip(before, weights.tensors, strict=True))
