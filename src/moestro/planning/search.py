"""Every way to run a model that memory has room for, and what each is predicted to take."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from moestro.errors import InvalidInputError, MoestroError, invalid_input
from moestro.memory.amounts import shown_bytes
from moestro.memory.sizes import cut, least_budget, total_bytes
from moestro.planning.machines import Machine
from moestro.planning.model import OPERATION, Counts, Model, count
from moestro.planning.predict import (
    Choice,
    Spread,
    Times,
    communication,
    described_rest,
    expert_seconds,
    logits_seconds,
    missed_bytes,
    strategies,
    times_of,
)
from moestro.planning.sample import BUSY, Load, Rest, Say, rest_of

FORMATS = (None, "int8", "mxfp4")
"""Of experts, that are looked at where nobody says: as they are stored, and what 16 bits are often quantised to."""
WIDE = 12
"""Bits of a weight from which on experts are worth quantising."""
WORKSPACE = 32
"""Numbers in float32 of a token of a prompt, for each hidden unit, that the pass holds at its peak: as seen, about."""
PROCESS = 20_000_000
"""Bytes that a process here holds once it has run, beside all that is counted: as seen, about."""
FURTHER = 8_000_000
"""Likewise each further one of several, which share the pages of code."""


@dataclass(frozen=True)
class Need:
    """Bytes that one device holds, or all processes of this machine together, and what stays on the disk.

    Attributes:
        experts: or the slots that some of them share.
        rest: all other weights.
        cache: of keys and values after the last token.
        workspace: of a prompt's pass, about.
        disk: experts that are read from there as they are needed.
    """

    experts: int
    rest: int
    cache: int
    workspace: int
    disk: int = 0

    @property
    def beside(self) -> int:
        """All that a device holds but experts."""
        return self.rest + self.cache + self.workspace

    @property
    def device(self) -> int:
        """All that a device holds."""
        return self.experts + self.beside


@dataclass(frozen=True)
class Candidate:
    """One way to run a model.

    Attributes:
        choice, load: what is run.
        bits: of a weight of the experts, in the mean.
        need: of memory.
        dispatcher, strategy, block_size: how; no block size where the engine chooses for itself.
        prompt, decode: seconds of the prompt's pass, with which the first new tokens come, and of a step of decoding,
            which makes one more of each sequence.
    """

    choice: Choice
    load: Load
    bits: float
    need: Need
    dispatcher: str
    strategy: str
    block_size: int | None
    prompt: Times
    decode: Times

    @property
    def prompt_rate(self) -> float:
        """Tokens per second of prompts, of all sequences."""
        return self.load.batch * self.load.prompt_tokens / self.prompt.total

    @property
    def decode_rate(self) -> float:
        """New tokens per second, of all sequences."""
        return self.load.batch / self.decode.total

    @property
    def rate(self) -> float:
        """New tokens per second with the prompt's pass counted in."""
        return self.load.rate(self.prompt.total, self.decode.total)

    @property
    def why_not_run(self) -> str | None:
        """Why `load` does not run it on the files as they are; None if it does."""
        if self.choice.format is None or self.choice.memory is None:
            return None
        return f"experts in {self.choice.format} within a budget: they have to be in files of that format"


@dataclass(frozen=True)
class Asked:
    """What is to be looked at.

    Attributes:
        formats: of experts; None is as stored.
        batches: numbers of sequences.
        prompt_tokens, new_tokens: of each.
        devices: that may be used.
        spread: of tokens over experts.
        projections: as for `moestro.load`.
    """

    formats: tuple[str | None, ...] | None = None
    batches: tuple[int, ...] = (1,)
    prompt_tokens: int = 128
    new_tokens: int = 128
    devices: int = 1
    spread: Spread = field(default_factory=Spread)
    projections: str = "auto"

    def __post_init__(self) -> None:
        numbers = (*self.batches, self.prompt_tokens, self.new_tokens, self.devices)
        if not self.batches or not all(type(number) is int and number >= 1 for number in numbers):
            raise invalid_input(
                OPERATION,
                got=f"batches {list(self.batches)}, {self.prompt_tokens} prompt and {self.new_tokens} new tokens, "
                f"{self.devices} devices",
                needs="whole numbers of at least 1",
                fix="Leave them out for their defaults.",
            )
        if self.formats == ():
            fix = "Leave formats out for its default."
            raise invalid_input(OPERATION, got="no format", needs="one at least; None is as stored", fix=fix)


