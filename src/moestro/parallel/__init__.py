"""Experts on several devices: who holds them, how rows travel, how load is balanced."""

from moestro.parallel.balance import Balanced, Move, balance, balance_layers, imbalance, moves, rank_loads
from moestro.parallel.eplb import Eplb
from moestro.parallel.placement import Placement
from moestro.parallel.simulate import simulate

__all__ = [
    "Balanced",
    "Eplb",
    "Move",
    "Placement",
    "balance",
    "balance_layers",
    "imbalance",
    "moves",
    "rank_loads",
    "simulate",
]
