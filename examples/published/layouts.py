"""Tensor names and shapes, family by family: from a configuration and a way to store experts to every tensor."""

from __future__ import annotations

from collections.abc import Iterator

from published.family import Config, Experts
from published.tensors import BF16, F32, Apart, Fill, Item, Linear, Stack, bias, item, norm, normal, router, table

BF16_LINEAR = Linear()


def opening(c: Config, prefix: str = "model") -> Iterator[Item]:
    """What comes before the layers: the embedding."""
    yield table(f"{prefix}.embed_tokens", c["vocab_size"], c["hidden_size"])


def closing(c: Config, prefix: str = "model", head: str = "lm_head") -> Iterator[Item]:
    """What comes after the layers: the last norm and the head."""
    yield norm(f"{prefix}.norm", c["hidden_size"])
    yield from BF16_LINEAR(head, c["vocab_size"], c["hidden_size"])


def norms(at: str, c: Config) -> Iterator[Item]:
    """The two norms of a layer."""
    yield norm(f"{at}.input_layernorm", c["hidden_size"])
    yield norm(f"{at}.post_attention_layernorm", c["hidden_size"])


def attention(at: str, c: Config, linear: Linear = BF16_LINEAR, biased: str = "") -> Iterator[Item]:
    """Grouped-query attention; `biased` names the projections with a bias, such as "qkv"."""
    heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
    dim = c.get("head_dim") or c["hidden_size"] // heads
    for letter, rows, columns in (
        ("q", heads * dim, c["hidden_size"]),
        ("k", kv_heads * dim, c["hidden_size"]),
        ("v", kv_heads * dim, c["hidden_size"]),
        ("o", c["hidden_size"], heads * dim),
    ):
        yield from linear(f"{at}.self_attn.{letter}_proj", rows, columns)
        if letter in biased:
            yield bias(f"{at}.self_attn.{letter}_proj.bias", rows)


def gated(at: str, hidden_size: int, intermediate_size: int, linear: Linear = BF16_LINEAR) -> Iterator[Item]:
    """A gated feed-forward network of three linear layers."""
    yield from linear(f"{at}.gate_proj", intermediate_size, hidden_size)
    yield from linear(f"{at}.up_proj", intermediate_size, hidden_size)
    yield from linear(f"{at}.down_proj", hidden_size, intermediate_size)


