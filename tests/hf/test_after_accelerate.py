"""A model that accelerate() went through: what it refuses afterwards, and what it keeps for others."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import zoo
from architectures import relative_error
from hf.models import ALL, built, logits, refused
from moestro.errors import UnsupportedError
from moestro.hf import accelerate, experts, served
from moestro.hf.families import linears
from moestro.hf.serving import adapter_of


class LoraLinear(nn.Module):
    """As PEFT does it: the wrapped layer's weight shows through, what its forward adds does not."""

    def __init__(self, base):
        super().__init__()
        self.base = base

    @property
    def weight(self):
        return self.base.weight

    @property
    def bias(self):
        return getattr(self.base, "bias", None)

    def forward(self, *args):
        return self.base(*args) * 2


@pytest.mark.parametrize(
    ("architecture", "layer"),
    [
        ("switch_transformers", "expert_0.wi"),
        ("nllb_moe", "expert_1.fc2"),
        ("doge", "up_embed"),
        ("jetmoe", "input_linear"),
        ("llama4", "experts"),
        ("dbrx", "mlp"),
    ],
)
def test_an_adapter_put_on_afterwards_is_not_ignored(architecture, layer):
    model = accelerate(built(architecture))
    logits(model)
    module = model.get_submodule(served(model)[0].path)
    parent, _, name = layer.rpartition(".")
    owner = module.get_submodule(parent)
    setattr(owner, name, LoraLinear(getattr(owner, name)))
    with pytest.raises(UnsupportedError, match=rf"{layer} as .*LoraLinear; needs a plain .*merge the adapter"):
        logits(model)


@pytest.mark.parametrize("architecture", ALL)
def test_a_data_parallel_replica_uses_its_own_parameters(architecture):
    model = accelerate(built(architecture))
    module = model.get_submodule(served(model)[0].path)
    seen = []
    hook = module.register_forward_pre_hook(lambda _, a, k: seen.append((a, k)), with_kwargs=True)
    logits(model)
    hook.remove()
    args, kwargs = seen[0]

    def run(m):
        with torch.no_grad():
            result = m.forward(*args, **kwargs)
        return result[0] if isinstance(result, tuple) else result

    wanted = run(module)
    for source in (module, copy.deepcopy(module)):
        replica = replicated(source)
        assert torch.equal(run(source), wanted)
        torch.testing.assert_close(run(replica), wanted)
        for part in replica.modules():
            for name in part._former:
                setattr(part, name, getattr(part, name) * 0)
        changed = run(replica)
        assert not torch.allclose(changed, wanted)
        assert torch.equal(run(source), wanted)


def replicated(module):
    """As torch.nn.parallel.replicate: parameters of a replica are plain tensors, and modules are replicas too."""
    replica = module._replicate_for_data_parallel()
    replica._former = [name for name, p in module._parameters.items() if p is not None]
    for name, parameter in module._parameters.items():
        setattr(replica, name, None if parameter is None else parameter.detach().clone())
    for name, child in module._modules.items():
        replica._modules[name] = None if child is None else replicated(child)
    return replica


def test_a_class_of_the_same_name_from_elsewhere_is_refused_by_name():
    model = built("jetmoe")
    module = model.model.layers[1].mlp
    same_name = type("JetMoeMoE", (type(module),), {"__module__": "transformers_modules.some_checkpoint.modeling"})
    module.__class__ = same_name
    assert adapter_of(module) is None
    refused(model, "model.layers.1.mlp is a JetMoeMoE", "no adapter")


def test_an_error_while_settling_leaves_no_layer_replaced(monkeypatch):
    model = built("gpt_oss")
    wanted, calls = logits(model), []
    right = experts.make_k_contiguous

    def fail(weight):
        calls.append(1)
        if len(calls) == 3:  # the first matrix of the second layer
            raise KeyboardInterrupt
        return right(weight)

    monkeypatch.setattr(experts, "make_k_contiguous", fail)
    with pytest.raises(KeyboardInterrupt):
        accelerate(model)
    assert served(model) == []
    assert relative_error(logits(model), wanted) <= 1e-6