class Search:
    """Candidates of one model on one machine; what several of them need is found once.

    Attributes:
        notes: why some choices were left out.
        lacking: bytes that the choice that needs least lacks.
    """

    def __init__(self, model: Model, machine: Machine, asked: Asked, say: Say) -> None:
        self.model, self.machine, self.asked, self.say = model, machine, asked, say
        self.notes: list[str] = []
        self.lacking: dict[str, int] = {}
        self._rest = functools.cache(self._measure_rest)
        self._counts = functools.cache(self._count)
        self._missed = functools.cache(self._miss)
        self._stored_as = functools.cache(model.stored_as)

    def share_rest(self, other: Search) -> None:
        """Take what another search has measured beside the experts."""
        self._rest, self._counts = other._rest, other._counts

    def found(self) -> list[Candidate]:
        """All that memory has room for, those with most tokens per second first."""
        loads = [Load(batch, self.asked.prompt_tokens, self.asked.new_tokens) for batch in self.asked.batches]
        ways = [(choice, load) for form in self._formats() for load in loads for choice in self._choices(form, load)]
        candidates = []
        for number, way in enumerate(ways):
            self.say("predicting", number, len(ways))
            candidates.append(self.candidate(*way))
        return sorted(candidates, key=lambda each: -each.rate)

    def candidate(self, choice: Choice, load: Load, machine: Machine | None = None) -> Candidate:
        """What one choice takes; on another machine than the search's if one is given."""
        machine = machine or self.machine
        model = self._stored_as(choice.format)
        strategy, block = strategies(model, machine, load)
        passes = []
        for tokens, rest, missed in zip(
            (load.batch * load.prompt_tokens, load.batch),
            self.rest(load, machine, choice.ranks),
            self._missed(choice, load) if choice.memory is not None else (0.0, 0.0),
            strict=True,
        ):
            dispatcher, sent = communication(model, machine, self.asked.spread, tokens, choice)
            experts = expert_seconds(model, machine, self.asked.spread, tokens, choice)
            sent += logits_seconds(model, machine, load.batch, choice.ranks)
            waited = missed / machine.disk_bytes_per_second if missed else 0.0
            passes.append((times_of(rest, experts=experts, communication=sent, misses=waited), dispatcher))
        (prompt, _), (decode, dispatcher) = passes
        need = self.need(choice, load)
        return Candidate(choice, load, model.bits, need, dispatcher, strategy, block, prompt, decode)

    def rest(self, load: Load, machine: Machine, ranks: int) -> tuple[Rest, Rest]:
        """Seconds beside the experts, of both passes."""
        if machine.is_here:
            return self._rest(load, ranks)
        return described_rest(self.model, machine, self._counts(load))

    def need(self, choice: Choice, load: Load) -> Need:
        """Bytes by tier."""
        model = self._stored_as(choice.format)
        whole = total_bytes(model.sizes)
        if self.machine.is_here and choice.ranks > 1:
            return self._need_of_processes(whole, choice.ranks, load)
        layers = [layer.cut(choice.tp) or layer for layer in model.layers]
        own = sum(-(-layer.size.experts // choice.ep) * layer.size.expert_bytes for layer in layers)
        # A model without a budget is mapped: of an embedding the pages of its tokens' rows are in memory.
        mapped = self.machine.is_here and choice.memory is None
        return Need(
            experts=own if choice.memory is None else _slots_bytes(model, choice.memory),
            rest=model.rest_bytes - (model.looked_up_bytes if mapped else 0),
            cache=self._counts(load)[-1],
            workspace=self._workspace(load),
            disk=0 if choice.memory is None else whole,
        )

    def _need_of_processes(self, experts: int, count: int, load: Load) -> Need:
        """Of all together: each expert is in one of them, and pages of files that all of them read are there once."""
        model = self.model
        return Need(
            experts=experts,
            rest=model.rest_bytes - model.looked_up_bytes + (count - 1) * model.copied_bytes,
            cache=count * self._counts(load)[-1],
            workspace=count * self._workspace(load) - (count - 1) * (PROCESS - FURTHER),
        )

    def _workspace(self, load: Load) -> int:
        size = 4 * WORKSPACE * load.batch * load.prompt_tokens * self.model.layers[0].gate_up[1]
        return size + (PROCESS if self.machine.is_here else 0)

    def _formats(self) -> Iterator[str | None]:
        asked, seen = self.asked.formats, set()
        wide = self.model.bits >= WIDE
        for name in asked if asked is not None else FORMATS if wide else FORMATS[:1]:
            try:
                stored = tuple(layer.format for layer in self._stored_as(name).layers)
            except InvalidInputError as error:
                if asked is not None:
                    raise
                self.notes.append(f"{name} is left out: {error}")
                continue
            if stored not in seen:
                yield name
            seen.add(stored)

    def _choices(self, form: str | None, load: Load) -> Iterator[Choice]:
        """Those that fit, of one format; the rest is noted."""
        model = self._stored_as(form)
        # Processes of this machine have whole experts: slices of them are copies, which are not mapped.
        degrees = _degrees(form, self.asked.devices, min(size.experts for size in model.sizes))
        for choice in (each for each in degrees if each.tp == 1 or not self.machine.is_here):
            if any(layer.cut(choice.tp) is None for layer in model.layers):
                self._note(f"{form or 'as stored'} is not cut into {choice.tp} slices: it has fewer groups of weights")
                continue
            lacks = self.need(choice, load).device - self.machine.memory
            if lacks <= 0:
                yield choice
                continue
            if choice.ranks == 1 and self.machine.disk_bytes_per_second:
                least = least_budget(model.sizes)
                budget = self.machine.memory - self.need(replace(choice, memory=least), load).beside
                if budget >= least:
                    yield replace(choice, memory=budget)
                    continue
                lacks = min(lacks, least - budget)
            self.lacking[_named(choice, load)] = lacks

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _measure_rest(self, load: Load, ranks: int) -> tuple[Rest, Rest]:
        prompt, step, taken = rest_of(self.model, load, self.asked.projections, self.say, ranks)
        if taken > BUSY:
            when = "while layers were timed: plan again when they have ended"
            self._note(f"other programs took {taken:.0%} of the processors {when}")
        return prompt, step

    def _count(self, load: Load) -> tuple[Counts, Counts, int]:
        self.say("counting what passes need", self.asked.batches.index(load.batch), len(self.asked.batches))
        return count(self.model, load.batch, load.prompt_tokens, load.new_tokens)

    def _miss(self, choice: Choice, load: Load) -> tuple[float, float]:
        assert choice.memory is not None
        self.say("replaying the routing", 0, 1)
        return missed_bytes(self._stored_as(choice.format), self.asked.spread, load, choice.memory)


def _slots_bytes(model: Model, budget: int) -> int:
    return sum(pool.slots * pool.expert_bytes for pool in cut(OPERATION, model.sizes, budget))


def _degrees(form: str | None, devices: int, num_experts: int) -> Iterator[Choice]:
    """All (ep, tp) with up to so many devices, in powers of two and all of them."""
    counts = sorted({*(1 << k for k in range(devices.bit_length())), devices})
    for ranks in counts:
        for ep in (n for n in range(1, ranks + 1) if ranks % n == 0 and n <= num_experts):
            yield Choice(form, None, ep, ranks // ep)


def _named(choice: Choice, load: Load) -> str:
    form = choice.format or "as stored"
    ranks = f", ep {choice.ep}, tp {choice.tp}" if choice.ranks > 1 else ""
    return f"{form}, batch {load.batch}{ranks}"


def refuse(search: Search) -> MoestroError:
    """The error where nothing fits: it says which choice lacks least, and how much."""
    name, lacks = min(search.lacking.items(), key=lambda each: each[1])
    machine = search.machine
    more = machine.devices > search.asked.devices and not machine.is_here  # where they share the memory
    return invalid_input(
        OPERATION,
        got=f"{search.model.name}, of which nothing fits: {name} lacks {lacks:,} bytes ({shown_bytes(lacks)})",
        needs=f"room in the {shown_bytes(machine.memory)} of {machine.name}"
        + (f", or some of its {machine.devices} devices" if more else ""),
        fix="Take a format of fewer bits, more devices, shorter or fewer sequences; or read experts from a disk.",
    )


def neighbours(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The first, and two others that files as they are can be run by: of the next format or batch each."""
    first, *others = candidates
    others = [each for each in others if each.why_not_run is None]
    kinds: dict[tuple[object, ...], Candidate] = {}
    for each in others:
        kinds.setdefault((each.choice.format, each.load.batch), each)
    return [first, *list(kinds.values())[:2]]
