"""Plans found on this device, kept in the user's cache directory. Imports no Triton.

`benchmarks/tune.py` of a checkout finds them by timing. One JSON file for each kind of device. It is read where a call
on such a device meets a shape for the first time in a process; nothing is written but by `store`.
"""

from __future__ import annotations

import functools
import json
import os
import re
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch

from moestro.ops.expert_mlp.triton_tuning import Plan, Problem, Tile

VERSION = 1
"""Of the files: plans of another version are not read."""

REACH = 1.5
"""A plan serves numbers of tokens within this factor of the one that it was found for."""


_stored = [0]


def edition() -> int:
    """How often this process has stored plans: `find` may answer otherwise where it is another number."""
    return _stored[0]


@functools.lru_cache(maxsize=1024)
def find(problem: Problem, device: torch.device) -> Plan | None:
    """The plan found for this shape, these formats and about as many tokens on this kind of device, or None."""
    if device.type != "cuda":
        return None
    return nearest(_read(_file(device_name(device))), problem)


def nearest(stored: dict[str, dict[int, Plan]], problem: Problem) -> Plan | None:
    """Of what is stored for a shape, the plan for the nearest number of tokens within `REACH`."""
    plans = stored.get(key(problem), {})
    tokens = problem.num_tokens
    within = [t for t in plans if max(t, tokens) <= REACH * min(t, tokens)]
    if not within:
        return None
    best = min(within, key=lambda t: max(t, tokens) / min(t, tokens))
    return replace(plans[best], reason=f"found by timing for T = {best} on this kind of device")


def store(name: str, found: dict[Problem, Plan]) -> Path:
    """Keep plans for a kind of device, beside and instead of those that are kept; returns the file."""
    path = _file(name)
    stored = _read(path)
    for problem, plan in found.items():
        stored.setdefault(key(problem), {})[problem.num_tokens] = plan
    plans = {k: {str(t): asdict(plan) for t, plan in sorted(of.items())} for k, of in sorted(stored.items())}
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")  # so that who reads meanwhile finds the old file or the new one
    fresh.write_text(json.dumps({"version": VERSION, "device": name, "plans": plans}, indent=1) + "\n")
    fresh.replace(path)
    find.cache_clear()
    _stored[0] += 1
    return path


def key(problem: Problem) -> str:
    """A problem without its number of tokens, as the file names it."""
    return " ".join(f"{f.name}={getattr(problem, f.name)!r}" for f in fields(problem) if f.name != "num_tokens")


def device_name(device: torch.device) -> str:
    """Name, compute capability and multiprocessors of a CUDA device: what a plan holds for."""
    found = torch.cuda.get_device_properties(device)
    return f"{found.name} sm_{found.major}{found.minor} x{found.multi_processor_count}"


def folder() -> Path:
    """Where plans are kept: under $XDG_CACHE_HOME where that is set, else under ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moestro" / "tuned"


def _file(name: str) -> Path:
    return folder() / f"{re.sub(r'[^a-z0-9]+', '-', name.lower())}.json"


def _read(path: Path) -> dict[str, dict[int, Plan]]:
    """What a file holds; nothing where there is none, or one of another version or of plans with other fields."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict) or found.get("version") != VERSION:
        return {}
    names = {f.name for f in fields(Plan)}
    return {
        k: {int(t): _plan(value) for t, value in of.items() if set(value) == names} for k, of in found["plans"].items()
    }


def _plan(value: dict[str, Any]) -> Plan:
    return Plan(**{**value, "gate_up": Tile(**value["gate_up"]), "down": Tile(**value["down"])})
