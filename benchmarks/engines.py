"""One engine continues one prompt, in a process of its own: `benchmarks/end_to_end.py` starts it with a job as JSON.

python benchmarks/engines.py '{"engine": "moestro", "model": "FOLDER", "ids": [1, 2, 3], "new_tokens": 16}'
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from peers import installed

MOESTRO = {
    "moestro": {},
    "moestro-projections": {"projections": "auto"},
    "moestro-projections-int8": {"projections": "int8"},
    "moestro-int8": {"input_format": "int8"},
    "moestro-int8-projections": {"input_format": "int8", "projections": "auto"},
}
"""Name -> options of `moestro.load`."""

TRANSFORMERS = ("eager", "batched_mm", "grouped_mm")
"""Transformers' own `experts_implementation`, each an engine of its name."""

LLAMA_CPP = "llama.cpp"


@dataclass(frozen=True)
class Job:
    """What one process does.

    Attributes:
        engine: a name above.
        model: a checkpoint folder, or a GGUF file for llama.cpp.
        ids: the prompt.
        new_tokens: how many tokens follow, greedily, whatever they are.
        repeats: how many timed runs follow a first one that is not.
        threads: of computation.
        logits: a file for those after the prompt's last token (float32, `numpy.save`), or none.
    """

    engine: str
    model: str
    ids: list[int]
    new_tokens: int
    repeats: int = 1
    threads: int = 1
    logits: str | None = None


@dataclass
class Turn:
    """What it found: seconds of loading, of each run's first token, and of the tokens that follow, by run."""

    load_seconds: float = 0.0
    prompt_seconds: list[float] = field(default_factory=list)
    step_seconds: list[list[float]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    resident_bytes: int = 0
    anonymous_bytes: int = 0


@dataclass(frozen=True)
class Engine:
    """A model in memory: `logits` of a prompt's last token, and `generate` -> ids and the times they came at."""

    logits: Callable[[list[int]], np.ndarray[Any, Any]]
    generate: Callable[[list[int], int], tuple[list[int], list[float]]]


class Clock:
    """Transformers' streamer, for the times at which tokens came; the first is that of the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: object) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def memory() -> dict[str, int]:
    """Bytes that this process holds now (VmRSS), the most it has held (VmHWM), and those of no file (RssAnon)."""
    lines = (line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(value.split()[0]) * 1024 for name, value in lines if name in ("VmHWM", "VmRSS", "RssAnon")}


def moestro_engine(job: Job) -> Engine:
    """As `moestro.load` gives it."""
    import moestro

    return _of_transformers(moestro.load(job.model, **MOESTRO[job.engine]))


def transformers_engine(job: Job) -> Engine:
    """Transformers alone, in bfloat16: what is packed it dequantises as a whole."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        job.model, dtype=torch.bfloat16, experts_implementation=job.engine.removeprefix("transformers-")
    )
    return _of_transformers(model.eval())


def _of_transformers(model: Any) -> Engine:
    def logits(ids: list[int]) -> np.ndarray[Any, Any]:
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0, -1].float().numpy()

    def generate(ids: list[int], count: int) -> tuple[list[int], list[float]]:
        clock, prompt = Clock(), torch.tensor([ids])
        options = {"max_new_tokens": count, "eos_token_id": None, "do_sample": False, "streamer": clock}
        found = model.generate(prompt, attention_mask=torch.ones_like(prompt), pad_token_id=0, **options)
        return found[0, len(ids) :].tolist(), clock.times[1:]

    return Engine(logits, generate)


def llama_engine(job: Job) -> Engine:
    """llama.cpp with its default settings, through the low-level functions of llama-cpp-python."""

    api = installed.module("llama_cpp", "llama")
    api.llama_log_set(_ERRORS_ONLY, None)
    api.llama_backend_init()
    model = api.llama_model_load_from_file(str(job.model).encode(), api.llama_model_default_params())
    options = api.llama_context_default_params()
    options.n_ctx = len(job.ids) + job.new_tokens + 8
    options.n_threads = options.n_threads_batch = job.threads
    context = api.llama_init_from_model(model, options) if model else None
    if not context:
        raise SystemExit(f"llama.cpp could not open {job.model}")
    size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))

    def decode(ids: list[int]) -> np.ndarray[Any, Any]:
        tokens = (api.llama_token * len(ids))(*ids)
        if api.llama_decode(context, api.llama_batch_get_one(tokens, len(ids))):
            raise SystemExit("llama.cpp could not decode")
        return np.ctypeslib.as_array(ctypes.cast(api.llama_get_logits_ith(context, -1), _FLOATS), (size,))

    def start(ids: list[int]) -> np.ndarray[Any, Any]:
        api.llama_memory_clear(api.llama_get_memory(context), True)
        return decode(ids)

    def generate(ids: list[int], count: int) -> tuple[list[int], list[float]]:
        found, times = [int(start(ids).argmax())], [time.perf_counter()]
        while len(found) < count:
            found.append(int(decode(found[-1:]).argmax()))
            times.append(time.perf_counter())
        return found, times

    return Engine(lambda ids: start(ids).copy(), generate)


_FLOATS = ctypes.POINTER(ctypes.c_float)
_GGML_ERROR = 4


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def _ERRORS_ONLY(level: int, text: bytes, _: object) -> None:  # noqa: N802 (a value: what llama.cpp logs to)
    if level == _GGML_ERROR:
        sys.stderr.buffer.write(text)


def open_engine(job: Job) -> Engine:
    """The engine of a job."""
    if job.engine in MOESTRO:
        return moestro_engine(job)
    return llama_engine(job) if job.engine.startswith(LLAMA_CPP) else transformers_engine(job)


def take_turn(job: Job) -> Turn:
    """Load, run once, then `repeats` times against the clock."""
    torch.set_num_threads(job.threads)
    turn, start = Turn(), time.perf_counter()
    engine = open_engine(job)
    turn.load_seconds = time.perf_counter() - start
    if job.logits is not None:
        np.save(job.logits, engine.logits(job.ids))
    engine.generate(job.ids, job.new_tokens)
    for _ in range(job.repeats):
        start = time.perf_counter()
        turn.ids, times = engine.generate(job.ids, job.new_tokens)
        turn.prompt_seconds.append(times[0] - start)
        turn.step_seconds.append([later - earlier for earlier, later in pairwise(times)])
    found = memory()
    turn.resident_bytes, turn.anonymous_bytes = found["VmHWM"], found["RssAnon"]
    return turn


if __name__ == "__main__":
    print(json.dumps(asdict(take_turn(Job(**json.loads(sys.argv[1]))))))
