"""Modules that Transformers itself puts in place of a model's experts: FP8 ones, and the MXFP4 MLP of gpt-oss.

What they store is undone here by the tests' own code, and computed by Transformers' own in float32.
"""

from __future__ import annotations

import copy
import inspect
import pickle
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, FineGrainedFP8Config, GptOssForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations import mxfp4 as transformers_mxfp4
from transformers.integrations.finegrained_fp8 import FP8Experts, replace_with_fp8_linear

import moestro
from hf.checkpoints import E2M1, blocks_128, logits, read
from moestro.errors import UnsupportedError
from moestro.hf import served
from tolerances import assert_close, bit_equal

E8M0 = torch.float8_e8m0fnu
BLOCK = (128, 128)
KINDS = {
    "blocks, float32 scales": {"block_size": BLOCK},
    "blocks, power-of-two scales": {"block_size": BLOCK, "scale_fmt": "ue8m0"},
    "one scale a matrix": {},
    "one power of two a matrix": {"scale_fmt": "ue8m0"},
    "FP4": {"block_size": BLOCK, "scale_fmt": "ue8m0", "expert_dtype": "fp4"},
}
IDS = torch.tensor([[0, 3], [1, 2], [3, 1], [4, 0], [4, 4]])
"""Of four experts: the fifth is none, as expert parallelism names those of other ranks."""


def config(hidden_size=256, intermediate_size=128, **changes):
    sizes = {"hidden_size": hidden_size, "moe_intermediate_size": intermediate_size, "num_experts": 4}
    return Qwen3MoeConfig(**sizes, **changes)


def experts_of(settings, **options):
    """Random bytes and scales in what Transformers' module has allocated."""
    torch.manual_seed(0)
    if "expert_dtype" not in inspect.signature(FP8Experts).parameters:  # older Transformers looks in the configuration
        settings.expert_dtype = options.pop("expert_dtype", "fp8")
    module = FP8Experts(settings, **options)
    for name, parameter in module.named_parameters():
        if parameter.dtype == torch.int8:
            parameter.data = torch.randint(-128, 128, parameter.shape, dtype=torch.int8)
        elif parameter.dtype == torch.float8_e4m3fn:
            parameter.data = torch.randn(parameter.shape).mul(30).to(parameter.dtype)
        elif parameter.dtype == E8M0:
            parameter.data = torch.randint(114, 119, parameter.shape, dtype=torch.uint8).view(E8M0)
        elif name.endswith("_scale_inv"):
            parameter.data = torch.rand(parameter.shape) * 0.005 + 0.0005
    return module


def plain(module, name, halves):
    """A projection in float32: each half of its rows has scales of its own."""
    data, scales = getattr(module, name).detach(), getattr(module, f"{name}_scale_inv").detach()
    if data.dtype == torch.int8:
        bits = data.view(torch.uint8)
        values = torch.stack([E2M1[(bits & 15).long()], E2M1[(bits >> 4).long()]], -1).flatten(-2)
        return values * scales.float().repeat_interleave(32, -1)
    parts = zip(data.chunk(halves, 1), scales.chunk(halves, 1), strict=True)
    if module.block_size is None:
        return torch.cat([part.float() * scale.float() for part, scale in parts], 1)
    return torch.cat([blocks_128(part, scale) for part, scale in parts], 1)


def expected(module, x, ids, weights):
    """The sum over slots, written as loops, with the module's own gate."""
    gated = module.has_gate
    first = plain(module, "gate_up_proj" if gated else "up_proj", 2 if gated else 1)
    second = plain(module, "down_proj", 1)
    between = module._apply_gate if gated else module.act_fn
    y = torch.zeros_like(x)
    for t, row in enumerate(ids.tolist()):
        for k, e in enumerate(row):
            if e < len(first):
                y[t] += weights[t, k] * (second[e] @ between((first[e] @ x[t])[None])[0])
    return y


def inputs(hidden_size=256):
    torch.manual_seed(1)
    return torch.randn(len(IDS), hidden_size), IDS, torch.rand(IDS.shape)


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("intermediate_size", [64, 128, 384])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_fp8_experts(kind, intermediate_size, gated):
    module = experts_of(config(intermediate_size=intermediate_size), has_gate=gated, **KINDS[kind])
    moestro.accelerate(module)
    (layer,) = served(module)
    assert (layer.family, layer.activation, layer.layout) == ("FP8 experts", "silu", "as stored")
    assert_close(module(*inputs()), expected(module, *inputs()))


GATES = {
    "silu": ({}, "silu"),
    "limit": ({"swiglu_limit": 2.0}, "silu (limit 2)"),
    "alpha": ({"swiglu_limit": 2.0, "swiglu_alpha": 1.702}, "silu (alpha 1.702, limit 2, up + 1)"),
    "softcap": ({"mlp_gate_softcap": 1.5, "mlp_up_softcap": 2.5}, "custom"),
}


