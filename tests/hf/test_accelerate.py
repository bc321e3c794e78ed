"""accelerate(): what it promises about the model it was given."""

from __future__ import annotations

import copy
import hashlib
import importlib
import io
from functools import partial

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import zoo
from architectures import relative_error
from hf.models import ALL, FAMILIES, built, logits, refused
from moestro.errors import InvalidInputError, MoestroError, UnsupportedError
from moestro.hf import accelerate, served
from moestro.hf.families import ADAPTERS
from moestro.hf.serving import adapter_of


def files(model, folder):
    model.save_pretrained(folder)
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


def test_there_is_an_architecture_here_for_every_adapter():
    used = {type(m).__name__ for name in FAMILIES for m in built(name).modules()}
    assert set(ADAPTERS) <= used


@pytest.mark.parametrize("architecture", ALL)
def test_returns_the_model_and_replaces_every_layer(architecture):
    model = built(architecture)
    assert served(model) == []
    assert accelerate(model) is model
    layers = [name for name, m in model.named_modules() if adapter_of(m) is not None]
    assert [entry.path for entry in served(model)] == layers
    assert {entry.strategy for entry in served(model)} == {"auto"}


@pytest.mark.parametrize("architecture", ALL)
def test_save_pretrained_writes_what_it_would_have_written(architecture, tmp_path):
    model = built(architecture)
    before = files(model, tmp_path / "before")
    accelerate(model)
    logits(model)
    assert files(model, tmp_path / "after") == before
    assert not any(b"moestro" in p.read_bytes() for p in (tmp_path / "after").glob("*.json"))


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss", "llama4", "dbrx", "switch_transformers"])
def test_a_saved_accelerated_model_loads(architecture, tmp_path):
    model = accelerate(built(architecture))
    wanted = logits(model)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, experts_implementation="eager", attn_implementation="eager")
    assert relative_error(logits(again.eval()), wanted) <= 1e-5


@pytest.mark.parametrize("architecture", ALL)
def test_parameters_keep_names_shapes_dtypes_values_and_identity(architecture):
    model = built(architecture)
    before = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}
    accelerate(model)
    logits(model)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    for name, (parameter, value) in before.items():
        assert after[name] is parameter
        assert torch.equal(parameter, value)
    for name, tensor in model.state_dict().items():
        assert name not in before or torch.equal(tensor, before[name][1])


@pytest.mark.parametrize("architecture", ALL)
def test_gradients_are_the_family_s_own(architecture):
    model = built(architecture)
    other = accelerate(copy.deepcopy(model))
    logits(other)  # joint storage exists before training starts
    inputs = zoo.inputs_of(model)
    for m in (model, other):
        result = m(**inputs)
        output = result[0] if result.get("logits") is None else result["logits"]
        output.square().mean().backward()
    theirs, ours = dict(model.named_parameters()), dict(other.named_parameters())
    largest = max(p.grad.abs().max() for p in theirs.values() if p.grad is not None)
    experts = 0
    for name, parameter in theirs.items():
        if parameter.grad is None:
            assert ours[name].grad is None or not ours[name].grad.any(), name
            continue
        experts += "expert" in name or "embed" in name
        assert ours[name].grad is not None, name
        assert (ours[name].grad - parameter.grad).abs().max() <= 1e-5 * largest, name
    assert experts


