"""What was published, written down by hand: sizes of whole checkpoints, their files, and the tensors of a layer.

WEIGHTS is what the Hugging Face hub counts by dtype in a repository's safetensors files, or, for gpt-oss, Mixtral and
Qwen3-30B-A3B, the total_size of its index. LAYERS is the list of tensors of the first layer with experts.
"""

from __future__ import annotations

WEIGHTS: dict[str, dict[str, int]] = {
    "gpt-oss-20b": {"BF16": 1_804_459_584, "U8": 13_761_264_768 - 2 * 1_804_459_584},
    "gpt-oss-120b": {"BF16": 2_167_371_072, "U8": 65_248_815_744 - 2 * 2_167_371_072},
    "deepseek-v3": {"BF16": 3_918_786_560, "F8_E4M3": 680_571_043_840, "F32": 41_555_600},
    "qwen3-30b-a3b": {"BF16": 61_064_245_248 // 2},
    "qwen3-30b-a3b-fp8": {"BF16": 636_948_480, "F8_E4M3": 29_896_998_912},
    "qwen3-235b-a22b": {"BF16": 235_093_634_560},
    "qwen2-moe": {"BF16": 14_315_784_192},
    "olmoe": {"BF16": 6_919_161_856},
    "mixtral-8x7b": {"BF16": 93_405_585_408 // 2},
    "dbrx": {"BF16": 131_596_523_520},
    "llama4-scout": {"BF16": 108_641_793_536},
    "glm4-moe": {"BF16": 110_468_824_832 - 46 * 128, "F32": 46 * 128},
}

FILES = {
    "gpt-oss-20b": ("model-00000-of-00002.safetensors", "model-00002-of-00002.safetensors", 3),
    "gpt-oss-120b": ("model-00000-of-00014.safetensors", "model-00014-of-00014.safetensors", 15),
    "deepseek-v3": ("model-00001-of-000163.safetensors", "model-00163-of-000163.safetensors", 163),
    "qwen3-30b-a3b": ("model-00001-of-00016.safetensors", "model-00016-of-00016.safetensors", 16),
    "qwen3-235b-a22b": ("model-00001-of-00118.safetensors", "model-00118-of-00118.safetensors", 118),
    "olmoe": ("model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors", 3),
    "mixtral-8x7b": ("model-00001-of-00019.safetensors", "model-00019-of-00019.safetensors", 19),
    "dbrx": ("model-00001-of-00061.safetensors", "model-00061-of-00061.safetensors", 61),
    "llama4-scout": ("model-00001-of-00050.safetensors", "model-00050-of-00050.safetensors", 50),
    "glm4-moe": ("model-00001-of-00047.safetensors", "model-00047-of-00047.safetensors", 47),
}

_QWEN3 = """
    input_layernorm.weight BF16 2048
    post_attention_layernorm.weight BF16 2048
    self_attn.q_proj.weight BF16 4096x2048
    self_attn.k_proj.weight BF16 512x2048
    self_attn.v_proj.weight BF16 512x2048
    self_attn.o_proj.weight BF16 2048x4096
    self_attn.q_norm.weight BF16 128
    self_attn.k_norm.weight BF16 128
    mlp.gate.weight BF16 128x2048
    mlp.experts.0.gate_proj.weight BF16 768x2048
    mlp.experts.0.up_proj.weight BF16 768x2048
    mlp.experts.0.down_proj.weight BF16 2048x768
"""

LAYERS = {
    "gpt-oss-20b": (
        "model.layers.0.",
        """
        input_layernorm.weight BF16 2880
        post_attention_layernorm.weight BF16 2880
        self_attn.q_proj.weight BF16 4096x2880
        self_attn.q_proj.bias BF16 4096
        self_attn.k_proj.weight BF16 512x2880
        self_attn.k_proj.bias BF16 512
        self_attn.v_proj.weight BF16 512x2880
        self_attn.v_proj.bias BF16 512
        self_attn.o_proj.weight BF16 2880x4096
        self_attn.o_proj.bias BF16 2880
        self_attn.sinks BF16 64
        mlp.router.weight BF16 32x2880
        mlp.router.bias BF16 32
        mlp.experts.gate_up_proj_blocks U8 32x5760x90x16
        mlp.experts.gate_up_proj_scales U8 32x5760x90
        mlp.experts.gate_up_proj_bias BF16 32x5760
        mlp.experts.down_proj_blocks U8 32x2880x90x16
        mlp.experts.down_proj_scales U8 32x2880x90
        mlp.experts.down_proj_bias BF16 32x2880
        """,
    ),
    "deepseek-v3": (
        "model.layers.3.",
        """
        input_layernorm.weight BF16 7168
        post_attention_layernorm.weight BF16 7168
        self_attn.q_a_proj.weight F8_E4M3 1536x7168
        self_attn.q_a_proj.weight_scale_inv F32 12x56
        self_attn.q_a_layernorm.weight BF16 1536
        self_attn.q_b_proj.weight F8_E4M3 24576x1536
        self_attn.q_b_proj.weight_scale_inv F32 192x12
        self_attn.kv_a_proj_with_mqa.weight F8_E4M3 576x7168
        self_attn.kv_a_proj_with_mqa.weight_scale_inv F32 5x56
        self_attn.kv_a_layernorm.weight BF16 512
        self_attn.kv_b_proj.weight F8_E4M3 32768x512
        self_attn.kv_b_proj.weight_scale_inv F32 256x4
        self_attn.o_proj.weight F8_E4M3 7168x16384
        self_attn.o_proj.weight_scale_inv F32 56x128
        mlp.gate.weight BF16 256x7168
        mlp.gate.e_score_correction_bias F32 256
        mlp.experts.0.gate_proj.weight F8_E4M3 2048x7168
        mlp.experts.0.gate_proj.weight_scale_inv F32 16x56
        mlp.experts.0.up_proj.weight F8_E4M3 2048x7168
        mlp.experts.0.up_proj.weight_scale_inv F32 16x56
        mlp.experts.0.down_proj.weight F8_E4M3 7168x2048
        mlp.experts.0.down_proj.weight_scale_inv F32 56x16
        mlp.shared_experts.gate_proj.weight F8_E4M3 2048x7168
        mlp.shared_experts.gate_proj.weight_scale_inv F32 16x56
        mlp.shared_experts.up_proj.weight F8_E4M3 2048x7168
        mlp.shared_experts.up_proj.weight_scale_inv F32 16x56
        mlp.shared_experts.down_proj.weight F8_E4M3 7168x2048
        mlp.shared_experts.down_proj.weight_scale_inv F32 56x16
        """,
    ),
    "qwen3-30b-a3b": ("model.layers.0.", _QWEN3),
    "qwen3-30b-a3b-fp8": (
        "model.layers.0.",
        """
        input_layernorm.weight BF16 2048
        post_attention_layernorm.weight BF16 2048
        self_attn.q_proj.weight F8_E4M3 4096x2048
        self_attn.q_proj.weight_scale_inv BF16 32x16
        self_attn.k_proj.weight F8_E4M3 512x2048
        self_attn.k_proj.weight_scale_inv BF16 4x16
        self_attn.v_proj.weight F8_E4M3 512x2048
        self_attn.v_proj.weight_scale_inv BF16 4x16
        self_attn.o_proj.weight F8_E4M3 2048x4096
        self_attn.o_proj.weight_scale_inv BF16 16x32
        self_attn.q_norm.weight BF16 128
        self_attn.k_norm.weight BF16 128
        mlp.gate.weight BF16 128x2048
        mlp.experts.0.gate_proj.weight F8_E4M3 768x2048
        mlp.experts.0.gate_proj.weight_scale_inv BF16 6x16
        mlp.experts.0.up_proj.weight F8_E4M3 768x2048
        mlp.experts.0.up_proj.weight_scale_inv BF16 6x16
        mlp.experts.0.down_proj.weight F8_E4M3 2048x768
        mlp.experts.0.down_proj.weight_scale_inv BF16 16x6
        """,
    ),
    "qwen2-moe": (
        "model.layers.0.",
        """
        input_layernorm.weight BF16 2048
        post_attention_layernorm.weight BF16 2048
        self_attn.q_proj.weight BF16 2048x2048
        self_attn.q_proj.bias BF16 2048
        self_attn.k_proj.weight BF16 2048x2048
        self_attn.k_proj.bias BF16 2048
        self_attn.v_proj.weight BF16 2048x2048
        self_attn.v_proj.bias BF16 2048
        self_attn.o_proj.weight BF16 2048x2048
        mlp.gate.weight BF16 60x2048
        mlp.experts.0.gate_proj.weight BF16 1408x2048
        mlp.experts.0.up_proj.weight BF16 1408x2048
        mlp.experts.0.down_proj.weight BF16 2048x1408
        mlp.shared_expert.gate_proj.weight BF16 5632x2048
        mlp.shared_expert.up_proj.weight BF16 5632x2048
        mlp.shared_expert.down_proj.weight BF16 2048x5632
        mlp.shared_expert_gate.weight BF16 1x2048
        """,
    ),
    "olmoe": (
        "model.layers.0.",
        """
        input_layernorm.weight BF16 2048
        post_attention_layernorm.weight BF16 2048
        self_attn.q_proj.weight BF16 2048x2048
        self_attn.k_proj.weight BF16 2048x2048
        self_attn.v_proj.weight BF16 2048x2048
        self_attn.o_proj.weight BF16 2048x2048
        self_attn.q_norm.weight BF16 2048
        self_attn.k_norm.weight BF16 2048
        mlp.gate.weight BF16 64x2048
        mlp.experts.0.gate_proj.weight BF16 1024x2048
        mlp.experts.0.up_proj.weight BF16 1024x2048
        mlp.experts.0.down_proj.weight BF16 2048x1024
        """,
    ),
    "mixtral-8x7b": (
        "model.layers.0.",
        """
        input_layernorm.weight BF16 4096
        post_attention_layernorm.weight BF16 4096
        self_attn.q_proj.weight BF16 4096x4096
        self_attn.k_proj.weight BF16 1024x4096
        self_attn.v_proj.weight BF16 1024x4096
        self_attn.o_proj.weight BF16 4096x4096
        block_sparse_moe.gate.weight BF16 8x4096
        block_sparse_moe.experts.0.w1.weight BF16 14336x4096
        block_sparse_moe.experts.0.w2.weight BF16 4096x14336
        block_sparse_moe.experts.0.w3.weight BF16 14336x4096
        """,
    ),
    "dbrx": (
        "transformer.blocks.0.",
        """
        norm_attn_norm.norm_1.weight BF16 6144
        norm_attn_norm.norm_2.weight BF16 6144
        norm_attn_norm.attn.Wqkv.weight BF16 8192x6144
        norm_attn_norm.attn.out_proj.weight BF16 6144x6144
        ffn.router.layer.weight BF16 16x6144
        ffn.experts.mlp.w1 BF16 172032x6144
        ffn.experts.mlp.v1 BF16 172032x6144
        ffn.experts.mlp.w2 BF16 172032x6144
        """,
    ),
    "llama4-scout": (
        "language_model.model.layers.0.",
        """
        input_layernorm.weight BF16 5120
        post_attention_layernorm.weight BF16 5120
        self_attn.q_proj.weight BF16 5120x5120
        self_attn.k_proj.weight BF16 1024x5120
        self_attn.v_proj.weight BF16 1024x5120
        self_attn.o_proj.weight BF16 5120x5120
        feed_forward.router.weight BF16 16x5120
        feed_forward.experts.gate_up_proj BF16 16x5120x16384
        feed_forward.experts.down_proj BF16 16x8192x5120
        feed_forward.shared_expert.gate_proj.weight BF16 8192x5120
        feed_forward.shared_expert.up_proj.weight BF16 8192x5120
        feed_forward.shared_expert.down_proj.weight BF16 5120x8192
        """,
    ),
    "glm4-moe": (
        "model.layers.1.",
        """
        input_layernorm.weight BF16 4096
        post_attention_layernorm.weight BF16 4096
        self_attn.q_proj.weight BF16 12288x4096
        self_attn.q_proj.bias BF16 12288
        self_attn.k_proj.weight BF16 1024x4096
        self_attn.k_proj.bias BF16 1024
        self_attn.v_proj.weight BF16 1024x4096
        self_attn.v_proj.bias BF16 1024
        self_attn.o_proj.weight BF16 4096x12288
        mlp.gate.weight BF16 128x4096
        mlp.gate.e_score_correction_bias F32 128
        mlp.experts.0.gate_proj.weight BF16 1408x4096
        mlp.experts.0.up_proj.weight BF16 1408x4096
        mlp.experts.0.down_proj.weight BF16 4096x1408
        mlp.shared_experts.gate_proj.weight BF16 1408x4096
        mlp.shared_experts.up_proj.weight BF16 1408x4096
        mlp.shared_experts.down_proj.weight BF16 4096x1408
        """,
    ),
}
"""By model: the first part of the names, and name, dtype and shape of everything below it; expert numbers as 0."""
