"""What a profile costs: the same generation with and without, in turns; the share that it adds to a token.

python benchmarks/profile_cost.py                     the bundled model
python benchmarks/profile_cost.py FOLDER --rounds 5   a checkpoint (examples/make_checkpoint.py makes them)

Prints milliseconds of a prompt and of a token for either, medians, and the median of the ratios of neighbours.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from statistics import median

import moestro
from moestro import machine
from moestro.bench.report import machine_line
from moestro.hf import MoestroConfig
from moestro.hf.generate import Generation, Sampling, generate
from moestro.hf.text_model import TextModel, load_text_model, quiet_transformers

TEXT = "def fibonacci(n):\n    if n < 2:\n        return n\n" * 4


def run(text_model: TextModel, new_tokens: int, profiled: bool) -> Generation:
    """The same tokens, with a profile or without."""
    with moestro.profile(text_model.model) if profiled else nullcontext():
        return generate(text_model, TEXT, Sampling(new_tokens, do_sample=False))


def main() -> None:
    """Run what the module says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--new-tokens", type=int, default=64)
    arguments = parser.parse_args()
    print(machine_line({**machine.describe(), "device": "cpu"}))
    with quiet_transformers():
        text_model = load_text_model(arguments.model, format=MoestroConfig(projections="auto"))
        run(text_model, 4, True)
        pairs = []
        for number in range(arguments.rounds):
            order = (False, True) if number % 2 else (True, False)
            found = {profiled: run(text_model, arguments.new_tokens, profiled) for profiled in order}
            pairs.append((found[False], found[True]))
    for name, count in (("prompt", 1), ("new", arguments.new_tokens - 1)):
        times = [tuple(getattr(each, f"{name}_seconds") / count * 1e3 for each in pair) for pair in pairs]
        plain, own = (median(column) for column in zip(*times, strict=True))
        ratio = median(after / before for before, after in times)
        what = "the prompt" if name == "prompt" else "a token"
        print(f"{what}: {plain:.3f} ms without, {own:.3f} ms with a profile, {ratio - 1:+.2%}")


if __name__ == "__main__":
    main()