@pytest.mark.parametrize("architecture", ["gpt_oss", "llama4"])
def test_state_dict_is_contiguous_and_keeps_vars_where_asked(architecture, tmp_path):
    model = accelerate(built(architecture))
    logits(model)
    strided = [name for name, p in model.named_parameters() if not p.is_contiguous()]
    assert strided
    state = {name: t for name, t in model.state_dict().items() if name in strided}
    save_file(state, tmp_path / "experts.safetensors")
    loaded = load_file(tmp_path / "experts.safetensors")
    parameters = dict(model.named_parameters())
    for name in strided:
        assert torch.equal(loaded[name], parameters[name])
        assert model.state_dict(keep_vars=True)[name] is parameters[name]


@pytest.mark.parametrize("architecture", ["dbrx", "switch_transformers"])
def test_parameters_of_families_are_not_moved(architecture):
    model = built(architecture)
    wanted = logits(model)
    places = [p.data_ptr() for p in model.parameters()]
    assert relative_error(logits(accelerate(model)), wanted) <= 1e-5
    assert [p.data_ptr() for p in model.parameters()] == places


@pytest.mark.parametrize("architecture", ["dbrx", "switch_transformers", "nllb_moe", "gpt_oss", "qwen3_moe"])
def test_experts_go_with_their_parameters(architecture):
    """What a pass without gradients keeps does not outlive the first pass with new parameters, whichever that is."""
    model = accelerate(built(architecture))
    logits(model)
    old = [weakref.ref(p) for m in model.modules() if adapter_of(m) is not None for p in m.parameters()]
    model.load_state_dict({name: t.clone() for name, t in model.state_dict().items()}, assign=True)
    result = model(**zoo.inputs_of(model))
    (result[0] if result.get("logits") is None else result["logits"]).sum().backward()
    del result
    gc.collect()
    assert old
    assert [parameter() is None for parameter in old] == [True] * len(old)


@pytest.mark.parametrize(
    ("architecture", "names"), [("switch_transformers", linears.SWITCH_NAMES), ("nllb_moe", linears.NLLB_NAMES)]
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_linear_layers_are_gathered_once_and_followed(architecture, names, mode):
    model = accelerate(built(architecture)).eval()
    module = next(m for m in model.modules() if adapter_of(m) is not None)

    def gathered():
        weights = linears.expert_weights(names, module)
        layers = [[getattr(e, name) for e in module.children() if hasattr(e, name)] for name in names]
        for of_experts, stored, bias in zip(
            layers, (weights.gate_up, weights.down), (weights.gate_up_bias, weights.down_bias), strict=True
        ):
            assert all(torch.equal(stored.blocks(e)[0].data, layer.weight) for e, layer in enumerate(of_experts))
            assert (bias is None) == (of_experts[0].bias is None)
            assert bias is None or torch.equal(bias, torch.stack([layer.bias for layer in of_experts]))
        return weights

    with mode():
        first = gathered()
        assert gathered() is first
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.data.add_(1)
        assert gathered() is first
    module.to(torch.bfloat16)
    with mode():
        assert gathered() is gathered()
    module.to("meta")
    with torch.no_grad():
        assert linears.expert_weights(names, module).tensors[-1].is_meta


def test_tied_experts_of_a_family_stay_tied():
    model = built("switch_transformers")
    module = next(m for m in model.modules() if adapter_of(m) is not None)
    module.expert_1.wi.weight = module.expert_0.wi.weight
    wanted = logits(model)
    accelerate(model)
    assert relative_error(logits(model), wanted) <= 1e-5
    places = [p.data_ptr() for p in model.parameters()]
    assert relative_error(logits(model), wanted) <= 1e-5
    assert [p.data_ptr() for p in model.parameters()] == places
    assert module.expert_1.wi.weight is module.expert_0.wi.weight