def gpt_oss(c: Config, experts: Experts) -> Iterator[Item]:
    """gpt-oss: biases everywhere, attention sinks."""
    e, h, i = c["num_local_experts"], c["hidden_size"], c["intermediate_size"]
    yield from opening(c)
    for layer in range(c["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        yield from norms(at, c)
        yield from attention(at, c, biased="qkvo")
        yield item(f"{at}.self_attn.sinks", (c["num_attention_heads"],), normal(1))
        yield router(f"{at}.mlp.router", e, h)
        yield bias(f"{at}.mlp.router.bias", e)
        yield from experts(Stack(f"{at}.mlp.experts", e, h, i))
        yield bias(f"{at}.mlp.experts.gate_up_proj_bias", e, 2 * i)
        yield bias(f"{at}.mlp.experts.down_proj_bias", e, h)
    yield from closing(c)


def qwen3(c: Config, experts: Experts) -> Iterator[Item]:
    """Qwen3-MoE in bfloat16."""
    return _qwen3(c, experts, BF16_LINEAR)


def qwen3_fp8(c: Config, experts: Experts) -> Iterator[Item]:
    """Qwen3-MoE in FP8: attention and experts in blocks, everything else in bfloat16."""
    return _qwen3(c, experts, Linear(BF16))


def _qwen3(c: Config, experts: Experts, linear: Linear) -> Iterator[Item]:
    e, h = c["num_experts"], c["hidden_size"]
    yield from opening(c)
    for layer in range(c["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        yield from norms(at, c)
        yield from attention(at, c, linear)
        yield norm(f"{at}.self_attn.q_norm", c["head_dim"])
        yield norm(f"{at}.self_attn.k_norm", c["head_dim"])
        yield router(f"{at}.mlp.gate", e, h)
        yield from experts(Stack(f"{at}.mlp.experts", e, h, c["moe_intermediate_size"]))
    yield from closing(c)


def qwen2(c: Config, experts: Experts) -> Iterator[Item]:
    """Qwen2-MoE: a shared expert with a gate of its own."""
    e, h = c["num_experts"], c["hidden_size"]
    yield from opening(c)
    for layer in range(c["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        yield from norms(at, c)
        yield from attention(at, c, biased="qkv")
        yield router(f"{at}.mlp.gate", e, h)
        yield from experts(Stack(f"{at}.mlp.experts", e, h, c["moe_intermediate_size"]))
        yield from gated(f"{at}.mlp.shared_expert", h, c["shared_expert_intermediate_size"])
        yield router(f"{at}.mlp.shared_expert_gate", 1, h)
    yield from closing(c)


def olmoe(c: Config, experts: Experts) -> Iterator[Item]:
    """OLMoE: norms over all queries and all keys."""
    e, h = c["num_experts"], c["hidden_size"]
    kv = h // c["num_attention_heads"] * c["num_key_value_heads"]
    yield from opening(c)
    for layer in range(c["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        yield from norms(at, c)
        yield from attention(at, c)
        yield norm(f"{at}.self_attn.q_norm", h)
        yield norm(f"{at}.self_attn.k_norm", kv)
        yield router(f"{at}.mlp.gate", e, h)
        yield from experts(Stack(f"{at}.mlp.experts", e, h, c["intermediate_size"]))
    yield from closing(c)


def mixtral(c: Config, experts: Experts) -> Iterator[Item]:
    """Mixtral, whose experts lie in `block_sparse_moe`."""
    e, h = c["num_local_experts"], c["hidden_size"]
    yield from opening(c)
    for layer in range(c["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        yield from norms(at, c)
        yield from attention(at, c)
        yield router(f"{at}.block_sparse_moe.gate", e, h)
        yield from experts(Stack(f"{at}.block_sparse_moe.experts", e, h, c["intermediate_size"]))
    yield from closing(c)


def dbrx(c: Config, experts: Experts) -> Iterator[Item]:
    """DBRX: one matrix for queries, keys and values, one for the rows of all experts."""
    h, ffn = c["d_model"], c["ffn_config"]
    e = ffn["moe_num_experts"]
    qkv = h + 2 * c["attn_config"]["kv_n_heads"] * (h // c["n_heads"])
    yield table("transformer.wte", c["vocab_size"], h)
    for layer in range(c["n_layers"]):
        at = f"transformer.blocks.{layer}"
        yield norm(f"{at}.norm_attn_norm.norm_1", h)
        yield norm(f"{at}.norm_attn_norm.norm_2", h)
        yield from BF16_LINEAR(f"{at}.norm_attn_norm.attn.Wqkv", qkv, h)
        yield from BF16_LINEAR(f"{at}.norm_attn_norm.attn.out_proj", h, h)
        yield router(f"{at}.ffn.router.layer", e, h)
        yield from experts(Stack(f"{at}.ffn.experts.mlp", e, h, ffn["ffn_hidden_size"]))
    yield norm("transformer.norm_f", h)
    yield from BF16_LINEAR("lm_head", c["vocab_size"], h)


def glm4(c: Config, experts: Experts) -> Iterator[Item]:
    """GLM-4 MoE, its multi-token prediction layer included where the configuration counts one."""
    yield from opening(c)
    last = c["num_hidden_layers"]
    for layer in range(last + c["num_nextn_predict_layers"]):
        at = f"model.layers.{layer}"
        yield from norms(at, c)
        yield from attention(at, c, biased="qkv")
        yield from _routed_or_dense(at, layer, c, experts if layer < last else Apart(), BF16_LINEAR)
        if layer >= last:
            yield from _prediction(at, c)
    yield from closing(c)


def deepseek_v3(c: Config, experts: Experts) -> Iterator[Item]:
    """DeepSeek-V3: latent attention, FP8 linears, and the multi-token prediction layer where one is counted."""
    linear = Linear(F32)
    yield from opening(c)
    last = c["num_hidden_layers"]
    for layer in range(last + c["num_nextn_predict_layers"]):
        at = f"model.layers.{layer}"
        yield from norms(at, c)
        yield from _latent_attention(at, c, linear)
        yield from _routed_or_dense(at, layer, c, experts if layer < last else Apart(linear), linear)
        if layer >= last:
            yield from _prediction(at, c)
    yield from closing(c)


def _latent_attention(at: str, c: Config, linear: Linear) -> Iterator[Item]:
    h, heads, q_rank, kv_rank = c["hidden_size"], c["num_attention_heads"], c["q_lora_rank"], c["kv_lora_rank"]
    nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    yield from linear(f"{at}.self_attn.q_a_proj", q_rank, h)
    yield norm(f"{at}.self_attn.q_a_layernorm", q_rank)
    yield from linear(f"{at}.self_attn.q_b_proj", heads * (nope + rope), q_rank)
    yield from linear(f"{at}.self_attn.kv_a_proj_with_mqa", kv_rank + rope, h)
    yield norm(f"{at}.self_attn.kv_a_layernorm", kv_rank)
    yield from linear(f"{at}.self_attn.kv_b_proj", heads * (nope + value), kv_rank)
    yield from linear(f"{at}.self_attn.o_proj", h, heads * value)


def _routed_or_dense(at: str, layer: int, c: Config, experts: Experts, linear: Linear) -> Iterator[Item]:
    h, i, e = c["hidden_size"], c["moe_intermediate_size"], c["n_routed_experts"]
    if layer < c["first_k_dense_replace"]:
        yield from gated(f"{at}.mlp", h, c["intermediate_size"], linear)
        return
    yield router(f"{at}.mlp.gate", e, h)
    yield item(f"{at}.mlp.gate.e_score_correction_bias", (e,), Fill("normal", 0.01), F32)
    yield from experts(Stack(f"{at}.mlp.experts", e, h, i))
    yield from gated(f"{at}.mlp.shared_experts", h, i * c["n_shared_experts"], linear)


def _prediction(at: str, c: Config) -> Iterator[Item]:
    """What a multi-token prediction layer has beyond an ordinary one: a copy of the frame, and a way in."""
    h = c["hidden_size"]
    yield table(f"{at}.embed_tokens", c["vocab_size"], h)
    yield norm(f"{at}.enorm", h)
    yield norm(f"{at}.hnorm", h)
    yield from BF16_LINEAR(f"{at}.eh_proj", h, 2 * h)
    yield norm(f"{at}.shared_head.norm", h)
    yield from BF16_LINEAR(f"{at}.shared_head.head", c["vocab_size"], h)


def llama4(config: Config, experts: Experts) -> Iterator[Item]:
    """Llama 4 as published: the language model, the vision model and the projector between them."""
    c = config["text_config"]
    e, h = c["num_local_experts"], c["hidden_size"]
    yield from opening(c, "language_model.model")
    for layer in range(c["num_hidden_layers"]):
        at = f"language_model.model.layers.{layer}"
        yield from norms(at, c)
        yield from attention(at, c)
        yield router(f"{at}.feed_forward.router", e, h)
        yield from experts(Stack(f"{at}.feed_forward.experts", e, h, c["intermediate_size"]))
        yield from gated(f"{at}.feed_forward.shared_expert", h, c["intermediate_size"])
    yield from closing(c, "language_model.model", "language_model.lm_head")
    vision = config["vision_config"]
    yield from _vision(vision)
    yield from BF16_LINEAR("multi_modal_projector.linear_1", h, vision["vision_output_dim"])


def _vision(c: Config) -> Iterator[Item]:
    h, i = c["hidden_size"], c["intermediate_size"]
    patches = (c["image_size"] // c["patch_size"]) ** 2
    yield item("vision_model.class_embedding", (h,), normal(h))
    yield item("vision_model.positional_embedding_vlm", (patches + 1, h), normal(h))
    yield from BF16_LINEAR("vision_model.patch_embedding.linear", h, c["num_channels"] * c["patch_size"] ** 2)
    for name in ("layernorm_pre", "layernorm_post"):
        yield from _layer_norm(f"vision_model.{name}", h)
    for layer in range(c["num_hidden_layers"]):
        at = f"vision_model.model.layers.{layer}"
        yield from _layer_norm(f"{at}.input_layernorm", h)
        yield from _layer_norm(f"{at}.post_attention_layernorm", h)
        names = [f"self_attn.{letter}_proj" for letter in "qkvo"]
        for name, rows, columns in [*((name, h, h) for name in names), ("mlp.fc1", i, h), ("mlp.fc2", h, i)]:
            yield from BF16_LINEAR(f"{at}.{name}", rows, columns)
            yield bias(f"{at}.{name}.bias", rows)
    yield from BF16_LINEAR("vision_model.vision_adapter.mlp.fc1", c["projector_input_dim"], i)
    yield from BF16_LINEAR("vision_model.vision_adapter.mlp.fc2", c["projector_output_dim"], c["projector_input_dim"])


def _layer_norm(name: str, size: int) -> Iterator[Item]:
    yield norm(name, size)
    yield bias(f"{name}.bias", size)
