"""Every MoE router of Transformers as a value of `Scoring`: one row a router class, and how to drive that class."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from moestro.routing import GroupLimit, GroupLimitedRouter, Scoring, TopKRouter, prune_experts, route, scale_experts
from moestro.types import Routing

H, E, K = 24, 16, 4


@dataclass(frozen=True)
class Attr:
    """A value that the family's configuration holds."""

    name: str

    def __repr__(self) -> str:
        return f"config.{self.name}"


@dataclass(frozen=True)
class Inverse:
    """One over a value that the family's configuration holds."""

    name: str

    def __repr__(self) -> str:
        return f"1 / config.{self.name}"


@dataclass(frozen=True)
class Family:
    """How one router class scores, and how the test runs it.

    Attributes:
        scoring: the fields of its `Scoring`, some of them an `Attr`.
        groups: the fields of its `GroupLimit`, or None.
        correction: where its correction bias is: an attribute path, "argument" for an argument of forward, or None.
        ours: None: a router module with its weights; else a function of the router, x and the config.
        theirs: None: forward returns (logits, weights, ids); else a function of the router, x, the config and the
            correction bias that returns the dense weights [T, E].
        build: how to make the router of a config.
        variants: overrides of the configuration to test.
        note: what the table says beside the value.
    """

    scoring: dict[str, Any]
    groups: dict[str, Any] | None = None
    correction: str | None = None
    ours: Callable[..., Routing] | None = None
    theirs: Callable[..., Tensor] | None = None
    build: Callable[..., nn.Module] = lambda cls, config: cls(config)
    variants: tuple[dict[str, Any], ...] = ({"norm_topk_prob": True}, {"norm_topk_prob": False})
    note: str = ""
    sizes: dict[str, int] = field(default_factory=dict)

    def scoring_for(self, config: SimpleNamespace) -> Scoring:
        return Scoring(**_resolve(self.scoring, config))

    def groups_for(self, config: SimpleNamespace) -> GroupLimit | None:
        if self.groups is None or config.n_group is None or config.topk_method == "greedy":
            return None
        return GroupLimit(**_resolve(self.groups, config))

    def text(self) -> str:
        """The value as the table shows it."""
        return f"Scoring({', '.join(f'{k}={v!r}' for k, v in self.scoring.items())})"


def _resolve(values: dict[str, Any], config: SimpleNamespace) -> dict[str, Any]:
    def resolve(value: Any) -> Any:
        if isinstance(value, Inverse):
            return 1 / getattr(config, value.name)
        return getattr(config, value.name) if isinstance(value, Attr) else value

    return {k: resolve(v) for k, v in values.items()}


def make_config(**overrides: Any) -> SimpleNamespace:
    """One configuration that holds what all of the router classes read; a name that is missing fails the test."""
    names: dict[str, Any] = dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), E
    ) | dict.fromkeys(("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k"), K)
    names |= {
        "hidden_size": H,
        "vocab_size": 50,
        "norm_topk_prob": True,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 2.5,
        "router_scaling_factor": 1.7,
        "route_scale": 1.3,
        "output_multiplier": 0.7,
        "moe_norm_min": 1e-12,
        "moe_router_logit_softcapping": 1.5,
        "moe_jitter_eps": None,
        "moe_normalize_expert_weights": 1,
        "router_jitter_noise": 0.01,
        "input_jitter_noise": 0.0,
        "use_expert_bias": True,
        "expert_selection_fn": "softmax",
        "scoring_func": "sqrtsoftplus",
        "rms_norm_eps": 1e-6,
        "router_hidden_size": 12,
        "n_shared_experts": 2,
        "zero_expert_num": 0,
        "router_bias": False,
        "router_dtype": "float32",
        "router_ignore_padding_tokens": False,
        "expert_capacity": 10**6,
        "moe_eval_capacity_token_fraction": 1.0,
        "second_expert_policy": "all",
        "normalize_router_prob_before_dropping": False,
        "batch_prioritized_routing": False,
        "hidden_act": "silu",
        "intermediate_size": 8,
        "mlp_bias": False,
    }
    return SimpleNamespace(**(names | overrides))


