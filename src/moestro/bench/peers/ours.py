"""moestro as a user gets it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import cast

import torch

import moestro
from moestro.bench.layers import DENSE, Layer, LayerSpec
from moestro.bench.peers.transformers_experts import bind_module, transformers_module
from moestro.bench.peers.variant import Bind, Numbers, Variant, cost, dense_cost
from moestro.errors import InvalidInputError, invalid_input
from moestro.experts import Experts
from moestro.formats import WeightFormat, check_shape, find_format
from moestro.ops.expert_mlp.tuning import parse_strategy
from moestro.tolerances import LOW_PRECISION_INPUT
from moestro.types import InputFormat
from moestro.weights import check_input_format


def ours(strategy: str = "auto", format: str = DENSE) -> Variant:
    """moestro with a strategy, on weights in a format, which a name of "moestro" and of both says if they are given.

    On the layer's own weights ("dense") it is Transformers' own module after `moestro.accelerate(module, strategy)`; on
    quantised ones, `moestro.Experts` of them, called as `moestro.MoE` calls it. "mxfp4/int8" is mxfp4 with int8 inputs.

    Raises:
        InvalidInputError: no such strategy, or no such format, or a floating-point one, which the layer's dtype is for.
    """
    parse_strategy(strategy)
    name = "-".join(["moestro", *(part for part in (strategy, format) if part not in ("auto", DENSE))])
    own_cost = dense_cost if strategy == "all_experts" else cost
    if format == DENSE:
        return Variant(name, lambda spec, dtype: None, partial(_prepare_module, strategy), own_cost)
    format, _, rows = format.partition("/")
    found, input_format = find_format(format), cast("InputFormat", rows or "float")
    if found.is_dense:
        raise invalid_input(
            "bench layer",
            got=f"format {found.name!r}",
            needs=f"a quantised one, or {DENSE!r} for weights of the layer's dtype",
            fix="Name floating-point dtypes with --dtype.",
        )
    check_input_format(input_format, (found,), "bench layer")
    bound = None if input_format == "float" else LOW_PRECISION_INPUT
    numbers = Numbers(found.name, int(found.bits), found.bits, found.name, bound, input_format)
    prepare = partial(_prepare_experts, strategy, found.name, input_format)
    return Variant(name, partial(_refuses, found), prepare, own_cost, numbers=numbers)


def _refuses(format: WeightFormat, spec: LayerSpec, dtype: torch.dtype) -> str | None:
    h, i = spec.hidden_size, spec.intermediate_size
    try:
        check_shape(format, 2 * i, h, "bench layer")
        check_shape(format, h, i, "bench layer")
    except InvalidInputError as error:
        return str(error)
    return None


def _prepare_module(strategy: str, layer: Layer) -> Bind:
    """On moestro's tensors in Transformers' shapes: a transposed family as `accelerate` leaves it."""
    gate_up, down = (dense.tensors[0] for dense in (layer.weights.gate_up, layer.weights.down))
    if layer.spec.transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    module = transformers_module(layer, "eager", replace(layer.stored, gate_up=gate_up, down=down))
    return bind_module(layer, moestro.accelerate(module, strategy))


def _prepare_experts(strategy: str, format: str, input_format: InputFormat, layer: Layer) -> Bind:
    experts = Experts.from_weights(replace(layer.in_format(format), input_format=input_format), strategy)
    return lambda x, routing: partial(experts, x, routing)
