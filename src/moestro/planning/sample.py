"""What all of a model but its experts takes on this machine: a few of its layers, made here, are run and timed.

Layers that are alike are represented by a few. Weights have the model's shapes, and their numbers mean nothing. Experts
return what they are given.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn

from moestro import machine
from moestro.errors import unsupported
from moestro.hf.beside import serve_beside
from moestro.hf.cache import appending_cache
from moestro.hf.serving import find
from moestro.hf.sources import empty_model
from moestro.hf.text_model import quiet_transformers
from moestro.memory.amounts import shown_bytes
from moestro.ops import measured
from moestro.parallel import Peers
from moestro.parallel.processes import ask, everyone, threads_each
from moestro.planning.model import OPERATION, Model, read_model, without_experts
from moestro.profiling.parts import other_parts

LAYERS = 3
"""Of each kind, at most; but all that are small."""
SMALL_BYTES = 16 << 20
"""Of one kind together, beside their experts: their time is that of caches, which few layers fit better than many."""
STEPS = 8
"""Of decoding in a round; the first does not count."""
ROUNDS, MOST_ROUNDS = 2, 30
ROUNDS_SECONDS = 1.0
"""Of the rounds of one process together, at least: the machine's speed is not the same all the time."""
BUSY = 0.1
"""The share of the cores in the hands of other programs above which all is timed again the next time."""
_GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "use_cache": True}
SHARE = 0.5
"""Of the free memory, that a sample may take, or those of several processes together."""
RANK = "moestro.planning.sample:rank"
"""What each of several processes calls."""

_NUMBER = re.compile(r"^(.*?)\.(\d+)\.")


@dataclass(frozen=True)
class Load:
    """What a model is to do.

    Attributes:
        batch: sequences at once.
        prompt_tokens, new_tokens: of each.
    """

    batch: int
    prompt_tokens: int
    new_tokens: int

    def rate(self, prompt_seconds: float, step_seconds: float) -> float:
        """New tokens per second: the first of each sequence comes with the prompt's pass, each other with a step."""
        return self.batch * self.new_tokens / (prompt_seconds + (self.new_tokens - 1) * step_seconds)


@dataclass(frozen=True)
class Rest:
    """Seconds of one pass beside the experts.

    Attributes:
        dense: in linear modules outside attention, routers and the head among them.
        attention: in attention, with its linear modules, or what a model has in its place.
        overhead: everything between: norms, and what generation does beside the model.
    """

    dense: float
    attention: float
    overhead: float

    def plus(self, other: Rest, times: float) -> Rest:
        """The sum with so many of the other."""
        return Rest(*(a + times * b for a, b in zip(astuple(self), astuple(other), strict=True)))


Say = Callable[[str, int, int], object]


def rest_of(
    model: Model, load: Load, projections: str, say: Say = lambda text, done, total: None, processes: int = 1
) -> tuple[Rest, Rest, float]:
    """Seconds of the prompt's pass and of one of decoding, and the share of the cores that others took meanwhile.

    Measured once and kept, unless that share was above `BUSY`. With several processes, which share the threads, all run
    it at once, and the slowest counts.

    Raises:
        InvalidInputError: more processes than threads.
        UnsupportedError: a sample that takes more than half of the free memory, or a model whose layers are not found.
    """
    config = hashlib.blake2b(json.dumps(model.config.to_dict(), sort_keys=True, default=str).encode(), digest_size=8)
    threads = threads_each(OPERATION, processes)
    what = f"{load.batch} of {load.prompt_tokens} tokens, {projections}, {threads} threads"
    what += f" in each of {processes} processes" if processes > 1 else ""
    dtype = str(model.dtype).removeprefix("torch.")
    name = f"beside the experts of {model.config.model_type} {config.hexdigest()}: {dtype}, {what}"

    def measure() -> list[float]:
        numbers, taken = measured.taken_by_others(passes)
        return [*numbers, taken]

    def passes() -> list[float]:
        if processes == 1:
            return _numbers(_measured(model, load, projections, say))
        say(f"timing some layers in {processes} processes", 0, 1)
        asked = {"folder": model.folder, "load": astuple(load), "projections": projections, "threads": threads}
        all_ranks = ask(OPERATION, RANK, processes, asked)
        return [*max((found[:3] for found in all_ranks), key=sum), *max((found[3:] for found in all_ranks), key=sum)]

    found, _ = measured.kept(name, measure, lambda found: len(found) == 7 and min(found) >= 0 and found[6] <= BUSY)
    return Rest(*found[:3]), Rest(*found[3:6]), found[6]


def _numbers(passes: Sequence[Rest]) -> list[float]:
    return [seconds for rest in passes for seconds in astuple(rest)]


