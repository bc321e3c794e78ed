"""A peer in a process of its own, which is stopped while others are timed.

For kernels with threads of their own: beside PyTorch's they would be asleep when they are timed, or turn while others
are. The process makes the layer itself, from the same seed, and counts the seconds of its own computation only.
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

from moestro.bench.failures import failures
from moestro.bench.layers import Layer, LayerSpec, make_layer
from moestro.bench.peers.variant import Bind, Call
from moestro.bench.timing import WARM_SECONDS, wall_clock, warm_up
from moestro.errors import unsupported
from moestro.types import Routing
from peers.teams import settle, wake_torch

Open = Callable[[Layer], Bind]
"""What a `Variant` prepares, there: a function of a module, or a `functools.partial` of one."""

LAYER_BITS = 32.0
"""Of a weight of the layer that a process makes, at most."""

WAKE_SECONDS = 0.005
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_START = f"import sys; sys.path.append({str(Path(__file__).parents[1])!r}); from peers.worker import serve; serve()"


class Worker:
    """The process, seen from here."""

    def __init__(self, opens: Open, layer: Layer) -> None:
        """Start it; it is stopped whenever nobody asks it anything.

        Raises:
            UnsupportedError: it failed; the text is what it said.
        """
        command = [sys.executable, "-c", _START]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=os.getcwd())
        self._end = weakref.finalize(self, _kill, self.process)
        self.ask("look_in", sys.path)
        self.ask("open", opens, torch.get_num_threads(), layer.spec, layer.dtype, layer.num_experts)

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


def prepare(opens: Open, layer: Layer) -> Bind:
    """What a `Variant` prepares: calls that a process computes."""
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
            answer = (True, getattr(served, name)(*arguments))
        except EOFError:
            return
        except failures() as error:
            answer = (False, f"{type(error).__name__}: {error}")
        pickle.dump(answer, answers)
        answers.flush()


class _Served:
    """What a process can be asked."""

    def look_in(self, path: list[str]) -> None:
        sys.path[:] = path

    def open(self, opens: Open, threads: int, spec: LayerSpec, dtype: torch.dtype, num_experts: int) -> None:
        torch.set_num_threads(threads)
        self.bind = opens(make_layer(spec, dtype, num_experts))
        self.calls: list[Call] = []
        self.given: list[tuple[Tensor, ...]] = []
        self.first, self.least = 0, 0.0

    def inputs(self, x: Tensor, expert_ids: Tensor, routing_weights: Tensor) -> int:
        """The number of a call; the same for what was given before. Those of another x are of another point."""
        given = x, expert_ids, routing_weights
        if self.given and not (x.shape == self.given[-1][0].shape and x.equal(self.given[-1][0])):
            self.first, self.least = len(self.calls), 0.0
        for number in range(self.first, len(self.calls)):
            if all(map(torch.equal, given, self.given[number])):
                return number
        self.calls.append(self.bind(x, Routing(expert_ids, routing_weights)))
        self.given.append(given)
        return len(self.calls) - 1

    def output(self, number: int) -> Tensor:
        return self.calls[number]()

    def seconds(self, number: int) -> float:
        """Of a call that follows others, as a step of decoding does; with other inputs, if there are any."""
        time.sleep(WAKE_SECONDS)  # threads that were stopped look for work again
        if self.least < WARM_SECONDS:
            warm_up(self.calls[self.first :], number - self.first)
        found = wall_clock()(self.calls[number])
        self.least = min(found, self.least or found)
        return found
