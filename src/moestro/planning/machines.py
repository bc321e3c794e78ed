"""Machines to plan for: this one, as measured, or one that a file describes."""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from moestro import machine
from moestro.errors import InvalidInputError, invalid_input
from moestro.memory.amounts import parse_bytes

OPERATION = "plan"
_KNOWN = Path(__file__).parent / "known"
_AMOUNTS = ("memory", "bytes_per_second", "link_bytes_per_second", "disk_bytes_per_second")
FIX = "docs/reference/plan.md lists the keys of such a file; `moestro plan --machine list` the names."


@dataclass(frozen=True)
class Machine:
    """Devices of one kind, and what joins them.

    Attributes:
        name: of the machine.
        memory: bytes of one device that weights, keys and values and workspace may take; here, of all processes.
        bytes_per_second: that a device reads of its memory.
        flops_per_second: of a device's matrix products, by the dtype or format of the weights; "default" for others.
        devices: how many there are; here as many processes as there are threads.
        link_bytes_per_second: that a device sends to another, in each direction.
        link_seconds: of a message, whatever its bytes.
        disk_bytes_per_second: that experts are read at which memory has no room for; 0 for none.
        layer_seconds: of one layer beside reading and multiplying, as starting its kernels.
        memory_share, compute_share: of the two published rates, that are reached.
        is_here: whether it is this one, where what is needed is measured.
        sources: of the figures, by key.
    """

    name: str
    memory: int
    bytes_per_second: float
    flops_per_second: dict[str, float] = field(default_factory=dict)
    devices: int = 1
    link_bytes_per_second: float = 0.0
    link_seconds: float = 0.0
    disk_bytes_per_second: float = 0.0
    layer_seconds: float = 0.0
    memory_share: float = 1.0
    compute_share: float = 1.0
    is_here: bool = False
    sources: dict[str, str] = field(default_factory=dict)

    @property
    def read_rate(self) -> float:
        """Bytes per second that are reached."""
        return self.bytes_per_second * self.memory_share

    def flops(self, name: str) -> float:
        """Per second that are reached, with weights of this dtype or format."""
        rates = self.flops_per_second
        found = next((rates[key] for key in (name, name.partition("-")[0]) if key in rates), rates["default"])
        return found * self.compute_share

    def balance(self, name: str) -> float:
        """FLOP per byte from which on products, not reading, bound the time; of the published rates."""
        return self.flops(name) / self.compute_share / self.bytes_per_second


def here(memory: int | None = None, disk: float | None = None, processes: int = 1) -> Machine:
    """This machine's memory and the rate that all threads read it at, measured; or so much of the memory.

    Of several processes also how fast they add up what each has.
    """
    from moestro.ops.expert_mlp import costs
    from moestro.parallel.links import Link, link

    free = machine.available_bytes()
    if memory is not None and memory > machine.memory_bytes():
        raise invalid_input(
            OPERATION,
            got=f"{memory:,} bytes of memory",
            needs=f"at most the {machine.memory_bytes():,} bytes of this machine",
            fix="Describe the other machine in a file: --machine FILE.toml.",
        )
    joined = link(OPERATION, processes) if processes > 1 else Link(0.0, 0.0)
    return Machine(
        name=machine.processor_name(),
        memory=free if memory is None else memory,
        bytes_per_second=costs.read_rate(),
        flops_per_second={"default": 1.0},
        devices=torch.get_num_threads(),
        link_bytes_per_second=joined.bytes_per_second,
        link_seconds=joined.seconds,
        disk_bytes_per_second=disk or 0.0,
        is_here=True,
        sources={"bytes_per_second": "measured", "memory": "free now" if memory is None else "as asked for"},
    )


def machine_names() -> tuple[str, ...]:
    """The names of the machines that come along."""
    return tuple(sorted(path.stem for path in _KNOWN.glob("*.toml")))


def read_machine(name: str | Path) -> Machine:
    """A machine that comes along, by its name, or of a TOML file.

    Raises:
        InvalidInputError: neither, or a file with other keys or values than a machine has.
    """
    path = _KNOWN / f"{name}.toml" if str(name) in machine_names() else Path(name)
    if path.suffix != ".toml":
        raise invalid_input(
            OPERATION,
            got=f"machine {str(name)!r}",
            needs=f"one of {', '.join(machine_names())}, or a .toml file",
            fix=FIX,
        )
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise invalid_input(OPERATION, got=f"{path} ({why})", needs="a machine in TOML", fix=FIX) from error
    return _machine(path, found)


def _machine(path: Path, found: dict[str, Any]) -> Machine:
    allowed = {each.name for each in fields(Machine)} - {"is_here"}
    missing = {"memory", "bytes_per_second", "flops_per_second"} - found.keys()
    if unknown := sorted(found.keys() - allowed):
        raise _wrong(path, f"key {unknown[0]!r}", f"some of {', '.join(sorted(allowed))}")
    if missing:
        raise _wrong(path, f"no {min(missing)}", "memory, bytes_per_second and flops_per_second")
    values: dict[str, Any] = {"name": path.stem, **found}
    for key in _AMOUNTS:
        if isinstance(values.get(key), str):
            values[key] = parse_bytes(OPERATION, f"{key} in {path}", values[key].removesuffix("/s"), least=1)
    rates = values["flops_per_second"]
    if isinstance(rates, int | float):
        values["flops_per_second"] = {"default": float(rates)}
    size = values["memory"]
    if isinstance(size, float) and size.is_integer():
        values["memory"] = int(size)
    _check(path, values)
    return Machine(**values)


def checked(given: Machine) -> Machine:
    """The same, or an InvalidInputError for values that no machine has."""
    _check(given.name, {each.name: getattr(given, each.name) for each in fields(given) if each.name != "is_here"})
    return given


def _check(path: Path | str, values: dict[str, Any]) -> None:
    """Refuse values that no machine has."""
    rates = values["flops_per_second"]
    if not isinstance(rates, dict) or "default" not in rates:
        needs = "a rate, or rates by dtype or format with default for all others"
        raise _wrong(path, f"flops_per_second = {rates!r}", needs)
    numbers = {key: value for key, value in values.items() if key not in ("name", "sources", "flops_per_second")}
    numbers |= {f"flops_per_second.{key}": value for key, value in rates.items()}
    for key, value in numbers.items():
        positive = key in ("memory", "bytes_per_second", "devices") or key.startswith("flops")
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or not (value > 0 if positive else value >= 0):
            raise _wrong(path, f"{key} = {value!r}", "a number above 0" if positive else "a number of at least 0")
        if key.endswith("_share") and not 0 < value <= 1:
            raise _wrong(path, f"{key} = {value!r}", "a share above 0, at most 1")
        if key in ("devices", "memory") and type(value) is not int:
            raise _wrong(path, f"{key} = {value!r}", "a whole number")
    sources = values.get("sources", {})
    if not isinstance(sources, dict) or not all(isinstance(text, str) for text in sources.values()):
        raise _wrong(path, "sources that are no texts by key", "a table of texts")
    if not isinstance(values["name"], str):
        raise _wrong(path, f"name = {values['name']!r}", "a text")


def _wrong(path: Path | str, got: str, needs: str) -> InvalidInputError:
    return invalid_input(OPERATION, got=f"{path} with {got}", needs=needs, fix=FIX)
