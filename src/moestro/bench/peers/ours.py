"""moestro as a user gets it."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

import moestro
from moestro.bench.layers import Layer, LayerSpec, StoredExperts
from moestro.bench.peers.transformers_experts import bind_module, transformers_module
from moestro.bench.peers.variant import DENSE, Bind, Call, Numbers, Variant, cost, dense_cost
from moestro.errors import InvalidInputError, invalid_input
from moestro.experts import Experts
from moestro.formats import check_shape, find_format
from moestro.ops.expert_mlp.tuning import parse_strategy
from moestro.tolerances import LOW_PRECISION_INPUT
from moestro.types import InputFormat, Routing
from moestro.weights import check_input_format

ROWS = "/"
"""Between the format of weights and that of rows."""

ROUNDED: dict[str, Literal["int8", "fp8-e4m3"]] = {"int8": "int8", "fp8-e4m3": "fp8-e4m3"}
"""What rows may be rounded to."""


def ours(strategy: str = "auto", format: str = DENSE) -> Variant:
    """moestro with a strategy, on weights in a format.

    On the layer's own weights ("dense") it is Transformers' own module after `moestro.accelerate(module, strategy)`; on
    quantised ones, `moestro.Experts` of them, called as `moestro.MoE` calls it. "mxfp4/int8" is mxfp4 whose rows of
    tokens are rounded to int8, "fp8-e4m3-b128/fp8-e4m3" that format with rows rounded to fp8. The name is "moestro",
    then the strategy unless it is "auto", then the format unless it is the layer's own.

    Raises:
        InvalidInputError: no such strategy, or no such format, or a floating-point one, which the layer's dtype is for.
    """
    parse_strategy(strategy)
    name = "-".join(["moestro", *(part for part in (strategy, format) if part not in ("auto", DENSE))])
    own_cost = dense_cost if strategy == "all_experts" else cost
    if format == DENSE:
        return Variant(name, _needs_transformers, partial(_prepare_module, strategy), own_cost)
    format, _, rows = format.partition(ROWS)
    found = find_format(format)
    format = found.name
    if rows not in ("", *ROUNDED):
        raise invalid_input(
            "bench layer", got=f"inputs as {rows!r}", needs="int8, fp8-e4m3, or nothing", fix=f'Try "{format}".'
        )
    if found.is_dense:
        raise invalid_input(
            "bench layer",
            got=f"format {format!r}",
            needs=f"a quantised one, or {DENSE!r} for weights of the layer's dtype",
            fix="Name floating-point dtypes with --dtype.",
        )
    numbers = Numbers(found.name, int(found.bits), found.bits, reference=found.name)
    input_format: InputFormat = "float"
    if rows:
        input_format = ROUNDED[rows]
        check_input_format(input_format, (found,), "bench layer")
        numbers = replace(numbers, bound=LOW_PRECISION_INPUT, products=input_format)
    prepare = partial(_prepare_experts, strategy, format, input_format)
    return Variant(name, partial(_refuses, format), prepare, own_cost, numbers=numbers)


def _needs_transformers(spec: LayerSpec, dtype: torch.dtype) -> str | None:
    return None if importlib.util.find_spec("transformers") else "transformers is not installed"


def _refuses(format: str, spec: LayerSpec, dtype: torch.dtype) -> str | None:
    h, i = spec.hidden_size, spec.intermediate_size
    try:
        for rows, columns in ((2 * i, h), (h, i)):
            check_shape(find_format(format), rows, columns, "bench layer")
    except InvalidInputError as error:
        return str(error)
    return None


def _prepare_module(strategy: str, layer: Layer) -> Bind:
    accelerate: Any = moestro.accelerate
    return bind_module(layer, accelerate(transformers_module(layer, "eager", k_contiguous(layer)), strategy))


def _prepare_experts(strategy: str, format: str, input_format: InputFormat, layer: Layer) -> Bind:
    experts = Experts.from_weights(replace(layer.in_format(format), input_format=input_format), strategy)

    def bind(x: Tensor, routing: Routing) -> Call:
        return partial(experts, x, routing)

    return bind


def k_contiguous(layer: Layer) -> StoredExperts:
    """The experts in Transformers' shapes over moestro's tensors: a transposed family as `accelerate` leaves it."""
    stored = layer.stored
    gate_up, down = (dense.tensors[0] for dense in (layer.weights.gate_up, layer.weights.down))
    if layer.spec.transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    return replace(stored, gate_up=gate_up, down=down)
