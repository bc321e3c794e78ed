"""Tensor maps asked of a driver that holds them to what CUDA documents, and what a call does where one is refused."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import moestro
from moestro import Activation, ExpertWeights, Routing
from moestro.formats import PackedTensor
from moestro.ops import dispatch, gpu
from moestro.ops.expert_mlp import triton, triton_maps, triton_tuning
from moestro.ops.expert_mlp.triton_maps import Layout, encode, layout
from moestro.ops.expert_mlp.triton_tuning import Plan, Tile
from moestro.types import GPT_OSS_SWIGLU

from .stub import COMPILER, stub_driver

pytestmark = pytest.mark.skipif(COMPILER is None or torch.cuda.is_available(), reason="a stub stands in for CUDA's")

SWIGLU = Activation("silu")
TILE = Tile(256, 64, 8, 4, tensor_map=True)
H200 = gpu.Device((9, 0), 132, gpu.shared_memory((9, 0)))
GIVEN = {
    "map": 0,
    "type": 9,
    "rank": 4,
    "address": 1 << 20,
    "dims": (2048, 2, 1024, 64),
    "strides": (4096, 8192, 8388608),
    "box": (64, 2, 128, 1),
    "steps": (1, 1, 1, 1),
    "interleave": 0,
    "swizzle": 3,
    "promotion": 2,
    "fill": 0,
}
BROKEN = {
    "a map off 64 bytes": {"map": 16},
    "a type that there is not": {"type": 13},
    "no dimension": {"rank": 0},
    "six dimensions": {"rank": 6},
    "an address off 16 bytes": {"address": (1 << 20) + 8},
    "a dimension of nothing": {"dims": (2048, 0, 1024, 64)},
    "a dimension beyond 2^32": {"dims": (2048, 2, (1 << 32) + 1, 64)},
    "a stride off 16 bytes": {"strides": (4096, 8200, 8388608)},
    "a stride of 2^40": {"strides": (4096, 8192, 1 << 40)},
    "an empty box": {"box": (64, 2, 0, 1)},
    "a box of 257": {"box": (64, 2, 257, 1)},
    "rows of a box off 16 bytes": {"box": (60, 2, 128, 1)},
    "rows of a box beyond the swizzle": {"box": (128, 2, 128, 1)},
    "a step of nothing": {"steps": (1, 0, 1, 1)},
    "a step of nine": {"steps": (1, 1, 9, 1)},
    "interleaved": {"interleave": 1},
    "a swizzle that there is not": {"swizzle": 4},
    "a promotion that there is not": {"promotion": 4},
    "NaN beyond bytes": {"type": 0, "box": (128, 2, 128, 1), "fill": 1},
    "a fill that there is not": {"fill": 2},
}


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    found = stub_driver(tmp_path)
    monkeypatch.setattr(triton_maps, "_driver", lambda: found)
    monkeypatch.setattr(triton_maps, "_is_asked", lambda data: True)
    return found


def asked(driver: ctypes.CDLL, **changed: object) -> int:
    """What the driver says of a map like the one of gate_up, with changes."""
    g = {**GIVEN, **changed}
    room = ctypes.create_string_buffer(256)
    at = ctypes.addressof(room)
    map = ctypes.c_void_p(at + -at % 64 + g["map"])
    dims, strides = ((ctypes.c_uint64 * 5)(*g[name]) for name in ("dims", "strides"))
    box, steps = ((ctypes.c_uint32 * 5)(*g[name]) for name in ("box", "steps"))
    rest = (g[name] for name in ("interleave", "swizzle", "promotion", "fill"))
    address = ctypes.c_void_p(g["address"])
    return driver.cuTensorMapEncodeTiled(map, g["type"], g["rank"], address, dims, strides, box, steps, *rest)


@pytest.mark.parametrize("what", BROKEN)
def test_each_broken_map_is_refused(what: str, driver: ctypes.CDLL) -> None:
    assert asked(driver) == 0
    assert asked(driver, **BROKEN[what]) == 1


def test_limits_themselves_are_taken(driver: ctypes.CDLL) -> None:
    assert asked(driver, dims=(1 << 32, 1, 1, 1), strides=((1 << 40) - 16,) * 3) == 0
    assert asked(driver, box=(64, 1, 256, 1)) == 0
    assert asked(driver, steps=(0, 8, 8, 8)) == 0  # of the fastest dimension it is not looked at
    assert asked(driver, fill=1) == 0
    assert asked(driver, swizzle=0, box=(256, 1, 1, 1)) == 0


def test_strides_that_do_not_grow_are_refused_where_the_driver_is_made_to(driver: ctypes.CDLL) -> None:
    shrinking = {"strides": (4194304, 4096, 8388608)}
    assert asked(driver, **shrinking) == 0
    ctypes.c_int.in_dll(driver, "growing").value = 1
    assert asked(driver) == 0
    assert asked(driver, **shrinking) == 1


def stored(*shape: int, dtype: torch.dtype = torch.bfloat16) -> PackedTensor:
    return moestro.formats.dense(torch.zeros(shape, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_only_the_map_of_concatenated_gate_and_up_has_strides_that_do_not_grow(dtype, driver) -> None:
    ctypes.c_int.in_dll(driver, "growing").value = 1
    taken = {}
    for name, shape, activation in (
        ("concatenated", (3, 512, 256), SWIGLU),
        ("interleaved", (3, 512, 256), GPT_OSS_SWIGLU),
        ("plain", (3, 512, 256), Activation("relu", gated=False)),
        ("down", (3, 256, 256), None),
    ):
        data = stored(*shape, dtype=dtype)
        found = layout(data, TILE, dtype, activation)
        assert found is not None
        taken[name] = encode(driver, data.data.data_ptr(), dtype, found)
    assert taken == {"concatenated": 1, "interleaved": 0, "plain": 0, "down": 0}


def test_a_dtype_without_a_number_is_refused(driver: ctypes.CDLL) -> None:
    data = torch.zeros(1, 16, 64, dtype=torch.float64)
    assert encode(driver, data.data_ptr(), data.dtype, Layout([1, 16, 1, 64], [1024, 64, 64, 1], [1, 16, 1, 16])) == 1


def case(num_tokens: int = 600) -> tuple[torch.Tensor, Routing, ExpertWeights]:
    weights = ExpertWeights.from_dense(
        torch.zeros(8, 512, 256, dtype=torch.bfloat16), torch.zeros(8, 256, 256, dtype=torch.bfloat16)
    )
    routing = Routing(torch.zeros(num_tokens, 2, dtype=torch.long), torch.zeros(num_tokens, 2))
    return torch.zeros(num_tokens, 256).bfloat16(), routing, weights


def planned(monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.setattr(gpu, "device_of", lambda tensor: H200)
    return triton.plan(*case(), ("auto", None))


def test_a_refused_map_makes_that_product_go_by_pointers(driver, monkeypatch) -> None:
    taken = planned(monkeypatch)
    assert taken.gate_up.tensor_map
    assert taken.down.tensor_map
    assert "pointers" not in str(taken)
    ctypes.c_int.in_dll(driver, "growing").value = 1
    refused = planned(monkeypatch)
    assert refused == replace(taken, gate_up=replace(taken.gate_up, tensor_map=False))
    assert "gate_up by pointers, since CUDA's driver refuses its tensor map (error 1)" in str(refused)
    assert "down by pointers" not in str(refused)


def test_a_driver_without_tensor_maps_makes_all_go_by_pointers(driver, monkeypatch) -> None:
    monkeypatch.setattr(triton_maps, "_driver", lambda: None)
    how = planned(monkeypatch)
    assert not how.gate_up.tensor_map
    assert not how.down.tensor_map
    assert str(how).count("CUDA's driver has no tensor maps") == 2


def test_weights_that_no_map_describes_are_planned_without_one(driver, monkeypatch) -> None:
    x, routing, weights = case()
    wide = torch.zeros(8, 512, 260, dtype=torch.bfloat16)[:, :, 1:257]
    monkeypatch.setattr(gpu, "device_of", lambda tensor: H200)
    odd = replace(weights, gate_up=moestro.formats.dense(wide))
    how = triton.plan(x, routing, odd, ("auto", None))
    assert (how.gate_up.tensor_map, how.down.tensor_map) == (False, True)


def test_explain_says_that_the_map_was_refused(driver, monkeypatch, triton_device) -> None:
    ctypes.c_int.in_dll(driver, "growing").value = 1
    monkeypatch.setattr(gpu, "device_of", lambda tensor: H200)
    dispatch._KEPT.clear()
    with moestro.use(implementation="triton"), torch.no_grad():
        said = str(moestro.explain(moestro.expert_mlp, *case()))
    dispatch._KEPT.clear()
    assert "gate_up by pointers, since CUDA's driver refuses its tensor map (error 1)" in said


def nibbles(num_tokens: int = 16) -> tuple[torch.Tensor, Routing, ExpertWeights]:
    x, routing, _ = case(num_tokens)
    weights = ExpertWeights.from_dense(torch.zeros(8, 512, 256), torch.zeros(8, 256, 256))
    return x, routing, weights.quantize("mxfp4")


def test_the_driver_takes_maps_of_nibbles_two_bytes_at_a_time(driver) -> None:
    weights, tile = nibbles()[2], replace(TILE, columns=128, depth=128)
    for data, activation in ((weights.gate_up, SWIGLU), (weights.down, None)):
        found = layout(data, tile, torch.bfloat16, activation)
        assert found is not None
        assert (found.shape[-1], found.box[-1]) == (64, 32)
        assert triton_maps.refusal(triton_maps.items(data), found) is None


@pytest.mark.unpoisoned
@pytest.mark.parametrize("is_large", [False, True])
def test_nibbles_come_through_maps_while_a_graph_is_made(is_large, driver, monkeypatch, triton_device) -> None:
    """The first call outside one launches both ways, so that no graph loads code; large layers have one way."""
    monkeypatch.setattr(gpu, "device_of", lambda tensor: H200)
    monkeypatch.setattr(triton_tuning, "LEAST_MAPPED", 0 if is_large else triton_tuning.LEAST_MAPPED)
    told: list[bool] = []

    def prepared(how: Plan, dtype: torch.dtype):
        return lambda x, *given: told.append(how.gate_up.tensor_map) or x

    monkeypatch.setattr(triton._launches(), "prepared", prepared)
    arguments = (*nibbles(), "auto")
    found = triton.prepare(*arguments)
    assert not isinstance(found, str), found
    for is_captured, expected in ((True, [True]), (False, [True, False]), (False, [False]), (True, [True])):
        monkeypatch.setattr(gpu, "is_captured", lambda x, now=is_captured: now)
        told.clear()
        found.compute(*arguments)
        assert told == ([True] if is_large else expected)