def dense(routing: Routing, num_experts: int) -> Tensor:
    """[T, E]: the weight of each expert; empty slots add nothing."""
    empty = routing.expert_ids < 0
    weights = routing.routing_weights.masked_fill(empty, 0.0)
    out = weights.new_zeros(routing.num_tokens, num_experts)
    return out.scatter_add(1, routing.expert_ids.masked_fill(empty, 0), weights)


def dense_of(ids: Tensor, weights: Tensor, num_experts: int = E) -> Tensor:
    return torch.zeros(len(ids), num_experts).scatter_add(1, ids, weights.float())


def their_weight(router: nn.Module) -> Tensor:
    for path in ("weight", "gate.weight", "wg.weight", "layer.weight", "classifier.weight", "proj.weight"):
        try:
            return router.get_parameter(path).detach()
        except AttributeError:
            continue
    raise AssertionError(f"{type(router).__name__} keeps its weight under a name not known here")


def our_router(family: Family, router: nn.Module, config: SimpleNamespace, correction: Tensor | None) -> nn.Module:
    """TopKRouter or GroupLimitedRouter with the other router's parameters."""
    scoring, groups, weight = family.scoring_for(config), family.groups_for(config), their_weight(router)
    num_experts = len(weight) - scoring.shared_experts
    top_k = family.sizes.get("top_k", K)
    has_bias = isinstance(getattr(router, "bias", None), nn.Parameter)
    ours: TopKRouter
    if groups is not None:
        ours = GroupLimitedRouter(weight.shape[1], num_experts, top_k, groups, scoring, has_bias)
    else:
        ours = TopKRouter(weight.shape[1], num_experts, top_k, scoring, has_bias, correction is not None)
    state = {"weight": weight}
    if has_bias:
        state["bias"] = router.bias.detach()
    if ours.correction_bias is not None:
        state["correction_bias"] = torch.zeros(num_experts) if correction is None else correction.float().flatten()
    ours.load_state_dict(state)
    return ours


def _gemma_ours(family: Family, router: Any, x: Tensor, config: SimpleNamespace) -> Routing:
    seen = router.norm(x) * router.scale * router.scalar_root_size
    return scale_experts(our_router(family, router, config, None)(seen), router.per_expert_scale)


def _zaya_ours(family: Family, router: Any, x: Tensor, config: SimpleNamespace) -> Routing:
    logits = router.router_mlp(router.down_proj(x))
    chosen = route(logits, K, family.scoring_for(config), router.balancing_biases)
    return prune_experts(chosen, torch.arange(E + 1) < E)


def _doge_ours(family: Family, router: Any, x: Tensor, config: SimpleNamespace) -> Routing:
    rows, columns = router.router_gate(x).view(2, len(x), -1)
    logits = (rows.unsqueeze(-1) + columns.unsqueeze(-2)).flatten(1)
    return route(logits, K, family.scoring_for(config))


