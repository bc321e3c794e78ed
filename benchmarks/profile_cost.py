"""What a profile costs: the same generation with and without, in turns; processor time that it adds to a token.

python benchmarks/profile_cost.py                     the bundled model
python benchmarks/profile_cost.py FOLDER --rounds 5   a checkpoint (examples/make_checkpoint.py makes them)

Prints milliseconds of a token, what a profile adds, and the ratio: medians over pairs of neighbours. Run it with
OMP_NUM_THREADS=1: threads that wait for each other take processor time too.
"""

from __future__ import annotations

import argparse
import time
from contextlib import nullcontext
from itertools import pairwise
from statistics import median

import moestro
from moestro import machine
from moestro.bench.report import machine_line
from moestro.hf import MoestroConfig
from moestro.hf.generate import Sampling, generate
from moestro.hf.text_model import TextModel, load_text_model, quiet_transformers

TEXT = "class Stack:"


def token(text_model: TextModel, new_tokens: int, profiled: bool) -> float:
    """Milliseconds of processor time of a token after the first, the median, with a profile or without."""
    times: list[float] = []
    with moestro.profile(text_model.model) if profiled else nullcontext():
        generate(
            text_model,
            TEXT,
            Sampling(new_tokens, do_sample=False),
            on_time=lambda now: times.append(time.process_time()),
        )
    return 1e3 * median(after - before for before, after in pairwise(times[1:]))


def main() -> None:
    """Run what the module says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--new-tokens", type=int, default=64)
    arguments = parser.parse_args()
    print(machine_line({**machine.describe(), "device": "cpu"}))
    with quiet_transformers():
        text_model = load_text_model(arguments.model, format=MoestroConfig(projections="auto"))
        for profiled in (True, False):
            token(text_model, 4, profiled)
        pairs = []
        for number in range(arguments.rounds):
            order = (False, True) if number % 2 else (True, False)
            found = {profiled: token(text_model, arguments.new_tokens, profiled) for profiled in order}
            pairs.append((found[False], found[True]))
    plain, added = median(a for a, _ in pairs), median(b - a for a, b in pairs)
    ratio = median(b / a for a, b in pairs) - 1
    print(f"a token: {plain:.3f} ms of processor time, {added:+.3f} ms with a profile, {ratio:+.2%}")


if __name__ == "__main__":
    main()
