"""One engine continues prompts, in a process of its own: `benchmarks/end_to_end.py` starts it with a job as JSON.

python benchmarks/engines.py '{"engine": "moestro", "model": "FOLDER", "ids": [[1, 2, 3]], "new_tokens": 16}'
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moestro.bench.peers import PlainRead
from moestro.errors import UnsupportedError
from peers import installed

MOESTRO = {
    "moestro": {},
    "moestro-projections": {"projections": "auto"},
    "moestro-projections-int8": {"projections": "int8"},
    "moestro-int8": {"input_format": "int8"},
    "moestro-int8-projections": {"input_format": "int8", "projections": "auto"},
    "moestro-float32": {"dtype": "float32"},
}
"""Name -> options of `moestro.load`."""

REFERENCE = "moestro-float32"
"""Whose logits all others' are compared with: the same stored weights, and all else in float32."""

TRANSFORMERS = ("eager", "batched_mm", "grouped_mm")
"""Transformers' own `experts_implementation`, each an engine of its name."""

LLAMA_CPP = "llama.cpp"


@dataclass(frozen=True)
class Job:
    """What one process does.

    Attributes:
        engine: a name above.
        model: a checkpoint folder, or a GGUF file for llama.cpp.
        ids: the prompts, all of one length.
        new_tokens: how many tokens follow each, greedily, whatever they are.
        repeats: how many timed runs follow a first one that is not; with 0 there is none at all.
        threads: of computation.
        logits: a file for those after the prompts [sequences, vocabulary] (float32, `numpy.save`), or none.
    """

    engine: str
    model: str
    ids: list[list[int]]
    new_tokens: int
    repeats: int = 1
    threads: int = 1
    logits: str | None = None


@dataclass
class Turn:
    """What it found: seconds of loading, of each run's first tokens, and of the steps that follow, by run.

    Attributes:
        ids: the new tokens, by step.
        read_rates: bytes per second of a plain read of its weights after each run, where they are PyTorch's tensors.
    """

    load_seconds: float = 0.0
    prompt_seconds: list[float] = field(default_factory=list)
    step_seconds: list[list[float]] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)
    read_rates: list[float] = field(default_factory=list)
    resident_bytes: int = 0
    anonymous_bytes: int = 0


@dataclass(frozen=True)
class Engine:
    """A model in memory.

    Attributes:
        logits: of prompts' last tokens.
        generate: of prompts and a number of steps: new tokens by step, and the times they came at.
        weights: its tensors, to be read; none where they are not PyTorch's.
    """

    logits: Callable[[list[list[int]]], np.ndarray[Any, Any]]
    generate: Callable[[list[list[int]], int], tuple[list[list[int]], list[float]]]
    weights: Sequence[torch.Tensor] = ()


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
    """As `moestro.load` gives it, with the cache of `moestro generate`."""
    import moestro
    from moestro.hf.cache import appending_cache

    return _of_transformers(moestro.load(job.model, **MOESTRO[job.engine]), appending_cache)


def transformers_engine(job: Job) -> Engine:
    """Transformers alone, in bfloat16: what is packed it dequantises as a whole."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        job.model, dtype=torch.bfloat16, experts_implementation=job.engine.removeprefix("transformers-")
    )
    return _of_transformers(model.eval())


def _of_transformers(model: Any, cache: Callable[[Any, Any], dict[str, Any]] = lambda *_: {}) -> Engine:
    def logits(ids: list[list[int]]) -> np.ndarray[Any, Any]:
        with torch.no_grad():
            return model(torch.tensor(ids), logits_to_keep=1).logits[:, -1].float().numpy()

    def generate(ids: list[list[int]], count: int) -> tuple[list[list[int]], list[float]]:
        clock, prompt = Clock(), torch.tensor(ids)
        options = {"max_new_tokens": count, "eos_token_id": None, "do_sample": False, "streamer": clock}
        options |= {"attention_mask": torch.ones_like(prompt), "pad_token_id": 0}
        found = model.generate(prompt, **options, **cache(model, model.generation_config))
        return found[:, prompt.shape[1] :].T.tolist(), clock.times[1:]

    return Engine(logits, generate, _weights(model))


def _weights(model: Any) -> list[torch.Tensor]:
    """As they are stored; none of a model whose linear modules were rounded, which has no state dict."""
    try:
        found = model.state_dict().values()
    except UnsupportedError:
        return []
    return list({tensor.data_ptr(): tensor for tensor in found}.values())


def read_rate(weights: Sequence[torch.Tensor]) -> float:
    """Bytes per second of a plain read of all of them, now, by all of PyTorch's threads."""
    read = PlainRead(weights)
    start = time.perf_counter()
    read()
    return read.nbytes / (time.perf_counter() - start)


