"""Named layers: routed experts of published models, at their real sizes, with random weights and routing."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from moestro.errors import not_one_of, unsupported
from moestro.reference import one_expert
from moestro.types import EMPTY, GPT_OSS_SWIGLU, SWIGLU, Activation, Routing, WeightOn
from moestro.weights import ExpertWeights

DENSE = "dense"
"""The name of a layer's own numbers, in its own dtype."""
RESERVE_BYTES = 2 << 30
"""Memory left to the reference and to everything else when deciding how many experts fit."""


@dataclass(frozen=True)
class LayerSpec:
    """The routed experts of one layer of a published model.

    Attributes:
        name: what `--layer` takes.
        family: the module of Transformers that computes it.
        activation, bias, weight_on: as in `moestro.Activation`, `moestro.ExpertWeights` and `moestro.Routing`.
        transposed: whether Transformers stores [E, H, 2 * I] and [E, I, H].
        narrow_weights: whether the model's router hands over routing weights in the layer's dtype, not in float32.
    """

    name: str
    family: str
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    activation: Activation = SWIGLU
    bias: bool = False
    transposed: bool = False
    weight_on: WeightOn = "output"
    narrow_weights: bool = True

    def expert_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one expert's weights and biases."""
        h, i = self.hidden_size, self.intermediate_size
        return (3 * h * i + (2 * i + h if self.bias else 0)) * dtype.itemsize


LAYERS = {
    spec.name: spec
    for spec in (
        LayerSpec("olmoe", "olmoe", 2048, 1024, 64, 8),
        LayerSpec("qwen3-30b-a3b", "qwen3_moe", 2048, 768, 128, 8),
        LayerSpec("mixtral", "mixtral", 4096, 14336, 8, 2, narrow_weights=False),
        LayerSpec("mixtral-half", "mixtral", 2048, 7168, 8, 2, narrow_weights=False),
        LayerSpec("gpt-oss-20b", "gpt_oss", 2880, 2880, 32, 4, GPT_OSS_SWIGLU, bias=True, transposed=True),
        LayerSpec("deepseek-v3", "deepseek_v3", 7168, 2048, 256, 8, narrow_weights=False),
        LayerSpec("llama4-scout", "llama4", 5120, 8192, 16, 1, transposed=True, weight_on="input"),
    )
}


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def named(name: str, operation: str = "bench layer") -> LayerSpec:
    """The layer of this name, or an InvalidInputError."""
    if name not in LAYERS:
        fix = "Or 'all' for every one." if operation == "bench layer" else "Pick one of these."
        raise not_one_of(operation, "layer", name, LAYERS, fix)
    return LAYERS[name]


@dataclass(frozen=True, eq=False)
class StoredExperts:
    """The experts as Transformers stores them: transposed or not, as the spec says; biases or None."""

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer in memory. `weights` and `stored` share their tensors unless the family stores them transposed."""

    spec: LayerSpec
    weights: ExpertWeights
    stored: StoredExperts
    quantized: dict[str, ExpertWeights] = field(default_factory=dict)

    def in_format(self, format: str) -> ExpertWeights:
        """The weights quantised to a format, once; "dense" is for the layer's own."""
        if format == DENSE:
            return self.weights
        if format not in self.quantized:
            self.quantized[format] = self.weights.quantize(format)
        return self.quantized[format]

    @property
    def dtype(self) -> torch.dtype:
        return self.stored.gate_up.dtype

    @property
    def device(self) -> torch.device:
        return self.stored.gate_up.device

    @property
    def num_experts(self) -> int:
        return self.weights.num_experts

    @property
    def notes(self) -> list[str]:
        """What a reader has to know to compare this layer with the published one."""
        spec, notes = self.spec, []
        if self.num_experts < spec.num_experts:
            size = _stored_bytes(spec, self.dtype, spec.num_experts) / 1e9
            count = f"{self.num_experts} of {spec.num_experts} experts"
            notes.append(f"{count}: all of them need {size:.1f} GB in {dtype_name(self.dtype)}, without copies")
        if spec.transposed:
            notes.append(
                "Transformers computes on its transposed tensors, moestro on a K-contiguous copy as accelerate() makes"
            )
        return notes


