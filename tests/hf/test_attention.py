"""Attention with sinks, fused on a CPU: what the models' own eager function gives, and that function for all else."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import moestro
import zoo
from architectures import relative_error
from hf.models import built
from moestro.hf.attention import FUSED, NAME_READERS, SINK_FAMILIES, STEPS, attend, attend_steps, is_step
from moestro.ops import native
from moestro.ops.attention import ATTENTION
from moestro.ops.dispatch import observed
from tolerances import assert_close

LENGTH = 300
"""Tokens of a prompt: more than any tiny model's window."""


@pytest.fixture(params=SINK_FAMILIES, scope="module")
def model(request):
    found = built(request.param).eval()
    for module in found.modules():
        if isinstance(getattr(module, "sinks", None), nn.Parameter):
            nn.init.normal_(module.sinks)
    return found


def answers(model):
    """Logits of a prompt, of one with padding on the left and of tokens one by one."""
    ids = torch.randint(3, 20, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    seen = torch.ones_like(ids)
    seen[0, :17] = 0
    with torch.no_grad():
        steps = model.generate(
            ids[:1, :20], max_new_tokens=6, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        return (
            model(input_ids=ids).logits,
            model(input_ids=ids, attention_mask=seen).logits[seen.bool()],
            torch.stack(steps.logits),
        )


def test_fused_is_eager(model):
    model.set_attn_implementation("eager")
    wanted = answers(model)
    moestro.accelerate(model)
    assert model.config._attn_implementation == FUSED
    calls = []
    module = next(m for m in model.modules() if hasattr(m, "sinks"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[type(module).__module__], "eager_attention_forward", lambda *a, **k: calls.append(1))
        found = answers(model)
    assert not calls
    assert max(relative_error(*pair) for pair in zip(found, wanted, strict=True)) < 2e-6


def test_gradients_and_attention_weights_are_the_models_own(model):
    moestro.accelerate(model)
    ids = torch.arange(3, 19)[None]
    sinks = next(m.sinks for m in model.modules() if isinstance(getattr(m, "sinks", None), nn.Parameter))

    def gradient(name):
        model.set_attn_implementation(name)
        model.zero_grad()
        model(input_ids=ids).logits.square().mean().backward()
        return sinks.grad.clone()

    assert relative_error(gradient(FUSED), gradient("eager")) < 1e-6
    model.set_attn_implementation(FUSED)
    module = next(m for m in model.modules() if hasattr(m, "sinks"))
    query, key = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    module.num_key_value_groups, before = 2, module.num_key_value_groups
    module.sinks, sinks = nn.Parameter(torch.randn(4)), module.sinks
    try:
        with torch.no_grad():
            fused, none = attend(module, query, key, key, None, 0.3)
            same, weights = attend(module, query, key, key, None, 0.3, output_attentions=True)
    finally:
        module.num_key_value_groups, module.sinks = before, sinks
    assert none is None
    assert weights.shape == (1, 4, 5, 5)
    assert torch.equal(weights.triu(1), torch.zeros_like(weights))
    assert relative_error(fused, same) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", [torch.bool, torch.float32, torch.float64])
def test_masks_of_other_dtypes(dtype, kind):
    torch.manual_seed(0)
    module = built("gpt_oss").model.layers[0].self_attn
    module.num_key_value_groups, module.sinks = 2, nn.Parameter(torch.randn(4).to(dtype))
    query, key, value = (torch.randn(2, heads, 70, 8).to(dtype) for heads in (4, 2, 2))
    seen = torch.rand(2, 1, 70, 70) > 0.3
    added = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)
    given = seen if kind is torch.bool else torch.zeros(seen.shape, dtype=kind).masked_fill_(~seen, -1e4)
    with torch.no_grad():
        found = attend(module, query, key, value, given, 0.3)[0]
        wanted = attend(
            module, query.double(), key.double(), value.double(), added.double(), 0.3, output_attentions=True
        )
    assert found.dtype == dtype
    assert relative_error(found.double(), wanted[0]) < (1e-12 if dtype is torch.float64 else 2e-2)


def test_a_configuration_that_asks_for_weights_stays_eager():
    model = built("gpt_oss")
    model.config.output_attentions = True
    assert moestro.accelerate(model).config._attn_implementation == "eager"
    assert model(input_ids=torch.arange(3, 9)[None]).attentions[0].shape[-1] == 6


def test_bfloat16_is_nearer_to_float32_than_eager():
    model = built("gpt_oss").eval()
    wanted = answers(model)[0]
    zoo.to_bfloat16(model)
    eager = answers(model)[0]
    moestro.accelerate(model)
    assert relative_error(answers(model)[0].float(), wanted) < 1.5 * relative_error(eager.float(), wanted) + 1e-3


def test_other_choices_and_other_models_stay():
    other = built("qwen3_moe")
    other.set_attn_implementation("eager")
    assert moestro.accelerate(other).config._attn_implementation == "eager"
    sinks = built("gpt_oss")
    sinks.config._attn_implementation = "flex_attention"
    assert moestro.accelerate(sinks).config._attn_implementation == "flex_attention"


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_steps_are_what_transformers_computes(name, monkeypatch):
    """Of each new token attention runs in the engine, with padding too, and of prompts where it ran."""
    model = built(name).eval()
    if name != "gpt_oss":
        model.set_attn_implementation("sdpa")
    ids = torch.randint(3, 20, (3, 11), generator=torch.Generator().manual_seed(0))
    seen = torch.ones_like(ids)
    seen[0, :4], seen[2, :1] = 0, 0

    def logits():
        asked = {"max_new_tokens": 5, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
        with torch.no_grad():
            return torch.stack(model.generate(ids, attention_mask=seen, **asked).logits)

    wanted = logits()
    moestro.accelerate(model)
    assert model.config._attn_implementation == (FUSED if name == "gpt_oss" else STEPS)
    calls = []
    with observed(ATTENTION, lambda prepared, arguments, result: calls.append(prepared.implementation)):
        found = logits()
    assert len(calls) == 4 * model.config.num_hidden_layers
    assert "torch" not in calls or native.module is None
    assert relative_error(found, wanted) < 2e-6


def test_models_that_read_the_name_keep_it():
    """Of all whose experts are served, those whose code asks whether the attention is called "sdpa"."""
    models = Path(transformers.__file__).parent / "models"
    asks = re.compile(r"_attn_implementation\s*(==|!=|in|not in)\s[^\n]*sdpa")
    readers = {path.parent.name for path in models.glob("*/modeling_*.py") if asks.search(path.read_text())}
    assert readers <= set(NAME_READERS)
    for name in ("deepseek_v32",):
        model = built(name)
        before = model.config._attn_implementation
        assert moestro.accelerate(model).config._attn_implementation == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks_of_steps_mean_what_sdpa_makes_of_them(dtype):
    """A boolean one that shows nothing gives zeros; others than it takes, or that do not fit, are its to judge."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, length, 8).to(dtype) for heads, length in ((4, 1), (2, 9), (2, 9)))
    module = nn.Module()
    module.num_key_value_groups = 2
    seen = torch.rand(2, 1, 1, 9) > 0.3
    seen[0] = False
    with torch.no_grad():
        assert is_step(query, key, value, seen)
        assert not is_step(query, key, value, torch.rand(2, 1, 2, 9) > 0.3)
        for mask, values in ((seen, value), (seen[:1], value), (None, value[:1])):
            wanted = sdpa_attention_forward(module, query, key, values, mask)[0]
            assert_close(attend_steps(module, query, key, values, mask)[0], wanted)
        for mask in (seen.long(), seen.byte(), seen.double()):
            with pytest.raises(RuntimeError, match="attn_mask dtype"):
                attend_steps(module, query, key, value, mask)


def test_continuous_batching_of_text_beside_other_parts_refuses_at_once():
    text = built("qwen3_vl_moe").config
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "deepstack_visual_indexes": [0]}
    vision["out_hidden_size"] = text.hidden_size
    config = transformers.Qwen3VLMoeConfig(text_config=text.to_dict(), vision_config=vision)
    model = transformers.Qwen3VLMoeForConditionalGeneration(config).eval()
    model.set_attn_implementation("sdpa")
    moestro.accelerate(model)
    names = [c._attn_implementation for c in (model.config, model.config.text_config, model.config.vision_config)]
    assert names == [STEPS, STEPS, "sdpa"]
    with pytest.raises(ValueError, match="not supported for continuous batching"):
        model.generate_batch([[3, 4, 5]], progress_bar=False)
    model.set_attn_implementation("sdpa")
    assert {c._attn_implementation for c in (model.config, model.config.text_config)} == {"sdpa"}


def test_a_saved_model_does_not_name_it(tmp_path):
    model = moestro.accelerate(built("gpt_oss"))
    model.save_pretrained(tmp_path)
    assert FUSED not in (tmp_path / "config.json").read_text()
    loaded = moestro.load(tmp_path)
    assert loaded.config._attn_implementation == FUSED