def llama_engine(job: Job) -> Engine:
    """llama.cpp with its default settings, through the low-level functions of llama-cpp-python."""

    api = installed.module("llama_cpp", "llama")
    api.llama_log_set(_ERRORS_ONLY, None)
    api.llama_backend_init()
    model = api.llama_model_load_from_file(str(job.model).encode(), api.llama_model_default_params())
    options, sequences = api.llama_context_default_params(), len(job.ids)
    options.n_seq_max = sequences
    options.n_ctx = sequences * (len(job.ids[0]) + job.new_tokens + 8)
    options.n_batch = max(options.n_batch, sequences * len(job.ids[0]))
    options.n_threads = options.n_threads_batch = job.threads
    context = api.llama_init_from_model(model, options) if model else None
    if not context:
        raise SystemExit(f"llama.cpp could not open {job.model}")
    size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
    batch = api.llama_batch_init(options.n_batch, 0, 1)

    def decode(rows: list[list[int]], start: int) -> np.ndarray[Any, Any]:
        asked = _fill(batch, rows, start)
        if api.llama_decode(context, batch):
            raise SystemExit("llama.cpp could not decode")
        found = [ctypes.cast(api.llama_get_logits_ith(context, place), _FLOATS) for place in asked]
        return np.stack([np.ctypeslib.as_array(each, (size,)) for each in found])

    def start(ids: list[list[int]]) -> np.ndarray[Any, Any]:
        api.llama_memory_clear(api.llama_get_memory(context), True)
        return decode(ids, 0)

    def generate(ids: list[list[int]], count: int) -> tuple[list[list[int]], list[float]]:
        found, times = [start(ids).argmax(1).tolist()], [time.perf_counter()]
        while len(found) < count:
            logits = decode([[token] for token in found[-1]], len(ids[0]) + len(found) - 1)
            found.append(logits.argmax(1).tolist())
            times.append(time.perf_counter())
        return found, times

    return Engine(start, generate)


def _fill(batch: Any, rows: list[list[int]], start: int) -> list[int]:
    """Put a row of tokens for each sequence, from position `start` on; returns where the last of each is."""
    batch.n_tokens, asked = 0, []
    for sequence, row in enumerate(rows):
        for position, token in enumerate(row, start):
            place = batch.n_tokens
            batch.token[place], batch.pos[place] = token, position
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, sequence
            batch.logits[place] = position == start + len(row) - 1
            batch.n_tokens += 1
        asked.append(batch.n_tokens - 1)
    return asked


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
    if job.repeats:
        engine.generate(job.ids, job.new_tokens)
        if engine.weights:
            read_rate(engine.weights)  # pages of mapped files that no token has touched yet
    for _ in range(job.repeats):
        start = time.perf_counter()
        turn.ids, times = engine.generate(job.ids, job.new_tokens)
        turn.prompt_seconds.append(times[0] - start)
        turn.step_seconds.append([later - earlier for earlier, later in pairwise(times)])
        if engine.weights:
            turn.read_rates.append(read_rate(engine.weights))
    found = memory()
    turn.resident_bytes, turn.anonymous_bytes = found["VmHWM"], found["RssAnon"]
    return turn


if __name__ == "__main__":
    print(json.dumps(asdict(take_turn(Job(**json.loads(sys.argv[1]))))))
