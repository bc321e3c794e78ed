"""Functions that run on this machine in several processes at once, the ranks of a job over gloo.

python -m moestro.parallel.processes '{"operation": "plan", "call": "module:function", "processes": 2, "asked": {...}}'
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import multiprocessing.connection
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from moestro import errors
from moestro.errors import CollectiveError, MoestroError, invalid_input, no_answer
from moestro.parallel.guard import Peers

COMMAND: tuple[str, ...] = (sys.executable, "-m", "moestro.parallel.processes")
"""What is started with a question as its last argument; its last line of output is what ranks found, or an error."""
START = "spawn"
MOST_PROCESSES = 64


def threads_each(operation: str, processes: int) -> int:
    """Threads that each of so many processes has of those that PyTorch has here.

    Raises:
        InvalidInputError: there are fewer threads than processes.
    """
    threads = torch.get_num_threads()
    if processes > min(threads, MOST_PROCESSES):
        raise invalid_input(
            operation,
            got=f"{processes} processes on {threads} thread{'' if threads == 1 else 's'}",
            needs=f"a thread for each process, and at most {MOST_PROCESSES} of them",
            fix="Start fewer processes.",
        )
    return threads // processes


def ask(operation: str, call: str, processes: int, asked: dict[str, Any]) -> list[Any]:
    """What a function, "module:function", returns on each rank of a job of its own, in their order.

    It is called on every rank with `asked`; both this and what it returns are plain values. The job is started by a
    process of its own, so that it does not depend on how this one was started.

    Raises:
        MoestroError: what a rank raises, the first that does.
        CollectiveError: a rank ended without a result.
    """
    question = {"operation": operation, "call": call, "processes": processes, "asked": asked}
    done = subprocess.run([*COMMAND, json.dumps(question)], capture_output=True, text=True, check=False)
    if done.returncode:
        why = ended(done.returncode, done.stderr)
        raise no_answer(
            operation,
            got=f"no result of {processes} processes, whose start {why}",
            needs="as many processes as were asked for, and memory for them",
            fix="Ask for fewer.",
        )
    found = json.loads(done.stdout.splitlines()[-1])
    if found.get("error") == CollectiveError.__name__ and done.stderr.strip():
        found["text"] += f" It said at last: {done.stderr.strip().splitlines()[-1]}"
    check_refusal(found)
    answers: list[Any] = found["results"]
    return answers


def ended(code: int, said: str) -> str:
    """How a process ended that gave no result: by a signal, or after it said why."""
    lines = said.strip().splitlines()
    return f"was ended by signal {-code}" if code < 0 else f"ended with {lines[-1] if lines else f'code {code}'}"


def check_refusal(found: dict[str, Any]) -> None:
    """Raise the error that a process has told instead of a result."""
    if "error" in found:
        raised: MoestroError = getattr(errors, found["error"], MoestroError)(found["text"])
        raise raised


def refusal(error: MoestroError) -> dict[str, str]:
    """What a process tells instead of a result."""
    return {"error": type(error).__name__, "text": str(error)}


def run_ranks(operation: str, processes: int, call: Callable[[], Any]) -> list[Any]:
    """What a function returns on each rank of a new job, in their order; it is called on every rank.

    Raises:
        CollectiveError: a rank ended without a result.
        MoestroError: what a rank raises, the first that does.
    """
    context: Any = multiprocessing.get_context(START)
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), False)  # type: ignore[attr-defined]
    started = []
    for rank in range(processes):
        mine, other = context.Pipe(duplex=False)
        process = context.Process(target=_serve, args=(rank, processes, store.port, call, other), daemon=True)
        process.start()
        other.close()
        started.append((process, mine))
    found: list[Any] = []
    try:
        found = results(operation, [mine for _, mine in started])
    finally:
        until = time.monotonic() + (5 if len(found) == processes else 0)  # else others wait for one that is gone
        for process, _ in started:
            process.join(max(until - time.monotonic(), 0))
            if process.is_alive():
                process.kill()
    error = next((each for each in found if isinstance(each, Exception)), None)
    if error is not None:
        raise error
    return found


def results(operation: str, pipes: list[Any]) -> list[Any]:
    """What all ranks send, in their order; where one fails, its error alone, at once."""
    found: dict[int, Any] = {}
    while len(found) < len(pipes):
        left = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in found}
        for pipe in multiprocessing.connection.wait(list(left)):
            rank = left[pipe]
            found[rank] = received(operation, rank, pipe)
            if isinstance(found[rank], Exception):
                return [found[rank]]
    return [found[rank] for rank in range(len(pipes))]


def received(operation: str, rank: int, pipe: Any) -> Any:
    """What a rank sends; the error, where it has ended."""
    try:
        return pipe.recv()
    except EOFError:
        return no_answer(
            operation,
            got=f"no result from rank {rank}, whose process has ended",
            needs="a result of every process",
            fix="Look at what it printed; too little memory ends a process without a word.",
        )


def _serve(rank: int, world: int, port: int, call: Callable[[], Any], pipe: Any) -> None:
    store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60))  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=120))
    try:
        pipe.send(call())
    except MoestroError as error:
        pipe.send(error)
    finally:
        dist.destroy_process_group()


def everyone() -> Peers:
    """All ranks of the job; the first call is collective."""
    return Peers.of(range(dist.get_world_size()))


def gathered(peers: Peers, operation: str, value: Any) -> list[Any]:
    """What every rank says, in the order of ranks, as JSON keeps it."""
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = peers.all_gather(torch.tensor([len(data)]), "results", operation).tolist()
    rows = peers.all_gather(F.pad(data, (0, max(sizes) - len(data)))[None], "results", operation)
    return [json.loads(bytes(row[:size].tolist())) for row, size in zip(rows, sizes, strict=True)]


def _called(name: str, asked: dict[str, Any]) -> Any:
    """On a rank: import the function, and call it."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)(asked)


def main(text: str) -> str:
    """What all ranks found, or how one refused, as one line of JSON."""
    given = json.loads(text)
    call = partial(_called, given["call"], given["asked"])
    try:
        return json.dumps({"results": run_ranks(given["operation"], given["processes"], call)})
    except MoestroError as error:
        return json.dumps(refusal(error))


if __name__ == "__main__":
    print(main(sys.argv[-1]))
