"""Hit rates with and without reading ahead, beside Belady's, on the bundled model's own text.

    python benchmarks/reading_ahead.py [FILE.json]

Belady's policy knows the future and reads nothing before it is asked for: reading ahead can be above it, at the cost of
bytes. Reading ahead is on in every step here, whether it gains or not; nothing is timed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer
from transformers.utils import logging

import moestro
from moestro import machine
from moestro.hf.memory import expert_memory
from moestro.hf.recording import recorded
from moestro.hf.text_model import bundled_folder
from moestro.memory import Belady, Counts, MemoryBudget, replay
from moestro.memory.prefetch import Gain

PROMPTS = ("def fibonacci(n):\n", "class Stack:\n    def __init__(self):\n", "import os\n\ndef read(path):\n")
NEW = 120
CYCLES = (1, 1.5, 2, 3, 4)


class Always(Gain):
    """On in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.on = True

    def end(self) -> None:
        """A step has ended, and nothing changes."""


def measure(cycles: float, prompt: str, prefetch: bool) -> tuple[Counts, Counts, float | None]:
    """Counts of generation, Belady's of the same visits, and recall."""
    folder = bundled_folder()
    cycle = expert_memory(moestro.load(folder, memory="1GB")).residents.cycle
    budget = int(cycles * cycle)
    model = moestro.load(folder, memory=MemoryBudget(budget, prefetch=prefetch))
    memory = expert_memory(model)
    if memory.prefetcher is not None:
        memory.prefetcher.gain = Always()
    ids = AutoTokenizer.from_pretrained(folder)(prompt, return_tensors="pt").input_ids
    torch.manual_seed(0)
    with recorded(model, "bundled") as recorder:
        model.generate(ids, max_new_tokens=NEW, do_sample=True)
    visits = recorder.trace().visits
    best = replay([layer.plan.size for layer in memory.layers], visits, budget, Belady(visits))
    recall = None if memory.prefetcher is None else memory.prefetcher.recall
    return sum(memory.residents.decode, Counts()), sum(best.decode, Counts()), recall


def main(target: str | None = None) -> None:
    """Print one line a budget."""
    logging.disable_progress_bar()
    rows: list[dict[str, Any]] = []
    print("cycles    hits    ahead    Belady    bytes ahead    recall")
    for cycles in CYCLES:
        own, ahead = ([measure(cycles, prompt, prefetch) for prompt in PROMPTS] for prefetch in (False, True))
        plain, early, best = (sum((each[i] for each in runs), Counts()) for runs, i in ((own, 0), (ahead, 0), (own, 1)))
        recall = sum(each[2] for each in ahead) / len(ahead)
        row = {
            "cycles": cycles,
            "hit_rate": plain.hit_rate,
            "hit_rate_ahead": early.hit_rate,
            "hit_rate_belady": best.hit_rate,
            "bytes_ahead": early.read_bytes / plain.read_bytes,
            "recall": recall,
        }
        rows.append(row)
        print(
            f"{cycles:6} {plain.hit_rate:7.1%} {early.hit_rate:8.1%} {best.hit_rate:9.1%}"
            f" {row['bytes_ahead']:13.2f}x {recall:9.0%}",
            flush=True,
        )
    if target is not None:
        command = "python benchmarks/reading_ahead.py"
        report = {"machine": machine.describe(), "command": command, "rows": rows}
        Path(target).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
