"""Switch Transformers and NLLB-MoE: every expert is a module of its own with two linear layers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from moestro.errors import unsupported
from moestro.hf import experts
from moestro.hf.activation import recognise
from moestro.hf.experts import Plan
from moestro.hf.families.base import Adapter, is_recorded, plain, recall, remember, stacked
from moestro.types import EMPTY, Activation, Routing
from moestro.weights import ExpertWeights

SWITCH_NAMES = ("wi", "wo")
NLLB_NAMES = ("fc1", "fc2")


def inspect(names: tuple[str, str], module: Any) -> Plan:
    layers = [layer for name in names for layer in _layers(module, name)]
    experts.check_dense(module, (p for layer in layers for p in layer.parameters()))
    dtypes = sorted({str(layer.weight.dtype) for layer in layers})
    if len(dtypes) > 1:
        raise experts.refuse(module, f"expert weights of {' and '.join(dtypes)}", "one dtype for both layers")
    return Plan(recognise(_experts(module)[0].act, False))


def expert_weights(names: tuple[str, str], module: Any) -> ExpertWeights:
    """All experts' linear layers as one value: gate_up [E, I, H], down [E, H, I], biases where they exist."""
    plan, own = recall(module, partial(inspect, names)), _experts(module)[0]
    first, second = (_layers(module, name) for name in names)
    activation = plan.activation
    if module.training and own.dropout.p > 0:
        activation = Activation("custom", gated=False, function=lambda z: own.dropout(own.act(z)))

    parameters = [p for layer in (*first, *second) for p in (layer.weight, layer.bias) if p is not None]
    recorded = is_recorded(parameters)

    def make() -> ExpertWeights:
        gate_up, down = (stacked([layer.weight for layer in layers]) for layers in (first, second))
        return ExpertWeights(gate_up, down, _biases(first, recorded), _biases(second, recorded), activation)

    if activation is not plan.activation or recorded:
        return experts.anew(plan, make)
    weights = experts.kept(plan, (parameters[0].device,), parameters, make)
    for layers, stack in ((first, weights.gate_up_bias), (second, weights.down_bias)):
        if stack is not None:  # a copy, which may be out of date
            torch.stack([layer.bias for layer in layers], out=stack)
    return weights


def forward_switch(
    module: Any, hidden_states: Tensor, selected_experts: Tensor, routing_weights: Tensor, *, strategy: str
) -> Tensor:
    """SwitchTransformersExperts: rows [T, H], a one-hot choice [T, 1, E] (all zero where the expert is full) and
    weights [T, 1] -> [T, H]."""
    weights = expert_weights(SWITCH_NAMES, module)
    ids = torch.where(selected_experts.any(-1), selected_experts.argmax(-1), EMPTY)
    return experts.run_rows(hidden_states, Routing(ids, routing_weights.float()), weights, strategy)


_BY_VALUE = 5.25


@cache
def check_mask(own: Any) -> None:
    """Check what the family's own experts class makes of its 0/1 mask [T, E] of first choices and weights [T, E].

    In Transformers 5.17 to 5.23 the *value* of the mask is the expert: slots marked 1 go to expert 1, all others to
    expert 0. Asked here with experts that multiply by 1, 10, 100 and 1000, slot 2 marked and weights 0, 1/4, 1/2, 0.
    """
    stand_in = own.__new__(own)
    nn.ModuleDict.__init__(stand_in)
    stand_in.num_experts, stand_in.moe_token_dropout = 4, 0.0
    for e in range(4):
        stand_in[f"expert_{e}"] = nn.Linear(1, 1, bias=False)
        nn.init.constant_(stand_in[f"expert_{e}"].weight, 10.0**e)
    one, mask, probs = torch.ones(1, 1), torch.tensor([[0, 0, 1, 0]]), torch.tensor([[0.0, 0.25, 0.5, 0.0]])
    with torch.no_grad():
        answer = float(stand_in(one, mask, probs))
    if answer != _BY_VALUE:
        raise unsupported(
            own.__name__,
            got=f"a forward that answers {answer} to the probe",
            needs=f"{_BY_VALUE}, as Transformers 5.17 to 5.23 compute",
            fix="This version of Transformers means something else by its mask; run the model as it is.",
        )


def inspect_nllb(module: Any) -> Plan:
    check_mask(module.__class__)
    return inspect(NLLB_NAMES, module)


def forward_nllb(
    module: Any, hidden_states: Tensor, router_mask: Tensor, router_probs: Tensor, *, strategy: str
) -> Tensor:
    """NllbMoeExperts: rows [T, H], a 0/1 mask [T, E] of first choices and weights [T, E] -> [T, H]."""
    first, probs = router_mask.bool(), router_probs.float()
    probs = torch.stack([probs.masked_fill(first, 0).sum(-1), probs.masked_fill(~first, 0).sum(-1)], -1)
    ids = torch.arange(2, device=probs.device).expand(probs.shape)
    weights = expert_weights(NLLB_NAMES, module)
    dropout = float(module.moe_token_dropout)
    if dropout > 0 and module.training:
        weights = replace(weights, output_norm=module.token_dropout)
    elif dropout > 0:
        probs = probs * (1 - dropout)
    routing = Routing(torch.where(probs == 0, EMPTY, ids), probs)
    return experts.run_rows(hidden_states, routing, weights, strategy)


def _experts(module: Any) -> list[Any]:
    return [m for name, m in module.named_children() if name.startswith("expert_")]


def _layers(module: Any, name: str) -> list[Any]:
    paths = [f"{e}.{name}" for e, _ in module.named_children() if e.startswith("expert_")]
    return [plain(module, path, nn.Linear) for path in paths]


def _biases(layers: list[Any], recorded: bool) -> Tensor | None:
    if layers[0].bias is None:
        return None
    biases = [layer.bias for layer in layers]
    if recorded:
        return torch.stack(biases)
    with torch.inference_mode(False), torch.no_grad():  # later calls write to it
        return torch.stack(biases)


_LAYOUT = "two linear layers an expert, not gated"

SWITCH = Adapter(
    "Switch Transformers",
    "SwitchTransformersExperts",
    partial(inspect, SWITCH_NAMES),
    remember,
    forward_switch,
    _LAYOUT,
)
NLLB_MOE = Adapter("NLLB-MoE", "NllbMoeExperts", inspect_nllb, remember, forward_nllb, f"{_LAYOUT}, biases")
