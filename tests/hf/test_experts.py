"""experts_implementation="moestro": what Transformers calls, and by which conventions."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import zoo
from architectures import relative_error
from moestro.errors import UnsupportedError
from moestro.hf import IMPLEMENTATION, experts, serve, served


def module_of(architecture="qwen3_moe", implementation="eager"):
    model = zoo.build(architecture).model
    model.set_experts_implementation(implementation)
    return next(m for m in model.modules() if "has_gate" in vars(m))


def routed(num_tokens, top_k=2, num_experts=8, hidden_size=32, seed=0):
    torch.manual_seed(seed)
    ids = torch.stack([torch.randperm(num_experts)[:top_k] for _ in range(num_tokens)])
    return torch.randn(num_tokens, hidden_size), ids, torch.rand(num_tokens, top_k)


def test_is_registered_under_its_name():
    assert ALL_EXPERTS_FUNCTIONS[IMPLEMENTATION] is serve


def test_is_an_argument_of_from_pretrained_and_leaves_no_trace(tmp_path):
    model = zoo.build("qwen3_moe").model
    wanted = zoo.outputs(model, zoo.inputs_of(model))
    model.save_pretrained(tmp_path / "a")
    ours = AutoModelForCausalLM.from_pretrained(
        tmp_path / "a", experts_implementation="moestro", attn_implementation="eager"
    ).eval()
    assert len(served(ours)) == 2
    assert relative_error(zoo.outputs(ours, zoo.inputs_of(ours)), wanted) <= 1e-5
    ours.save_pretrained(tmp_path / "b")
    for path in (tmp_path / "a").iterdir():
        assert (tmp_path / "b" / path.name).read_bytes() == path.read_bytes(), path.name


def test_can_be_switched_on_and_off():
    model = zoo.build("gpt_oss").model
    inputs = zoo.inputs_of(model)
    wanted = zoo.outputs(model, inputs)
    for name in (IMPLEMENTATION, "grouped_mm", "eager", "batched_mm", IMPLEMENTATION):
        model.set_experts_implementation(name)
        assert relative_error(zoo.outputs(model, inputs), wanted) <= 1e-5, name
        assert bool(served(model)) == (name == IMPLEMENTATION)


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss", "aria", "nemotron_h", "inkling2"])
def test_ids_beyond_the_experts_are_empty_slots(architecture):
    module = module_of(architecture)
    x, ids, weights = routed(6, num_experts=module.num_experts)
    wanted = serve(module, x, ids, weights)
    first = serve(module, x, ids[:, :1], weights[:, :1])
    elsewhere = ids.clone()
    for sentinel in (module.num_experts, module.num_experts + 1, 10**6):
        elsewhere[:, 1] = sentinel
        for weight in (0.0, 1.0):
            marked = torch.cat([weights[:, :1], torch.full((6, 1), weight)], dim=1)
            torch.testing.assert_close(serve(module, x, elsewhere, marked), first)
    assert not serve(module, x, torch.full_like(ids, module.num_experts), weights).any()
    assert int(elsewhere[0, 1]) == 10**6, "the caller's routing was written to"
    assert not torch.allclose(wanted, first)


def test_expert_parallel_shards_add_up_to_the_whole():
    whole = module_of("qwen3_moe")
    x, ids, weights = routed(9)
    wanted = serve(whole, x, ids, weights)
    total = torch.zeros_like(wanted)
    for rank in range(2):
        shard = copy.deepcopy(whole)
        shard._is_expert_parallel, shard.num_experts = True, 4
        shard.gate_up_proj = nn.Parameter(whole.gate_up_proj[rank * 4 : rank * 4 + 4].detach().clone())
        shard.down_proj = nn.Parameter(whole.down_proj[rank * 4 : rank * 4 + 4].detach().clone())
        here = (ids >= rank * 4) & (ids < rank * 4 + 4)
        local = torch.where(here, ids - rank * 4, 4)
        total += serve(shard, x, local, torch.where(here, weights, 0.0))
    torch.testing.assert_close(total, wanted)


def test_repeated_ids_count_with_the_sum_of_their_weights():
    module = module_of()
    x, ids, weights = routed(5)
    ids[:, 1] = ids[:, 0]
    once = serve(module, x, ids[:, :1], weights.sum(-1, keepdim=True))
    torch.testing.assert_close(serve(module, x, ids, weights), once)


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 33])
@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss", "nemotron_h", "muse_spark"])
def test_any_number_of_tokens(architecture, num_tokens):
    module = module_of(architecture)
    hidden_size = module.down_proj.shape[2 if module.is_transposed else 1]
    x, ids, weights = routed(num_tokens or 1, num_experts=module.num_experts, hidden_size=hidden_size)
    x, ids, weights = x[:num_tokens], ids[:num_tokens], weights[:num_tokens]
    out = serve(module, x, ids, weights)
    assert out.shape == x.shape
    if num_tokens:
        torch.testing.assert_close(out, module(x, ids, weights), rtol=1e-5, atol=1e-5)


def test_keeps_the_caller_s_shape_and_dtype():
    module = module_of().bfloat16()
    x, ids, weights = routed(6)
    out = serve(module, x.view(2, 3, 32), ids, weights.bfloat16())
    assert out.shape == (2, 3, 32)
    assert out.dtype == torch.float32


def test_a_version_without_the_newer_flags():
    module = module_of("qwen3_moe")
    x, ids, weights = routed(4)
    wanted = module(x, ids, weights)
    for name in ("_is_expert_parallel", "has_post_expert_norm", "is_concatenated", "has_bias"):
        delattr(module, name)
    torch.testing.assert_close(serve(module, x, ids, weights), wanted, rtol=1e-5, atol=1e-5)


def test_gradients_reach_input_weights_and_router():
    module = module_of("gpt_oss")
    x, ids, weights = routed(7)
    grads = []
    for function in (module.forward, lambda *args: serve(module, *args)):
        leaf, w = x.clone().requires_grad_(), weights.clone().requires_grad_()
        module.zero_grad()
        function(leaf, ids, w).square().sum().backward()
        grads.append([leaf.grad, w.grad, *(p.grad.clone() for p in module.parameters())])
    for theirs, ours in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_the_plan_is_neither_copied_nor_saved():
    module = module_of("qwen3_moe", IMPLEMENTATION)
    x, ids, weights = routed(3)
    wanted = module(x, ids, weights)
    plan = vars(module)[experts.PLAN]
    assert plan is not None
    copied = copy.deepcopy(module)
    assert vars(copied)[experts.PLAN] is None
    assert torch.equal(copied(x, ids, weights), wanted)
    buffer = io.BytesIO()
    torch.save(module, buffer)
    assert b"moestro.hf" not in buffer.getvalue()
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=False)(x, ids, weights), wanted)


def test_a_custom_gate_of_a_copy_is_the_copy_s_own():
    module = module_of("inkling2", IMPLEMENTATION)
    x, ids, weights = routed(3, num_experts=module.num_experts)
    before = module(x, ids, weights)
    copied = copy.deepcopy(module)
    copied.act_fn.forward = lambda gate, up: gate * 0
    assert not copied(x, ids, weights).any()
    assert torch.equal(module(x, ids, weights), before)


@pytest.mark.parametrize("fullgraph", [True, False])
def test_compiles_without_a_first_run(fullgraph):
    if fullgraph and torch.__version__ < "2.13":
        pytest.skip("the graph breaks at each module's plan there")
    model = zoo.build("qwen3_moe").model
    wanted = zoo.outputs(model, zoo.inputs_of(model))
    model.set_experts_implementation(IMPLEMENTATION)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=fullgraph, backend="eager")
    assert relative_error(zoo.outputs(compiled, zoo.inputs_of(model)), wanted) <= 1e-5


def test_weights_that_cannot_be_served_say_so_at_the_call():
    module = module_of()
    module.down_proj = nn.Parameter(module.down_proj.to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(UnsupportedError, match=r"\[Qwen3MoeExperts\] got weights of torch.float8_e4m3fn; needs one of"):
        serve(module, *routed(2))


def test_a_missing_parameter_is_named():
    module = module_of()
    del module.down_proj
    with pytest.raises(UnsupportedError, match=r"no parameter down_proj; needs exactly gate_up_proj, down_proj"):
        serve(module, *routed(2))


def test_a_parametrised_weight_is_served_as_it_computes():
    module = module_of()
    x, ids, weights = routed(3)

    class Doubled(nn.Module):
        def forward(self, weight):
            return 2 * weight

    wanted = module(x, ids, weights) * 2
    nn.utils.parametrize.register_parametrization(module, "down_proj", Doubled())
    torch.testing.assert_close(serve(module, x, ids, weights), wanted, rtol=1e-5, atol=1e-5)


def test_an_activation_with_parameters_stays_its_own_and_trains():
    class Slope(nn.Module):
        def __init__(self):
            super().__init__()
            self.alpha = nn.Parameter(torch.ones(()))

        def forward(self, z):
            return z * torch.sigmoid(self.alpha * z)

    module = module_of()
    module.act_fn = Slope()
    x, ids, weights = routed(5)
    assert experts.plan_of(module).activation.kind == "custom"
    wanted = module(x, ids, weights)
    wanted.sum().backward()
    theirs = module.act_fn.alpha.grad.clone()
    module.zero_grad()
    ours = serve(module, x, ids, weights)
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)
    ours.sum().backward()
    torch.testing.assert_close(module.act_fn.alpha.grad, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss"])
def test_follows_parameters_that_are_moved_replaced_cast_and_trained(architecture):
    """What a module's parameters make up is kept between calls, and never after it has changed."""
    module = module_of(architecture)
    x, ids, weights = routed(6, num_experts=module.num_experts)

    def check():
        torch.testing.assert_close(serve(module, x, ids, weights), module(x, ids, weights), rtol=1e-5, atol=1e-5)

    def built():
        return experts.expert_weights(module, experts.plan_of(module))

    with torch.no_grad():
        check()
        assert built() is built()
        module.down_proj.mul_(2)
        check()
        for name, parameter in list(module.named_parameters()):
            old, parameter.data = parameter.data, parameter.data.clone() * 1.5
            old.fill_(torch.nan)
            check()
            setattr(module, name, nn.Parameter(parameter.detach().clone() / 1.5))
            check()
        module.bfloat16()
        assert built().gate_up.format.name == "bfloat16"
        module.float()
        check()
        copied = copy.deepcopy(module)
        module.down_proj.zero_()
        assert serve(copied, x, ids, weights).any()
        assert built() is not experts.expert_weights(copied, experts.plan_of(copied))
    module.requires_grad_()
    serve(module, x, ids, weights).sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())
