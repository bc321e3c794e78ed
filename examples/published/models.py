"""The published models."""

from __future__ import annotations

import torch

from published import configs, layouts
from published.configs import tiny
from published.family import Config, Published
from published.tensors import Apart, Linear, mxfp4_blocks, rows_together, transposed


def _alternating_attention(config: Config) -> Config:
    kinds = ("sliding_attention", "full_attention")
    return {"layer_types": [kinds[layer % 2] for layer in range(config["num_hidden_layers"])]}


def _gpt_oss(num_layers: int, num_experts: int, repository: str, shards: int) -> Published:
    return Published(
        repository,
        configs.GPT_OSS | {"num_hidden_layers": num_layers, "num_local_experts": num_experts},
        layouts.gpt_oss,
        mxfp4_blocks,
        tiny(
            head_dim=16,
            hidden_size=96,
            intermediate_size=64,
            num_attention_heads=4,
            num_hidden_layers=2,
            num_key_value_heads=2,
            num_local_experts=num_experts // 4,
            sliding_window=8,
        ),
        generation={
            "bos_token_id": 199998,
            "do_sample": True,
            "eos_token_id": [200002, 199999, 200012],
            "pad_token_id": 199999,
        },
        per_layer=_alternating_attention,
        shards=shards,
        first_file=0,
        fusable=False,
    )


def _qwen3_kept(config: Config) -> Config:
    """What Qwen's FP8 checkpoints name as not quantised, layer by layer."""
    parts = ("input_layernorm", "mlp.gate", "post_attention_layernorm")
    layers = range(config["num_hidden_layers"])
    kept = ["lm_head", *(f"model.layers.{layer}.{part}" for layer in layers for part in parts)]
    return {"quantization_config": configs.FP8 | {"modules_to_not_convert": kept}}


def _llama4_layers(config: Config) -> Config:
    layers = range(config["text_config"]["num_hidden_layers"])
    rope = [int((layer + 1) % 4 != 0) for layer in layers]
    return {"text_config": {"moe_layers": list(layers), "no_rope_layers": rope}}


