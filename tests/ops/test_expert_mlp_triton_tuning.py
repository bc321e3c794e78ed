"""Tiles for a GPU as a function of shape and device, and what the kernels need once compiled for it."""

from __future__ import annotations

import itertools
import os
import subprocess
from dataclasses import replace

import pytest
import torch

from forked import python
from moestro.ops import gpu
from moestro.ops.expert_mlp import triton_tuning as tuning
from moestro.ops.expert_mlp.triton_tuning import Problem

from .engines import PACKAGE, TESTS

H200 = gpu.Device((9, 0), 132, gpu.shared_memory((9, 0)))
A100 = gpu.Device((8, 0), 108, gpu.shared_memory((8, 0)))
RTX = gpu.Device((8, 9), 128, gpu.shared_memory((8, 9)))
LAYERS = {
    "mixtral": (2, 8, 4096, 14336),
    "olmoe": (8, 64, 2048, 1024),
    "qwen3": (8, 128, 2048, 768),
    "gpt-oss": (4, 128, 2880, 2880),
    "deepseek-v3": (8, 256, 7168, 2048),
    "tiny": (1, 2, 8, 4),
}
TOKENS = (1, 2, 3, 8, 16, 33, 64, 128, 512, 2048, 4096, 16384, 131072)


def problem(layer: str, num_tokens: int, itemsize: int = 2, bits: float = 16.0) -> Problem:
    top_k, num_experts, hidden, inner = LAYERS[layer]
    return Problem(num_tokens, top_k, num_experts, hidden, inner, 2, itemsize, (bits, bits))


def choose(p: Problem, device=H200, strategy="auto", block=None, invariant=False):
    return tuning.choose(p, device, (strategy, block), invariant)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("device", [H200, A100, RTX], ids=["sm_90", "sm_80", "sm_89"])
def test_every_plan_is_sound(layer, device):
    for num_tokens, (itemsize, bits) in itertools.product(TOKENS, ((2, 16.0), (4, 32.0), (2, 4.25), (2, 8.0))):
        p = problem(layer, num_tokens, itemsize, bits)
        for strategy, block in (("auto", None), ("grouped", None), ("selective", None), ("blockwise", 40)):
            how = choose(p, device, strategy, block)
            assert how.block <= how.rows <= tuning.MOST_ROWS
            for tile in (how.gate_up, how.down):
                assert {n & (n - 1) for n in (how.rows, tile.columns, tile.depth, tile.warps)} == {0}
                assert tile.columns >= 16
                assert tile.depth >= 32
                assert tile.stages >= 2
                assert tuning.shared_bytes(tile, how.rows, itemsize, bits, device) <= device.shared_memory
            assert how.splits >= 1
            assert strategy in ("auto", how.strategy) or (strategy, how.strategy) == ("grouped", "selective")


def test_few_rows_have_low_tiles_and_many_have_high_ones():
    assert [choose(problem("qwen3", t)).rows for t in (1, 16, 128, 512, 4096)] == [16, 16, 16, 64, 128]
    assert [tuning.tile_rows(r) for r in (0, 12, 13, 24, 25, 64, 65, 1e9)] == [16, 16, 32, 32, 64, 64, 128, 128]


def test_weights_are_the_left_operand_where_hopper_has_few_rows():
    for t, swap in ((1, True), (64, True), (4096, False)):
        assert choose(problem("qwen3", t)).gate_up.swap is swap
        assert not choose(problem("qwen3", t), A100).gate_up.swap
        assert choose(problem("qwen3", t, bits=4.25)).gate_up.swap
    assert not choose(problem("qwen3", 16, bits=8.002)).gate_up.swap


def test_pairs_are_not_ordered_where_there_are_few():
    assert not choose(problem("qwen3", 1)).ordered
    assert not choose(problem("deepseek-v3", 8)).ordered  # 4 * 64 <= 256
    assert choose(problem("deepseek-v3", 9)).ordered
    assert choose(problem("deepseek-v3", 1), strategy="grouped").ordered
    assert choose(problem("mixtral", 2)).ordered


