"""Load a language model and its tokenizer, ready to generate with moestro, or say in one sentence why not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils import logging as hub_logging
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from moestro.checkpoint import open_checkpoint
from moestro.errors import invalid_input, not_one_of
from moestro.hf.config import QUANTIZED, MoestroConfig
from moestro.hf.loading import check_complete, load
from moestro.hf.models import explained, find_device, find_model, fitting, read_config
from moestro.hf.serving import Served, accelerate, adapter_of, find, served
from moestro.machine import available_bytes
from moestro.ops.expert_mlp.tuning import parse_strategy

OPERATION = "load"

BUNDLED = "bundled"
"""What `TextModel.name` says of the model that comes with the package."""

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, eq=False)
class TextModel:
    """A causal language model of Transformers with its tokenizer, and its configuration as it is stored.

    `path` is the folder or hub id that it came from, and its `name` too, but for the "bundled" one. Before weights are
    read, `model` has empty parameters; then moestro serves its expert layers.
    """

    name: str
    path: str
    config: Any
    tokenizer: Any
    model: Any

    @property
    def context(self) -> int | None:
        """The most tokens the model was made for, prompt included, if its configuration says."""
        length = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return length if isinstance(length, int) and length > 0 else None

    @cached_property
    def served(self) -> tuple[Served, ...]:
        """The expert layers that moestro serves."""
        return tuple(served(self.model))


def bundled_folder() -> Path:
    """Where the package keeps its own model; an InvalidInputError where this installation has none."""
    folder = Path(__file__).parent.parent / "bundled"
    if not (folder / "config.json").is_file():
        raise invalid_input(
            OPERATION,
            got="an installation without the bundled model",
            needs=f"a model in {folder}",
            fix="Reinstall moestro, or name a model.",
        )
    return folder


def find_text_model(model: str | Path | None = None) -> TextModel:
    """The model that `load_text_model` would load, without its weights; it refuses what cannot be served."""
    source = str(bundled_folder() if model is None else find_model(str(model), OPERATION))
    stored = open_checkpoint(Path(source)) if any(Path(source).glob("*.safetensors")) else None
    config = read_config(source, OPERATION, stored)
    fix = "Use moestro.accelerate(model) on other kinds."
    with explained(OPERATION, source, "a causal language model", fix), torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    if not any(adapter_of(module) is not None for module in skeleton.modules()):
        accelerate(skeleton)  # which says why not
    return TextModel(BUNDLED if model is None else str(model), source, config, _tokenizer(source), skeleton)


def load_text_model(
    model: str | Path | None = None,
    dtype: str = "auto",
    device: str | DeviceMesh = "cpu",
    strategy: str = "auto",
    check: Callable[[str, Any, int | None], object] | None = None,
    format: str | MoestroConfig | None = None,
) -> TextModel:
    """Load a Mixture-of-Experts language model and let moestro serve its expert layers.

    A model that would be refused for its architecture is refused before its weights are read or downloaded. Experts
    stay as their checkpoint stores them (`moestro.load`), unless `dtype` names another dtype than the checkpoint's and
    the weights in it take less than half of the free memory.

    Args:
        model: a local folder, a hub id, or None for the bundled model.
        dtype: "float32", "bfloat16", "float16", or "auto" for that of the checkpoint.
        device, format: as for `moestro.load`, whose errors it raises; a tokenizer that is missing is one too.
        strategy: as for `moestro.accelerate`.
        check: called with name, tokenizer and context before the weights are read, to raise what speaks against them.
    """
    parse_strategy(strategy, OPERATION)
    target = find_device(device.device_type if isinstance(device, DeviceMesh) else device, OPERATION)
    if dtype not in DTYPES:
        raise not_one_of(OPERATION, "dtype", dtype, DTYPES)
    found = find_text_model(model)
    source = found.path
    if check is not None:
        check(found.name, found.tokenizer, found.context)
    readable = explained(OPERATION, source, "readable weights in safetensors form", "Download or save the model again.")
    how = format if isinstance(format, MoestroConfig) else MoestroConfig(format)
    room = partial(fitting, OPERATION, source, dtype if dtype != "auto" else found.config.dtype, how.format)
    with readable, room():
        stays = (
            isinstance(device, DeviceMesh)
            or not how.changes_nothing
            or how.input_format != "float"
            or how.memory is not None
            or _stays(found, dtype)
        )
        loaded = load(source, how, dtype, device) if stays else _weights(source, found.config, dtype)
    accelerate(loaded, strategy, projections=how.projections)
    with room():
        loaded = loaded.to(target).eval()
    return replace(found, model=loaded)


@contextmanager
def quiet_transformers(progress: bool = False) -> Iterator[None]:
    """Warnings of Transformers and of the hub, and unless `progress` the progress bars, off inside the block."""
    verbosity, hub_verbosity = transformers_logging.get_verbosity(), hub_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.CRITICAL)
    hub_logging.set_verbosity(logging.CRITICAL)
    if not progress:
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        hub_logging.set_verbosity(hub_verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def _weights(source: str, config: Any, dtype: str) -> Any:
    """The model; Transformers itself would fill weights that the files lack with random numbers."""
    model, report = AutoModelForCausalLM.from_pretrained(source, config=config, dtype=dtype, output_loading_info=True)
    check_complete(source, report)
    return model


def _stays(found: TextModel, dtype: str) -> bool:
    """Whether experts are to stay as stored: nothing else was asked for, or memory would not hold them otherwise.

    They can in families that say where they are, and in safetensors.
    """
    quantization = getattr(found.config, "quantization_config", None) or {}
    if quantization:
        return quantization.get("quant_method") in QUANTIZED and not quantization.get("dequantize")
    folder = Path(found.path)
    if folder.is_dir() and not any(folder.glob("*.safetensors")):
        return False
    if any(layer.adapter.projections is None for layer in find(found.model)):
        return False
    if dtype == "auto" or getattr(torch, dtype) == found.config.dtype:
        return True
    total = sum(p.numel() for p in found.model.parameters()) * getattr(torch, dtype).itemsize
    return bool(total > available_bytes() / 2)


def _tokenizer(source: str) -> Any:
    needs, fix = "a tokenizer beside the model", "Save it there: AutoTokenizer.from_pretrained(...).save_pretrained()."
    with explained(OPERATION, source, needs, fix):
        tokenizer = AutoTokenizer.from_pretrained(source)
    # Without tokenizer files Transformers makes an empty tokenizer of the architecture's usual class.
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        raise invalid_input(OPERATION, got=f"{source} without a tokenizer", needs=needs, fix=fix)
    return tokenizer
