"""A model within memory budgets: tokens a second, hits, bytes read and memory taken, budget by budget.

    python benchmarks/memory.py FOLDER [BUDGET ...]

Each budget is a process of its own: "mapped", or a size as `moestro.load(memory=...)` takes it. A prompt of 512 random
tokens, then 24 greedy ones, of which the last 18 are timed. All of a folder's budgets must give the same tokens.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

import moestro
from moestro.hf.memory import expert_memory, memory_line

PROMPT, NEW, UNTIMED = 512, 24, 6


def measure(folder: str, budget: str) -> dict[str, Any]:
    """One budget, in this process."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = moestro.load(folder, memory=None if budget == "mapped" else budget)
    memory = expert_memory(model)
    torch.manual_seed(0)
    ids = torch.randint(0, min(1000, model.config.vocab_size), (1, PROMPT))
    tokens: list[int] = []
    start = time.perf_counter()
    with torch.no_grad():
        out = model(ids, use_cache=True)
        prompt = time.perf_counter() - start
        while len(tokens) < NEW:
            if len(tokens) == UNTIMED:
                start, before = time.perf_counter(), _so_far(memory)
            tokens.append(int(out.logits[0, -1].argmax()))
            out = model(torch.tensor([tokens[-1:]]), past_key_values=out.past_key_values, use_cache=True)
    steps = NEW - UNTIMED
    seconds = time.perf_counter() - start
    waited, read, lookups, hits = (now - then for now, then in zip(_so_far(memory), before, strict=True))
    return {
        "budget": budget,
        "prompt_seconds": prompt,
        "milliseconds": 1000 * seconds / steps,
        "waiting_milliseconds": 1000 * waited / steps,
        "read_megabytes": read / steps / 1e6,
        "hit_rate": hits / lookups if lookups else None,
        "tokens": tokens,
        "anonymous_gigabytes": _anonymous() / 1e9,
        "line": memory_line(model),
    }


def _so_far(memory: Any) -> tuple[float, int, int, int]:
    """Seconds waited, bytes read, lookups and hits of decoding."""
    if memory is None:
        return 0.0, 0, 0, 0
    told = memory.statistics()
    decode = told["decode"]
    return told["seconds_waiting"], memory.reader.counts["bytes"], decode["lookups"], decode["hits"]


def _anonymous() -> int:
    """Bytes of this process that are no pages of files; 0 where the system does not say."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def main(folder: str, *budgets: str) -> int:
    """Print one line a budget; 1 where tokens differ."""
    found = []
    for budget in budgets or ("mapped",):
        command = [sys.executable, __file__, "--one", folder, budget]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
        said = {name: value for name, value in found[-1].items() if name != "tokens"}
        print(", ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in said.items()), flush=True)
    return int(any(each["tokens"] != found[0]["tokens"] for each in found))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(measure(*sys.argv[2:])))
    else:
        sys.exit(main(*sys.argv[1:]))