def test_every_multiprocessor_has_work_in_decode():
    for layer in ("mixtral", "olmoe", "qwen3", "gpt-oss", "deepseek-v3"):
        how, p = choose(problem(layer, 1)), problem(layer, 1)
        blocks = p.num_pairs
        assert blocks * -(-2 * p.intermediate_size // how.gate_up.columns) >= H200.num_sms
        assert blocks * -(-p.hidden_size // how.down.columns) * how.splits >= H200.num_sms * 0.9


def test_a_batch_does_not_choose_where_bits_must_not_depend_on_it():
    plans = {str(choose(problem("qwen3", t), invariant=True)) for t in TOKENS}
    assert len(plans) == 1
    assert len({choose(problem("qwen3", t), invariant=True) for t in TOKENS}) == 1
    assert choose(problem("qwen3", 5), strategy="blockwise", block=16, invariant=True).rows == 16


@pytest.mark.parametrize(("block", "rows"), [(1, 16), (16, 16), (17, 32), (100, 128), (1000, 128)])
def test_a_block_size_that_is_asked_for(block, rows):
    how = choose(problem("qwen3", 64), strategy="blockwise", block=block)
    assert (how.block, how.rows, how.strategy) == (min(block, 128), rows, "blockwise")


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (12, 0)])
def test_tiles_of_small_groups_leave_registers_for_the_sums(capability):
    for rows in (64, 128):
        for group in (0, 16, 32, 128):
            asked = replace(problem("qwen3", 64, bits=4.25), group=group)
            tile, _ = tuning._tiles(asked, gpu.Device(capability, 132, 227 << 10), rows)
            small = 0 < group < 64 and capability != (9, 0)
            many = rows == 128 or (group == 128 and capability != (9, 0))
            assert tile.warps == (8 if capability != (9, 0) and (small or many) else 4)
            assert tile.columns == (64 if rows == 128 and (small or group == 128) else 128)


def computed(rows: int, how: tuning.Plan) -> int:
    """Rows of the tiles of an expert with so many."""
    full, rest = divmod(rows, how.rows)
    tile = how.rows
    for _ in range(how.tails):
        tile = tile // 2 if rest <= tile // 2 else tile
    return full * how.rows + (tile if rest else 0)


CEILINGS = {
    ("deepseek-v3", 4096): (0.68, 0.81, 0.89),
    ("qwen3", 4096): (0.81, 0.89, 0.94),
    ("olmoe", 4096): (0.89, 0.94, 0.97),
    ("mixtral", 4096): (0.93, 0.96, 0.98),
    ("deepseek-v3", 16384): (0.90, 0.95, 0.97),
    ("qwen3", 16384): (0.95, 0.97, 0.98),
    ("olmoe", 16384): (0.97, 0.99, 0.99),
    ("mixtral", 16384): (0.98, 0.99, 0.99),
}
"""Rows over those of their tiles, where tokens choose experts evenly; of tiles that are halved 0, 1 and 2 times."""


@pytest.mark.parametrize(("layer", "num_tokens"), CEILINGS)
def test_low_tiles_for_the_last_rows_of_experts_raise_what_padding_leaves(layer, num_tokens):
    top_k, num_experts, *_ = LAYERS[layer]
    chosen = torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(0)).topk(top_k).indices
    counts = torch.bincount(chosen.flatten(), minlength=num_experts).tolist()
    how = choose(problem(layer, num_tokens))
    assert (how.rows, how.tails) == (128, 1)
    ways = [replace(how, tails=tails) for tails in range(3)]
    shares = [sum(counts) / sum(computed(n, way) for n in counts) for way in ways]
    assert shares == pytest.approx(CEILINGS[layer, num_tokens], abs=0.006)


def test_only_the_highest_tiles_are_halved():
    for part, often in ((H200, 1), (A100, 2)):
        assert [tuning.tails(rows, part) for rows in (16, 32, 64, 128)] == [0, 0, 0, often]
    assert str(choose(problem("qwen3", 4096))).endswith("blocks of few rows in tiles of 64")
    for how in (choose(problem("qwen3", 64)), choose(problem("qwen3", 4096), invariant=True)):
        assert how.tails == 0
        assert "few rows in tiles" not in str(how)


