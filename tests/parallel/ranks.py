"""A group of processes on this machine that run functions of `parallel.cases`, for as many tests as like."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

PATIENCE = 240
"""Seconds after which a test fails whose processes do not answer: a net under all others, which decides nothing."""

PRELOADED = ["torch", "torch._inductor.config", "moestro.hf", "transformers.models.qwen3_moe.modeling_qwen3_moe"]
"""What takes long to import, once for all processes; the second is what PyTorch's deterministic mode imports."""


class Ranks:
    """Processes 0..world-1 in one group, with one thread each. The store is kept here, as torchrun does it."""

    def __init__(self, world: int, backend: str | None = "gloo") -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), False)
        self.world, self.processes, self.pipes = world, [], []
        for rank in range(world):
            mine, other = context.Pipe()
            arguments = (rank, world, self.store.port, other, backend)
            self.processes.append(context.Process(target=serve, args=arguments, daemon=True))
            self.processes[-1].start()
            other.close()
            self.pipes.append(mine)

    def run(self, function, *arguments, ranks=None):
        """What the function returns on every rank, in order; an error that a rank raises comes as a string."""
        ranks = range(self.world) if ranks is None else ranks
        for rank in ranks:
            self.pipes[rank].send((function, arguments))
        return [self.result(rank) for rank in ranks]

    def result(self, rank):
        try:
            if not self.pipes[rank].poll(PATIENCE):
                raise AssertionError(f"rank {rank} hangs")
            return self.pipes[rank].recv()
        except EOFError:
            return "dead"

    def stop(self):
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self.processes:
            process.join(20)
            if process.is_alive():
                process.kill()


def make_each_mesh_once():
    """Threads of gloo poll as long as a group lives, and those of a mesh live as long as the process."""
    import moestro.parallel.mesh

    made = functools.cache(dist.init_device_mesh)

    def kept(device, sizes, *, mesh_dim_names=None, **others):
        names = None if mesh_dim_names is None else tuple(mesh_dim_names)
        return made(device, tuple(sizes), mesh_dim_names=names, **others)

    dist.init_device_mesh = dist.device_mesh.init_device_mesh = moestro.parallel.mesh.init_device_mesh = kept


def give_groups_one_device():
    """Each device of gloo has a thread that wakes a hundred times a second, and each group would have its own."""
    device = dist.ProcessGroupGloo.create_default_device()

    class OnOneDevice(dist.ProcessGroupGloo):
        def __init__(self, store, rank, size, timeout):
            options = dist.ProcessGroupGloo._Options()
            options._devices, options._threads, options._timeout = [device], 2, timeout
            super().__init__(store, rank, size, options)

    dist.distributed_c10d.ProcessGroupGloo = OnOneDevice


def serve(rank, world, port, pipe, backend):
    """The life of a rank: run what comes through the pipe until None does."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60))
    give_groups_one_device()
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    make_each_mesh_once()
    while (job := pipe.recv()) is not None:
        function, arguments = job
        try:
            pipe.send(function(*arguments))
        except Exception as error:
            frames = traceback.format_exc() if not type(error).__module__.startswith("moestro") else ""
            pipe.send(f"{type(error).__name__}: {error}{frames}")
    if dist.is_initialized():
        dist.destroy_process_group()
