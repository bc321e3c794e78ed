"""Steps of the engine behind `moestro serve`, without HTTP: their time, and what reading a prompt in parts changes.

python benchmarks/steps.py                          the bundled model
python benchmarks/steps.py FOLDER --projections     a checkpoint (examples/make_checkpoint.py makes them)

Prints milliseconds of a step of 1, 2, 4 and 8 requests of 64 tokens; processor time of a token by the engine and by
`moestro.hf.generate`, in turns; and how far the keys of each layer are from those of the same prompt read at once.
"""

from __future__ import annotations

import argparse
import threading
import time
from statistics import median

import torch

from moestro import machine
from moestro.bench.report import machine_line
from moestro.hf import MoestroConfig
from moestro.hf.generate import Sampling, configure, encode, generate
from moestro.hf.text_model import TextModel, load_text_model, quiet_transformers
from moestro.serve.cache import RequestCache
from moestro.serve.engine import Engine
from moestro.serve.request import Ended, Request, Token
from moestro.serve.step_model import StepModel
from moestro.tolerances import relative_error

REQUESTS = (1, 2, 4, 8)
PROMPT, STEPS, ROUNDS = 64, 6, 3
TEXT = "def fibonacci(n):"


class Heard:
    """A listener that waits for the end."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def token(self, token: Token) -> bool:
        return False

    def end(self, ended: Ended) -> None:
        self.ended.set()


def steps(text_model: TextModel, chance: torch.Generator) -> None:
    """Milliseconds of a step by the number of requests, medians."""
    model = StepModel(text_model.model, several=True)

    def tokens(count: int) -> list[int]:
        return torch.randint(10, 250, (count,), generator=chance).tolist()

    caches = [model.new_cache(PROMPT + STEPS * len(REQUESTS)) for _ in range(max(REQUESTS))]
    for cache in caches:
        model.read(tokens(PROMPT), cache)
    for count in REQUESTS:
        times = []
        for _ in range(STEPS):
            start = time.perf_counter()
            model.step([[token] for token in tokens(count)], caches[:count])
            times.append(time.perf_counter() - start)
        seconds = median(times[1:])
        print(f"a step of {count}: {seconds * 1e3:.0f} ms, {count / seconds:.1f} tokens/s", flush=True)


def by_token(text_model: TextModel, new_tokens: int) -> None:
    """Milliseconds of processor time of a token, by the engine and by `generate`, which take turns."""
    sampling = Sampling(max_new_tokens=new_tokens, do_sample=False)
    ids = encode(text_model.name, text_model.tokenizer, TEXT)
    config = configure(text_model, sampling, len(ids))
    engine = Engine(text_model, prefix_bytes=0)
    for _ in range(ROUNDS):
        start = time.process_time()
        count = generate(text_model, TEXT, sampling).new_tokens
        between = time.process_time()
        heard = Heard()
        engine.submit(Request(tuple(ids), config), heard)
        heard.ended.wait()
        end = time.process_time()
        first, second = (between - start) / count * 1e3, (end - between) / count * 1e3
        print(f"a token: generate {first:.2f} ms of processor time, engine {second:.2f} ({second / first:.2f})")
    engine.close()


def in_parts(text_model: TextModel) -> None:
    """Distance of each layer's keys, the prompt read in two parts, from those of the prompt read at once."""
    model = StepModel(text_model.model)
    ids = (100, 90, 80, 70, 60, 50)
    whole, parts = model.new_cache(len(ids)), model.new_cache(len(ids))
    if not isinstance(whole, RequestCache) or not isinstance(parts, RequestCache):
        return
    model.read(ids, whole)
    model.read(ids[:3], parts)
    model.read(ids[3:], parts)
    layers = zip(parts.layers, whole.layers, strict=True)
    distances = [relative_error(one.keys[..., 3:6, :], other.keys[..., 3:6, :]) for one, other in layers]
    print("keys by layer, two parts from one:", " ".join(f"{distance:.4f}" for distance in distances))


def main() -> None:
    """Run what the module says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--projections", default="auto", help="auto, torch or a format")
    parser.add_argument("--new-tokens", type=int, default=64)
    arguments = parser.parse_args()
    print(machine_line({**machine.describe(), "device": "cpu"}))
    with quiet_transformers(), torch.no_grad():
        how = MoestroConfig(projections=arguments.projections)
        text_model = load_text_model(arguments.model, format=how)
        steps(text_model, torch.Generator().manual_seed(0))
        in_parts(text_model)
        by_token(text_model, arguments.new_tokens)


if __name__ == "__main__":
    main()
