"""A peer in a process of its own, which is stopped while others are timed.

For kernels whose threads spin when there is nothing to do, or that bring a second OpenMP. The process makes the layer
itself, from the same seed, and counts the seconds of its own computation only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from moestro.bench.layers import Layer, LayerSpec, make_layer
from moestro.bench.peers.variant import Bind, Call
from moestro.errors import unsupported
from moestro.types import Routing
from peers.teams import settle, wake_torch

Compute = Callable[[], Tensor]
Open = Callable[[Layer], Callable[[Tensor, Tensor, Tensor], Compute]]
"""Maps a layer to a function (x, expert_ids, routing_weights) -> computation; named as "module:name"."""

WAKE_SECONDS = 0.005
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_START = f"import sys; sys.path.append({str(Path(__file__).parents[1])!r}); from peers.worker import serve; serve()"


class Worker:
    """The process, seen from here."""

    def __init__(self, opens: str, layer: Layer) -> None:
        """Start it; it is stopped whenever nobody asks it anything.

        Raises:
            UnsupportedError: it failed; the text is what it said.
        """
        command = [sys.executable, "-c", _START]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=os.getcwd())
        self._end = weakref.finalize(self, _kill, self.process)
        self.ask("open", opens, sys.path, torch.get_num_threads(), layer.spec, layer.dtype, layer.num_experts)

    def ask(self, *request: object) -> Any:
        """Let the process go on, answer one request, and stop again.

        Raises:
            UnsupportedError: it failed; the text is what it said.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.send_signal(signal.SIGCONT)
        try:
            pickle.dump(request, self.process.stdin)
            self.process.stdin.flush()
            ok, answer = pickle.load(self.process.stdout)
        except (EOFError, BrokenPipeError) as error:
            raise _refused("a process that ended") from error
        self.process.send_signal(signal.SIGSTOP)
        if not ok:
            raise _refused(answer)
        return answer


class _Run:
    """One call: its inputs lie in the process."""

    def __init__(self, worker: Worker, x: Tensor, routing: Routing) -> None:
        self.worker = worker
        self.number = worker.ask("inputs", x, routing.expert_ids, routing.routing_weights)

    def __call__(self) -> Tensor:
        output: Tensor = self.worker.ask("output", self.number)
        return output

    def seconds(self) -> float:
        """Those the process counted."""
        settle()
        found: float = self.worker.ask("seconds", self.number)
        wake_torch()
        return found


def prepare(opens: str, layer: Layer) -> Bind:
    """What a `Variant` prepares: `opens` names an `Open` that the process imports."""
    worker = Worker(opens, layer)

    def bind(x: Tensor, routing: Routing) -> Call:
        return _Run(worker, x, routing)

    return bind


def _refused(got: str) -> Exception:
    return unsupported("bench layer", got=got, needs="a peer that computes the layer", fix="Leave this peer out.")


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # of a request that nobody reads any more
                pipe.close()


def serve() -> None:
    """The process itself: answer requests until there are none. What the peer prints goes to nobody."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    with torch.inference_mode():
        _answer(sys.stdin.buffer, answers)


def _answer(requests: BinaryIO, answers: BinaryIO) -> None:
    served = _Served()
    while True:
        try:
            name, *arguments = pickle.load(requests)
        except EOFError:
            return
        try:
            answer = (True, getattr(served, name)(*arguments))
        except (RuntimeError, ImportError, ValueError, NotImplementedError, AttributeError) as error:
            answer = (False, f"{type(error).__name__}: {error}")
        pickle.dump(answer, answers)
        answers.flush()


class _Served:
    """What a process can be asked."""

    def open(
        self, opens: str, path: list[str], threads: int, spec: LayerSpec, dtype: torch.dtype, num_experts: int
    ) -> None:
        sys.path[:] = path
        torch.set_num_threads(threads)
        module, _, name = opens.partition(":")
        found: Open = getattr(__import__(module, fromlist=[name]), name)
        self.bind = found(make_layer(spec, dtype, num_experts))
        self.computations: list[Compute] = []

    def inputs(self, x: Tensor, expert_ids: Tensor, routing_weights: Tensor) -> int:
        self.computations.append(self.bind(x, expert_ids, routing_weights))
        return len(self.computations) - 1

    def output(self, number: int) -> Tensor:
        return self.computations[number]()

    def seconds(self, number: int) -> float:
        time.sleep(WAKE_SECONDS)  # threads that were stopped look for work again
        start = time.perf_counter()
        self.computations[number]()
        return time.perf_counter() - start
