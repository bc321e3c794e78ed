"""Small checkpoints in published layouts, what Transformers makes of them, and what is in their files.

Low precision is undone here by code that shares nothing with the package: scales repeated over their blocks, a table
of the sixteen e2m1 values.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import make_checkpoint as mc
from tolerances import bit_equal

FAMILIES = [
    "gpt-oss-20b",
    "deepseek-v3",
    "qwen3-30b-a3b",
    "qwen3-30b-a3b-fp8",
    "qwen2-moe",
    "olmoe",
    "mixtral-8x7b",
    "dbrx",
    "llama4-scout",
    "glm4-moe",
]
FP8 = ["deepseek-v3", "qwen3-30b-a3b-fp8"]
FUSABLE = ["qwen3-30b-a3b", "qwen2-moe", "olmoe", "mixtral-8x7b", "glm4-moe"]
DROPPED = re.compile(r"model\.layers\.3\.")
"""The multi-token prediction layer of the tiny DeepSeek-V3 and GLM-4: Transformers neither loads nor saves it."""

E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
IDS = torch.arange(24).view(2, 12) * 10 % 60


@functools.cache
def _plan(like, fused):
    return mc.plan(mc.Request(like, tiny=True, fused=fused))


class Checkpoints:
    """Makes each checkpoint once, below one folder."""

    def __init__(self, root):
        self.root = root
        self.expected = functools.cache(self.expected)

    def folder(self, like, fused=False, shard_bytes=None):
        """A tiny checkpoint as published."""
        folder = self.root / f"{like}-{fused}-{shard_bytes}"
        if not folder.exists():
            mc.write(_plan(like, fused), folder, shard_bytes=shard_bytes)
        return folder

    def copy(self, like, target, **options):
        """The same, for a test that changes it."""
        return Path(shutil.copytree(self.folder(like, **options), target))

    def plain(self, like, fused=False):
        """The same weights in float32, in the layout in which Transformers holds no scales."""
        source, folder = self.folder(like, fused), self.root / f"{like}-{fused}-plain"
        config = json.loads((source / "config.json").read_text())
        if config.pop("quantization_config", None) is None:
            return source
        if folder.exists():
            return folder
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        save_file(dequantised(read(source)), folder / "model.safetensors", {"format": "pt"})
        return folder

    def expected(self, like, fused=False):
        """Logits of Transformers' own code on the plain weights, in float32."""
        model = AutoModelForCausalLM.from_pretrained(
            self.plain(like, fused), dtype=torch.float32, experts_implementation="eager"
        )
        return logits(model)

    def wide(self):
        """Experts whose sizes are multiples of every format's group, in bfloat16, saved by Transformers."""
        folder = self.root / "wide"
        if folder.exists():
            return folder
        config = Qwen3MoeConfig(
            vocab_size=64,
            hidden_size=128,
            intermediate_size=64,
            moe_intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            num_experts=4,
            num_experts_per_tok=2,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=2,
        )
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1) if parameter.dim() > 1 else None
        model.to(torch.bfloat16).save_pretrained(folder)
        return folder


def logits(model, ids=IDS):
    with torch.no_grad():
        return model.eval()(ids).logits


def read(folder):
    """Every tensor of a checkpoint, read by safetensors itself."""
    tensors = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    return tensors


def differing(first, second):
    """Names of tensors that are not the same, bit for bit, in both."""
    same = {name for name in first.keys() & second.keys() if bit_equal(first[name], second[name])}
    return (first.keys() | second.keys()) - same


def dequantised(tensors):
    """Published FP8 and MXFP4 as float32."""
    plain = {}
    for name, tensor in tensors.items():
        if name.endswith(("_scales", "_scale_inv")):
            continue
        if name.endswith("_blocks"):
            stem = name.removesuffix("_blocks")
            plain[stem] = mxfp4(tensor, tensors[f"{stem}_scales"]).transpose(1, 2).contiguous()
        elif tensor.dtype == torch.float8_e4m3fn:
            plain[name] = blocks_128(tensor, tensors[f"{name}_scale_inv"])
        else:
            plain[name] = tensor.float()
    return plain


def mxfp4(blocks, scales):
    """[..., G, 16] bytes and [..., G] exponents -> [..., 32 * G]."""
    values = torch.stack([E2M1[(blocks & 15).long()], E2M1[(blocks >> 4).long()]], -1).flatten(-2)
    return (values * torch.exp2(scales.float() - 127)[..., None]).flatten(-2)


def blocks_128(data, scales):
    """[..., N, K] and one scale for each 128 x 128 -> [..., N, K]."""
    wide = scales.float().repeat_interleave(128, -2).repeat_interleave(128, -1)
    return data.float() * wide[..., : data.shape[-2], : data.shape[-1]]