@pytest.mark.parametrize("gate", GATES)
def test_gates_are_the_modules_own(gate):
    changes, words = GATES[gate]
    module = moestro.accelerate(experts_of(config(**changes), block_size=BLOCK))
    if gate == "softcap" and not hasattr(module, "gate_softcap"):
        pytest.skip("this Transformers knows no such gate")
    assert served(module)[0].activation == words
    y = module(*inputs())
    assert_close(y, expected(module, *inputs()))
    assert not torch.equal(y, moestro.accelerate(experts_of(config(), block_size=BLOCK))(*inputs())) or gate == "silu"


def test_scales_for_calling_in_fp8_stay_aside():
    """Static scales are for activations in FP8; moestro keeps those in the model's dtype."""
    module = moestro.accelerate(experts_of(config(), block_size=BLOCK, activation_scheme="static"))
    assert_close(module(*inputs()), expected(module, *inputs()))


def test_a_model_that_transformers_has_filled_with_fp8_experts():
    """As it does where there is a GPU: the registry finds moestro by name, and the parameters stay Transformers'."""
    settings = config(
        vocab_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        num_experts_per_tok=2, intermediate_size=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(settings).eval()
    reference = copy.deepcopy(model)
    reference.set_experts_implementation("eager")
    linear = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    options = FineGrainedFP8Config(weight_block_size=BLOCK, modules_to_not_convert=linear)
    replace_with_fp8_linear(model, linear, options, pre_quantized=True)
    for layer, other in zip(model.model.layers, reference.model.layers, strict=True):
        assert isinstance(layer.mlp.experts, FP8Experts)
        layer.mlp.experts.load_state_dict(experts_of(settings, block_size=BLOCK).state_dict(), assign=True)
        other.mlp.experts.gate_up_proj.data = plain(layer.mlp.experts, "gate_up_proj", 2)
        other.mlp.experts.down_proj.data = plain(layer.mlp.experts, "down_proj", 1)
    ids = torch.arange(24).view(2, 12) * 5 % 64
    wanted = logits(reference, ids)
    assert served(model) == []
    model.set_experts_implementation("moestro")
    assert [layer.family for layer in served(model)] == ["FP8 experts"] * 2
    assert_close(logits(model, ids), wanted)
    kept = model.state_dict()
    assert kept["model.layers.0.mlp.experts.down_proj"].dtype == torch.float8_e4m3fn
    assert bit_equal(logits(copy.deepcopy(model), ids), logits(model, ids))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_close(logits(compiled, ids), wanted)


def test_gradients_pass_fp8_experts():
    module = moestro.accelerate(experts_of(config(), block_size=BLOCK))
    x, ids, weights = inputs()
    leaves = [t.clone().requires_grad_() for t in (x, weights)]
    module(leaves[0], ids, leaves[1]).square().sum().backward()
    again = [t.clone().requires_grad_() for t in (x, weights)]
    expected_of_leaves(module, again[0], ids, again[1]).square().sum().backward()
    for leaf, wanted in zip(leaves, again, strict=True):
        assert_close(leaf.grad, wanted.grad)


def expected_of_leaves(module, x, ids, weights):
    first, second = plain(module, "gate_up_proj", 2), plain(module, "down_proj", 1)
    rows = []
    for t, row in enumerate(ids.tolist()):
        parts = [
            weights[t, k] * (second[e] @ module._apply_gate((first[e] @ x[t])[None])[0])
            for k, e in enumerate(row)
            if e < len(first)
        ]
        rows.append(sum(parts, 0 * x[t]))
    return torch.stack(rows)


def with_dtype(module, name, dtype):
    parameter = module.get_parameter(name)
    setattr(module, name, torch.nn.Parameter(torch.ones(parameter.shape, dtype=dtype), requires_grad=False))
    return module


REFUSED = {
    "other blocks": (lambda: experts_of(config(), block_size=(64, 64)), "blocks of [64, 64]"),
    "FP4 with float32 scales": (
        lambda: experts_of(config(), block_size=BLOCK, expert_dtype="fp4"),
        "FP4 weights with scales of torch.float32",
    ),
    "e5m2": (
        lambda: with_dtype(experts_of(config(), block_size=BLOCK), "down_proj", torch.float8_e5m2),
        "weights of torch.float8_e5m2",
    ),
    "scales of another dtype": (
        lambda: with_dtype(experts_of(config(), block_size=BLOCK), "down_proj_scale_inv", torch.float64),
        "scales that do not fit",
    ),
    "one block for the ends of gate and the start of up": (
        lambda: experts_of(config(intermediate_size=96), block_size=BLOCK),
        "gate and up of 96 rows each",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_refused_and_left_alone(case):
    make, words = REFUSED[case]
    module = make()
    with pytest.raises(UnsupportedError) as caught:
        moestro.accelerate(torch.nn.ModuleDict({"experts": module}))
    text = str(caught.value)
    assert words in text
    assert "experts is a FP8Experts" in text
    assert "forward" not in vars(module)
    assert served(module) == []
    module.config._experts_implementation = "moestro"
    with pytest.raises(UnsupportedError, match="FP8Experts"):
        moestro.hf.low_precision.serve_fp8(module, *inputs())


class Swizzled:
    """Stands for a tensor in the layout of a GPU kernel: the bytes lie in an order of its own."""

    def __init__(self, tensor):
        self.order = torch.randperm(tensor[0].numel(), generator=torch.Generator().manual_seed(3))
        self.logical, self.storage = tuple(tensor.shape), SimpleNamespace(data=tensor.flatten(1)[:, self.order])
        self.storage.layout = SimpleNamespace(unswizzle_data=self.unswizzle_data)

    def unswizzle_data(self, data):
        return data[:, self.order.argsort()].view(self.logical)


KERNELS = SimpleNamespace(
    tensor=SimpleNamespace(
        FP4=object(),
        wrap_torch_tensor=lambda tensor, dtype=None: tensor,
        convert_layout=lambda tensor, layout, **options: Swizzled(tensor),
    ),
    tensor_details=SimpleNamespace(
        layout=SimpleNamespace(StridedLayout=None, make_default_matmul_mxfp4_w_layout=lambda mx_axis: (None, {}))
    ),
    matmul_ogs=SimpleNamespace(
        PrecisionConfig=SimpleNamespace, FlexCtx=SimpleNamespace, InFlexData=SimpleNamespace
    ),
)  # fmt: skip


@pytest.fixture
def swapped(made, monkeypatch):
    """gpt-oss with Transformers' MXFP4 modules, filled by its own code from a published checkpoint."""
    if not hasattr(transformers_mxfp4, "Mxfp4GptOssMLP"):
        pytest.skip("this Transformers puts no module in the place of gpt-oss's MLP")
    # Transformers moves tensors of the CPU to the accelerator that PyTorch was built for, whether there is one or not.
    monkeypatch.setattr(transformers_mxfp4, "get_current_accelerator", lambda: None, raising=False)
    folder = made.folder("gpt-oss-20b")
    tensors = read(folder)
    settings = AutoConfig.from_pretrained(folder)
    del settings.quantization_config
    model = GptOssForCausalLM(settings)
    for layer in model.model.layers:
        experts = transformers_mxfp4.Mxfp4GptOssExperts(settings)
        layer.mlp = transformers_mxfp4.Mxfp4GptOssMLP(layer.mlp.router, experts)
    packed = [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]
    rest = {n: t.float() for n, t in tensors.items() if not n.endswith(("_blocks", "_scales"))}
    missing, unexpected = model.load_state_dict(rest, strict=False)
    assert (set(missing), unexpected) == (set(packed), [])
    for name in packed:
        path, _, projection = name.rpartition(".")
        transformers_mxfp4.swizzle_mxfp4_convertops(
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"], model.get_submodule(path), projection, "cpu", KERNELS
        )
    return model.eval(), tensors


def published(model):
    """What Transformers would save of the packed experts."""
    found = {}
    for path, module in model.named_modules():
        if isinstance(module, transformers_mxfp4.Mxfp4GptOssExperts):
            for projection in ("gate_up_proj", "down_proj"):
                name = f"{path}.{projection}_blocks"
                found |= transformers_mxfp4.Mxfp4ReverseDeserialize(None).convert({}, model=model, full_layer_name=name)
    return found


def test_gpt_oss_packed_for_other_kernels(made, swapped):
    model, tensors = swapped
    assert moestro.accelerate(model) is model
    layers = served(model)
    assert {(s.family, s.module, s.layout) for s in layers} == {("MXFP4 gpt-oss", "Mxfp4GptOssMLP", "as stored")}
    assert len(layers) == len(model.model.layers)
    assert_close(logits(model), made.expected("gpt-oss-20b"))
    for name, tensor in published(model).items():
        assert bit_equal(tensor.contiguous(), tensors[name]), name
    again = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert bit_equal(logits(moestro.accelerate(again, "grouped")), logits(moestro.accelerate(model, "grouped")))


def test_gpt_oss_whose_experts_nobody_loaded_is_refused(swapped):
    model, _ = swapped
    first = model.model.layers[0].mlp.experts
    first.gate_up_proj_precision_config = None
    before = [layer.mlp.experts.down_proj for layer in model.model.layers]
    with pytest.raises(UnsupportedError, match=r"layers\.0\.mlp is a Mxfp4GptOssMLP.*gate_up_proj that no checkpoint"):
        moestro.accelerate(model)
    assert served(model) == []
    assert [layer.mlp.experts.down_proj for layer in model.model.layers] == before