def test_nibbles_come_through_tensor_maps_in_graphs_and_where_there_is_much_to_read():
    small, large = (problem(name, 16, bits=4.25) for name in ("olmoe", "mixtral"))
    gpt_oss = Problem(16, 4, 32, 2880, 2880, 2, 2, (4.25, 4.25))
    for asked, is_mapped in ((small, False), (large, True), (gpt_oss, True), (replace(large, num_tokens=1), False)):
        how = choose(asked)
        assert how.gate_up.tensor_map
        assert how.down.tensor_map
        called = tuning.outside_graphs(how, asked)
        assert (called == how) is is_mapped
        assert called.gate_up.tensor_map is called.down.tensor_map is is_mapped
    assert not choose(large, A100).gate_up.tensor_map
    assert not choose(large, invariant=True).gate_up.tensor_map


@pytest.mark.parametrize("bits", [(4.25, 8.002), (16.0, 4.25), (8.002, 8.002)])
def test_only_the_nibbles_of_a_mixed_layer_change_their_way(bits):
    asked = replace(problem("olmoe", 16), bits=bits)
    how = choose(asked)
    called = tuning.outside_graphs(how, asked)
    for name, n in zip(("gate_up", "down"), bits, strict=True):
        tile = getattr(how, name)
        assert tile.tensor_map is (n < 8)
        assert getattr(called, name) == replace(tile, tensor_map=False)


