"""What ranks do in the tests of processes that a plan or a benchmark starts."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from moestro.parallel import processes
from parallel import models


def quietly(call, asked):
    """A call as a process of its own makes it: in PyTorch's default mode; the threads are as before."""
    models.quiet()
    try:
        return call(asked)
    finally:
        torch.use_deterministic_algorithms(True)
        torch.set_num_threads(1)


def dies(asked):
    """One rank ends without a word while the others wait for it."""
    if dist.get_rank() == asked["dead"]:
        os._exit(1)
    processes.everyone().barrier("test")


def refuses(asked):
    """One rank is asked for more processes than it has threads, while the others wait for it."""
    if dist.get_rank() == asked["refuses"]:
        processes.threads_each("plan", 100)
    processes.everyone().barrier("test")
