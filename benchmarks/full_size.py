"""Load a checkpoint, generate, and print how long it took and how much memory it was resident in.

python examples/make_checkpoint.py --like gpt-oss-20b full         (see its --help)
python benchmarks/full_size.py full
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import moestro
import moestro.hf
from engines import Clock, memory

SHORT = "def fibonacci(n):"
LONG = "import os, sys, re, json, math\nclass Queue:\n    def __init__(self, items): self.items = items\n" * 12
RUNS = (("short prompt", SHORT, 32), ("long prompt", LONG, 16), ("long prompt", LONG, 16), ("short prompt", SHORT, 32))


def held() -> str:
    """What this process holds now, and the most it has held, in GB (Linux)."""
    gb = {name: value / 1e9 for name, value in memory().items()}
    return f"resident {gb['VmRSS']:.2f} GB (not of files {gb['RssAnon']:.2f}), at most {gb['VmHWM']:.2f}"


def main() -> None:
    """Run what the module says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    folder = parser.parse_args().model
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    start = time.perf_counter()
    model: Any = moestro.load(folder)
    seconds = time.perf_counter() - start
    print(f"loaded in {seconds:.1f} s, experts {moestro.hf.served(model)[0].layout}; {held()}", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for name, text, count in RUNS:
        clock, inputs = Clock(), tokenizer(text, return_tensors="pt")
        start = time.perf_counter()
        model.generate(**inputs, max_new_tokens=count, eos_token_id=None, do_sample=False, streamer=clock)
        first, speed = clock.times[1] - start, (count - 1) / (clock.times[-1] - clock.times[1])
        length = inputs["input_ids"].shape[1]
        print(f"{name} of {length} tokens: first token after {first:.1f} s, then {speed:.1f} a second; {held()}")


if __name__ == "__main__":
    main()
