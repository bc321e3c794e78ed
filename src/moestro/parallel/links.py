"""What it takes processes of this machine to add up what their experts made of the same tokens."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from moestro.ops import measured
from moestro.parallel.dispatchers import AllReduceDispatcher, Place
from moestro.parallel.placement import Placement
from moestro.parallel.processes import ask, everyone, gathered, threads_each
from moestro.types import Routing

RANK = "moestro.parallel.links:rank"
HIDDEN, TOP_K = 1024, 8
"""Of the rows that are added up."""
FEW, MANY = 1, 256
"""Their numbers."""
ROUNDS = 40
WORK = 1 << 18
"""Numbers that a rank adds up by itself before each round: its threads are as those of a rank that computes."""


@dataclass(frozen=True)
class Link:
    """Of a ring of processes that add up numbers, each of which sends 2 (R - 1) messages.

    Attributes:
        bytes_per_second: that a process sends.
        seconds: of a message, whatever its bytes.
    """

    bytes_per_second: float
    seconds: float


def link(operation: str, processes: int) -> Link:
    """Of so many processes that share the threads, measured once and kept.

    Raises:
        InvalidInputError: there are fewer threads.
        CollectiveError: a process ended.
    """
    threads = threads_each(operation, processes)

    def measure() -> list[float]:
        few, many = ask(operation, RANK, processes, {"operation": operation, "threads": threads})[0]
        messages, more = 2 * (processes - 1), (MANY - FEW) * HIDDEN * torch.float32.itemsize
        return [messages / processes * more / max(many - few, 1e-9), few / messages]

    name = f"{processes} processes of {threads} threads add up"
    numbers, _ = measured.kept(name, measure, lambda numbers: len(numbers) == 2 and min(numbers) > 0)
    return Link(*numbers)


def rank(asked: dict[str, Any]) -> list[float]:
    """On each rank: seconds of `AllReduceDispatcher` with few rows and with many, from when the last rank has come."""
    torch.set_num_threads(asked["threads"])
    peers, found = everyone(), []
    dispatcher = AllReduceDispatcher(Place(Placement.contiguous(TOP_K * peers.size, peers.size), peers))
    work = torch.zeros(WORK)
    for num_tokens in (FEW, MANY):
        x, ids = torch.zeros(num_tokens, HIDDEN, dtype=torch.bfloat16), torch.arange(TOP_K).repeat(num_tokens, 1)
        routing = Routing(ids, torch.ones(num_tokens, TOP_K))
        times = []
        for _ in range(1 + ROUNDS):
            work.sum()
            begin = time.perf_counter()
            rows, _, handle = dispatcher.dispatch(x, routing)
            dispatcher.combine(rows, handle)
            times.append(time.perf_counter() - begin)
        all_ranks = gathered(peers, asked["operation"], times[1:])
        found.append(median(min(of_round) for of_round in zip(*all_ranks, strict=True)))
    return found
