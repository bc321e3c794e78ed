"""A step: the order of its items, the budget that they keep, the file after each, and processes that end before it."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from forked import python
from gpu import items
from gpu.items import DONE, FAILED, LEFT, LOST, REFUSED, SCHEMA, Item, Record, Row, run_items, supervise
from moestro.bench.failures import DeviceLostError


class Clock:
    """Time that passes where it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def taking(self, seconds: float, said: list[str] | None = None) -> Callable[[float], list[Row]]:
        def run(left: float) -> list[Row]:
            self.now += seconds
            if said is not None:
                said.append(f"{left:g}")
            return [{"status": "ok", "left": left}]

        return run


def test_items_run_in_order_and_each_is_in_the_file_when_the_next_begins(tmp_path: Path) -> None:
    clock, path, seen = Clock(), tmp_path / "deep" / "step.json", []

    def look(left: float) -> list[Row]:
        found = json.loads(path.read_text())
        seen.append((found["at"], sorted(found["done"]), sorted(found["left"])))
        clock.now += 1
        return [{"status": "ok"}]

    record = Record("step")
    code = run_items(record, [Item(n, look) for n in ("one", "two", "three")], lambda r: r.save(path), 100.0, clock)
    assert code == DONE
    assert seen == [
        ("one", [], ["one", "three", "two"]),
        ("two", ["one"], ["three", "two"]),
        ("three", ["one", "two"], ["three"]),
    ]
    found = json.loads(path.read_text())
    assert found["schema"] == SCHEMA
    assert found["done"] == {"one": 1.0, "two": 1.0, "three": 1.0}
    assert (found["at"], found["left"], found["failed"]) == (None, {}, {})
    assert [row["item"] for row in found["rows"]] == ["one", "two", "three"]
    assert Record.load(path, "step") == record
    assert Record.load(path, "another") == Record("another")
    path.write_text(json.dumps({**found, "schema": SCHEMA + 1}))
    assert Record.load(path, "step") == Record("step")


def test_what_the_time_does_not_do_for_is_not_begun_and_said(tmp_path: Path) -> None:
    """An item is taken to need 1.3 times what the slowest of its kind took; one of another kind may still fit."""
    clock, record, said = Clock(), Record("step"), []
    work = [Item(f"slow {i}", clock.taking(10.0, said), 1.0) for i in range(4)]
    work.append(Item("quick 1", clock.taking(1.0, said), 1.0))
    assert run_items(record, work, lambda r: None, 32.0, clock) == LEFT
    assert said == ["32", "22", "12"]
    assert clock.now == 21.0
    assert sorted(record.done) == ["quick 1", "slow 0", "slow 1"]
    assert record.left == {f"slow {i}": "12 s were left of the budget, and it needs about 13" for i in (2, 3)}
    # Again, with time: only what was left.
    said.clear()
    assert run_items(record, work, lambda r: None, 1000.0, clock) == DONE
    assert said == ["979", "969"]
    assert record.left == {}


def test_what_an_item_raises_is_why_it_failed_and_the_next_one_runs() -> None:
    def breaks(left: float) -> list[Row]:
        raise RuntimeError("no such\n kernel")

    clock, record = Clock(), Record("step")
    work = [Item("one", breaks), Item("two", clock.taking(1.0))]
    assert run_items(record, work, lambda r: None, 100.0, clock) == FAILED
    assert record.failed == {"one": "no such kernel"}
    assert list(record.done) == ["two"]
    assert run_items(record, work, lambda r: None, 100.0, clock) == FAILED  # it is not tried again


def test_behind_a_device_that_is_lost_none_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(device: object, variant: object, reason: str) -> None:
        raise DeviceLostError(None, reason)

    monkeypatch.setattr(items, "check_device", lost)
    clock, record = Clock(), Record("step")
    work = [Item("one", lambda left: [][1]), Item("two", clock.taking(1.0))]
    assert run_items(record, work, lambda r: None, 100.0, clock) == LOST
    assert list(record.failed) == ["one"]
    assert record.left == {"two": "it was not reached"}


def test_wrong_rows_are_a_failure() -> None:
    record = Record("step", rows=[{"status": "ok"}])
    assert record.code() == DONE
    record.rows.append({"status": "wrong"})
    assert record.code() == FAILED


CHILD = """
import sys, time
from pathlib import Path
sys.path[:0] = {path!r}
from gpu.items import Item, Record, run_items
def work(name):
    def run(left):
        {body}
        return [dict(status="ok")]
    return run
path = Path({file!r})
record = Record.load(path, "step")
names = ("one", "two", "three")
sys.exit(run_items(record, [Item(n, work(n), 0.0, {most}) for n in names], lambda r: r.save(path), time.time() + 60))
"""


def child(path: Path, body: str, most: float = 90.0) -> list[str]:
    start = python("gpu.items", PYTHONPATH=os.pathsep.join(sys.path))
    return [*start, "-c", CHILD.format(path=sys.path, file=str(path), body=body, most=most)]


def test_another_process_goes_on_behind_the_item_at_which_one_ended(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    command = child(path, "name == 'two' and __import__('os')._exit(139)")
    assert supervise(command, "step", path, time.time() + 60) == FAILED
    record = Record.load(path, "step")
    assert sorted(record.done) == ["one", "three"]
    assert record.failed == {"two": "its process ended with code 139 at this item"}
    assert record.left == {}


def test_an_item_that_hangs_is_ended_and_the_next_process_goes_on(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(items, "GRACE", 0.0)
    path = tmp_path / "step.json"
    command = child(path, "name == 'two' and time.sleep(600)", most=1.0)
    assert supervise(command, "step", path, time.time() + 60) == FAILED
    record = Record.load(path, "step")
    assert sorted(record.done) == ["one", "three"]
    assert record.failed == {"two": "its process hung and was ended at this item"}
    assert (record.at, record.until, record.left) == (None, None, {})


def test_a_process_is_ended_with_the_time_of_the_step(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(items, "GRACE", 0.0)
    path, over = tmp_path / "step.json", []

    def clock() -> float:
        """Over for good as soon as the second item is at work."""
        over.extend([1.0] if path.is_file() and Record.load(path, "step").at == "two" else [])
        return 1.0 if over else 0.0

    assert supervise(child(path, "name == 'two' and time.sleep(600)"), "step", path, 1.0, clock) == FAILED
    record = Record.load(path, "step")
    assert list(record.done) == ["one"]
    assert list(record.failed) == ["two"]
    assert record.left == {"three": "it was not reached"}


def test_a_process_that_cannot_begin_is_not_started_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    assert supervise([sys.executable, "-c", "raise SystemExit(9)"], "step", path, time.time() + 60) == FAILED
    assert "ended with code 9 before it was at an item" in Record.load(path, "step").failed["begin"]
    assert supervise([sys.executable, "-c", "raise SystemExit(2)"], "step", path, time.time() + 60) == REFUSED