def said(*arguments: str, module: str = "ops.compiled") -> list[str]:
    """What `python -m` of a module prints, in a process whose kernels are compiled and not interpreted."""
    pytest.importorskip("triton")
    path = os.pathsep.join((str(PACKAGE), str(TESTS)))
    imports = ("torch._inductor.config", "triton.compiler", "pytest", "moestro.ops.expert_mlp.triton")
    run = subprocess.run(
        [*python(*imports, TRITON_INTERPRET="0"), "-m", module, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
        cwd=TESTS,
        env={**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "0"},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout.splitlines()


def test_sizes_that_triton_specialises_on_compile():
    """Sizes of 1 and off 16, weights either way round: the interpreter runs what the compiler may refuse."""
    lines = said("edges", "sm_90")
    assert len(lines) == 8
    assert all(line.startswith("edge") for line in lines)


COMPILED = [
    ("sm_90", "bfloat16", "4096"),
    ("sm_86", "bfloat16", "mxfp4", "64"),
    ("sm_80", "bfloat16", "nvfp4", "4096"),
]


@pytest.mark.parametrize("arguments", COMPILED, ids="-".join)
def test_kernels_compile_within_the_part(arguments):
    """What a launch compiles for a GPU that is not here: shared memory that it has, nothing spilled, its instructions.

    `python -m ops.compiled` in tests/ prints the same for every architecture, dtype and format.
    """
    lines = [line for line in said("loops", *arguments) if "gate_up_kernel" in line or "down_kernel" in line]
    assert len(lines) == 2
    for line in lines:
        words = line.split()
        used, most = int(words[words.index("shared") + 1]), int(words[words.index("of") + 1])
        assert used <= most, line
        assert words[words.index("spills") + 1] == "0", line
        assert words[-1] == ("wgmma" if arguments[0] == "sm_90" else "mma"), line
        assert int(words[words.index("loop") + 1]) > 0, line


@pytest.mark.parametrize(
    ("architecture", "dtype", "forms"),
    [
        ("sm_80", "bfloat16", ("mxfp4", "int4-g128")),
        ("sm_90", "bfloat16", ("mxfp4", "int4-g128", "nvfp4", "int4-g32-zp")),
        ("sm_90", "float16", ("nvfp4",)),
    ],
)
def test_four_bit_weights_go_from_shared_memory_to_the_tensor_cores_registers(architecture, dtype, forms):
    """Tiles of 128 x 128 in flight and rows take 41 KiB; a decoded tile that passed through it would take 32 more."""
    lines = [line for line in said(architecture, dtype, *forms, "64") if "gate_up" in line or "down_" in line]
    assert len(lines) == 2 * len(forms)
    for line in lines:
        words = line.split()
        assert int(words[words.index("shared") + 1]) <= 44 << 10, line
        assert words[words.index("spills") + 1] == "0", line


@pytest.mark.parametrize(("architecture", "num_tokens"), [("sm_89", 16), ("sm_90", 4096), ("sm_120", 4096)])
def test_tiles_of_rounded_rows_fit_the_part(architecture, num_tokens):
    """Shared memory is within what the plan was told, and nothing is spilled."""
    lines = said(architecture, "fp8-e4m3-b128/fp8-e4m3", str(num_tokens))
    (words,) = [line.split() for line in lines if "gate_up_kernel" in line]
    assert words[words.index("spills") + 1] == "0"
    part = gpu.Device(divmod(int(architecture[3:]), 10), 132, int(words[words.index("of") + 1]))
    asked = Problem(num_tokens, 8, 128, 2048, 768, 2, 1, (8.002, 8.002), 128)
    how = choose(asked, part)
    shared = int(words[words.index("shared") + 1])
    assert shared <= tuning.shared_bytes(how.gate_up, how.rows, 1, 8.002, part)


def test_few_rows_of_sixteen_bits_meet_bytes_in_the_older_instruction_of_hopper():
    lines = [line for line in said("sm_90", "int8", "fp8-e4m3-b128", "16") if "gate_up" in line or "down_" in line]
    assert len(lines) == 4
    for line in lines:
        assert line.endswith("  mma"), line
        assert line.split()[line.split().index("spills") + 1] == "0", line


def test_packed_weights_are_copied_sixteen_bytes_at_a_time():
    """Around the first cache, where steps end with rows; scales of e8m0 four at a time. K is 2048 and 768."""
    lines = [line for line in said("sm_80", "sm_90", "mxfp4", "int8", "16") if "gate_up" in line or "down_" in line]
    assert len(lines) == 8
    for line in lines:
        assert line.split()[line.split().index("copies") + 1] == ("4,16" if "mxfp4" in line else "16"), line


def test_weights_in_registers_are_not_replaced_while_a_product_reads_them():
    """Hopper's products run on while others begin, and Triton 3.6 has the next step's weights take their registers.

    Each step ends with a wait for all of its products: of weights that are decoded, none is told to wait for fewer.
    """
    forms = ("mxfp4", "int8")
    lines = [line for line in said("sm_90", *forms, "512", "4096") if "gate_up" in line or "down_" in line]
    assert len(lines) == 4 * len(forms)
    for line in lines:
        assert line.endswith("wgmma"), line
        assert line.split()[line.split().index("waits") + 1] == "0", line


def test_rows_of_eight_bits_in_tiles_of_64_rows_compile():
    lines = said("sm_90", "fp8-e4m3-channel/fp8-e4m3", "512")
    for line in lines:
        if "gate_up" in line or "down_" in line:
            assert line.endswith("wgmma"), line
            assert line.split()[line.split().index("spills") + 1] == "0", line


def test_rows_of_eight_bits_reach_the_tensor_cores_of_hopper():
    """Those with a scale a row in tiles that spill a little were the fastest that were timed: docs/log.md."""
    most = {"fp8-e4m3-b128/fp8-e4m3": 0, "fp8-e4m3-channel/fp8-e4m3": 64, "int8/int8": 64}
    lines = said("sm_90", *most, "4096")
    assert sum("round_rows_kernel" in line for line in lines) == 3
    for line in lines:
        if "gate_up" in line or "down_" in line:
            assert line.endswith("wgmma"), line
            form, spills = (
                line.split()[line.split().index(word) + by] for word, by in (("bfloat16", 1), ("spills", 1))
            )
            assert int(spills) <= most[form], line
