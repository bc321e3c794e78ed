"""Decode by the planner's arithmetic: bytes of weights that multiprocessors have asked for at once, layer by layer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moestro.bench.layers import LAYERS, LayerSpec
from moestro.formats import FORMATS
from moestro.ops import gpu
from moestro.ops.expert_mlp import triton_tuning
from moestro.ops.expert_mlp.triton_tuning import Plan, Problem, Tile
from tolerances import bit_equal

from . import problems
from .triton_calls import launch

PARTS = {"sm_80": 108, "sm_86": 84, "sm_89": 128, "sm_90": 132, "sm_120": 170}
STORED = ("bfloat16", "fp8-e4m3-b128", "fp8-e4m3-channel", "int8", "mxfp4", "nvfp4", "int4-g32", "int4-g128")
ROUNDED = ("fp8-e4m3-b128/fp8-e4m3", "fp8-e4m3-channel/fp8-e4m3")
TOKENS = (1, 4, 16, 64)
WANTED, LEAST = 48 << 10, 30 << 10
"""Of a multiprocessor with more than 100 KB of shared memory, and of one with less."""
THREAD_REGISTERS, REGISTERS = 256, 1 << 16


def device(part: str) -> gpu.Device:
    capability = divmod(int(part.removeprefix("sm_")), 10)
    return gpu.Device(capability, PARTS[part], gpu.shared_memory(capability))


def problem(spec: LayerSpec, form: str, num_tokens: int) -> Problem:
    stored, _, rows = form.partition("/")
    bits, scaling = FORMATS[stored].bits, FORMATS[stored].scaling
    columns = 0 if scaling is None else scaling.columns
    sizes = num_tokens, spec.top_k, spec.num_experts, spec.hidden_size, spec.intermediate_size
    return Problem(*sizes, 2, 1 if rows else 2, (bits, bits), columns)


def held(tile: Tile, how: Plan, p: Problem, bits: float, part: gpu.Device) -> int:
    """Programs of a product that a multiprocessor holds at once, as far as memory and registers go."""
    by_memory = part.shared_memory // triton_tuning.shared_bytes(tile, how.rows, p.itemsize, bits, part)
    return max(min(by_memory, REGISTERS // (32 * tile.warps * (tile.registers or THREAD_REGISTERS))), 1)


def in_flight(how: Plan, p: Problem, part: gpu.Device) -> list[tuple[float, float, float]]:
    """Of each product: bytes a multiprocessor has asked for, all that it will read, and the share that has a tile."""
    blocks, found = min(p.num_pairs, p.num_experts), []
    for tile, outputs, columns, splits, bits in (
        (how.gate_up, p.halves * p.intermediate_size, p.hidden_size, 1, p.bits[0]),
        (how.down, p.hidden_size, p.intermediate_size, how.splits, p.bits[1]),
    ):
        size = int(bits) / 8
        programs = blocks * -(-outputs // tile.columns) * splits
        running = min(programs, part.num_sms * held(tile, how, p, bits, part))
        steps = -(-columns // (tile.depth * splits))
        asked = running * min(tile.stages - 1, steps) * tile.columns * tile.depth * size
        read = blocks * outputs * columns * size
        found.append((asked / part.num_sms, read / part.num_sms, programs / part.num_sms))
    return found


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("layer", LAYERS)
def test_every_multiprocessor_waits_for_enough_of_the_weights(layer, part):
    on, spec = device(part), LAYERS[layer]
    wanted = WANTED if on.shared_memory > 100 << 10 else LEAST
    for form in (*STORED, *(ROUNDED if on.capability >= gpu.LEAST_FP8 else ())):
        for num_tokens in TOKENS:
            p = problem(spec, form, num_tokens)
            how = triton_tuning.choose(p, on, ("auto", None), False)
            assert how.rows <= 32
            for asked, read, share in in_flight(how, p, on):
                assert asked >= wanted or asked >= read, (form, num_tokens, how)
                assert share >= 7 / 8, (form, num_tokens, how)


def is_uneven(tiles: int, how: Plan, part: gpu.Device) -> bool:
    """Whether low tiles are up to four for a multiprocessor, and fewer than nine tenths of what all could have."""
    each = -(-tiles // part.num_sms)
    return how.rows == 16 and each <= 4 and tiles / (each * part.num_sms) < 0.9


@pytest.mark.parametrize(
    ("layer", "columns"), [("olmoe", (128, 128)), ("gpt-oss-20b", (64, 64)), ("mixtral", (64, 128))]
)
def test_tiles_of_one_token_are_halved_where_multiprocessors_had_unequal_shares(layer, columns):
    """128, 180 and 448 tiles of gate_up and 128, 184 and 128 of down for 132 multiprocessors."""
    how = triton_tuning.choose(problem(LAYERS[layer], "mxfp4", 1), device("sm_90"), ("auto", None), False)
    assert (how.gate_up.columns, how.down.columns) == columns


@pytest.mark.parametrize("layer", LAYERS)
def test_tiles_stay_wide_and_the_sum_is_cut_instead(layer):
    on, cut = device("sm_90"), 0
    for form in (*STORED, *ROUNDED):
        for num_tokens in TOKENS:
            p = problem(LAYERS[layer], form, num_tokens)
            how = triton_tuning.choose(p, on, ("auto", None), False)
            blocks = min(p.num_pairs, p.num_experts)
            nibbles = p.bits[0] < 8
            narrow = not nibbles and (how.rows == 16 or p.itemsize == 1)
            whole = blocks * -(-p.halves * p.intermediate_size // 128)
            halved = narrow or whole < on.num_sms * 7 / 8 or is_uneven(whole, how, on)
            assert how.gate_up.columns == (64 if halved else 128), (form, num_tokens)
            least = blocks * -(-p.hidden_size // (64 if narrow else 128))
            halved = narrow or is_uneven(least * how.splits, how, on)
            assert how.down.columns == (64 if halved else 128), (form, num_tokens)
            assert how.splits == 1 or least * (how.splits - 1) < on.num_sms <= least * how.splits * 8 / 7
            cut += how.splits > 1
    assert bool(cut) is (layer in ("mixtral", "mixtral-half", "gpt-oss-20b", "llama4-scout"))


@pytest.mark.parametrize("form", ["bfloat16", "mxfp4"])
def test_a_sum_that_is_cut_has_the_same_bits_again(form, triton_device):
    """Its pieces are added one after another: each call's bits are the same, and those of the pieces in that order."""
    sizes = problems.Sizes(2, 64, 256, 3, 2)
    weights = problems.weights(sizes, problems.ACTIVATIONS[0], torch.bfloat16)
    weights = weights if form == "bfloat16" else weights.quantize(form)
    routing, x = problems.routing(sizes, kind="full"), torch.randn(2, 64).bfloat16()
    tile = Tile(64, 32, stages=2)
    how = Plan("selective", "pairs", False, 1, 16, tile, tile, splits=4)
    first = launch(x, routing, weights, how)
    assert bit_equal(launch(x, routing, weights, how), first)
    assert bit_equal(launch(x, routing, weights, replace(how, gate_up=replace(tile, stages=10))), first)
