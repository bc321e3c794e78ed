"""Attention of one new token of each sequence in two calls of the engine: what comes before its keys and values go into
the cache, and what comes after.

Each of the two is what the modules of a layer would have the engine compute one by one. Between 100 MB of weights and
the next, what an operation of PyTorch needs has left the processor's caches, and it takes 15 us.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from moestro.formats import PackedTensor
from moestro.hf import norms
from moestro.hf.attention import FUSED, STEPS, added_rows, attend, attend_steps, is_one_row
from moestro.hf.cache import AppendingLayer
from moestro.hf.dense import Projection, StoredProjection
from moestro.hf.stand_in import KEPT, Kept, is_untouched, stand_in
from moestro.ops import native
from moestro.ops.attention import ATTENTION
from moestro.ops.dispatch import is_unwatched, prepare
from moestro.ops.projection import PROJECTION
from moestro.ops.projection.cpu import linear
from moestro.ops.tensors import Layout, is_ordinary, layout_key
from moestro.tolerances import disagreement

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")
NORMS = ("q_norm", "k_norm")
_NAMED = frozenset({"hidden_states", "position_embeddings", "attention_mask", "past_key_values"})
_ASKS_MORE = ("dropout", "softcap", "cache", "output_attentions", "position_bias")
_FUNCTIONS = {STEPS: attend_steps, FUSED: attend}
_NOWHERE = 0, 0, 0
_CONTEXT = 3
"""Tokens before the one by which a module is tried."""


@dataclass(frozen=True)
class Turn:
    """Which columns of a head a position turns: of so many, the second half by the angles from `second` on."""

    columns: int
    second: int


class Steps(Kept):
    """What one module was found to compute: by (batch, dtype, threads, angles) a `Step`, or the reason why not."""

    def __init__(self) -> None:
        self.by_call: dict[tuple[Any, ...], Step | str] = {}


@dataclass(frozen=True, eq=False)
class Step:
    """The engine's calls for one module, whose parts lie where they lay."""

    engine: Any
    sizes: tuple[int, int, int, int]  # heads, groups, columns of a head, columns of the output
    turn: Turn
    threads: int
    parts: tuple[Any, ...]
    layout: list[Layout]

    def run(self, module: Any, x: Tensor, position: tuple[Tensor, Tensor], mask: Tensor | None, past: Any) -> Tensor:
        """The module's result [B, 1, hidden] for x of that shape; the cache has the new keys and values then."""
        (heads, groups, columns, wide), batch = self.sizes, len(x)
        layer = _appending(past, module.layer_idx)
        room = None if layer is None else layer.room((batch, groups, columns), x.dtype)
        made = torch.empty_strided((batch * (heads + 2 * groups) * columns,), (1,), dtype=x.dtype)
        turned = (*_angles(position), self.turn.columns, self.turn.second)
        given = self.threads, batch, x.data_ptr(), x.stride(0), turned, made.data_ptr()
        if layer is None or room is None:
            self.engine.project(*given, _NOWHERE, _NOWHERE)
            new = batch, groups, 1, columns
            keys = made[batch * heads * columns :].view(2, *new)
            key, value = past.update(keys[0], keys[1], module.layer_idx)
        else:
            self.engine.project(*given, *((row.data_ptr(), row.stride(0), row.stride(1)) for row in room))
            key, value = layer.take()
        if not _can_read(key, value, mask, (batch, groups, columns), x.dtype):
            query = made[: batch * heads * columns].view(batch, heads, 1, columns)
            return _one_by_one(module, query, key, value, mask)
        rows = None if mask is None else added_rows(mask, x)
        seen = (0, 0) if rows is None else (rows.data_ptr(), rows.stride(0))
        out = torch.empty_strided((batch, 1, wide), (wide, wide, 1), dtype=x.dtype)
        places = (key.data_ptr(), *key.stride()[:3]), (value.data_ptr(), *value.stride()[:3])
        self.engine.attend(self.threads, batch, made.data_ptr(), *places, key.shape[2], seen, out.data_ptr())
        return out


def _appending(past: Any, index: int) -> AppendingLayer | None:
    """The layer of a cache that has memory for more tokens, if it is such a one."""
    layers = getattr(past, "layers", ())
    layer = layers[index] if index < len(layers) else None
    return layer if type(layer) is AppendingLayer else None


def _angles(position: tuple[Tensor, Tensor]) -> tuple[int, int, int]:
    """Where they lie, and how far those of one sequence are from those of the next."""
    cos, sin = position
    return cos.data_ptr(), sin.data_ptr(), cos.stride(0) if len(cos) > 1 else 0


def _can_read(key: Tensor, value: Tensor, mask: Tensor | None, sizes: tuple[int, int, int], dtype: torch.dtype) -> bool:
    """Whether what a cache gives, and a mask, are what the engine reads: keys and values [B, groups, T, columns]."""
    batch, groups, columns = sizes
    if key.shape != value.shape or key.shape[:2] != (batch, groups) or key.shape[3] != columns or not key.shape[2]:
        return False
    if key.dtype != dtype or value.dtype != dtype or key.stride(3) != 1 or value.stride(3) != 1:
        return False
    if not is_ordinary(key) or not is_ordinary(value) or not key.is_cpu:
        return False
    return mask is None or is_one_row(mask, batch, key.shape[2], dtype)


