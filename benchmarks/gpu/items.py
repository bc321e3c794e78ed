"""A step of a run as items within a budget of its own: what each found is in one file when the next begins.

The items run in a process of their own, which may end before they do: a kernel that reads where nothing is costs it the
device, one that never returns costs it everything. Another process then goes on behind the item that it was at.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from moestro.bench.failures import DeviceLostError, check_device, failures, sentence

SCHEMA = 1
"""Of the files."""
DONE, FAILED, REFUSED, LEFT, LOST = 0, 1, 2, 3, 75
"""Exit codes: all was done; something failed or was wrong; it could not begin; time ran out; the device is lost."""
MARGIN = 1.3
"""What an item is taken to need, over what the slowest of its kind took."""
GRACE = 20.0
"""Seconds beyond the budget, after which a process is ended."""
_MOST_STARTS = 12
_POLL_SECONDS = 0.1

Row = dict[str, Any]


@dataclass(frozen=True)
class Item:
    """A piece of work by name, whose first word says of which kind it is.

    `run` is given the seconds that are left and returns rows. It is worth beginning with `least` seconds, and taken to
    hang after `most`; one that `ends_itself` within the seconds that it is given may take them all.
    """

    name: str
    run: Callable[[float], list[Row]]
    least: float = 5.0
    most: float = 90.0
    ends_itself: bool = False

    @property
    def kind(self) -> str:
        return self.name.partition(" ")[0]


@dataclass
class Record:
    """What a step has found so far: its file.

    Attributes:
        step: its name.
        about: the command, date, machine and versions.
        rows: what was found, each with the `item` that found it and a `status`: "ok", "wrong", "skipped" or a tool's.
        done: seconds of each item that came to its end.
        failed: items that did not, and why.
        left: items that were not begun, and why.
        at: the item that is at work; None between them.
        until: when that one is taken to hang, by the clock of `run_items`.
        notes: what a reader has to know.
    """

    step: str
    about: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    done: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    at: str | None = None
    until: float | None = None
    notes: list[str] = field(default_factory=list)
    schema: int = SCHEMA

    @property
    def is_wrong(self) -> bool:
        """Whether an item failed or an output was wrong."""
        return bool(self.failed) or any(row.get("status") == "wrong" for row in self.rows)

    def code(self) -> int:
        """The exit code that says how it went."""
        return FAILED if self.is_wrong else LEFT if self.left else DONE

    def save(self, path: Path) -> None:
        """Keep it in a file, which is whole at any time."""
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(".new")
        new.write_text(json.dumps(asdict(self), indent=1) + "\n")
        new.replace(path)

    @classmethod
    def load(cls, path: Path, step: str) -> Record:
        """What `save` kept for the step; nothing found where there is no file, or one of another schema."""
        if path.is_file():
            found = json.loads(path.read_text())
            if found.get("schema") == SCHEMA and found.get("step") == step:
                return cls(**found)
        return cls(step)


def run_items(
    record: Record,
    items: Sequence[Item],
    save: Callable[[Record], None],
    end: float,
    clock: Callable[[], float] = time.time,
    device: str = "cpu",
) -> int:
    """Run the items that are neither done nor failed, in order, each if the time is likely to do for it.

    Returns the exit code. What an item raises is why it failed; where it broke the device, none is begun after it.
    """
    open_items = [item for item in items if item.name not in record.done and item.name not in record.failed]
    record.left = {item.name: "it was not reached" for item in open_items}
    for item in open_items:
        seconds, wanted = end - clock(), _wanted(item, record)
        if seconds < wanted:
            record.left[item.name] = f"{max(seconds, 0):.0f} s were left of the budget, and it needs about {wanted:.0f}"
            continue
        begun = clock()
        record.at, record.until = item.name, end if item.ends_itself else min(begun + item.most, end)
        save(record)
        try:
            rows = item.run(seconds)
            record.rows += [{"item": item.name, **row} for row in rows]
            record.done[item.name] = clock() - begun
        except failures() as error:
            record.failed[item.name] = sentence(error)
        del record.left[item.name]
        record.at = record.until = None
        save(record)
        if item.name in record.failed:
            try:
                check_device(torch.device(device), None, record.failed[item.name])
            except DeviceLostError:
                return LOST
    save(record)
    return record.code()


def _wanted(item: Item, record: Record) -> float:
    if item.ends_itself:
        return item.least
    taken = [seconds for name, seconds in record.done.items() if name.partition(" ")[0] == item.kind]
    return max([item.least, *(MARGIN * seconds for seconds in taken)])


def supervise(command: Sequence[str], step: str, path: Path, end: float, clock: Callable[[], float] = time.time) -> int:
    """Run the command that works on a step, and again where it lost the device, broke off or hung, until `end`.

    The item that a process was at when it broke off, or was ended with its time, has failed. Returns the exit code.
    """
    for _ in range(_MOST_STARTS):
        code = _watched(command, step, path, end, clock)
        if code in (DONE, FAILED, REFUSED, LEFT):
            return code
        record = Record.load(path, step)
        if record.at is not None:
            how = "hung and was ended" if code is None else f"ended with code {code}"
            record.failed[record.at] = f"its process {how} at this item"
            record.left.pop(record.at, None)
            record.at = record.until = None
            record.save(path)
        elif code not in (None, LOST):
            record.failed["begin"] = f"a process ended with code {code} before it was at an item"
            record.save(path)
            break
        if clock() >= end:
            break
    return Record.load(path, step).code()


def _watched(command: Sequence[str], step: str, path: Path, end: float, clock: Callable[[], float]) -> int | None:
    """The exit code of the command; None where it was ended: the time was over, or the item at work hung."""
    process = subprocess.Popen(command)
    seen, limit = -1.0, end
    try:
        while (code := process.poll()) is None:
            if path.is_file() and path.stat().st_mtime != seen:
                seen = path.stat().st_mtime
                limit = Record.load(path, step).until or end
            if clock() >= min(limit, end) + GRACE:
                return None
            time.sleep(_POLL_SECONDS)
        return code
    finally:
        process.kill()
        process.wait()
