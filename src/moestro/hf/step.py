"""A step of attention: two calls of the engine for one new token of each sequence, before and after its keys and values
go into the cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moestro.formats import PackedTensor
from moestro.hf import norms
from moestro.hf.attention import FUSED, STEPS, added_rows, attend, attend_steps, is_one_row
from moestro.hf.cache import AppendingLayer, AppendingWindow, Place
from moestro.hf.dense import Projection, StoredProjection
from moestro.hf.pending import Call, Later
from moestro.hf.stand_in import KEPT, Kept, is_untouched, plain_values
from moestro.ops import native
from moestro.ops.attention import ATTENTION
from moestro.ops.dispatch import prepare
from moestro.ops.projection import PROJECTION
from moestro.ops.projection.cpu import linear
from moestro.ops.tensors import Layout, is_ordinary, layout_key

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")
NORMS = ("q_norm", "k_norm")
FUNCTIONS = {STEPS: attend_steps, FUSED: attend}
"""Attention as a configuration names it, where a step can be made of it."""

_NOWHERE: Place = 0, 0, 0

Position = tuple[Tensor, Tensor]
"""Cosines and sines of the angles of tokens' positions, [1 or B, 1, angles] each."""


@dataclass(frozen=True)
class Turn:
    """Which columns of a head a position turns: of so many, the second half by the angles from `second` on."""

    columns: int
    second: int


Around = tuple[()] | tuple[nn.Module, nn.Module]
"""The norms of a layer before and after its attention, where they belong to a step."""


State = tuple[tuple[Any, ...], list[Layout]]
"""What decides about a step beside its call: numbers and classes of its parts, and how their tensors lie."""


class Steps(Kept):
    """What one module was found to compute.

    Attributes:
        by_call: by (batch, dtype, angles, how PyTorch is set) the state it was found in, and a `Step` or the reason why
            there is none.
        last: what was found for the last call.
        of_layer: of a layer, the steps that hold as long as nothing in it changes.
        followed: of a layer, whether another one was given what it returned, as it was.
    """

    followed = False
    of_layer: Any = None

    def __init__(self) -> None:
        self.by_call: dict[tuple[Any, ...], tuple[State, Step | str]] = {}
        self.last: Step | str = "no step that it takes has come yet"


@dataclass(frozen=True, eq=False)
class Step:
    """The engine's calls for one module, whose parts lie where they lay."""

    engine: Any
    sizes: tuple[int, int, int, int]  # heads, groups, columns of a head, columns of the output
    turn: Turn
    threads: int
    around: Around = ()

    def run(self, module: Any, x: Tensor, position: Position, mask: Tensor | None, past: Any) -> tuple[Tensor, Tensor]:
        """The module's result y [B, 1, hidden] for x of that shape, twice; the cache has the new keys and values then.

        With norms around it, the module is given x normalised, and the results are x + y and that normalised.
        """
        later = self.later(module, x, position, mask, past)
        if later is None:
            return self._with_any_cache(module, x, position, mask, past)
        later.run()
        out, *after = later.results
        return out, after[0] if after else out

    def later(self, module: Any, x: Tensor, position: Position, mask: Tensor | None, past: Any) -> Later | None:
        """The calls that give what `run` gives, none of which reads numbers before it runs; the cache counts the new
        token in. None, and nothing has changed, where the cache has no room for it, or a mask is none that the engine
        reads."""
        (_, groups, columns, _), batch = self.sizes, x.shape[0]
        layer = _appending(past, module.layer_idx)
        room = None if layer is None else layer.room((batch, groups, columns), x.dtype)
        if layer is None or room is None or not layer.keys.is_cpu:
            return None
        if not _can_read_mask(mask, batch, layer.keys.shape[2] + 1, x.dtype):
            return None
        seen = layer.take()
        made, project = self._projects(x, position, room)
        attends = self._attends(x, made, seen, mask)
        return Later((project, *attends.calls), attends.results, (x, made, position, attends.held))

    def _projects(self, x: Tensor, position: Position, rooms: tuple[Place, Place]) -> tuple[Tensor, Call]:
        """Memory for queries, new keys and new values, and the call that writes them there and to rooms in a cache."""
        (heads, groups, columns, _), batch = self.sizes, x.shape[0]
        made = torch.empty_strided((batch * (heads + 2 * groups) * columns,), (1,), dtype=x.dtype, device=x.device)
        turned = (*_angles(position), self.turn.columns, self.turn.second)
        given = self.threads, batch, x.data_ptr(), x.stride(0), turned, made.data_ptr(), *rooms
        return made, (self.engine.project, given)

    def _attends(self, x: Tensor, made: Tensor, seen: tuple[Tensor, Tensor], mask: Tensor | None) -> Later:
        """The call that attends to keys and values by what `_projects` made."""
        wide, batch, (key, value) = self.sizes[3], x.shape[0], seen
        rows = None if mask is None else added_rows(mask, x)
        added = (0, 0) if rows is None else (rows.data_ptr(), rows.stride(0))
        out = torch.empty_strided((batch, 1, wide), (wide, wide, 1), dtype=x.dtype, device=x.device)
        after = torch.empty_like(out) if self.around else None
        to = (out.data_ptr(),) if after is None else (out.data_ptr(), x.data_ptr(), after.data_ptr())
        rooms = (key.data_ptr(), *key.stride()[:3]), (value.data_ptr(), *value.stride()[:3])
        given = self.threads, batch, made.data_ptr(), *rooms, key.shape[2], added, *to
        results = (out,) if after is None else (out, after)
        return Later(((self.engine.attend, given),), results, (x, made, seen, rows))

    def _with_any_cache(
        self, module: Any, x: Tensor, position: Position, mask: Tensor | None, past: Any
    ) -> tuple[Tensor, Tensor]:
        """What `run` gives, by the cache's own way to keep new keys and values."""
        (heads, groups, columns, _), batch = self.sizes, x.shape[0]
        made, (project, given) = self._projects(x, position, (_NOWHERE, _NOWHERE))
        project(*given)
        keys = made[batch * heads * columns :].view(2, batch, groups, 1, columns)
        key, value = past.update(keys[0], keys[1], module.layer_idx)
        if not _can_read(key, value, mask, (batch, groups, columns), x.dtype):
            query = made[: batch * heads * columns].view(batch, heads, 1, columns)
            return _one_by_one(self, module, x, (query, key, value, mask))
        attends = self._attends(x, made, (key, value), mask)
        attends.run()
        out, *after = attends.results
        return out, after[0] if after else out