def _one_by_one(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """What is left of the module's forward, where a cache or a mask is none that the engine reads."""
    function: Any = _FUNCTIONS[module.config._attn_implementation]
    y, _ = function(module, query, key, value, mask, scaling=module.scaling)
    out: Tensor = module.o_proj(y.reshape(len(query), 1, -1))
    return out


def serve_attention_steps(model: nn.Module) -> None:
    """Have the engine compute attention of one new token as a whole where its projections are served, in place."""
    if native.missing() is None:
        for module in model.modules():
            if is_known_attention(module):
                stand_in(module, _attended)


def served_steps(model: nn.Module) -> dict[str, str | None]:
    """The modules of attention whose steps the engine may compute as a whole, by their names: None where it did the
    last time, or the reason why it does not. Before the first step that is "no step that it takes has come yet"."""
    found: dict[str, str | None] = {}
    for name, module in model.named_modules():
        if hasattr(type(module), "_moestro_own_class") and is_known_attention(module):
            found[name] = _why_not(module)
    return found


def _why_not(module: Any) -> str | None:
    steps, name = module.__dict__.get(KEPT), module.config._attn_implementation
    if name not in _FUNCTIONS:
        return f"its attention is {name!r}, which is not the engine's"
    if not isinstance(steps, Steps):
        return "no step that it takes has come yet"
    last = list(steps.by_call.values())[-1]
    return last if isinstance(last, str) else None


def is_known_attention(module: nn.Module) -> bool:
    """Whether it is made as a module of attention that a step can be made of: the rest a trial shows."""
    children = module._modules
    if set(children) not in (set(LINEARS), {*LINEARS, *NORMS}) or module._buffers:
        return False
    if not all(type(children[name]) in (Projection, StoredProjection) for name in LINEARS):
        return False
    if not all(norms.is_norm(children[name]) for name in NORMS if name in children):  # type: ignore[arg-type]
        return False
    values = module.__dict__
    sizes = all(isinstance(values.get(name), kind) for name, kind in (("head_dim", int), ("scaling", float)))
    if not sizes or not isinstance(values.get("layer_idx"), int) or not set(module._parameters) <= {"sinks"}:
        return False
    named = inspect.signature(type(module).forward).parameters
    return set(named) >= _NAMED and "position_ids" not in named and not getattr(values["config"], "clip_qkv", None)


def _attended(module: Any, forward: Any, *arguments: Any, **named: Any) -> tuple[Tensor, None] | None:
    if arguments or not named.keys() >= _NAMED or any(named.get(name) for name in _ASKS_MORE) or module.training:
        return None
    x, position, past = named["hidden_states"], named["position_embeddings"], named["past_key_values"]
    if (
        past is None
        or type(x) is not Tensor
        or x.dim() != 3
        or x.shape[1] != 1
        or not is_unwatched(PROJECTION, ATTENTION)
    ):
        return None
    if module.config._attn_implementation not in _FUNCTIONS or not _fits(x, position):
        return None
    step = _step_for(module, forward, x, position)
    if isinstance(step, str):
        return None
    return step.run(module, x, position, named["attention_mask"], past), None


def _fits(x: Tensor, position: Any) -> bool:
    """Whether tokens and the angles of their positions are rows of one dtype in memory here."""
    if not isinstance(position, tuple) or len(position) != 2 or not x.is_cpu or not len(x) or x.stride(2) != 1:
        return False
    cos, sin = position
    for angles in position:
        if type(angles) is not Tensor or angles.dtype != x.dtype or angles.dim() != 3 or not angles.is_cpu:
            return False
    rows = len(cos) in (1, len(x)) and cos.shape[1] == 1 and cos.stride(2) == 1
    return bool(rows and cos.shape == sin.shape and cos.stride() == sin.stride())


def _step_for(module: Any, forward: Any, x: Tensor, position: tuple[Tensor, Tensor]) -> Step | str:
    steps = module.__dict__.get(KEPT)
    if not isinstance(steps, Steps):
        steps = module.__dict__[KEPT] = Steps()
    key = len(x), x.dtype, torch.get_num_threads(), position[0].shape[2], module.config._attn_implementation
    found: Step | str | None = steps.by_call.get(key)
    parts = _parts(module)
    if parts is None:
        return "a part of it has a hook"
    kinds, tensors = parts
    if found is None or (isinstance(found, Step) and (found.parts != kinds or found.layout != layout_key(tensors))):
        found = steps.by_call[key] = _made(module, forward, x, position, (kinds, layout_key(tensors)))
    return found


def _parts(module: Any) -> tuple[tuple[Any, ...], list[Tensor]] | None:
    """What a module's parts are, numbers and classes, and the tensors that they hold; None where a call of one is more
    than its forward."""
    parts: list[Any] = [module.scaling, module.head_dim]
    tensors = [t for t in module._parameters.values() if t is not None]
    for name, child in module._modules.items():
        if not is_untouched(child):
            return None
        parts.append(type(child))
        if name in NORMS:
            parts.append(norms.epsilon(child))
        tensors += [t for t in child._parameters.values() if t is not None]
        if child.__class__ is StoredProjection:
            tensors += child.stored.tensors
    return tuple(parts), tensors


def _made(
    module: Any, forward: Any, x: Tensor, position: tuple[Tensor, Tensor], state: tuple[tuple[Any, ...], list[Layout]]
) -> Step | str:
    """The step of the first way to turn heads that gives what the module's own forward gives, or why there is none."""
    if not is_known_attention(module):
        return "a part of it was replaced"
    linears = [module._modules[name] for name in LINEARS]
    columns, width = module.head_dim, position[0].shape[2]
    shapes = [(each.stored if each.stored is not None else each.weight).shape for each in linears]
    heads, groups = shapes[0][0] // columns, shapes[1][0] // columns
    if shapes[0][0] != heads * columns or not shapes[1][0] == shapes[2][0] == groups * columns or groups < 1:
        return "its projections make no whole heads"
    engine = _engine_of(module, linears, x, (heads, groups, columns))
    if isinstance(engine, str):
        return engine
    for turn in (Turn(width, width // 2), Turn(2 * width, 0)):
        if turn.columns <= columns and turn.columns % 2 == 0:
            sizes = heads, groups, columns, shapes[3][0]
            step = Step(engine, sizes, turn, torch.get_num_threads(), *state)
            if _reproduces(module, forward, step, x, position):
                return step
    return "it computes something else than rotary positions and a softmax"


def _engine_of(module: Any, linears: list[Any], x: Tensor, shape: tuple[int, int, int]) -> Any:
    """The engine's part of a step, of what the module's own calls would choose; or why it has none."""
    heads, groups, columns = shape
    rows, handles = x[:, 0], []
    for each in linears:
        weight: Tensor | PackedTensor = each.weight if each.stored is None else each.stored
        given = rows if each is not linears[-1] else rows.new_empty(len(x), heads * columns)
        if (
            weight.shape[1] != given.shape[1]
            or each.dtype != x.dtype
            or (each.bias is not None and each.bias.dtype != x.dtype)
        ):
            return "its projections do not take what it is given"
        chosen = prepare(PROJECTION, given, weight, each.bias).implementation
        isa = _isa(chosen)
        if isa is None or (each.bias is not None and each.bias.stride(0) != 1):
            return f"a projection of {len(x)} rows runs in {chosen}"
        handles.append(linear(isa, x.dtype, weight, each.bias))
    query, key = x.new_zeros(len(x), heads, columns), x.new_zeros(len(x), groups, 1, columns)
    sinks = module._parameters.get("sinks")
    chosen = prepare(ATTENTION, query, key, key, module.scaling, None, sinks).implementation
    isa = _isa(chosen)
    if isa is None:
        return f"attention runs in {chosen}"
    found = [norms.native_norm(module._modules[name], x.dtype) for name in NORMS if name in module._modules]
    if None in found:
        return "its norms are none that the engine computes"
    q_norm, k_norm = found or (None, None)
    return native.engine().AttentionStep(
        isa=isa.index,
        projections=tuple(handles),
        shape=shape,
        q_norm=q_norm,
        k_norm=k_norm,
        scale=module.scaling,
        sinks=native.array(None if sinks is None else sinks.detach()),
    )


def _isa(implementation: str) -> native.Isa | None:
    return next((isa for isa in native.ISAS if f"cpu-{isa.name}" == implementation), None)


def _reproduces(module: Any, forward: Any, step: Step, x: Tensor, position: tuple[Tensor, Tensor]) -> bool:
    """Whether it gives what the module's own forward gives for a token after a few others, all of them random."""
    generator = torch.Generator("cpu").manual_seed(0)
    own, others = DynamicCache(), DynamicCache()
    for _ in range(_CONTEXT + 1):
        hidden = torch.randn(x.shape, generator=generator, device="cpu", dtype=torch.float32).to(x.dtype)
        angles = 7 * torch.randn(1, 1, position[0].shape[2], generator=generator, device="cpu", dtype=torch.float32)
        turned = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        given = {"position_embeddings": turned, "attention_mask": None}
        wanted, _ = forward(module, hidden_states=hidden, past_key_values=own, **given)
        found = step.run(module, hidden, turned, None, others)
        layers = own.layers[module.layer_idx], others.layers[module.layer_idx]
        pairs = (wanted, found), (layers[0].keys, layers[1].keys), (layers[0].values, layers[1].values)
        if any(disagreement(mine, theirs, x.dtype) is not None for theirs, mine in pairs):
            return False
    return True
