"""Plain reads: every byte of the experts that a call touches, once, and what rows of a benchmark are a share of."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moestro.bench import PEERS, Plan, make_layer, ours, run
from moestro.bench.layers import inputs
from moestro.bench.peers import PlainRead, plain_reads, tensors_of
from moestro.bench.point import no_room
from moestro.errors import UnsupportedError
from moestro.machine import Roof
from moestro.ops import native

pytestmark = pytest.mark.skipif(native.missing() is not None, reason="no native engine")

PART = 256 << 10


def found(*tensors: torch.Tensor, threads: int = 2) -> int:
    """What the engine makes of the bytes."""
    return native.engine().plain_read([(tensor.data_ptr(), tensor.nbytes) for tensor in tensors], threads)


@pytest.mark.parametrize("num_bytes", [1, 7, 63, 64, 255, 256, 300, 1000])
@pytest.mark.parametrize("shift", [0, 3])
def test_every_byte_is_read(num_bytes: int, shift: int) -> None:
    memory = torch.randint(0, 256, (shift + num_bytes,), dtype=torch.uint8)[shift:]
    before = found(memory)
    for i in range(num_bytes):
        memory[i] ^= 0x40
        assert found(memory) != before
        memory[i] ^= 0x40
    assert found(memory) == before == found(memory, threads=1)


@pytest.mark.parametrize("num_bytes", [PART - 1, PART, 3 * PART + 77])
def test_every_part_and_every_stream_of_it_is_read(num_bytes: int) -> None:
    memory = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
    before = found(memory, torch.empty(0), memory[:5])
    for i in {*range(0, num_bytes, PART // 16), PART - 2, num_bytes - 1}:
        memory[i] ^= 1
        assert (found(memory, torch.empty(0), memory[:5]) != before) == (i >= 5)  # of two alike nothing is left
        memory[i] ^= 1


def test_memory_that_is_none_is_refused() -> None:
    for piece in ((0, 8), (1 << 20, -1)):
        with pytest.raises(ValueError, match="no memory"):
            native.engine().plain_read([piece], 1)
    with pytest.raises(ValueError, match="number of threads"):
        native.engine().plain_read([], 0)


@pytest.mark.parametrize("name", ["olmoe", "gpt-oss-20b"])
@pytest.mark.parametrize("format", ["dense", "int8", "mxfp4"])
def test_it_has_the_bytes_of_the_experts_that_are_routed_to(tiny, name: str, format: str) -> None:
    layer = make_layer(replace(tiny(name), hidden_size=64, intermediate_size=32), torch.float32, 6)
    _, routings = inputs(layer, 3, 1)
    weights = layer.in_format(format)
    active = len(set(routings[0].expert_ids.flatten().tolist()))
    assert PlainRead(tensors_of(weights, routings[0])).nbytes == active * weights.bytes_per_expert


def test_what_is_no_piece_of_memory_is_refused() -> None:
    matrix = torch.randn(6, 40)
    for whole in (matrix, matrix.t(), matrix[1:3]):
        read = PlainRead([whole])
        assert read.nbytes == whole.nbytes
        read()
    with pytest.raises(UnsupportedError, match="there are gaps between its values"):
        PlainRead([matrix, matrix[:, :33]])
    with pytest.raises(UnsupportedError, match="meta"):
        PlainRead([torch.empty(3, device="meta")])


def test_rows_of_a_table_are_a_share_of_it(tiny, known_roof: Roof) -> None:
    spec = replace(tiny("olmoe"), hidden_size=64, intermediate_size=32)
    variants = tuple(ours("auto", name) for name in ("dense", "int8", "int8/int8", "fp8-e4m3-channel"))
    plan = Plan((spec,), (1, 5), (torch.bfloat16,), variants, (PEERS["eager"],), seconds=1e-4)
    plan = replace(plan, reads=plain_reads(plan.ours, "cpu"))
    report = run(plan)
    for num_tokens in (1, 5):
        rows = {row.variant: row for row in report.rows if row.num_tokens == num_tokens}
        reads = {name: row for name, row in rows.items() if row.kind == "read"}
        assert reads.keys() == {"plain-read", "plain-read-int8", "plain-read-fp8-e4m3-channel"}
        own = {"moestro": "plain-read", "moestro-int8": "plain-read-int8", "moestro-int8/int8": "plain-read-int8"}
        of = {**own, "moestro-fp8-e4m3-channel": "plain-read-fp8-e4m3-channel", "eager": "plain-read"}
        for name, read in {**of, **{name: name for name in reads}}.items():
            rate = rows[read].gigabytes_per_second
            assert rows[name].bandwidth_share == pytest.approx(rows[name].gigabytes_per_second / rate)
            assert rows[name].bandwidth_of == read
        for name, row in reads.items():
            assert (row.status, row.bandwidth_share) == ("ok", pytest.approx(1.0))
            assert row.gigaflops is row.roof_share is row.peak_share is row.error is None
            assert row.ratio == row.ratios["moestro" if name == "plain-read" else "moestro-int8"]
    assert [row.variant for row in report.rows[:3]] == ["moestro", "plain-read", "eager"]


def test_there_is_none_on_an_accelerator() -> None:
    assert plain_reads((ours(),), "cuda") == ()


def test_it_makes_no_copy_of_the_weights(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer(replace(tiny("olmoe"), hidden_size=64, intermediate_size=32), torch.float32, 6)
    mine = ours("auto", "int8")
    (read,) = plain_reads((mine,), "cpu")
    with pytest.raises(UnsupportedError, match="no weights in int8"):
        read.prepare(layer)
    weights = layer.in_format("int8")
    monkeypatch.setattr("moestro.machine.available_bytes", lambda device="cpu": 0)
    assert no_room(read, layer) is None
    assert "for a copy" in str(no_room(mine, layer))
    assert read.numbers.bytes_per_expert(layer) == weights.bytes_per_expert


def test_where_there_is_none_shares_are_of_the_roof(tiny, known_roof: Roof) -> None:
    spec = replace(tiny("olmoe"), hidden_size=64, intermediate_size=32)
    report = run(Plan((spec,), (1,), (torch.bfloat16,), (ours(),), (), seconds=1e-4))
    assert [row.bandwidth_of for row in report.rows] == ["roof"]
