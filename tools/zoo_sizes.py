"""Small numbers for the fields of Transformers' configurations, by name; and what a family's own rules ask for."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "d_model": 32,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "top_k_experts": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "shared_expert_intermediate_size": 24,
    "shared_intermediate_size": 24,
    "shared_experts_intermediate_size": 24,
    "first_k_dense_replace": 0,
    "num_dense_layers": 0,
    "max_position_embeddings": 128,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "index_topk": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "mlp_only_layers": [],
    "mlp_layer_types": ["sparse", "sparse"],
}

LATENT = {"num_key_value_heads": 4}
"""Where keys and values come from one latent vector (`kv_lora_rank`), each head has its own."""

HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
"""Where the default pattern repeats after more than two layers (`linear_*` sizes), one layer of each kind."""

OVERRIDES: dict[str, dict[str, Any]] = {
    "BailingHybridConfig": HYBRID,
    "DbrxConfig": {
        "n_heads": 4,
        "n_layers": 2,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "DeepseekV4Config": {"mlp_layer_types": ["hash_moe", "moe"]},
    # Sums of two bfloat16 scores tie so often that a second layer's router would measure nothing but ties.
    "DogeConfig": {
        "is_moe": True,
        "num_hidden_layers": 1,
        "num_experts": 16,
        "num_experts_per_tok": 4,
    },
    "Ernie4_5_VLMoeTextConfig": {
        "moe_intermediate_size": [24, 16],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    },
    "Gemma4TextConfig": {
        "enable_moe_block": True,
        "global_head_dim": 8,
        "vocab_size_per_layer_input": 96,
        "hidden_size_per_layer_input": 8,
    },
    "Glm4vMoeTextConfig": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0]}},
    "Glm5NextTextConfig": {"index_kpool": 2, "qk_rope_head_dim": 0} | HYBRID,
    "GraniteMoeHybridConfig": {"mamba_n_heads": 4, "mamba_d_state": 8, "mamba_chunk_size": 8} | HYBRID,
    "JambaConfig": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 1,
        "expert_layer_offset": 0,
        "mamba_d_state": 8,
        "use_mamba_kernels": False,
    },
    "KimiLinearConfig": HYBRID,
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "LongcatFlashConfig": {
        "ffn_hidden_size": 40,
        "expert_ffn_hidden_size": 24,
        "zero_expert_num": 4,
        "moe_topk": 3,
    },
    "MuseSparkTextConfig": {"moe_hidden_size": 24},
    "NemotronHConfig": {
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 8,
        "moe_shared_expert_intermediate_size": 24,
    },
    "NllbMoeConfig": {
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_ffn_dim": 40,
        "decoder_ffn_dim": 40,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_sparse_step": 1,
        "decoder_sparse_step": 1,
    },
    "Qwen3_5MoeTextConfig": HYBRID,
    "Qwen3NextConfig": HYBRID,
    "Qwen4ExpTextConfig": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
        "hc_lowrank": 8,
    }
    | HYBRID,
    "Step3p7TextConfig": {"swiglu_limits": [0.0, 0.5], "swiglu_limits_shared": [0.0, 0.5], "sliding_window": 8},
    "SwitchTransformersConfig": {
        "d_kv": 8,
        "d_ff": 40,
        "num_heads": 4,
        "num_decoder_layers": 2,
        "num_sparse_encoder_layers": 2,
        "num_sparse_decoder_layers": 2,
        "expert_capacity": 2,
        "num_experts": 4,
    },
    "UnlimitedOcrTextConfig": LATENT,
    "VitPoseBackboneConfig": {"num_experts": 2, "part_features": 8, "image_size": [32, 32]},
    "ZayaConfig": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}
"""By configuration class, what cannot be shrunk field by field."""
