"""The mesh: every rank's place among copies of the model, groups of experts and slices of an expert."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from moestro.errors import invalid_input
from moestro.parallel.guard import DEFAULT_TIMEOUT, Peers, job_timeout, set_job_timeout

DIMENSIONS = ("dp", "ep", "tp")
"""Copies of the experts; ranks that each hold some of the experts; ranks that each hold a slice of every expert."""


def make_mesh(
    dp: int = 1, ep: int = 1, tp: int = 1, device: str = "cpu", timeout: float = DEFAULT_TIMEOUT
) -> DeviceMesh:
    """A DeviceMesh with the dimensions "dp", "ep" and "tp", over all ranks of the job; collective.

    Ranks are numbered along tp first, then ep, then dp. Where torch.distributed was not started yet, it is, from the
    variables that torchrun sets: gloo for the CPU, NCCL for "cuda".

    Args:
        dp: how many copies of all experts there are; their ranks exchange nothing.
        ep: over how many ranks the experts are spread.
        tp: over how many ranks each expert's intermediate size is cut.
        device: the device type of the mesh, whatever else the machine has.
        timeout: seconds that starting, and each collective of the mesh and of a model loaded on it, may take; of models
            that Transformers cuts by itself in this job, too.

    Raises:
        InvalidInputError: a size below 1, or sizes whose product is not the number of ranks.
        CollectiveError: ranks want different meshes, or one does not come.
    """
    sizes = (dp, ep, tp)
    if min(sizes) < 1:
        raise invalid_input(
            "make_mesh", got=_text(sizes), needs="sizes of at least 1", fix="Leave out what is not cut."
        )
    if device not in ("cpu", "cuda"):
        raise invalid_input(
            "make_mesh", got=f"device {device!r}", needs='"cpu" or "cuda"', fix="Each rank takes a device of its own."
        )
    if not dist.is_initialized():
        _start(sizes, device, timeout)
    world = dist.get_world_size()
    Peers.of(range(world), timeout).agree({"mesh": sizes, "torch": torch.__version__}, "make_mesh", "")
    if math.prod(sizes) != world:
        raise invalid_input(
            "make_mesh",
            got=f"{_text(sizes)} with {world} ranks",
            needs=f"sizes whose product is {world}",
            fix=f"Start torchrun --nproc-per-node {math.prod(sizes)}, or change the sizes.",
        )
    mesh = init_device_mesh(device, sizes, mesh_dim_names=DIMENSIONS)
    vars(mesh)[_TIMEOUT] = timeout
    set_job_timeout(timeout)
    return mesh


_TIMEOUT = "moestro_timeout"


def timeout_of(mesh: DeviceMesh) -> float:
    """The timeout that `make_mesh` was given, in seconds; of another mesh that of its last call in this job."""
    return float(vars(mesh).get(_TIMEOUT, job_timeout()))


def _start(sizes: Sequence[int], device: str, timeout: float) -> None:
    try:
        dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timedelta(seconds=timeout))
    except ValueError as error:  # a variable that torchrun sets is not there
        raise invalid_input(
            "make_mesh",
            got=f"{_text(sizes)} in a process that belongs to no job of torch.distributed",
            needs=f"{math.prod(sizes)} processes that torchrun started",
            fix=f"Start it with torchrun --nproc-per-node {math.prod(sizes)}.",
        ) from error


def mesh_size(mesh: DeviceMesh, *dimensions: str) -> int:
    """The number of ranks along these dimensions together; one that the mesh has not counts 1."""
    return math.prod(_sizes(mesh)[name] for name in dimensions)


def mesh_place(mesh: DeviceMesh, dimension: str) -> int:
    """This rank's number along a dimension; 0 in one that the mesh has not."""
    names = mesh.mesh_dim_names or ()
    return mesh.get_local_rank(dimension) if dimension in names else 0


def ranks_along(mesh: DeviceMesh, *dimensions: str) -> list[int]:
    """The ranks of the job that differ from this one in these dimensions only.

    Along one dimension in the order of the mesh, which `check_mesh` has seen to rise; along several in that of the job.
    """
    names = mesh.mesh_dim_names or ()
    here = mesh.get_coordinate()
    assert here is not None
    index = tuple(slice(None) if name in dimensions else place for name, place in zip(names, here, strict=True))
    ranks = [int(rank) for rank in mesh.mesh[index].flatten()]
    return ranks if len(dimensions) == 1 else sorted(ranks)


def check_mesh(mesh: DeviceMesh, operation: str) -> None:
    """Raise `InvalidInputError` for a mesh that experts cannot be cut over, on every rank of it.

    Its dimensions are to be some of dp, ep and tp, with this rank among them; its ranks are to rise along ep and tp.
    """
    names = mesh.mesh_dim_names or ()
    if not names or not set(names) <= set(DIMENSIONS) or mesh.get_coordinate() is None:
        raise invalid_input(
            operation,
            got=f"a mesh with dimensions {', '.join(names) or 'without names'}",
            needs=f"dimensions among {', '.join(DIMENSIONS)}, and this rank in it",
            fix="Make it with moestro.parallel.make_mesh(dp=..., ep=..., tp=...).",
        )
    falls = [name for i, name in enumerate(names) if name != "dp" and bool((mesh.mesh.diff(dim=i) < 0).any())]
    if falls:
        raise invalid_input(
            operation,
            got=f"a mesh of ranks {mesh.mesh.tolist()}, which fall along {' and '.join(falls)}",
            needs="ranks that rise: groups of torch.distributed are in that order",
            fix="Make it with moestro.parallel.make_mesh(dp=..., ep=..., tp=...).",
        )


def _sizes(mesh: DeviceMesh) -> dict[str, int]:
    names = mesh.mesh_dim_names or ()
    return {name: mesh.size(names.index(name)) if name in names else 1 for name in DIMENSIONS}


def _text(sizes: Sequence[int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in zip(DIMENSIONS, sizes, strict=True))
