"""Experts over many devices: who holds them, how rows travel, how load is balanced; on torch.distributed.

A rank runs the one primitive on routing that was rewritten to its own experts; nothing else computes.
"""

from __future__ import annotations

from moestro.parallel.balance import Balanced, Move, balance, balance_layers, imbalance, moves, rank_loads
from moestro.parallel.cheapest import CheapestDispatcher, LinkRates
from moestro.parallel.dispatchers import (
    AllGatherDispatcher,
    AllReduceDispatcher,
    AllToAllDispatcher,
    Place,
    SlicedDispatcher,
)
from moestro.parallel.eplb import Eplb
from moestro.parallel.flow import FlowMetadata, MeshFlow
from moestro.parallel.guard import Peers
from moestro.parallel.mesh import make_mesh
from moestro.parallel.parallelize import parallelize
from moestro.parallel.placement import Placement
from moestro.parallel.rebalance import Loads, count_loads, move_experts, placements, rebalance
from moestro.parallel.sequence import SequenceParallel
from moestro.parallel.simulate import simulate
from moestro.parallel.wire import wire_error

__all__ = [
    "AllGatherDispatcher",
    "AllReduceDispatcher",
    "AllToAllDispatcher",
    "Balanced",
    "CheapestDispatcher",
    "Eplb",
    "FlowMetadata",
    "LinkRates",
    "Loads",
    "MeshFlow",
    "Move",
    "Peers",
    "Place",
    "Placement",
    "SequenceParallel",
    "SlicedDispatcher",
    "balance",
    "balance_layers",
    "count_loads",
    "imbalance",
    "make_mesh",
    "move_experts",
    "moves",
    "parallelize",
    "placements",
    "rank_loads",
    "rebalance",
    "simulate",
    "wire_error",
]