def rank(asked: dict[str, Any]) -> list[float]:
    """On each of several processes that run a model at once: its own seconds."""
    torch.set_num_threads(asked["threads"])
    projections, peers = asked["projections"], everyone()
    with quiet_transformers():
        return _numbers(
            _measured(read_model(asked["folder"], projections), Load(*asked["load"]), projections, peers=peers)
        )


def _measured(
    model: Model, load: Load, projections: str, say: Say = lambda text, done, total: None, peers: Peers | None = None
) -> tuple[Rest, Rest]:
    skeleton = empty_model(model.config)
    kinds = _kinds(skeleton)
    positions = [(position, kind) for kind, of_kind in enumerate(kinds) for position in _few(skeleton, of_kind)]
    say("timing some layers", 0, 1)
    passes = _run(model, [position for position, _ in sorted(positions)], load, projections, peers)
    sampled = [kind for _, kind in sorted(positions)]
    found = []
    for phase in passes:
        total = _middle([one.outside for one in phase])
        for kind, of_kind in enumerate(kinds):
            blocks = [rest for one in phase for rest, own in zip(one.blocks, sampled, strict=True) if own == kind]
            total = total.plus(_middle(blocks), len(of_kind))
        found.append(total)
    return found[0], found[1]


def _few(skeleton: Any, of_kind: Sequence[int]) -> Sequence[int]:
    """The layers of a kind that are timed."""
    _, blocks = _blocks_of(skeleton)
    experts = {id(p) for layer in find(skeleton) for p in layer.module.parameters()}
    each = sum(p.nbytes for p in blocks[of_kind[0]].parameters() if id(p) not in experts)
    return of_kind[: max(LAYERS, SMALL_BYTES // max(each, 1))]


def _middle(found: Sequence[Rest]) -> Rest:
    """The median of each."""
    return Rest(*(median(each) for each in zip(*map(astuple, found), strict=True)))


def _blocks_of(skeleton: Any) -> tuple[str, nn.ModuleList]:
    """The list of a model's layers, and its name."""
    names = sorted({found[1] for layer in find(skeleton) if (found := _NUMBER.match(f"{layer.path}."))})
    blocks = skeleton.get_submodule(names[0]) if len(names) == 1 else None
    if not isinstance(blocks, nn.ModuleList):
        raise unsupported(
            OPERATION,
            got=f"{type(skeleton).__name__}, whose layers are in no list of modules",
            needs="one list of layers, as language models of Transformers have",
            fix="Measure it: moestro bench model FOLDER.",
        )
    return names[0], blocks


def _kinds(skeleton: Any) -> list[list[int]]:
    """The positions of layers that are alike, in shapes and in attention."""
    _, blocks = _blocks_of(skeleton)
    types = getattr(skeleton.config.get_text_config(), "layer_types", None) or [None] * len(blocks)
    found: dict[Any, list[int]] = {}
    for position, block in enumerate(blocks):
        shapes = tuple((name, tuple(p.shape)) for name, p in block.named_parameters())
        found.setdefault((shapes, types[position]), []).append(position)
    return list(found.values())


@dataclass(frozen=True)
class _Pass:
    """One call of a model: what each of its layers takes, and what all else."""

    blocks: tuple[Rest, ...]
    outside: Rest


def _run(
    model: Model, positions: Sequence[int], load: Load, projections: str, peers: Peers | None
) -> tuple[list[_Pass], list[_Pass]]:
    """Passes of prompts, and of decoding, of a model with some of the layers; all peers begin together."""
    made = _made(model, positions, SHARE / (1 if peers is None else peers.size))
    serve_beside(made, projections)
    made.eval()
    ids = torch.ones((load.batch, load.prompt_tokens), dtype=torch.int64)
    _generated(made, ids, 2)
    rounds: list[list[_Pass]] = []
    start = time.perf_counter()
    while _goes_on(len(rounds), time.perf_counter() - start, peers):
        if peers is not None:
            peers.barrier(OPERATION)
        rounds.append(_generated(made, ids, STEPS + 1))
    if peers is not None:
        peers.barrier(OPERATION)
    return [found[0] for found in rounds], [one for found in rounds for one in found[2:]]


def _goes_on(rounds: int, seconds: float, peers: Peers | None) -> bool:
    """Whether another round is to be timed; peers have as many of them."""
    if rounds < ROUNDS:
        return True
    return peers is None and seconds < ROUNDS_SECONDS and rounds < MOST_ROUNDS


def _made(model: Model, positions: Sequence[int], share: float = SHARE) -> Any:
    """Some layers of a model, and all around them, in memory, of which they may take that share of what is free."""
    skeleton = empty_model(copy.deepcopy(model.config))
    without_experts(skeleton)
    name, blocks = _blocks_of(skeleton)
    kept = nn.ModuleList(blocks[position] for position in positions)
    parent, _, own = name.rpartition(".")
    setattr(skeleton.get_submodule(parent), own, kept)
    for number, block in enumerate(kept):
        for module in block.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = number  # type: ignore[assignment]
    text = skeleton.config.get_text_config()
    text.num_hidden_layers = len(positions)
    if getattr(text, "layer_types", None):
        text.layer_types = [text.layer_types[position] for position in positions]
    _fill(skeleton, share)
    return skeleton


def _fill(skeleton: Any, share: float) -> None:
    """Give all parameters but those of experts memory, and numbers that keep outputs finite."""
    experts = {id(p) for layer in _find_again(skeleton) for p in layer.parameters()}
    looked_up = {id(m.weight) for m in skeleton.modules() if isinstance(m, nn.Embedding)}
    wanted = {id(p): p for p in skeleton.parameters() if id(p) not in experts}
    needed, free = sum(p.nbytes for p in wanted.values()), machine.available_bytes()
    if needed > share * free:
        raise unsupported(
            OPERATION,
            got=f"a model of which some layers and the head take {shown_bytes(needed)}, to be timed here",
            needs=f"at most {shown_bytes(int(share * free))} of the {shown_bytes(free)} that are free",
            fix="Describe the machine in a file: moestro plan MODEL --machine FILE.toml.",
        )
    made: dict[int, nn.Parameter] = {}
    for module in skeleton.modules():
        for name, p in list(module._parameters.items()):
            if p is None or id(p) in experts:
                continue
            if id(p) not in made:
                # A head whose weight the embedding shares is read as a whole; an embedding alone is not.
                fill = torch.zeros if id(p) in looked_up and not _is_tied(skeleton, p) else _small
                made[id(p)] = nn.Parameter(fill(tuple(p.shape), dtype=p.dtype), requires_grad=False)
            module._parameters[name] = made[id(p)]
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = torch.zeros(tuple(buffer.shape), dtype=buffer.dtype)


def _small(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, 0.01, dtype=dtype)


def _is_tied(skeleton: Any, p: nn.Parameter) -> bool:
    return any(isinstance(m, nn.Linear) and m.weight is p for m in skeleton.modules())


def _find_again(skeleton: Any) -> list[nn.Module]:
    """The expert layers of a model whose experts return what they are given."""
    return [module for module in skeleton.modules() if "forward" in module.__dict__]


class _Clock:
    """Adds up seconds of every pass by stage, for each block and for what is outside of all, at -1."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self.starts: list[float] = []
        self.spent: list[dict[int, dict[str, float]]] = []
        self._block, self._began = -1, dict.fromkeys(("block", "dense", "attention"), 0.0)

    def begin(self, *_: Any) -> None:
        """A pass."""
        self.starts.append(time.perf_counter())
        self.spent.append({i: dict.fromkeys(self._began, 0.0) for i in range(-1, self._num_blocks)})

    def enter(self, stage: str, block: int, *_: Any) -> None:
        if stage == "block":
            self._block = block
        self._began[stage] = time.perf_counter()

    def leave(self, stage: str, *_: Any) -> None:
        self.spent[-1][self._block][stage] += time.perf_counter() - self._began[stage]
        if stage == "block":
            self._block = -1

    def passes(self) -> list[_Pass]:
        """Of all that ended; the last start is the end."""
        found = []
        for start, end, spent in zip(self.starts, self.starts[1:], self.spent, strict=False):
            outside = end - start - sum(spent[i]["block"] for i in range(self._num_blocks))
            blocks = tuple(_rest(spent[i], spent[i]["block"]) for i in range(self._num_blocks))
            found.append(_Pass(blocks, _rest(spent[-1], outside)))
        return found


def _rest(spent: dict[str, float], total: float) -> Rest:
    dense, attention = spent["dense"], spent["attention"]
    return Rest(dense, attention, max(total - dense - attention, 0.0))


def _generated(made: Any, ids: torch.Tensor, new_tokens: int) -> list[_Pass]:
    """Every pass of a generation, greedy, from one call of the model to the next."""
    _, blocks = _blocks_of(made)
    clock = _Clock(len(blocks))
    watched = [(part.module, part.stage, -1) for part in other_parts(made, set(_find_again(made)))]
    watched += [(block, "block", number) for number, block in enumerate(blocks)]
    with ExitStack() as stack, torch.inference_mode():
        stack.callback(made.register_forward_pre_hook(clock.begin).remove)
        for module, stage, block in watched:
            stack.callback(module.register_forward_pre_hook(partial(clock.enter, stage, block)).remove)
            stack.callback(module.register_forward_hook(partial(clock.leave, stage)).remove)
        mask = torch.ones_like(ids)
        kept = appending_cache(made, made.generation_config)
        made.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, **_GREEDY, **kept)
        clock.starts.append(time.perf_counter())
    return clock.passes()
