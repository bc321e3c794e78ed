"""moestro's dispatchers as implementations of Transformers' expert parallelism, for experts that are parameters.

Transformers cuts the parameters, hands over local tensors, and slices nothing else: here rows travel, and the rank's
own experts run through the primitive.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed import get_process_group_ranks
from torch.distributed.device_mesh import DeviceMesh
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

from moestro.errors import unsupported
from moestro.hf.experts import Spread, serve
from moestro.hf.sharding import ALL_GATHER, ALL_TO_ALL
from moestro.moe import Dispatcher
from moestro.parallel import (
    AllGatherDispatcher,
    AllReduceDispatcher,
    AllToAllDispatcher,
    Peers,
    Place,
    Placement,
    SlicedDispatcher,
)
from moestro.parallel.guard import job_timeout


class _Dispatched(EPImplementation):
    """Runs `serve` on what a dispatcher brings. Ranks along tp have the same tokens, those beside them others."""

    def __init__(self, experts: Any, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self.experts = experts
        self.ranks, self.batch = (get_process_group_ranks(mesh.get_group()) for mesh in (ep_mesh, tp_mesh))
        self.name = _name_of(experts)
        held = int(self.num_local_experts) if getattr(experts, "_is_expert_parallel", False) else 0
        self.placement = Placement.contiguous(max(held, 1) * len(self.ranks), len(self.ranks))
        self.dispatcher: Dispatcher | None = None

    def make(self) -> Dispatcher:
        raise NotImplementedError

    def peers(self, ranks: Sequence[int]) -> Peers:
        return Peers.of(ranks, job_timeout())

    def place(self, rank: int | None = None) -> Place:
        return Place(self.placement, self.peers(self.ranks), None, rank, self.name)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        config = getattr(self.experts, "config", None)
        if getattr(config, "_experts_implementation", None) != "moestro":
            raise unsupported(
                type(self).__name__,
                got=f"experts_implementation={getattr(config, '_experts_implementation', None)!r}",
                needs='"moestro", whose experts these dispatchers bring tokens to',
                fix='Pass experts_implementation="moestro" to from_pretrained.',
            )
        if self.dispatcher is None:  # the first call is on all ranks, building a module need not be
            self.dispatcher = self.make()
        return serve(self.experts, hidden_states, top_k_index, top_k_weights, strategy=Spread("auto", self.dispatcher))


class AllToAllEP(_Dispatched):
    """`ep_implementation="moestro_all_to_all"`."""

    def make(self) -> Dispatcher:
        inner = AllToAllDispatcher(self.place())
        return inner if len(self.batch) == 1 else SlicedDispatcher(inner, self.peers(self.batch), self.name)


class AllGatherEP(_Dispatched):
    """`ep_implementation="moestro_all_gather"`. Where all ranks have the same tokens there is nothing to gather."""

    def make(self) -> Dispatcher:
        if self.shares_batch:
            return AllReduceDispatcher(self.place(self.peers(self.ranks).rank))
        inner = AllGatherDispatcher(self.place())
        return inner if len(self.batch) == 1 else SlicedDispatcher(inner, self.peers(self.batch), self.name)


def _name_of(experts: Any) -> str:
    """The layer's place among those of its model with experts, which Transformers builds one after the other.

    Transformers hands over modules without their names; those of one model share its configuration.
    """
    config = getattr(experts, "config", None)
    before, number = _LAST
    number = number + 1 if config is not None and before() is config else 0
    _LAST[:] = [weakref.ref(config) if config is not None else lambda: None, number]
    return f"expert layer {number} ({type(experts).__name__})"


_LAST: list[Any] = [lambda: None, 0]


def register() -> None:
    """Make both known to Transformers by their names; a second call changes nothing."""
    for name, implementation in ((ALL_TO_ALL, AllToAllEP), (ALL_GATHER, AllGatherEP)):
        EPImplementationInterface.register(name, implementation)