@pytest.mark.parametrize("architecture", ALL)
def test_fine_tuning_is_seen_at_once(architecture):
    model = accelerate(built(architecture))
    before = logits(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    result = model(**zoo.inputs_of(model))
    (result[0] if result.get("logits") is None else result["logits"]).square().mean().backward()
    optimizer.step()
    after = logits(model)
    assert relative_error(after, before) > 1e-4
    eager = built(architecture)
    eager.load_state_dict(model.state_dict())
    assert relative_error(after, logits(eager)) <= 1e-5


@pytest.mark.parametrize("architecture", ALL)
def test_survives_copy_pickle_dtype_and_loading(architecture):
    model = accelerate(built(architecture))
    wanted = logits(model)
    copied = copy.deepcopy(model)
    for entry in served(copied):
        module = copied.get_submodule(entry.path)
        assert module.forward.args[0] is module
    assert torch.equal(logits(copied), wanted)

    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert torch.equal(logits(loaded), wanted)
    assert len(served(loaded)) == len(served(model))

    other = built(architecture, seed=1)
    model.load_state_dict(other.state_dict())
    assert relative_error(logits(model), logits(other)) <= 1e-5
    assert torch.equal(logits(copied), wanted)  # the copy shares nothing with its origin

    fresh = accelerate(zoo.to_bfloat16(built(architecture)))
    assert torch.equal(logits(zoo.to_bfloat16(copied)), logits(fresh))


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss", "llama4", "dbrx", "switch_transformers"])
def test_load_state_dict_with_assign(architecture):
    model = accelerate(built(architecture))
    logits(model)
    other = built(architecture, seed=1)
    wanted = logits(other)
    model.load_state_dict(other.state_dict(), assign=True)
    assert relative_error(logits(model), wanted) <= 1e-5


@pytest.mark.parametrize("architecture", ALL)
def test_a_second_call_changes_nothing_but_the_strategy(architecture):
    model = accelerate(built(architecture))
    wanted, places = logits(model), [p.data_ptr() for p in model.parameters()]
    first = served(model)
    assert served(accelerate(model)) == first
    assert torch.equal(logits(model), wanted)
    assert [p.data_ptr() for p in model.parameters()] == places
    accelerate(model, strategy="grouped")
    assert {entry.strategy for entry in served(model)} == {"grouped"}
    assert relative_error(logits(model), wanted) <= 1e-5


@pytest.mark.parametrize("strategy", ["grouped", "blockwise", "selective", "all_experts"])
@pytest.mark.parametrize("architecture", ["gpt_oss", "llama4", "longcat_flash"])
def test_every_strategy(architecture, strategy):
    model = built(architecture)
    wanted = logits(model)
    assert relative_error(logits(accelerate(model, strategy=strategy)), wanted) <= 1e-5


def test_training_mode_keeps_the_dropout_of_expert_layers():
    model = accelerate(built("nllb_moe"))
    assert model.config.moe_token_dropout > 0
    experts = model.get_submodule(served(model)[0].path)
    rows, mask = torch.randn(64, 32), torch.zeros(64, 8, dtype=torch.long)
    mask[:, 3] = 1
    probs = mask * 0.7
    with torch.no_grad():
        quiet = experts.eval()(rows, mask, probs)
        torch.manual_seed(0)
        noisy = experts.train()(rows, mask, probs)
    dropped = (noisy == 0).float().mean()
    assert abs(float(dropped) - model.config.moe_token_dropout) < 0.05
    kept = noisy != 0
    scale = 1 / (1 - model.config.moe_token_dropout) ** 2  # inverted dropout in training, a factor at inference
    torch.testing.assert_close(noisy[kept], quiet[kept] * scale, rtol=1e-4, atol=1e-6)


def test_training_mode_keeps_the_dropout_inside_switch_experts():
    model = accelerate(built("switch_transformers")).train()
    experts = model.get_submodule(served(model)[0].path)
    assert experts.expert_0.dropout.p > 0
    rows = torch.randn(16, 32)
    chosen = torch.nn.functional.one_hot(torch.zeros(16, 1, dtype=torch.long), 4)
    with torch.no_grad():
        first, second = (experts(rows, chosen, torch.ones(16, 1)) for _ in range(2))
        still = [experts.eval()(rows, chosen, torch.ones(16, 1)) for _ in range(2)]
    assert not torch.equal(first, second)
    assert torch.equal(*still)


def test_switch_drops_what_is_over_capacity():
    experts = accelerate(built("switch_transformers")).get_submodule("encoder.block.0.layer.1.mlp.experts")
    chosen = torch.zeros(3, 1, 4, dtype=torch.long)
    chosen[1, 0, 2] = 1
    out = experts(torch.randn(3, 32), chosen, torch.ones(3, 1))
    assert not out[0].any()
    assert out[1].any()
    assert not out[2].any()


@pytest.mark.parametrize(
    ("folder", "name", "layers"),
    [
        ("aria", "AriaForConditionalGeneration", 32),
        ("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", 24),
        ("dots3_note", "Dots3NoteForConditionalGeneration", 62),  # 45 of the text model, 17 of the vision model
        ("step3p7", "Step3p7ForConditionalGeneration", 42),
        ("mixtral", "MixtralForSequenceClassification", 32),
    ],
)
def test_whole_models_of_full_size_before_their_weights_are_loaded(folder, name, layers):
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    model_class = getattr(module, name)
    with torch.device("meta"):
        model = model_class(model_class.config_class())
    assert len(served(accelerate(model))) == layers


# --- refusals -------------------------------------------------------------------------------------------------------


def test_a_dense_model_is_refused():
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=40, num_hidden_layers=1, num_attention_heads=4, head_dim=8
    )
    refused(LlamaForCausalLM(config), "a dense model", "a Mixture-of-Experts model", "nothing here to serve")


class Top2MLP(nn.Module):
    """An expert of Mixtral as Transformers had it before it stacked them, and as code beside checkpoints has it."""

    def __init__(self):
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 16)


class Block(nn.Module):
    def __init__(self, router="gate", experts="experts"):
        super().__init__()
        setattr(self, router, nn.Linear(8, 4, bias=False))
        setattr(self, experts, nn.ModuleList(Top2MLP() for _ in range(4)))


