"""What Triton's kernels load, counted where they load it: no padded row, no empty block, no weights twice in a row."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from moestro import ExpertWeights, Routing, reference
from moestro.ops import gpu
from moestro.types import GPT_OSS_SWIGLU
from tolerances import assert_close

from . import problems
from .stored import sizes_for
from .test_expert_mlp_triton import PLANS, SMALL, TILE
from .triton_calls import launch
from .watched import watching

pytestmark = [
    pytest.mark.usefixtures("triton_device"),
    pytest.mark.skipif(not gpu.interpreted(), reason="loads are watched in the interpreter"),
]

H, INNER = 40, 24


def weights(num_experts: int) -> ExpertWeights:
    sizes = problems.Sizes(1, H, INNER, num_experts, 1)
    return problems.weights(sizes, GPT_OSS_SWIGLU, torch.float32)


@pytest.mark.parametrize("name", ["ordered", "swapped", "pairs", "blocks-of-5"])
def test_padded_rows_are_not_loaded_and_empty_blocks_not_run(monkeypatch, name):
    how = PLANS[name]
    layer = weights(5)
    ids = torch.tensor([[0, 3], [-1, 3], [-1, -1], [0, -1], [3, 0], [3, -1]])
    x = torch.randn(6, H)
    with watching(monkeypatch) as seen:
        launch(x, Routing(ids, torch.rand(6, 2)), layer, how)
    counts = torch.bincount(ids[ids >= 0], minlength=5).tolist()
    blocks = sum(-(-n // how.block) for n in counts)
    columns = -(-2 * INNER // how.gate_up.columns)
    rows = np.concatenate(seen.of(x)) // H
    assert np.bincount(rows, minlength=6).tolist() == [(i >= 0).sum() * H * columns for i in ids]
    for stored in (layer.gate_up.data, layer.down.data):
        loaded = np.concatenate(seen.of(stored))
        assert set(np.unique(loaded // stored[0].numel())) == {0, 3}
        if name != "swapped" and 2 * INNER % how.gate_up.columns == 0:
            assert len(loaded) == blocks * stored[0].numel()


def test_consecutive_blocks_of_an_expert_meet_its_weights_once(monkeypatch):
    """[E0, E0, E1, E2, E2] takes three loads of a tile of weights, not five: the others find it where it was."""
    ids = torch.tensor([0] * 5 + [1] * 2 + [2] * 6)[:, None]
    for group, loads in ((8, 3), (1, 5)):
        tile = replace(TILE, columns=16, group=group)
        how = replace(SMALL, block=3, gate_up=tile, down=tile)
        layer = weights(3)
        with watching(monkeypatch) as seen:
            launch(torch.randn(13, H), Routing(ids, torch.rand(13, 1)), layer, how)
        for stored, columns in ((layer.gate_up.data, 3), (layer.down.data, 3)):
            last = [divmod(int(a.max()), stored.shape[2]) for a in seen.of(stored)]
            tiles = [row for row, column in last if column < 32]  # the first step of each tile, by its last row
            assert len(tiles) == 5 * columns
            assert len(list(itertools.groupby(tiles))) == loads * columns


def test_every_address_lies_in_a_tensor(monkeypatch):
    for i, name in enumerate(("float32", "mxfp4", "nvfp4", "int8", "fp8-e4m3-b128", "int4-g32-zp")):
        sizes = sizes_for(name, num_tokens=3)
        layer = problems.weights(sizes, GPT_OSS_SWIGLU, torch.float32, bias=True).quantize(name)
        how = PLANS[("split", "swapped", "pairs")[i % 3]]
        with watching(monkeypatch):
            launch(torch.randn(3, sizes.hidden_size), problems.routing(sizes), layer, how)


@pytest.mark.parametrize("name", PLANS)
def test_ids_beyond_the_experts_lead_to_no_address(monkeypatch, name):
    ids = torch.tensor([[2, 0], [1 << 20, 1 << 33], [-5, 1]])
    layer, x = weights(2), torch.randn(3, H)
    with watching(monkeypatch) as seen:
        launch(x, Routing(ids, torch.rand(3, 2)), layer, PLANS[name])
    assert set(np.concatenate(seen.of(x)) // H) == {0, 2}


def test_an_address_in_no_tensor_is_found(monkeypatch):
    routing = Routing.unchecked(torch.zeros(3, 1, dtype=torch.long), torch.rand(1, 1), "output")
    with watching(monkeypatch), pytest.raises(Exception, match="lie in no tensor"):
        launch(torch.randn(3, H), routing, weights(2), PLANS["pairs"])


def test_products_of_sizes_past_two_to_the_31(tmp_path: Path):
    """Experts, rows of x and rows of weights so far apart that 32 bits do not reach from one to the next."""
    far = 2**31 + 64
    memory = torch.from_numpy(np.memmap(tmp_path / "sparse", dtype=np.float16, mode="w+", shape=(2 * far + 64 * H,)))
    gate_up = memory.as_strided((2, 2 * INNER, H), (far, H, 1))
    down = memory.as_strided((2, H, INNER), (far, INNER, 1), 64 * H // 2 + 16)
    for stack in (gate_up[:, :, :], down):
        stack[:] = torch.randn(stack.shape).half() / 6
    x = memory.as_strided((3, H), (far - 64, 1), 64 * H)
    x[:] = torch.randn(3, H).half()
    routing = Routing(torch.tensor([[1, 0], [1, -1], [0, 1]]), torch.rand(3, 2))
    layer = ExpertWeights.from_dense(gate_up, down)
    for name in ("ordered", "swapped", "pairs"):
        y = launch(x, routing, layer, PLANS[name])
        assert_close(y, reference.expert_mlp(x, routing, layer).half(), torch.float16)
