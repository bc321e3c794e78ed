"""Experts over many devices: who holds them, how rows travel, how load is balanced; on torch.distributed.

A rank runs the one primitive on routing that was rewritten to its own experts; nothing else computes.
"""

from __future__ import annotations

from moestro.parallel.balance import Balanced, Move, balance, balance_layers, imbalance, moves, rank_loads
from moestro.parallel.dispatchers import (
    AllGatherDispatcher,
    AllReduceDispatcher,
    AllToAllDispatcher,
    Place,
    SlicedDispatcher,
)
from moestro.parallel.eplb import Eplb
from moestro.parallel.guard import Peers
from moestro.parallel.mesh import make_mesh
from moestro.parallel.parallelize import parallelize
from moestro.parallel.placement import Placement
from moestro.parallel.simulate import simulate

__all__ = [
    "AllGatherDispatcher",
    "AllReduceDispatcher",
    "AllToAllDispatcher",
    "Balanced",
    "Eplb",
    "Move",
    "Peers",
    "Place",
    "Placement",
    "SlicedDispatcher",
    "balance",
    "balance_layers",
    "imbalance",
    "make_mesh",
    "moves",
    "parallelize",
    "rank_loads",
    "simulate",
]