class MixtralSparseMoeBlock(Block):
    pass


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (Block, "layers.0.experts is a ModuleList: experts as 4 modules of Top2MLP"),
        (partial(Block, "router", "mlps"), "layers.0.mlps is a ModuleList: experts as 4 modules of Top2MLP"),
        (MixtralSparseMoeBlock, "layers.0 is a MixtralSparseMoeBlock"),
    ],
)
def test_experts_in_a_list_of_modules_are_not_called_dense(block, words):
    model = nn.Sequential()
    model.layers = nn.ModuleList(block() for _ in range(3))
    refused(model, words, "without trust_remote_code", "add-an-architecture.md")


def test_a_list_of_layers_is_no_list_of_experts():
    model = nn.Sequential()
    model.gate_proj = nn.Linear(8, 3)
    model.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(3))
    refused(model, "a dense model")


def test_single_projection_experts_are_refused():
    refused(zoo.build("vitpose_backbone").model, "VitPoseNaiveMoe", "single linear projections")


class StrangeExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 2, 2))


def test_one_unknown_expert_layer_refuses_the_whole_model():
    model = built("gpt_oss")
    model.model.layers[-1].mlp.experts = StrangeExperts()
    refused(model, "model.layers.1.mlp.experts is a StrangeExperts", "no adapter")


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_weight_that_is_no_ordinary_float_refuses_the_whole_model(architecture):
    model = built(architecture)
    path = [name for name, m in model.named_modules() if adapter_of(m) is not None][-1]
    module = model.get_submodule(path)
    *_, (name, parameter) = [
        (n, p) for n, p in module.named_parameters() if p.dim() >= 2 and "router" not in n and "shared" not in n
    ]
    owner = module.get_submodule(name.rpartition(".")[0])
    setattr(owner, name.rpartition(".")[2], nn.Parameter(parameter.to(torch.float8_e4m3fn), requires_grad=False))
    refused(model, "weights of torch.float8_e4m3fn", path)


def test_a_quantised_experts_module_is_refused():
    model = built("qwen3_moe")
    experts = model.model.layers[1].mlp.experts
    experts.gate_up_proj_scale_inv = nn.Parameter(torch.ones(8, 1, 1))
    refused(model, "model.layers.1.mlp.experts", "an unknown parameter gate_up_proj_scale_inv")


def test_flags_that_do_not_fit_the_shapes_are_refused():
    model = built("gpt_oss")
    model.model.layers[1].mlp.experts.is_transposed = False
    refused(model, "GptOssExperts", "shapes its flags do not explain")


def test_offloaded_weights_behind_an_adapter_are_refused():
    refused(built("llama4").to("meta"), "weights on the meta device")


def test_experts_that_are_no_plain_linear_layers_are_refused():
    model = built("switch_transformers")
    path = [name for name, m in model.named_modules() if adapter_of(m) is not None][-1]

    class Lora(nn.Linear):
        pass

    model.get_submodule(path).expert_0.wi = Lora(32, 40, bias=False)
    refused(model, "expert_0.wi as ", "Lora, where moestro needs a plain Linear")


def test_a_wrong_strategy_is_refused():
    with pytest.raises(
        InvalidInputError, match=r"\[accelerate\] got strategy='fast'; needs \"auto\" or one of grouped"
    ):
        accelerate(built("qwen3_moe"), strategy="fast")


def test_errors_belong_to_one_family():
    assert issubclass(UnsupportedError, MoestroError)


# --- beyond one process and one mode ----------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss"])
def test_compiles_into_one_graph(architecture):
    model = accelerate(built(architecture))
    wanted = logits(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert relative_error(logits(compiled), wanted) <= 1e-5


def test_works_under_inference_mode_and_trains_afterwards():
    for architecture in ("gpt_oss", "dbrx", "switch_transformers"):
        model = built(architecture)
        with torch.inference_mode():
            accelerate(model)
            logits(model)
        result = model(**zoo.inputs_of(model))
        result["logits"].square().mean().backward()
        modules = [m for m in model.modules() if adapter_of(m) is not None]
        for module in modules:
            grads = [p.grad for name, p in module.named_parameters() if p.dim() > 1 and "router" not in name]
            assert any(g is not None and g.any() for g in grads), architecture
            assert all(g is None or torch.isfinite(g).all() for g in grads)


def test_a_forward_wrapped_by_the_accelerate_library_stays_wrapped():
    model = built("qwen3_moe")
    module = model.model.layers[0].mlp.experts
    calls = []
    module._old_forward = module.forward

    def wrapper(*args, **kwargs):
        calls.append(1)
        return module._old_forward(*args, **kwargs)

    module.forward = wrapper
    wanted = logits(model)
    accelerate(model)
    calls.clear()
    assert relative_error(logits(model), wanted) <= 1e-5
    assert calls == [1]
    assert len(served(model)) == 2
