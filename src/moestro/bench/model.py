"""Whole models, timed: each case in a process of its own, so that its peak of memory is its own."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

from moestro.errors import MoestroError, invalid_input, no_answer
from moestro.parallel.processes import ask, check_refusal, ended, threads_each

OPERATION = "bench model"
COMMAND: tuple[str, ...] = (sys.executable, "-m", "moestro.hf.timed")
"""What is started with a case as its last argument; its last line of output is what it found, or its error."""
RANK = "moestro.hf.timed:rank"
"""What each process of a case with several calls."""
FEWEST_NEW_TOKENS = 3
"""The first comes with the prompt, the second by the first step, which is apart; the third is one to be timed."""


@dataclass(frozen=True)
class ModelCase:
    """What one process loads and runs, or several together.

    Attributes:
        folder: a checkpoint, or a hub id.
        format, memory: as for `moestro.load`; memory in bytes.
        batch: sequences that share a step.
        prompt_tokens, new_tokens: of each sequence.
        projections: as for `moestro.load`; True is "auto" and False "torch".
        processes: that the experts are spread over, the ranks of one job; each has its share of the threads.

    Raises:
        InvalidInputError: a number that is too small.
    """

    folder: str
    format: str | None = None
    memory: int | None = None
    batch: int = 1
    prompt_tokens: int = 128
    new_tokens: int = 32
    projections: bool | str | None = None
    processes: int = 1

    def __post_init__(self) -> None:
        least = {"batch": 1, "prompt_tokens": 1, "new_tokens": FEWEST_NEW_TOKENS, "memory": 1, "processes": 1}
        for name, fewest in least.items():
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < fewest):
                raise invalid_input(
                    OPERATION,
                    got=f"{name} {value}",
                    needs=f"a whole number of at least {fewest}",
                    fix="Leave it out for its default.",
                )


@dataclass(frozen=True)
class ModelPoint:
    """What a process found; of several, what the first of them did unless it says otherwise.

    Attributes:
        case: what it was asked.
        prompt_seconds: from the call to the first new token; the median of the timed runs.
        decode_seconds: of one step of all sequences; the median of the steps after the first one.
        peak_bytes: the most that the process held in memory while it loaded and ran, beside what it held with
            everything imported. Pages of the checkpoint's files that were read through a mapping are in it; the
            profile, which comes after, is not. Of several processes the sum, in which such pages count once.
        stages: of a profiled run that comes after the timed ones: phase ("prompt", "decode") -> stage -> seconds of a
            pass; a stage is one of `moestro.profiling.STAGES`. The first step is left out.
        first_step_seconds: of the step that makes the second token; the median of the timed runs.
        load_seconds: of loading.
        anonymous_bytes: what the process held when the timed runs had ended, beside the same, and without pages of
            files: what cannot be given back when memory runs short. Of several processes the sum.
        step_bytes: of weights that a step reads: the distinct experts of its sequences, counted in the profiled run,
            and all other weights but the embedding's rows. Keys and values are left out. Of several processes the sum.
        expert_bytes: those of `step_bytes` that are experts'.
        threads, runs, steps: PyTorch's threads in each process, timed runs, and timed steps of all runs.
        dtype, experts: of the model, and how its experts are held.
    """

    case: ModelCase
    prompt_seconds: float
    decode_seconds: float
    peak_bytes: int
    stages: dict[str, dict[str, float]] = field(default_factory=dict)
    first_step_seconds: float = 0.0
    load_seconds: float = 0.0
    anonymous_bytes: int = 0
    step_bytes: int = 0
    expert_bytes: int = 0
    threads: int = 0
    runs: int = 0
    steps: int = 0
    dtype: str = ""
    experts: str = ""

    @property
    def prompt_tokens_per_second(self) -> float:
        """Of all sequences together."""
        return self.case.batch * self.case.prompt_tokens / self.prompt_seconds

    @property
    def decode_tokens_per_second(self) -> float:
        """Of all sequences together."""
        return self.case.batch / self.decode_seconds


def measure(case: ModelCase) -> ModelPoint:
    """Load and run a case in a fresh process with as many threads as PyTorch has here, or in several that share them.

    It reads a prompt of random tokens once, uncounted, then three times and for a second at least, each followed by the
    likeliest tokens whatever they are; no run begins after thirty, or ten seconds. Another run is profiled. With a
    memory budget the experts that the uncounted run left in memory are there.

    Raises:
        MoestroError: what `moestro.load` raises, a prompt that the model's context does not hold, or more processes
            than threads.
        CollectiveError: a process ended without a result, as where memory did not suffice.
    """
    asked = {**asdict(case), "threads": threads_each(OPERATION, case.processes)}
    if case.processes > 1:
        return ModelPoint(case=case, **ask(OPERATION, RANK, case.processes, asked)[0])
    done = subprocess.run([*COMMAND, json.dumps(asked)], capture_output=True, text=True, check=False)
    if done.returncode:
        why = _ended(case, done.returncode, done.stderr)
        raise why
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    check_refusal(found)
    return ModelPoint(case=case, **found)


def _ended(case: ModelCase, code: int, said: str) -> MoestroError:
    """The error for a process without a result."""
    return no_answer(
        OPERATION,
        got=f"no result for {case.folder}, whose process {ended(code, said)}",
        needs="a process that loads and runs the model",
        fix="Try moestro generate; where memory does not suffice, a smaller format or a memory budget.",
    )