def _one_by_one(
    step: Step, module: Any, x: Tensor, seen: tuple[Tensor, Tensor, Tensor, Tensor | None]
) -> tuple[Tensor, Tensor]:
    """What is left of a step, where a cache or a mask is none that the engine reads."""
    function: Any = FUNCTIONS[module.config._attn_implementation]
    y, _ = function(module, *seen, scaling=module.scaling)
    out: Tensor = module.o_proj(y.reshape(len(x), 1, -1))
    if step.around:
        out = x + out
    return out, step.around[1](out) if step.around else out


def _appending(past: Any, index: int) -> AppendingLayer | AppendingWindow | None:
    """The layer of a cache that has memory for more tokens, if it is such a one."""
    layers = getattr(past, "layers", ())
    layer = layers[index] if index < len(layers) else None
    return layer if type(layer) in (AppendingLayer, AppendingWindow) else None


def _angles(position: Position) -> tuple[int, int, int]:
    """Where they lie, and how far those of one sequence are from those of the next."""
    cos, sin = position
    return cos.data_ptr(), sin.data_ptr(), cos.stride(0) if cos.shape[0] > 1 else 0


def _can_read(key: Tensor, value: Tensor, mask: Tensor | None, sizes: tuple[int, int, int], dtype: torch.dtype) -> bool:
    """Whether what a cache gives, and a mask, are what the engine reads: keys and values [B, groups, T, columns]."""
    batch, groups, columns = sizes
    if key.shape != value.shape or key.shape[:2] != (batch, groups) or key.shape[3] != columns or not key.shape[2]:
        return False
    if key.dtype != dtype or value.dtype != dtype or key.stride(3) != 1 or value.stride(3) != 1:
        return False
    if not is_ordinary(key) or not is_ordinary(value) or not key.is_cpu:
        return False
    return _can_read_mask(mask, batch, key.shape[2], dtype)


def _can_read_mask(mask: Tensor | None, batch: int, num_keys: int, dtype: torch.dtype) -> bool:
    """Whether the engine reads what is to be added for so many keys."""
    if mask is None:
        return True
    return is_one_row(mask, batch, num_keys, dtype) and mask.stride(3) == 1 and is_ordinary(mask)


def attention_of(module: Any) -> str | None:
    """What its configuration names, past the configuration's own `__getattribute__`, which is Python."""
    found: str | None = object.__getattribute__(module.config, "__dict__").get("_attn_implementation_internal")
    return module.config._attn_implementation if found is None else found


def step_for(
    holder: nn.Module, module: Any, around: Around, given: tuple[Tensor, Position], agrees: Callable[[Step], bool]
) -> Step | str:
    """The step that `holder` keeps for a module of attention and the norms around it, or why there is none.

    It is made where `agrees` says that it computes what it is to.
    """
    steps, (x, position) = holder.__dict__.get(KEPT), given
    if not isinstance(steps, Steps):
        steps = holder.__dict__[KEPT] = Steps()
    parts = _parts(module, around)
    if parts is None:
        steps.last = "a part of it has a hook, or a forward of its own"
        return steps.last
    kinds, tensors = (*plain_values(holder), *parts[0]), parts[1]
    how = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), attention_of(module)
    key = x.shape[0], x.dtype, position[0].shape[2], how
    state, found = (kinds, layout_key(tensors)), steps.by_call.get(key)
    if found is None or found[0] != state:
        found = steps.by_call[key] = state, _made(module, around, given, agrees)
    steps.last = found[1]
    return steps.last


