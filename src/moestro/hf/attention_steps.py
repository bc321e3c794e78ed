"""Modules of attention, and layers around them, that run one new token of each sequence as a step of the engine.

A step is what their modules would have the engine compute one by one. Between 100 MB of weights and the next, what an
operation of PyTorch needs has left the processor's caches, and it takes 15 us.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from moestro import settings
from moestro.hf import norms
from moestro.hf.expert_steps import EXPERTS, ExpertStep, expert_step_for
from moestro.hf.pending import Chain, Later, Pending, settled
from moestro.hf.snapshot import Snapshot
from moestro.hf.stand_in import KEPT, is_served, is_untouched, stand_in, with_parts
from moestro.hf.step import FUNCTIONS, LINEARS, Position, Step, Steps, attention_of, is_made_of_linears, step_for
from moestro.hf.store import stored_weights
from moestro.ops import native
from moestro.ops.attention import ATTENTION
from moestro.ops.dispatch import is_unwatched
from moestro.ops.expert_mlp import EXPERT_MLP
from moestro.ops.measured import measures
from moestro.ops.projection import PROJECTION
from moestro.tolerances import disagreement
from moestro.weights import ExpertWeights

_NAMED = frozenset({"position_embeddings", "attention_mask", "past_key_values"})
_ASKS_MORE = ("dropout", "softcap", "cache", "output_attentions")
_TAKEN = frozenset({"self", "hidden_states", *_NAMED, "kwargs", "cache_position", "use_cache", "output_attentions"})
"""What the forward of a module of attention may take; by anything else it may compute something else."""
_AROUND = ("input_layernorm", "post_attention_layernorm")
_LAYER = {"self_attn", "mlp", *_AROUND}
_NO_STEP = Steps().last


class _Last(threading.local):
    """What the last layer of a thread returned, and what is kept of that layer."""

    returned: weakref.ref[Tensor] | None = None
    steps: weakref.ref[Steps] | None = None


_LAST = _Last()
_CONTEXT = 3
"""Tokens before the one by which a module is tried."""


def serve_attention_steps(model: nn.Module) -> None:
    """Have the engine compute attention of one new token as a whole where its projections are served, with the norms of
    a layer around it, in place."""
    if native.missing() is not None:
        return
    for module in model.modules():
        if is_known_attention(module):
            stand_in(module, _attended)
    for module in model.modules():
        if is_known_layer(module):
            stand_in(module, _passed)


def served_steps(model: nn.Module) -> dict[str, str | None]:
    """The modules of attention whose steps the engine may compute as a whole, by their names.

    None where it did the last time, by itself or with the norms of the layer around it; else the reason why not. Before
    the first step that is "no step that it takes has come yet".
    """
    modules, found = dict(model.named_modules()), {}
    for name, module in modules.items():
        if is_served(module) and is_known_attention(module):
            layer = modules[name.rpartition(".")[0]]
            reasons = [_why_not(module, each) for each in (layer, module)]
            found[name] = None if None in reasons else min(reasons, key=lambda reason: reason == _NO_STEP)
    return found


def _why_not(module: Any, holder: nn.Module) -> str | None:
    """Why `holder` computes no step of a module of attention."""
    steps, name = holder.__dict__.get(KEPT), module.config._attn_implementation
    if name not in FUNCTIONS:
        return f"its attention is {name!r}, which is not the engine's"
    last = steps.last if isinstance(steps, Steps) else _NO_STEP
    return last if isinstance(last, str) else None


def is_known_attention(module: nn.Module) -> bool:
    """Whether it is made as a module of attention that a step can be made of: the rest a trial shows."""
    if module._buffers or not set(module._parameters) <= {"sinks"} or not is_made_of_linears(module):
        return False
    values = module.__dict__
    sizes = isinstance(values.get("head_dim"), int) and isinstance(values.get("scaling"), float)
    if not sizes or not isinstance(values.get("layer_idx"), int):
        return False
    named = inspect.signature(type(module).forward).parameters
    takes = {"hidden_states", *_NAMED} <= named.keys() <= _TAKEN
    return takes and not getattr(values["config"], "clip_qkv", None)


def is_known_layer(module: nn.Module) -> bool:
    """Whether it is made of attention that is known, a norm before and one after it, and anything behind that."""
    children: Any = module._modules
    if set(children) != _LAYER or module._parameters or module._buffers:
        return False
    if not inspect.signature(type(module).forward).parameters.keys() <= {*_TAKEN, "position_ids"}:
        return False
    return is_known_attention(children["self_attn"]) and all(norms.is_norm(children[name]) for name in _AROUND)


def _attended(module: Any, forward: Any, *arguments: Any, **named: Any) -> tuple[Tensor, None] | None:
    if arguments:
        return None
    given = _given(module, named.get("hidden_states"), named)
    if given is None:
        return None
    step = step_for(module, module, (), given, partial(_gives_attention, module, forward, given))
    if isinstance(step, str):
        return None
    return step.run(module, *given, named["attention_mask"], named["past_key_values"])[0], None


def _passed(layer: Any, forward: Any, x: Any = None, *arguments: Any, **named: Any) -> Any:
    x, module = named.pop("hidden_states", x), layer._modules["self_attn"]
    plain = x.plain if type(x) is Pending else x
    if x is None:
        return None
    given = None if arguments else _given(module, plain, named)
    if isinstance(plain, Tensor) and not plain.is_cpu and type(layer.__dict__.get(KEPT)) is Steps:
        layer.__dict__[KEPT].of_layer = None  # which keeps what was moved from here
    found = None if given is None else _found(layer, forward, given)
    if given is None or found is None:
        return forward(layer, settled(x) if type(x) is Pending else x, *arguments, **named)
    return _after(layer, found, x, given, named)


@dataclass(frozen=True, eq=False)
class LayerSteps:
    """The steps of a layer, as it was when they were found: of its attention and of the experts behind it.

    Attributes:
        by_call: by (batch, dtype, angles, how PyTorch and moestro are set).
    """

    snapshot: Snapshot
    weights: ExpertWeights
    by_call: dict[tuple[Any, ...], tuple[Step, ExpertStep]] = field(default_factory=dict)

    def is_current(self, layer: Any) -> bool:
        """Whether the layer is as it was, and its experts may be computed with their router."""
        if not is_unwatched(EXPERT_MLP) or not self.snapshot.is_current(layer):
            return False
        stored = stored_weights(layer._modules["mlp"]._modules[EXPERTS])  # which also says what is read next
        return stored is None or stored is self.weights


def _found(layer: Any, forward: Any, given: tuple[Tensor, Position]) -> tuple[Step, ExpertStep | None] | None:
    """The steps of a layer's attention and of the block behind it; None where attention has none."""
    (x, (cos, _)), module, steps = given, layer._modules["self_attn"], layer.__dict__.get(KEPT)
    asked = attention_of(module), settings.current(), measures(), torch.are_deterministic_algorithms_enabled()
    how = x.shape[0], x.dtype, cos.shape[2], torch.get_num_threads(), asked
    kept: LayerSteps | None = steps.of_layer if type(steps) is Steps else None
    if kept is not None and how in kept.by_call:
        if kept.is_current(layer):
            found = kept.by_call[how]
            layer.__dict__[KEPT].last = found[0]
            return found
        kept = layer.__dict__[KEPT].of_layer = None  # which keeps what was replaced
    if not is_untouched(module):
        return None
    around = tuple(layer._modules[name] for name in _AROUND)
    step = step_for(layer, module, around, given, partial(_gives_layer, layer, forward, given))
    if isinstance(step, str):
        return None
    experts = expert_step_for(layer._modules["mlp"], x)
    if experts is None:
        return step, None
    if kept is None or not kept.is_current(layer):
        kept = layer.__dict__[KEPT].of_layer = _of_layer(layer, module, experts.weights)
    kept.by_call[how] = step, experts
    return step, experts


