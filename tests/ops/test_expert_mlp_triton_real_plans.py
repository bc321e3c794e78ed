"""The plans that an H200 gets for the layers of the benchmark, tile by tile as they are, on layers cut to a few tiles.

Elsewhere tiles are 32 x 32, so that much of a layer fits into a test. Here the tiles are those of a device: 128 x 256
in bfloat16, through tensor maps; of the layer three experts are left, and of H and I a tile and a part of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from moestro import reference
from moestro.bench.layers import LAYERS
from moestro.formats import FORMATS
from moestro.ops import gpu
from moestro.ops.expert_mlp.triton_launch import work
from moestro.ops.expert_mlp.triton_tuning import Plan, Problem, choose
from tolerances import assert_close, bit_equal

from . import problems
from .stored import dequantized
from .triton_calls import launch

H200 = gpu.Device((9, 0), 132, gpu.shared_memory((9, 0)))


@pytest.fixture(autouse=True)
def _on_the_device(triton_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where the interpreter stands for one, its kernels are those of an H200 too: the order of columns is."""
    if gpu.interpreted():
        monkeypatch.setattr(gpu, "device_of", lambda tensor: H200)
    torch.set_default_device(triton_device)
    yield
    torch.set_default_device(None)


TOKENS = (1, 16, 64, 256, 1024, 4096, 16384)
STORED = ("bfloat16", "mxfp4", "fp8-e4m3-b128", "int8", "int4-g32")


def plans(name: str) -> list[Plan]:
    """Those of all layers and numbers of tokens, each once."""
    form = FORMATS[name]
    columns = 0 if form.scaling is None else form.scaling.columns
    found = {}
    for spec in LAYERS.values():
        for num_tokens in TOKENS:
            sizes = num_tokens, spec.top_k, spec.num_experts, spec.hidden_size, spec.intermediate_size
            how = choose(Problem(*sizes, 2, 2, (form.bits, form.bits), columns), H200, ("auto", None), False)
            found[how] = None
    return list(found)


CASES = [(name, how) for name in STORED for how in plans(name) if how.rows >= 64 or name == "bfloat16"]
"""Low tiles of other formats differ from what the other tests have by their columns alone, and take long."""


def cut(how: Plan, columns: int) -> problems.Sizes:
    """An expert of more rows than a block has, one of few and one of none; H and I in whole groups."""
    hidden = how.down.columns + how.gate_up.depth
    inner = how.gate_up.columns // 2 + how.down.depth
    hidden, inner = (-(-size // max(columns, 16)) * max(columns, 16) for size in (hidden, inner))
    return problems.Sizes(how.block + 9, hidden, inner, 3, 2)


@pytest.mark.parametrize(("name", "how"), CASES, ids=[f"{name}-{how.rows}-{i}" for i, (name, how) in enumerate(CASES)])
def test_meets_the_reference(name, how, triton_device):
    scaling = FORMATS[name].scaling
    sizes = cut(how, 0 if scaling is None else scaling.columns)
    dense = problems.weights(sizes, problems.ACTIVATIONS[0], torch.bfloat16)
    weights = dense if name == "bfloat16" else dense.quantize(name)
    routing = problems.routing(sizes, kind="random")
    ids = torch.zeros_like(routing.expert_ids)
    ids[:, 1] = -1
    ids[: 7 if how.rows < 128 else 40, 1] = 2  # of high tiles, blocks of 128, 9 and 40 rows: one for each of the three
    routing = replace(routing, expert_ids=ids, routing_weights=torch.rand(ids.shape))
    x = torch.randn(sizes.num_tokens, sizes.hidden_size).bfloat16()
    launches = work(x, routing, weights, how, torch.bfloat16)
    maps = [launches.gate_up[1], launches.down[1]]
    assert [m is not None for m in maps] == [tile.tensor_map for tile in (how.gate_up, how.down)]
    y = launch(x, routing, weights, how)
    wanted = reference.expert_mlp(x, routing, dequantized(weights, torch.bfloat16))
    assert_close(y, wanted.to(x.dtype), x.dtype)


def test_without_the_map_that_a_driver_may_refuse_bits_are_the_same(triton_device):
    """Of gate and up one above the other: the same tiles, loaded by pointers."""
    how = max((how for name, how in CASES if name == "bfloat16"), key=lambda how: how.gate_up.columns)
    assert how.gate_up.tensor_map
    sizes = cut(how, 0)
    weights = problems.weights(sizes, problems.ACTIVATIONS[0], torch.bfloat16)
    routing, x = problems.routing(sizes), torch.randn(sizes.num_tokens, sizes.hidden_size).bfloat16()
    other = replace(how, gate_up=replace(how.gate_up, tensor_map=False))
    assert work(x, routing, weights, other, torch.bfloat16).gate_up[1] is None
    assert bit_equal(launch(x, routing, weights, how), launch(x, routing, weights, other))


@pytest.mark.skipif(not gpu.interpreted(), reason="products are counted in Triton's interpreter")
def test_blocks_of_few_rows_have_the_same_bits_in_lower_tiles(triton_device, products_in_order, monkeypatch):
    """Of blocks of 128, 9 and 40 rows; the rows of each product are those of its tile."""
    from triton.runtime.interpreter import InterpreterBuilder

    monkeypatch.setattr(gpu, "device_of", lambda tensor: gpu.INTERPRETER)  # Hopper has weights on the left below 64
    dot, heights = InterpreterBuilder.create_dot, set()
    monkeypatch.setattr(
        InterpreterBuilder, "create_dot", lambda *given: heights.add(given[1].data.shape[0]) or dot(*given)
    )
    how = max((how for name, how in CASES if name == "bfloat16"), key=lambda how: how.gate_up.columns)
    assert how.tails == 1
    sizes = replace(cut(how, 0), hidden_size=64, intermediate_size=72)
    weights = problems.weights(sizes, problems.ACTIVATIONS[0], torch.bfloat16)
    routing, x = problems.routing(sizes, kind="random"), torch.randn(sizes.num_tokens, 64).bfloat16()
    ids = torch.zeros_like(routing.expert_ids)
    ids[:40, 1], ids[40:, 1] = 2, -1
    routing = replace(routing, expert_ids=ids)
    found = []
    for tails, met in ((0, {128}), (1, {128, 64}), (2, {128, 64, 32})):
        heights.clear()
        found.append(launch(x, routing, weights, replace(how, tails=tails)))
        assert heights == met
        assert bit_equal(found[-1], found[0])


def test_there_are_all_kinds():
    """High tiles through tensor maps, low ones with weights on the left, and pairs."""
    kinds = {(how.rows, how.ordered, how.gate_up.tensor_map, how.gate_up.swap) for _, how in CASES}
    assert {(128, True, True, False), (16, True, False, True), (16, False, False, True)} <= kinds
    assert any(how.gate_up.columns == 256 for _, how in CASES)
    assert {how.tails for _, how in CASES} == {0, 1}
