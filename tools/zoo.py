"""Every MoE architecture of the installed Transformers, built tiny with random weights.

The list is Transformers' own registry of configurations, filtered by what its modeling source defines. A tiny model
keeps its family's structure (every kind of layer, its router, its experts, its biases) and shrinks the numbers.
"""

from __future__ import annotations

import importlib
import inspect
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import (
    CONFIG_MAPPING,
    CONFIG_MAPPING_NAMES,
    model_type_to_module_name,
)

from moestro.errors import unsupported
from moestro.hf.serving import adapter_of, routes
from zoo_sizes import LATENT, OVERRIDES, SIZES

VOCABULARY = 96
LARGEST = 3_000_000
PADDING, FIRST_WORD = 0, 4

_CANNOT_BUILD = (
    TypeError,
    ValueError,
    KeyError,
    AttributeError,
    RuntimeError,
    IndexError,
    ZeroDivisionError,
    StrictDataclassError,
)
"""What a family's constructor raises when sizes do not suit it; collected, and reported if no model could be built."""


@dataclass(frozen=True)
class Tiny:
    """A tiny model of one architecture.

    Attributes:
        architecture: the folder of Transformers' models it comes from.
        model: in eval mode, float32, with Transformers' eager experts.
    """

    architecture: str
    model: PreTrainedModel


def architectures() -> list[str]:
    """Folders of registered architectures whose modeling source defines routed experts, in alphabetical order."""
    folders = {model_type_to_module_name(model_type) for model_type in CONFIG_MAPPING_NAMES}
    return sorted(folder for folder in folders if _defines_experts(folder))


def build(architecture: str, seed: int = 0) -> Tiny:
    """Build `architecture` tiny: its first registered text model (or model) that holds experts.

    Raises:
        UnsupportedError: no registered model of it holds experts at these sizes; carries what each one said.
    """
    said = []
    for config_class, model_class in _candidates(architecture):
        try:
            model = _construct(model_class, tiny_config(config_class), seed)
            if not any(adapter_of(m) is not None or routes(type(m).__name__) for m in model.modules()):
                raise ValueError("no experts in it")
            fill(model, seed)
            if any(adapter_of(m) is not None for m in model.modules()):
                outputs(model, inputs_of(model))
        except _CANNOT_BUILD as error:
            said.append(f"{model_class.__name__}: {type(error).__name__}: {error}")
            continue
        return Tiny(architecture, model)
    raise unsupported(
        "zoo.build",
        got=f"{architecture} ({'; '.join(said) or 'no model is registered for it'})",
        needs="a registered model with experts",
        fix="Give its sizes in tools/zoo_sizes.py.",
    )


def _construct(model_class: type[PreTrainedModel], config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    with torch.device("meta"):
        size = sum(p.numel() for p in model_class(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size} parameters, which is not tiny")
    torch.manual_seed(seed)
    return model_class(config).eval()


def tiny_config(config_class: type[PreTrainedConfig]) -> PreTrainedConfig:
    """The family's default configuration with small numbers in every field that has a common name."""
    known = inspect.signature(config_class.__init__).parameters
    sizes = {name: value for name, value in SIZES.items() if name in known}
    family = LATENT if "kv_lora_rank" in known else {}
    config = config_class(**(sizes | family | OVERRIDES.get(config_class.__name__, {})))
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    return config


def fill(model: nn.Module, seed: int) -> None:
    """Give matrices weights that keep the size of what passes through, so that every layer's output counts.

    Vectors (norms, time constants, sinks) keep the family's own initial values; biases and the routers' correction
    get small random ones.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * _spread(model, name, parameter))
            elif name.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)


def inputs_of(model: PreTrainedModel, seed: int = 0, batch: int = 2, length: int = 9) -> dict[str, Tensor]:
    """Random words [batch, length]; of several sequences the last is padded by three on the left."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(FIRST_WORD, VOCABULARY, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[1:][-1:, :3] = 0
    inputs = {"input_ids": ids.masked_fill(mask == 0, PADDING), "attention_mask": mask}
    if "moe_mm_token_type_ids" in inspect.signature(model.forward).parameters:
        inputs["moe_mm_token_type_ids"] = (torch.arange(length) >= length // 2).int().expand(batch, length)
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.randint(FIRST_WORD, VOCABULARY, (batch, 5), generator=generator)
    return inputs


def to_bfloat16(model: PreTrainedModel) -> PreTrainedModel:
    """Cast in place as loading with dtype=bfloat16 does: what the family keeps in float32 stays float32."""
    patterns = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    kept = {name: t.data for name, t in tensors.items() if any(re.search(p, name) for p in patterns)}
    model.bfloat16()
    for name, data in kept.items():
        tensors[name].data = data
    return model


@torch.no_grad()
def outputs(model: PreTrainedModel, inputs: dict[str, Tensor]) -> Tensor:
    """The logits of a forward pass, or the last hidden states of a model without a head."""
    result = model(**inputs)
    logits: Tensor | None = result.get("logits")
    return result[0] if logits is None else logits


def _spread(model: nn.Module, name: str, parameter: Tensor) -> float:
    if "embed" in name or "wte" in name:
        return 1.0
    owner = model.get_submodule(name.rpartition(".")[0])
    transposed = parameter.dim() == 3 and getattr(owner, "is_transposed", type(owner).__name__ == "Llama4TextExperts")
    fan_in: int = parameter.shape[-2 if transposed else -1]
    return math.sqrt(1 / fan_in)


def _configurations(folder: str) -> set[type[PreTrainedConfig]]:
    """Those of one folder: reading an entry of the mapping imports it, and there are hundreds."""
    return {CONFIG_MAPPING[name] for name in CONFIG_MAPPING_NAMES if model_type_to_module_name(name) == folder}


def _source(folder: str) -> Path:
    return Path(transformers.__file__).parent / "models" / folder / f"modeling_{folder}.py"


def _defines_experts(folder: str) -> bool:
    path = _source(folder)
    return path.is_file() and any(routes(name) for name in re.findall(r"^class (\w+)\(", path.read_text(), re.M))


def _candidates(architecture: str) -> Iterator[tuple[type[PreTrainedConfig], type[PreTrainedModel]]]:
    """The models the architecture's file defines for its registered configurations, language models first."""
    configs = _configurations(architecture)
    module = importlib.import_module(f"transformers.models.{architecture}.modeling_{architecture}")
    own = [
        model_class
        for name, model_class in inspect.getmembers(module, inspect.isclass)
        if issubclass(model_class, PreTrainedModel) and not name.endswith("PreTrainedModel")
    ]
    for model_class in sorted(own, key=_preference):
        config_class: Any = getattr(model_class, "config_class", None)
        if config_class in configs:
            yield config_class, model_class


def _preference(model_class: type) -> int:
    endings = ("ForCausalLM", "ForConditionalGeneration", "TextModel", "Model")
    return next((i for i, ending in enumerate(endings) if model_class.__name__.endswith(ending)), len(endings))