def experts_that_fit(spec: LayerSpec, dtype: torch.dtype, free_bytes: int, num_tokens: int, copies: float = 0.0) -> int:
    """How many of the layer's experts fit into memory, all of them at most; an UnsupportedError below top_k.

    Beside them fit `RESERVE_BYTES` and twice what a call on `num_tokens` tokens works on. Where not all experts do,
    those that are left fit with `copies`, bits for each weight that variants make of them, if top_k experts do.
    """
    each = _stored_bytes(spec, dtype, 1)
    reserve = RESERVE_BYTES + 2 * working_bytes(spec, dtype, num_tokens * spec.top_k)
    room = max(free_bytes - reserve, 0)
    count = min(room // each, spec.num_experts)
    if count < spec.num_experts:
        with_copies = int(room // (each + 3 * spec.hidden_size * spec.intermediate_size * copies / 8))
        count = max(with_copies, min(count, spec.top_k))
    if count < spec.top_k:
        raise unsupported(
            "bench layer",
            got=f"{spec.name} in {dtype_name(dtype)} with {free_bytes / 1e9:.1f} GB of free memory",
            needs=f"{(each * spec.top_k + reserve) / 1e9:.1f} GB for the {spec.top_k} experts of one token",
            fix="Use a smaller layer or a 16-bit dtype, or free memory.",
        )
    return count


def working_bytes(spec: LayerSpec, dtype: torch.dtype, num_pairs: int) -> int:
    """Upper estimate of what a call holds for its (token, expert) pairs: input, two halves, product, output, spares."""
    return num_pairs * 4 * (spec.hidden_size + spec.intermediate_size) * dtype.itemsize


def make_layer(spec: LayerSpec, dtype: torch.dtype, num_experts: int, device: torch.device | str = "cpu") -> Layer:
    """Random weights, scaled so that outputs stay near 1. Every expert is another window onto one random sequence."""
    h, i = spec.hidden_size, spec.intermediate_size
    generator = torch.Generator(device).manual_seed(0)
    gate_up = _windows((num_experts, 2 * i, h), h**-0.5, dtype, generator)
    down = _windows((num_experts, h, i), i**-0.5, dtype, generator)
    gate_up_bias = down_bias = None
    if spec.bias:
        gate_up_bias = _windows((num_experts, 2 * i), 0.1, dtype, generator)
        down_bias = _windows((num_experts, h), 0.1, dtype, generator)
    weights = ExpertWeights.from_dense(gate_up, down, gate_up_bias, down_bias, spec.activation)
    if spec.transposed:
        gate_up, down = (t.transpose(1, 2).contiguous() for t in (gate_up, down))
    return Layer(spec, weights, StoredExperts(gate_up, down, gate_up_bias, down_bias))


def inputs(layer: Layer, num_tokens: int, count: int) -> tuple[Tensor, list[Routing]]:
    """x [T, H], and up to `count` random routings that all touch equally many experts.

    One token walks a permutation of the experts, so that no expert returns before the others had their turn. More
    tokens choose their experts uniformly; of eight times as many draws those are kept whose number of distinct
    experts is the median one, so that every routing is the same amount of work.
    """
    spec, num_experts, device = layer.spec, layer.num_experts, layer.device
    generator = torch.Generator(device).manual_seed(num_tokens)
    x = torch.randn(num_tokens, spec.hidden_size, generator=generator, device=device).to(layer.dtype)
    if num_tokens == 1:
        walk = torch.randperm(num_experts, generator=generator, device=device)
        chosen = list(walk[: num_experts // spec.top_k * spec.top_k].view(-1, 1, spec.top_k))[:count]
    else:
        draws = [
            torch.rand(num_tokens, num_experts, generator=generator, device=device).topk(spec.top_k).indices
            for _ in range(8 * count)
        ]
        distinct = [active_experts(ids) for ids in draws]
        median = sorted(distinct)[len(distinct) // 2]
        chosen = [ids for ids, n in zip(draws, distinct, strict=True) if n == median][:count]
    return x, [Routing(ids, _routing_weights(layer, ids, generator), spec.weight_on) for ids in chosen]


def active_experts(expert_ids: Tensor) -> int:
    """Distinct experts that a routing touches; -1 is none."""
    return len(_distinct(expert_ids))


def flops(spec: LayerSpec, routing: Routing) -> int:
    """6 * H * I for every (token, expert) pair: three matmuls of H * I multiply-adds. Nothing else is counted."""
    pairs = int((routing.expert_ids >= 0).sum())
    return 6 * spec.hidden_size * spec.intermediate_size * pairs


def expected_output(layer: Layer, x: Tensor, routing: Routing, format: str = DENSE) -> Tensor:
    """The layer's output [T, H] in float32: the shipped reference's expert, each expert widened once."""
    weights = layer.in_format(format)
    y = torch.zeros(x.shape, device=x.device)
    wide = x.float()
    for e in _distinct(routing.expert_ids):
        tokens, slots = (routing.expert_ids == e).nonzero(as_tuple=True)
        w = routing.routing_weights[tokens, slots, None]
        before, after = (w, 1.0) if routing.weight_on == "input" else (1.0, w)
        rows = one_expert(wide[tokens] * before, weights, e) * after
        y.index_add_(0, tokens, rows)
    return y


def _distinct(expert_ids: Tensor) -> list[int]:
    return [e for e in torch.unique(expert_ids).tolist() if e != EMPTY]  # sorted


def _stored_bytes(spec: LayerSpec, dtype: torch.dtype, num_experts: int) -> int:
    return spec.expert_bytes(dtype) * num_experts * (2 if spec.transposed else 1)


def _windows(shape: tuple[int, ...], scale: float, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """A random [E, ...] tensor at the price of one random expert: expert e starts 97 * e numbers into the sequence."""
    each = torch.Size(shape[1:]).numel()
    sequence = torch.randn(each + 97 * shape[0], generator=generator, device=generator.device).mul_(scale).to(dtype)
    return sequence.unfold(0, each, 97)[: shape[0]].clone(memory_format=torch.contiguous_format).view(shape)


def _routing_weights(layer: Layer, expert_ids: Tensor, generator: torch.Generator) -> Tensor:
    """Positive weights that sum to 1 over a token's slots, or sigmoids for one slot; exact in the layer's dtype."""
    logits = torch.randn(expert_ids.shape, generator=generator, device=expert_ids.device)
    weights = logits.softmax(-1) if layer.spec.top_k > 1 else logits.sigmoid()
    return weights.to(layer.dtype).float()
