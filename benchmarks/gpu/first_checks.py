"""What the first run checks on a device before it times anything: tensor maps, then plans against the reference."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from gpu import tune
from gpu.first_points import DTYPE, Device, make_layer
from gpu.items import Row
from moestro import formats
from moestro.bench.failures import failures, sentence
from moestro.bench.layers import DENSE, Layer, LayerSpec, expected_output, inputs
from moestro.formats import FORMATS, PackedTensor
from moestro.ops import gpu
from moestro.ops.expert_mlp import triton, triton_maps, triton_tuning
from moestro.ops.expert_mlp.triton_tuning import Plan, Problem
from moestro.tolerances import LOW_PRECISION_INPUT, disagreement, too_far
from moestro.types import Routing
from moestro.weights import ExpertWeights

EXPERTS = 16
"""Of a layer that is checked, at most; plans are those for all of them. Triton compiles for multiples of 16 apart."""

FORMS = (DENSE, "fp8-e4m3-b128", "mxfp4", "fp8-e4m3-b128/fp8-e4m3", "int8", "int4-g32")
TOKENS = (1, 16, 64, 256, 4096)


@dataclass(frozen=True)
class Kernel:
    """A layer in a format and the plan of a number of tokens of it: what compiles two kernels and more."""

    spec: LayerSpec
    form: str
    num_tokens: int
    how: Plan

    def __str__(self) -> str:
        return f"{self.spec.name} {self.form} T={self.num_tokens}"


def kernels(
    device: gpu.Device, specs: Iterable[LayerSpec], forms: Iterable[str] = FORMS, tokens: Iterable[int] = TOKENS
) -> list[Kernel]:
    """Those of every combination, plans that none before has first."""
    found = [Kernel(s, f, t, choose(s, f, t, device)) for f in forms for s in specs for t in tokens]
    fresh: list[Kernel] = []
    again: list[Kernel] = []
    seen: set[tuple[str, Plan]] = set()
    for kernel in found:
        key = kernel.form, kernel.how
        (again if key in seen else fresh).append(kernel)
        seen.add(key)
    return fresh + again


def choose(spec: LayerSpec, form: str, num_tokens: int, device: gpu.Device) -> Plan:
    """The plan of the whole layer by default."""
    return triton_tuning.choose(problem_of(spec, form, num_tokens), device, ("auto", None), False)


def problem_of(spec: LayerSpec, form: str, num_tokens: int) -> Problem:
    """What the whole layer's plan depends on."""
    stored, _, rows = form.partition("/")
    found = formats.find_format("bfloat16" if stored == DENSE else stored)
    bits, columns = found.bits, 0 if found.scaling is None else found.scaling.columns
    return Problem(
        num_tokens,
        spec.top_k,
        spec.num_experts,
        spec.hidden_size,
        spec.intermediate_size,
        2 if spec.activation.gated else 1,
        1 if rows else DTYPE.itemsize,
        (bits, bits),
        columns,
    )


def in_form(layer: Layer, form: str) -> ExpertWeights:
    """The layer's weights in a format, with the input format behind a slash."""
    stored, _, rows = form.partition("/")
    weights = layer.in_format(stored)
    if not rows:
        return weights
    assert stored in FORMATS
    return weights.quantize(stored, input_format="int8" if rows == "int8" else "fp8-e4m3")


def map_rows(device: Device, spec: LayerSpec) -> list[Row]:
    """What the driver says of the maps of a dense layer's products, in tiles of many rows."""
    layer = make_layer(device, spec, 1, 1)
    weights, rows = layer.weights, []
    how = choose(spec, DENSE, TOKENS[-1], gpu.device_of(layer.stored.gate_up))
    for name, stored, activation in (("gate_up", weights.gate_up, weights.activation), ("down", weights.down, None)):
        found, tile = None, getattr(how, name)
        if isinstance(stored, PackedTensor):
            found = triton_maps.layout(stored, tile, DTYPE, activation)
        why = None
        if found is not None and isinstance(stored, PackedTensor):
            why = triton_maps.refusal(stored.data, found)
        about = {"layer": spec.name, "product": name, "map": None if found is None else found._asdict()}
        rows.append({**about, "status": "ok" if why is None else "refused", "reason": why})
    return rows