def _of_layer(layer: Any, module: Any, weights: ExpertWeights) -> LayerSteps:
    """Of a layer as it is now; none is kept yet."""
    stored = (module._modules[name].stored for name in LINEARS)
    tensors = (each.tensors for each in (*stored, weights.parts) if each is not None)
    return LayerSteps(Snapshot(layer, chain.from_iterable(tensors)), weights)


def _after(
    layer: Any,
    found: tuple[Step, ExpertStep | None],
    x: Tensor,
    given: tuple[Tensor, Position],
    named: dict[str, Any],
) -> Tensor:
    """What a layer's step gives: at once, or where a layer is known to follow, as soon as somebody looks."""
    seen, module, steps = (named["attention_mask"], named["past_key_values"]), layer.self_attn, layer.__dict__[KEPT]
    before = None if _LAST.steps is None or _LAST.returned is None or _LAST.returned() is not x else _LAST.steps()
    if before is not None:
        before.followed = True
    step, experts = found
    attended = None if experts is None else step.later(module, *given, *seen)
    chain = x.chain if type(x) is Pending else Chain()
    if experts is None or attended is None:
        chain.run()
        out, normalised = step.run(module, *given, *seen)
    else:
        out, normalised = attended.results
    if experts is None:
        total = _behind(layer, out, normalised)
    else:
        behind = experts.later(normalised, out)
        calls = behind.calls if attended is None else (*attended.calls, *behind.calls)
        (total,) = plain = behind.results
        chain.add(Later(calls, plain, (attended, behind)), lambda: plain[0].copy_(_behind(layer, out, normalised)))
        if attended is not None and steps.followed and is_untouched(layer):
            total = Pending.of(total, chain)
        else:
            chain.run()
    _LAST.returned, _LAST.steps = weakref.ref(total), weakref.ref(steps)
    return total


