"""Tiny language models on disk, as a user could have them, and as a user should not."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    ViTConfig,
    ViTModel,
)

from forked import python

CONTEXT = 64
SIZES = {
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.5,
}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with a few merges; a character outside ASCII is several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<end>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["def f(n):\n    return n\n"] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mixture-of-Experts model with its tokenizer, complete."""
    folder = tmp_path_factory.mktemp("moe")
    torch.manual_seed(0)
    sizes = {**SIZES, "moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2}
    _save(Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)), folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def _save(model: PreTrainedModel, folder: Path) -> None:
    if model.can_generate():
        model.generation_config.eos_token_id = 0
    model.save_pretrained(folder)


IMPORTS = (
    "moestro.cli",
    "moestro.hf.generate",
    "moestro.hf.text_model",
    "moestro.hf.quantization",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
)


@pytest.fixture(scope="session")
def forked() -> str:
    """How a shell starts `python -m moestro` as a fork of a process that has imported everything."""
    return shlex.join([*python(*IMPORTS), "-m", "moestro"])


@pytest.fixture
def broken(model_folder: Path, tmp_path: Path) -> Callable[[str], str]:
    """Makes a model that cannot be used, by what is wrong with it."""

    def make(fault: str) -> str:
        folder = tmp_path / "model"
        if fault == "absent":
            return str(tmp_path / "nowhere")
        if fault == "hub":
            return "moestro-tests/no-such-model"
        if fault == "nobody":
            return "~nobody-of-this-name/x"
        if fault == "name":
            return "a:b"
        shutil.copytree(model_folder, folder)
        FAULTS[fault](folder)
        return str(folder)

    return make


def _without(*names: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return change


def _dense(folder: Path) -> None:
    _save(Qwen3ForCausalLM(Qwen3Config(**SIZES)), folder)


def _image(folder: Path) -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    _save(ViTModel(ViTConfig(image_size=16, patch_size=8, **sizes)), folder)


def _unknown(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "no_such_architecture"}))


def _cut(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def _rename_weight(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights["unknown"] = weights.pop("model.norm.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _wider(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 24}))


def _wrong_type(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_experts": "many"}))


def _empty_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")


FAULTS: dict[str, Callable[[Path], None]] = {
    "empty": _without("config.json"),
    "no tokenizer": _without("tokenizer.json", "tokenizer_config.json"),
    "no weights": _without("model.safetensors"),
    "dense": _dense,
    "image": _image,
    "unknown": _unknown,
    "cut": _cut,
    "missing weight": _rename_weight,
    "other shapes": _wider,
    "wrong type": _wrong_type,
    "empty tokenizer": _empty_tokenizer,
}
