"""`moestro.plan`: how to run a model on a machine, predicted before anything is loaded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

from moestro.errors import invalid_input
from moestro.hf.dense import check_choice
from moestro.memory.amounts import parse_bytes
from moestro.parallel.processes import threads_each
from moestro.planning import report as tables
from moestro.planning.machines import Machine, checked, here, machine_names, read_machine
from moestro.planning.model import OPERATION, Model, read_model
from moestro.planning.predict import Choice, Spread, Times
from moestro.planning.sample import Load, Say
from moestro.planning.search import Asked, Candidate, Need, Search, refuse

__all__ = ["Candidate", "Choice", "Load", "Machine", "Need", "Plan", "Times", "machine_names", "plan", "read_machine"]

UNEVEN = 0.8
"""The exponent of loads of models in use, about: what a plan is compared with."""


class Options(TypedDict, total=False):
    """What `plan` takes by name only."""

    formats: Sequence[str | None]
    devices: int
    memory: int | str
    disk: float
    spread: Spread
    projections: str
    say: Say


@dataclass(frozen=True, eq=False)
class Plan:
    """Ways to run a model, the best first.

    Attributes:
        model: that was planned for.
        machine: likewise.
        candidates: that fit, those with most tokens per second first.
        assumptions: what the first one's rate depends on, in words, and the share by which the rate changes with it;
            the one that matters most first.
        notes: why choices were left out.
        projections: as for `moestro.load`.
    """

    model: Model
    machine: Machine
    candidates: tuple[Candidate, ...]
    assumptions: tuple[tuple[str, float], ...]
    notes: tuple[str, ...]
    projections: str = "auto"

    @property
    def best(self) -> Candidate:
        """The one to run."""
        return self.candidates[0]

    def as_json(self) -> dict[str, Any]:
        """Plain values for json.dumps."""
        return tables.as_json(self)

    def __str__(self) -> str:
        """A table of 80 columns, and what bounds the first."""
        return tables.text(self)

    def plot(self, path: str | Path) -> None:
        """Write a picture (png, svg or pdf by the name's ending): tokens per second, and where the time goes."""
        from moestro.planning.plot import plan_plot

        plan_plot(self, path)


def plan(
    model: str | Path | None = None,
    machine: str | Path | Machine | None = None,
    batches: Sequence[int] = (1,),
    prompt_tokens: int = 128,
    new_tokens: int = 128,
    **options: Unpack[Options],
) -> Plan:
    """Recommend how to run a model: format, memory, ranks, batch; from its configuration and headers alone.

    On this machine what is needed is measured, in seconds, and kept: costs of experts' products, a few layers without
    their experts, the disk. On a described one it follows from the rates of its file.

    Args:
        model: a folder with weights, one with a config.json only, or a hub id; None for the bundled model.
        machine: None for this one, a name of `moestro.planning.machine_names()`, or a TOML file.
        batches: numbers of sequences to look at.
        prompt_tokens, new_tokens: of each sequence.
        formats: by name only: of the experts; None among them is as stored. Left out: as stored, and int8 and mxfp4
            where experts are stored in 16 bits or more.
        devices: by name only: that may be used together, at most those of the machine. On this one they are processes,
            which share its threads and its memory.
        memory: by name only: bytes of a device, or "8GB", in place of what is free or described.
        disk: by name only: bytes per second that experts are read at, 0 to hold all of them; else measured on the
            model's own files.
        spread: by name only: of tokens over experts; even if left out.
        projections: by name only: as for `moestro.load`.
        say: by name only: called with what is being done, how much of it is, and how much there is.

    Raises:
        InvalidInputError: nothing fits (it says what is missing), a machine or numbers that there are not, or a model
            that cannot be read.
        UnsupportedError: a model whose experts `load` does not read, or that cannot be timed here.
    """
    if unknown := options.keys() - Options.__annotations__.keys():
        raise invalid_input(OPERATION, got=f"{min(unknown)}=", needs="an argument that there is", fix="See its page.")
    say: Say = options.get("say", _quiet)
    asked = _asked(batches, prompt_tokens, new_tokens, options)
    found = read_model(model, asked.projections)
    _check_spread(asked.spread, found)
    _check_context(asked, found)
    target = _machine(machine, found, options, asked)
    _check_devices(asked.devices, target)
    search = Search(found, target, asked, say)
    candidates = search.found()
    if not candidates:
        raise refuse(search)
    notes = (*search.notes, *(f"{name} lacks {lacks:,} bytes" for name, lacks in search.lacking.items()))
    assumptions = _assumptions(search, candidates[0])
    return Plan(found, target, tuple(candidates), assumptions, notes, asked.projections)


def _quiet(text: str, done: int, total: int) -> None:
    """What is told to nobody."""


def _asked(batches: Sequence[int], prompt_tokens: int, new_tokens: int, options: Options) -> Asked:
    formats = options.get("formats")
    asked = Asked(
        formats=None if formats is None else tuple(dict.fromkeys(formats)),
        batches=tuple(dict.fromkeys(batches)),
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        devices=options.get("devices", 1),
        spread=options.get("spread") or Spread(),
        projections=options.get("projections", "auto"),
    )
    check_choice(asked.projections, OPERATION)
    return asked


def _machine(given: str | Path | Machine | None, model: Model, options: Options, asked: Asked) -> Machine:
    say: Say = options.get("say", _quiet)
    memory, disk = options.get("memory"), options.get("disk")
    size = parse_bytes(OPERATION, "memory", memory, least=1) if isinstance(memory, str) else memory
    is_rate = disk is None or (isinstance(disk, int | float) and 0 <= disk < math.inf)
    if not is_rate or not (size is None or (type(size) is int and size > 0)):
        needs = "bytes of at least 1, and a finite rate; a rate of 0 is no disk"
        raise invalid_input(OPERATION, got=f"memory={size!r}, disk={disk!r}", needs=needs, fix="Leave them out.")
    if given is None:
        if disk is None and model.checkpoint is not None:
            from moestro.planning.disk import read_rate

            say("reading some experts from the disk", 0, 1)
            disk = read_rate(model.checkpoint)
        if asked.devices > 1:
            threads_each(OPERATION, asked.devices)
            say("timing what processes send", 0, 1)
        return here(size, disk, asked.devices)
    found = checked(given) if isinstance(given, Machine) else read_machine(given)
    return replace(
        found,
        memory=found.memory if size is None else size,
        disk_bytes_per_second=found.disk_bytes_per_second if disk is None else disk,
    )


def _check_spread(spread: Spread, model: Model) -> None:
    """Refuse recorded ids of another model."""
    if not spread.recorded:
        return
    fits = len(spread.recorded) == len(model.layers) and all(
        ids.dim() == 2
        and len(ids) > 0
        and ids.shape[1] == layer.size.top_k
        and not ids.is_floating_point()
        and int(ids.min()) >= -1
        and int(ids.max()) < layer.size.experts
        for ids, layer in zip(spread.recorded, model.layers, strict=False)
    )
    if not fits:
        raise invalid_input(
            OPERATION,
            got=f"recorded ids of {len(spread.recorded)} layers",
            needs=f"those of {model.name}: {len(model.layers)} layers, as many slots and experts as each has",
            fix="Record them with this model: moestro generate --trace FILE.",
        )


def _check_context(asked: Asked, model: Model) -> None:
    """Refuse sequences that the model was not made for."""
    if model.context is not None and asked.prompt_tokens + asked.new_tokens > model.context:
        raise invalid_input(
            OPERATION,
            got=f"{asked.prompt_tokens:,} prompt tokens and {asked.new_tokens:,} new ones",
            needs=f"at most {model.context:,} together, the context of {model.name}",
            fix="Lower one of them.",
        )


def _check_devices(devices: int, machine: Machine) -> None:
    """Refuse more than there are, and several that nothing joins."""
    if devices > machine.devices:
        needs = f"at most the {machine.devices} of {machine.name}"
        raise invalid_input(OPERATION, got=f"{devices} devices", needs=needs, fix="Describe a machine with more.")
    if devices > 1 and not machine.link_bytes_per_second:
        got, needs = f"{devices} devices of {machine.name}, whose links have no rate", "link_bytes_per_second"
        raise invalid_input(OPERATION, got=got, needs=needs, fix="Add it to the machine's file.")


def _assumptions(search: Search, best: Candidate) -> tuple[tuple[str, float], ...]:
    """How the best one's rate changes with each thing that was taken for granted, the largest change first."""
    machine = search.machine
    kind = "measured" if machine.is_here else "described"
    changed = {
        f"memory is read at {machine.bytes_per_second / 1e9:,.0f} GB/s ({kind}): a fifth less": replace(
            machine, bytes_per_second=0.8 * machine.bytes_per_second
        )
    }
    if not machine.is_here:
        rates = {name: 0.8 * rate for name, rate in machine.flops_per_second.items()}
        changed["products run at the described rate: a fifth less"] = replace(machine, flops_per_second=rates)
    if best.choice.memory is not None:
        text = f"the disk gives {machine.disk_bytes_per_second / 1e9:,.1f} GB/s: a fifth less"
        changed[text] = replace(machine, disk_bytes_per_second=0.8 * machine.disk_bytes_per_second)
    if best.choice.ranks > 1:
        text = f"links carry {machine.link_bytes_per_second / 1e9:.3g} GB/s: a fifth less"
        changed[text] = replace(machine, link_bytes_per_second=0.8 * machine.link_bytes_per_second)
        text = f"links take {machine.link_seconds * 1e6:,.0f} us of a message beside its bytes: a fifth more"
        changed[text] = replace(machine, link_seconds=1.2 * machine.link_seconds)
    if machine.layer_seconds:
        text = f"{machine.layer_seconds * 1e6:,.0f} us of each layer beside its work: a fifth more"
        changed[text] = replace(machine, layer_seconds=1.2 * machine.layer_seconds)
    found = {text: search.candidate(best.choice, best.load, other).rate for text, other in changed.items()}
    spread = search.asked.spread
    if not spread.recorded and spread.exponent != UNEVEN:
        uneven = Search(search.model, machine, replace(search.asked, spread=Spread(UNEVEN)), search.say)
        uneven.share_rest(search)
        taken = f"unevenly, by an exponent of {spread.exponent:g}" if spread.exponent else "evenly"
        text = f"tokens go to experts {taken}: by an exponent of {UNEVEN}"
        found[text] = uneven.candidate(best.choice, best.load).rate
    changes = ((text, rate / best.rate - 1) for text, rate in found.items())
    return tuple(sorted(changes, key=lambda each: -abs(each[1])))