def is_made_of_linears(module: nn.Module) -> bool:
    """Whether its parts are four linear modules that the engine serves, and maybe norms of queries and keys."""
    children = module._modules
    if set(children) not in (set(LINEARS), {*LINEARS, *NORMS}):
        return False
    served = all(type(children[name]) in (Projection, StoredProjection) for name in LINEARS)
    return served and all(norms.is_norm(children[name]) for name in NORMS if name in children)  # type: ignore[arg-type]


def _parts(module: Any, around: Around) -> tuple[tuple[Any, ...], list[Tensor]] | None:
    """What a step is made of, numbers and classes, and the tensors of these; None where a call of one is more than its
    forward."""
    parts: list[Any] = [*plain_values(module)]
    tensors = [t for t in module._parameters.values() if t is not None]
    for child in (*module._modules.values(), *around):
        if not is_untouched(child):
            return None
        parts.append(type(child))
        tensors += [t for t in child._parameters.values() if t is not None]
        if child.__class__ is StoredProjection:
            tensors += child.stored.tensors
        elif child.__class__ is not Projection:
            parts.append(norms.epsilon(child))
    return tuple(parts), tensors


def _made(module: Any, around: Around, given: tuple[Tensor, Position], agrees: Callable[[Step], bool]) -> Step | str:
    """The step of the first way to turn heads that agrees."""
    if not is_made_of_linears(module):
        return "a part of it was replaced"
    linears = [module._modules[name] for name in LINEARS]
    (x, (cos, _)), columns = given, module.head_dim
    shapes = [(each.stored if each.stored is not None else each.weight).shape for each in linears]
    heads, groups, width = shapes[0][0] // columns, shapes[1][0] // columns, cos.shape[2]
    if shapes[0][0] != heads * columns or not shapes[1][0] == shapes[2][0] == groups * columns or groups < 1:
        return "its projections make no whole heads"
    engine = _engine_of(module, around, x, (heads, groups, columns))
    if isinstance(engine, str):
        return engine
    for turn in (Turn(width, width // 2), Turn(2 * width, 0)):
        if turn.columns <= columns and turn.columns % 2 == 0:
            sizes = heads, groups, columns, shapes[3][0]
            step = Step(engine, sizes, turn, torch.get_num_threads(), around)
            if agrees(step):
                return step
    return "it computes something else than rotary positions and a softmax"


def _engine_of(module: Any, around: Around, x: Tensor, shape: tuple[int, int, int]) -> Any:
    """The engine's part of a step, of what the module's own calls would choose; or why it has none."""
    heads, groups, columns = shape
    handles = _linears(module, x, heads * columns)
    if isinstance(handles, str):
        return handles
    query, key = x.new_zeros(len(x), heads, columns), x.new_zeros(len(x), groups, 1, columns)
    sinks = module._parameters.get("sinks")
    chosen = prepare(ATTENTION, query, key, key, module.scaling, None, sinks).implementation
    isa = _isa(chosen)
    if isa is None:
        return f"attention runs in {chosen}"
    asked = [*(module._modules.get(name) for name in NORMS), *(around or (None, None))]
    found = [None if each is None else norms.native_norm(each, x.dtype) for each in asked]
    if any(norm is None for norm, each in zip(found, asked, strict=True) if each is not None):
        return "its norms are none that the engine computes"
    names = "q_norm", "k_norm", "norm_before", "norm_after"
    return native.engine().AttentionStep(
        isa=isa.index,
        projections=handles,
        shape=shape,
        scale=module.scaling,
        sinks=native.array(None if sinks is None else sinks.detach()),
        **dict(zip(names, found, strict=True)),
    )


def _linears(module: Any, x: Tensor, size: int) -> tuple[Any, ...] | str:
    """The engine's handles of a module's projections; `size`: the columns of the last one."""
    handles = []
    for name in LINEARS:
        each = module._modules[name]
        weight: Tensor | PackedTensor = each.weight if each.stored is None else each.stored
        given = x.new_empty(len(x), size) if name == LINEARS[-1] else x[:, 0]
        biased = each.bias is not None
        fits = weight.shape[1] == given.shape[1] and each.dtype == x.dtype
        if not fits or (biased and each.bias.dtype != x.dtype):
            return "its projections do not take what it is given"
        chosen = prepare(PROJECTION, given, weight, each.bias).implementation
        isa = _isa(chosen)
        if isa is None or (biased and each.bias.stride(0) != 1):
            return f"a projection of {len(x)} rows runs in {chosen}"
        handles.append(linear(isa, x.dtype, weight, each.bias))
    return tuple(handles)


def _isa(implementation: str) -> native.Isa | None:
    return next((isa for isa in native.ISAS if f"cpu-{isa.name}" == implementation), None)
