"""What an operation is given, where it is not even of the right kind: refused at the public edge, in four parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moestro.errors import InvalidInputError, invalid_input
from moestro.types import Routing
from moestro.weights import ExpertWeights


def no_tensor(operation: str, name: str, value: object) -> InvalidInputError:
    """The error for what is not a tensor: a numpy array, a list, None."""
    kind = type(value)
    fix = "Use torch.as_tensor(...)." if kind.__module__ == "numpy" or kind in (list, tuple) else "Pass a tensor."
    return invalid_input(
        operation,
        got="no value" if value is None else f"a value of type {kind.__module__}.{kind.__qualname__}",
        needs=f"a torch.Tensor for {name}",
        fix=fix,
    )


def no_rows(operation: str, x: Tensor, hidden_size: int) -> InvalidInputError:
    """The error for what are no rows of hidden states."""
    return invalid_input(
        operation,
        got=f"x {list(x.shape)} of {x.dtype}",
        needs=f"floating-point x [..., {hidden_size}]",
        fix="The last dimension is hidden_size.",
    )


def check_tensor(operation: str, name: str, value: object) -> None:
    """Refuse what no kernel can read: no tensor, a sparse or a nested one, one on the meta device."""
    if not isinstance(value, Tensor):
        raise no_tensor(operation, name, value)
    if value.layout == torch.strided and not value.is_meta and not value.is_nested:
        return
    kind, fix = "on the meta device, which holds no values", "Make it on a real device, or materialise the module."
    if value.is_nested:
        kind, fix = "that is nested", "Use torch.nested.to_padded_tensor, or concatenate the rows."
    elif value.layout != torch.strided:
        kind, fix = f"of layout {value.layout}", "Use .to_dense()."
    raise invalid_input(operation, got=f"{name}, a tensor {kind}", needs="a dense tensor with values", fix=fix)


def check_call(operation: str, x: Any, routing: Any, weights: Any) -> None:
    """Refuse arguments of `moestro.expert_mlp` that are of other kinds than it takes."""
    check_tensor(operation, "x", x)
    if not isinstance(routing, Routing):
        raise invalid_input(
            operation,
            got=f"a {type(routing).__name__} as routing",
            needs="a moestro.Routing",
            fix="Use moestro.Routing(expert_ids, routing_weights); a router returns one.",
        )
    if not isinstance(weights, ExpertWeights):
        raise invalid_input(
            operation,
            got=f"a {type(weights).__name__} as weights",
            needs="a moestro.ExpertWeights",
            fix="Use moestro.ExpertWeights.from_dense(gate_up, down).",
        )
    for name, tensor in (("expert_ids", routing.expert_ids), ("routing_weights", routing.routing_weights)):
        check_tensor(operation, name, tensor)