PUBLISHED = {
    "gpt-oss-20b": _gpt_oss(24, 32, "openai/gpt-oss-20b", 3),
    "gpt-oss-120b": _gpt_oss(36, 128, "openai/gpt-oss-120b", 15),
    "deepseek-v3": Published(
        "deepseek-ai/DeepSeek-V3",
        configs.DEEPSEEK_V3,
        layouts.deepseek_v3,
        Apart(Linear(torch.float32)),
        # Blocks that are cut off are alone in their dimension: Transformers computes a block's height as rows / blocks.
        tiny(
            first_k_dense_replace=1,
            hidden_size=256,
            intermediate_size=384,
            kv_lora_rank=64,
            moe_intermediate_size=96,
            n_routed_experts=16,
            num_attention_heads=4,
            num_experts_per_tok=4,
            num_hidden_layers=3,
            num_key_value_heads=4,
            q_lora_rank=128,
            qk_nope_head_dim=32,
            qk_rope_head_dim=32,
            v_head_dim=32,
        ),
        generation={"_from_model_config": True, "bos_token_id": 0, "eos_token_id": 1},
        shards=163,
        file_name="model-{:05d}-of-{:06d}.safetensors",
        own_formats=False,
        fusable=False,
    ),
    "qwen3-30b-a3b": Published(
        "Qwen/Qwen3-30B-A3B",
        configs.QWEN3,
        layouts.qwen3,
        Apart(),
        configs.TINY_QWEN3,
        configs.QWEN3_GENERATION,
        shards=16,
    ),
    "qwen3-30b-a3b-fp8": Published(
        "Qwen/Qwen3-30B-A3B-FP8",
        configs.QWEN3,
        layouts.qwen3_fp8,
        Apart(Linear(torch.bfloat16)),
        configs.TINY_QWEN3 | {"hidden_size": 256, "head_dim": 32, "moe_intermediate_size": 96},
        configs.QWEN3_GENERATION,
        per_layer=_qwen3_kept,
        shards=7,
        own_formats=False,
        fusable=False,
    ),
    "qwen3-235b-a22b": Published(
        "Qwen/Qwen3-235B-A22B",
        configs.QWEN3
        | {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "max_window_layers": 94,
            "moe_intermediate_size": 1536,
            "num_attention_heads": 64,
            "num_hidden_layers": 94,
        },
        layouts.qwen3,
        Apart(),
        configs.TINY_QWEN3 | {"num_attention_heads": 8},
        configs.QWEN3_GENERATION,
        shards=118,
    ),
    "qwen2-moe": Published(
        "Qwen/Qwen1.5-MoE-A2.7B", configs.QWEN2, layouts.qwen2, Apart(), configs.TINY_QWEN2, shards=8
    ),
    "qwen2-57b-a14b": Published(
        "Qwen/Qwen2-57B-A14B", configs.QWEN2_57B, layouts.qwen2, Apart(), configs.TINY_QWEN2 | {"num_experts": 16}
    ),
    "olmoe": Published(
        "allenai/OLMoE-1B-7B-0924",
        configs.OLMOE,
        layouts.olmoe,
        Apart(),
        tiny(
            hidden_size=72,
            intermediate_size=40,
            num_attention_heads=4,
            num_experts=16,
            num_hidden_layers=2,
            num_key_value_heads=4,
        ),
        generation={"_from_model_config": True, "eos_token_id": 50279, "pad_token_id": 1},
        shards=3,
    ),
    "mixtral-8x7b": Published(
        "mistralai/Mixtral-8x7B-v0.1",
        configs.MIXTRAL,
        layouts.mixtral,
        Apart(names=("w1", "w3", "w2")),
        tiny(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_hidden_layers=2, num_key_value_heads=2),
        generation={"_from_model_config": True, "bos_token_id": 1, "eos_token_id": 2},
        shards=19,
    ),
    "dbrx": Published(
        "databricks/dbrx-base",
        configs.DBRX,
        layouts.dbrx,
        rows_together,
        {
            "attn_config": {"kv_n_heads": 2},
            "d_model": 64,
            "ffn_config": {"ffn_hidden_size": 48},
            "max_seq_len": 256,
            "n_heads": 4,
            "n_layers": 2,
            "vocab_size": configs.TINY_VOCABULARY,
        },
        layers="n_layers",
        shards=61,
        fusable=False,
    ),
    "llama4-scout": Published(
        "meta-llama/Llama-4-Scout-17B-16E",
        configs.LLAMA4_SCOUT,
        layouts.llama4,
        transposed,
        {
            "boi_token_index": 300,
            "eoi_token_index": 301,
            "image_token_index": 302,
            "text_config": tiny(
                head_dim=16,
                hidden_size=64,
                intermediate_size=48,
                intermediate_size_mlp=96,
                num_attention_heads=4,
                num_hidden_layers=4,
                num_key_value_heads=2,
            ),
            "vision_config": {
                "hidden_size": 32,
                "image_size": 28,
                "intermediate_size": 64,
                "num_attention_heads": 2,
                "num_hidden_layers": 1,
                "projector_input_dim": 48,
                "projector_output_dim": 48,
                "vision_output_dim": 48,
            },
        },
        generation={
            "bos_token_id": 200000,
            "do_sample": True,
            "eos_token_id": [200001, 200007, 200008],
            "pad_token_id": 200018,
            "temperature": 0.6,
            "top_p": 0.9,
        },
        per_layer=_llama4_layers,
        text="text_config",
        shards=50,
        fusable=False,
    ),
    "glm4-moe": Published(
        "zai-org/GLM-4.5-Air",
        configs.GLM_45_AIR,
        layouts.glm4,
        Apart(),
        tiny(
            head_dim=16,
            hidden_size=64,
            intermediate_size=96,
            moe_intermediate_size=40,
            n_routed_experts=16,
            num_attention_heads=4,
            num_experts_per_tok=4,
            num_hidden_layers=3,
            num_key_value_heads=2,
        ),
        generation={"_from_model_config": True, "eos_token_id": [151329, 151336, 151338], "pad_token_id": 151329},
        shards=47,
    ),
}
"""By the name that `--like` takes."""