def _behind(layer: Any, x: Tensor, normalised: Tensor) -> Tensor:
    """The sum with what a layer adds behind its attention, by the modules of that."""
    y: Any = layer.mlp(normalised)
    total: Tensor = x + (y[0] if isinstance(y, tuple) else y)
    return total


def _given(module: Any, x: Any, named: dict[str, Any]) -> tuple[Tensor, Position] | None:
    """The tokens of a step and the angles of their positions; None where a call is no step of the engine."""
    if not named.keys() >= _NAMED or any(named.get(name) for name in _ASKS_MORE) or module.training:
        return None
    if named.get("position_bias") is not None or named["past_key_values"] is None:
        return None
    if type(x) is not Tensor or x.dim() != 3 or x.shape[1] != 1:
        return None
    if not is_unwatched(PROJECTION, ATTENTION) or attention_of(module) not in FUNCTIONS:
        return None
    position = named["position_embeddings"]
    return (x.contiguous(), position) if _fits(x, position) else None


def _fits(x: Tensor, position: Any) -> bool:
    """Whether tokens and the angles of their positions are rows of one dtype in memory here."""
    if not isinstance(position, tuple) or len(position) != 2 or not x.is_cpu or not x.shape[0] or x.is_neg():
        return False
    cos, sin = position
    for angles in position:
        if type(angles) is not Tensor or angles.dtype != x.dtype or angles.dim() != 3 or not angles.is_cpu:
            return False
    rows = cos.shape[0] in (1, x.shape[0]) and cos.shape[1] == 1 and cos.stride(2) == 1
    return bool(rows and cos.shape == sin.shape and cos.stride() == sin.stride())


def _gives_attention(module: Any, forward: Any, given: tuple[Tensor, Position], step: Step) -> bool:
    """Whether a step gives what the forward of a module of attention gives."""

    def own(hidden: Tensor, position: Position, past: Any) -> Any:
        named = {"position_embeddings": position, "attention_mask": None, "past_key_values": past}
        y, weights = forward(module, hidden_states=hidden, **named)
        return y if weights is None else (y, weights)

    return _reproduces(own, lambda *tried: step.run(module, *tried)[0], given, module.layer_idx)


def _gives_layer(layer: Any, forward: Any, given: tuple[Tensor, Position], step: Step) -> bool:
    """The same for a layer, in which something small stands for its experts: these, and who is told of them, are to
    see no random tokens."""
    module = layer.self_attn
    for behind in (_Halved(), _HalvedAndMore()):
        like = with_parts(layer, self_attn=with_parts(module), mlp=behind)

        def own(hidden: Tensor, position: Position, past: Any, like: Any = like) -> Any:
            named = {"position_embeddings": position, "attention_mask": None, "past_key_values": past}
            return forward(like, hidden, **named)

        def tried(*given: Any, like: Any = like) -> Tensor:
            return _behind(like, *step.run(module, *given))

        if _reproduces(own, tried, given, module.layer_idx):
            return True
    return False


class _Halved(nn.Module):
    """What stands for the experts of a layer in a trial."""

    def forward(self, x: Tensor) -> Any:
        return 0.5 * x


class _HalvedAndMore(_Halved):
    """Of one whose experts also say how they were chosen."""

    def forward(self, x: Tensor) -> Any:
        return 0.5 * x, None


def _reproduces(
    own: Callable[..., Any], step: Callable[..., Tensor], given: tuple[Tensor, Position], layer_idx: int
) -> bool:
    """Whether two ways give the same for a token after a few others, all of them random, and keep the same."""
    generator = torch.Generator("cpu").manual_seed(0)
    caches, (x, (cos, _)) = (DynamicCache(), DynamicCache()), given
    for _ in range(_CONTEXT + 1):
        hidden = torch.randn(x.shape, generator=generator, device="cpu", dtype=torch.float32).to(x.dtype)
        angles = 7 * torch.randn(1, 1, cos.shape[2], generator=generator, device="cpu", dtype=torch.float32)
        position = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        try:
            wanted, theirs = own(hidden, position, caches[0]), caches[0].layers[layer_idx]
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            return False
        if not isinstance(wanted, Tensor) or not theirs.is_initialized:
            return False
        found, mine = step(hidden, position, None, caches[1]), caches[1].layers[layer_idx]
        pairs = (found, wanted), (mine.keys, theirs.keys), (mine.values, theirs.values)
        if any(disagreement(a, b, x.dtype) is not None for a, b in pairs):
            return False
    return True