class _Ones(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ones_like(x)


def _doge_theirs(router: Any, x: Tensor, config: SimpleNamespace, correction: Tensor | None) -> Tensor:
    """With an activation of one and an identity for up_embed the block's output is the matrix of weights."""
    router.act_fn = _Ones()
    router.up_embed.weight.copy_(torch.eye(E))
    router.down_proj.weight.zero_()
    return router(x[None])[0][0]


def _llama4_theirs(router: Any, x: Tensor, config: SimpleNamespace, correction: Tensor | None) -> Tensor:
    return router(x)[0]


def _jetmoe_theirs(router: Any, x: Tensor, config: SimpleNamespace, correction: Tensor | None) -> Tensor:
    _, tokens, weights, counts, _ = router(x)
    experts = torch.arange(E).repeat_interleave(torch.tensor(counts))
    return torch.zeros(len(x), E).index_put((tokens, experts), weights)


def _inkling_theirs(router: Any, x: Tensor, config: SimpleNamespace, correction: Tensor | None) -> Tensor:
    _, weights, ids, shared = router(x)
    return torch.cat([dense_of(ids, weights), shared], dim=-1)


def _inkling_ours(family: Family, router: Any, x: Tensor, config: SimpleNamespace) -> Routing:
    chosen = our_router(family, router, config, router.e_score_correction_bias)(x)
    return scale_experts(chosen, router.global_scale.expand(E + config.n_shared_experts))


def _switch_theirs(router: Any, x: Tensor, config: SimpleNamespace, correction: Tensor | None) -> Tensor:
    chosen, weight, _ = router(x[None])
    return (chosen * weight)[0]


def _nllb_theirs(router: Any, x: Tensor, config: SimpleNamespace, correction: Tensor | None) -> Tensor:
    return router(x)[1]


def _dbrx_theirs(router: Any, x: Tensor, config: SimpleNamespace, correction: Tensor | None) -> Tensor:
    block = importlib.import_module("transformers.models.dbrx.modeling_dbrx").DbrxFFN
    weights, ids = block.route_tokens_to_experts(
        SimpleNamespace(top_k=K, moe_normalize_expert_weights=config.moe_normalize_expert_weights), router(x)
    )
    return dense_of(ids, weights)


def _afmoe_theirs(router: Any, x: Tensor, config: SimpleNamespace, correction: Tensor | None) -> Tensor:
    _, weights, ids = router(x[None], correction)
    return dense_of(ids, weights)


def _zaya_theirs(router: Any, x: Tensor, config: SimpleNamespace, correction: Tensor | None) -> Tensor:
    _, weights, ids, _ = router(x[None])
    return dense_of(ids, weights)


_RENORM = Attr("norm_topk_prob")
_FACTOR = Attr("routed_scaling_factor")
_BUFFER = "e_score_correction_bias"
_GROUPS = {"num_groups": Attr("n_group"), "top_groups": Attr("topk_group")}
_SIGMOID = {"score": "sigmoid", "renormalize": True, "epsilon": 1e-20}

_softmax = Family({"score": "softmax", "renormalize": _RENORM})
_softmax_renormalized = Family({"score": "softmax", "renormalize": True})
_softmax_topk = Family({"score": "softmax", "select_on": "logits"})
_deepseek_v2 = Family(
    {"score": "softmax", "scale": _FACTOR},
    _GROUPS | {"best": 1},
    variants=({"topk_method": "greedy"}, {"topk_method": "group_limited_greedy"}),
    note='groups for topk_method "group_limited_greedy" only',
)
_deepseek_v3 = Family(
    {"score": "sigmoid", "renormalize": _RENORM, "epsilon": 1e-20, "scale": _FACTOR}, _GROUPS, correction=_BUFFER
)
_sqrtsoftplus = Family(
    {"score": Attr("scoring_func"), "renormalize": True, "epsilon": 1e-20, "scale": _FACTOR},
    correction=_BUFFER,
    variants=({"scoring_func": "sqrtsoftplus"}, {"scoring_func": "sigmoid"}),
)
_ernie = Family(
    {"score": "softmax", "renormalize": True, "floor": Attr("moe_norm_min")},
    correction="moe_statics.e_score_correction_bias",
)
_minimax_m2 = Family({"score": "sigmoid", "renormalize": True}, correction=_BUFFER)
_hy_v3 = Family(_SIGMOID | {"scale": Attr("router_scaling_factor")}, correction="argument")
_gemma = Family(_softmax_renormalized.scoring, ours=_gemma_ours, note="then `scale_experts(routing, per_expert_scale)`")
_mistral4 = {"score": "softmax", "renormalize": _RENORM, "epsilon": 1e-20, "scale": _FACTOR}

ROUTERS: dict[str, Family] = {
    "AXK1TopkRouter": _deepseek_v3,
    "AXK2TopkRouter": Family(
        _deepseek_v3.scoring,
        _GROUPS | {"excluded": 0.0},
        correction=_BUFFER,
        variants=({"n_group": 4}, {"n_group": None}, {"norm_topk_prob": False}),
        note="no groups where n_group is None",
    ),
    "AfmoeTokenChoiceRouter": Family(
        _SIGMOID | {"scale": Attr("route_scale")}, correction="argument", theirs=_afmoe_theirs
    ),
    "AriaTextTopKRouter": _softmax_topk,
    "BailingHybridTopkRouter": _deepseek_v3,
    "BeamTopKRouter": Family(
        {"score": "sigmoid", "renormalize": _RENORM, "epsilon": 1e-20},
        _GROUPS,
        correction=_BUFFER,
        note="its block multiplies the experts' sum by routed_scaling_factor",
    ),
    "Cohere2MoeTopKRouter": Family(
        {"score": Attr("expert_selection_fn"), "select_on": "logits", "renormalize": _RENORM},
        variants=(
            {"expert_selection_fn": "softmax", "norm_topk_prob": False},
            {"expert_selection_fn": "sigmoid", "norm_topk_prob": True},
            {"expert_selection_fn": "sigmoid", "norm_topk_prob": False},
        ),
    ),
    "DbrxRouter": Family(
        {"score": "softmax", "renormalize": Attr("moe_normalize_expert_weights")},
        theirs=_dbrx_theirs,
        variants=({"moe_normalize_expert_weights": 1}, {"moe_normalize_expert_weights": 2}),
        note="None means renormalize=False",
    ),
    "DeepseekOcr2TextTopkRouter": _deepseek_v2,
    "DeepseekV2TopkRouter": _deepseek_v2,
    "DeepseekV32TopkRouter": _deepseek_v3,
    "DeepseekV3TopkRouter": _deepseek_v3,
    "DeepseekV4TopKRouter": _sqrtsoftplus,
    "DiffusionGemmaTextRouter": _gemma,
    "DogeCDMoE": Family(
        {"score": "softmax", "select_on": "logits", "renormalize": _RENORM},
        ours=_doge_ours,
        theirs=_doge_theirs,
        sizes={"hidden_size": E},
        note="logits are the sums of two halves' (product keys)",
    ),
    "Dots1TopkRouter": _deepseek_v3,
    "Dots3NoteTextTopkRouter": _deepseek_v3,
    "Dots3NoteVisionTopKRouter": _hy_v3,
    "Ernie4_5_MoeTopKRouter": _ernie,
    "Ernie4_5_VLMoeMoeTopKRouter": _ernie,
    "ExaoneMoeTopkRouter": _deepseek_v3,
    "FlexOlmoTopKRouter": _softmax,
    "FlintTopKRouter": Family({"score": "sigmoid", "renormalize": _RENORM}),
    "Gemma4TextRouter": _gemma,
    "Glm4MoeLiteTopkRouter": _deepseek_v3,
    "Glm4MoeTopkRouter": _deepseek_v3,
    "Glm4vMoeTextTopkRouter": _deepseek_v3,
    "Glm5NextTextTopkRouter": _deepseek_v3,
    "GlmMoeDsaTopkRouter": _deepseek_v3,
    "GptOssTopKRouter": _softmax_topk,
    "GraniteMoeHybridTopKRouter": _softmax_topk,
    "GraniteMoeSWATopKRouter": _softmax_topk,
    "GraniteMoeSharedTopKRouter": _softmax_topk,
    "GraniteMoeTopKRouter": _softmax_topk,
    "HYV3TopKRouter": _hy_v3,
    "HYV4TopkRouter": _deepseek_v3,
    "HunYuanMoEV1Gate": _softmax_renormalized,
    "Inkling2TopKRouter": _sqrtsoftplus,
    "InklingTopkRouter": Family(
        {
            "score": "sigmoid",
            "renormalize": True,
            "scale": Attr("route_scale"),
            "shared_experts": Attr("n_shared_experts"),
        },
        correction=_BUFFER,
        ours=_inkling_ours,
        theirs=_inkling_theirs,
        note="then `scale_experts(routing, global_scale)`",
    ),
    "JambaTopKRouter": Family({"score": "softmax"}),
    "JetMoeTopKGating": Family(
        _softmax_topk.scoring, build=lambda cls, config: cls(H, E, K), theirs=_jetmoe_theirs, note="attention too"
    ),
    "KimiLinearTopkRouter": _deepseek_v3,
    "Kolibri1TopKRouter": Family(
        {"score": "sigmoid", "select_on": "logits", "renormalize": _RENORM}, correction=_BUFFER
    ),
    "LagunaTopKRouter": Family(
        {"score": "sigmoid", "renormalize": True, "logit_softcap": Attr("moe_router_logit_softcapping")},
        correction=_BUFFER,
        note="a cap of 0 means None",
    ),
    "Lfm2MoeTopKRouter": Family(
        {"score": "sigmoid", "renormalize": _RENORM, "epsilon": 1e-6, "scale": _FACTOR}, correction="argument"
    ),
    "Llama4Router": Family({"score": "sigmoid", "select_on": "logits", "weight_on": "input"}, theirs=_llama4_theirs),
    "LongcatFlashTopkRouter": Family(
        {"score": "softmax", "scale": _FACTOR}, correction=_BUFFER, note="ids past the experts are identities"
    ),
    "MellumTopKRouter": _softmax,
    "MiMoV2FlashTopkRouter": _deepseek_v3,
    "MiniMaxM2TopKRouter": Family(_minimax_m2.scoring, correction="argument"),
    "MiniMaxM3VLTopKRouter": _minimax_m2,
    "MiniMaxTopKRouter": _softmax_renormalized,
    "Mistral4TopkRouter": Family(_mistral4, _GROUPS),
    "MistralLarge4TextTopkRouter": Family(_mistral4 | {"renormalize": True}, _GROUPS),
    "MixtralTopKRouter": _softmax_renormalized,
    "MuseSparkTopkRouter": Family(
        {
            "score": "sigmoid",
            "renormalize": True,
            "epsilon": 1e-15,
            "scale": _FACTOR,
            "logit_scale": Attr("output_multiplier"),
        },
        correction=_BUFFER,
    ),
    "NemotronHTopkRouter": _deepseek_v3,
    "NllbMoeTop2Router": Family(
        {"score": "softmax", "renormalize": True, "floor": torch.finfo(torch.float32).eps},
        theirs=_nllb_theirs,
        sizes={"top_k": 2},
        note="top 2; capacity is `drop_over_capacity`, then `rescale`",
    ),
    "OlmoeTopKRouter": _softmax,
    "OpenAIPrivacyFilterTopKRouter": Family(
        {"score": "softmax", "select_on": "logits", "scale": Inverse("num_experts_per_tok")}
    ),
    "PhimoeTopKRouter": Family(
        {"score": "sparsemixer", "select_on": "logits", "tolerance": Attr("router_jitter_noise")},
        sizes={"top_k": 2, "num_experts_per_tok": 2},
        variants=({"router_jitter_noise": 0.01}, {"router_jitter_noise": 0.4}),
        note="top 2, at inference",
    ),
    "Qwen2MoeTopKRouter": _softmax,
    "Qwen3MoeTopKRouter": _softmax,
    "Qwen3NextTopKRouter": _softmax,
    "Qwen3OmniMoeTalkerTextTopKRouter": _softmax,
    "Qwen3OmniMoeTextTopKRouter": _softmax_renormalized,
    "Qwen3OmniMoeThinkerTextTopKRouter": _softmax,
    "Qwen3VLMoeTextTopKRouter": _softmax_renormalized,
    "Qwen3_5MoeTopKRouter": _softmax_renormalized,
    "Qwen4ExpTextTopKRouter": _softmax,
    "SolarOpenTopkRouter": _deepseek_v3,
    "Step3p7TopKRouter": _minimax_m2,
    "SwitchTransformersTop1Router": Family(
        {"score": "softmax"}, theirs=_switch_theirs, sizes={"top_k": 1}, note="top 1; capacity is `drop_over_capacity`"
    ),
    "UnlimitedOcrTextTopkRouter": _deepseek_v2,
    "ZayaRouter": Family(
        {"score": "softmax"},
        correction="balancing_biases",
        ours=_zaya_ours,
        theirs=_zaya_theirs,
        build=lambda cls, config: cls(config, layer_idx=0),
        note="an MLP makes E + 1 logits; the last expert skips: `prune_experts`",
    ),
}

NOT_BY_LOGITS = {
    "DeepseekV4HashRouter": "a table of token ids chooses the experts; `weigh` gives their weights",
    "GraniteDoclingDensityRouter": "chooses between two paths of a vision connector, not among experts",
}
NO_ROUTER = {
    "vitpose": "the caller names the data set, and with it the expert",
    "vitpose_backbone": "the caller names the data set, and with it the expert",
}


def randomize(router: nn.Module, seed: int) -> None:
    """Logits of order one, biases that matter."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in (*router.parameters(), *(b for b in router.buffers() if b.is_floating_point())):
        spread = 0.3 if tensor.dim() < 2 else 1 / math.sqrt(tensor.shape[-1])
        values = torch.randn(tensor.shape, generator=generator) * spread
        tensor.data.copy_(values.abs() + 0.1 if tensor.dim() < 2 else values)