def check_rows(device: Device, kernel: Kernel) -> list[Row]:
    """One row: the plan's output against the reference, a second call, a graph with other ids, pointers for maps."""
    layer = make_layer(device, kernel.spec, kernel.num_tokens, EXPERTS)
    weights = in_form(layer, kernel.form)
    x, routings = inputs(layer, kernel.num_tokens, 2)
    first, other = routings[0], routings[-1]
    how = triton_maps.by_pointers(kernel.how, weights, triton.compute_dtype(x, weights))
    y = tune.launch(x, first, weights, how)
    wrong = _wrong(y, layer, x, first, kernel.form)
    found: dict[str, bool | str] = {"again": same(y, tune.launch(x, first, weights, how))}
    found["graph with other ids"] = _replayed(device, x, (first, other), weights, how)
    if how.gate_up.tensor_map or how.down.tensor_map:
        up, down = (replace(tile, tensor_map=False) for tile in (how.gate_up, how.down))
        found["pointers"] = same(y, tune.launch(x, first, weights, replace(how, gate_up=up, down=down)))
    broken = [name for name, equal in found.items() if equal is not True]
    if wrong is None and broken:
        wrong = "; ".join(f"{name}: {found[name] or 'other bits'}" for name in broken)
    return [{**_about(kernel, how, wrong), "bits": found}]


def output_rows(device: Device, kernel: Kernel) -> list[Row]:
    """One row: the plan's output against the reference."""
    layer = make_layer(device, kernel.spec, kernel.num_tokens, EXPERTS)
    x, routings = inputs(layer, kernel.num_tokens, 1)
    y = tune.launch(x, routings[0], in_form(layer, kernel.form), kernel.how)
    return [_about(kernel, kernel.how, _wrong(y, layer, x, routings[0], kernel.form))]


def _about(kernel: Kernel, how: Plan, wrong: str | None) -> Row:
    about = {"layer": kernel.spec.name, "format": kernel.form, "tokens": kernel.num_tokens, "plan": str(how)}
    return {**about, "status": "ok" if wrong is None else "wrong", "reason": wrong}


def _wrong(y: Tensor, layer: Layer, x: Tensor, routing: Routing, form: str) -> str | None:
    stored, _, rows = form.partition("/")
    expected = expected_output(layer, x, routing, stored)
    return too_far(y, expected, LOW_PRECISION_INPUT) if rows else disagreement(y, expected, DTYPE)


def _replayed(
    device: Device, x: Tensor, routings: tuple[Routing, Routing], weights: ExpertWeights, how: Plan
) -> bool | str:
    """Whether a graph that was captured with the first routing computes the other put in its place."""
    first, other = routings
    ids, given = first.expert_ids.clone(), first.routing_weights.clone()
    held = Routing.unchecked(ids, given, first.weight_on)
    try:
        replay = device.capture(partial(tune.launch, x, held, weights, how))
        ids.copy_(other.expert_ids)
        given.copy_(other.routing_weights)
        replayed = replay()
        assert isinstance(replayed, Tensor)
        return same(replayed, tune.launch(x, other, weights, how))
    except failures() as error:
        return sentence(error)


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two results have the same bits."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def compile_kernels(device: Device, share: Iterable[Kernel]) -> list[str]:
    """Launch each once on few experts, which compiles it; returns why launches failed."""
    said = []
    for kernel in share:
        try:
            layer = make_layer(device, kernel.spec, kernel.num_tokens, EXPERTS)
            x, routings = inputs(layer, kernel.num_tokens, 1)
            tune.launch(x, routings[0], in_form(layer, kernel.form), kernel.how)
        except failures() as error:
            said.append(f"{kernel}: {sentence(error)}")
    return said
