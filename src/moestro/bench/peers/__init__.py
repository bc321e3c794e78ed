"""What is timed: moestro as a user gets it, and the ways of Transformers and of torch; `outside` finds other peers."""

from __future__ import annotations

from moestro.bench.layers import DENSE
from moestro.bench.peers import outside
from moestro.bench.peers.ours import ours
from moestro.bench.peers.plain_read import PlainRead, plain_reads, tensors_of
from moestro.bench.peers.torch_grouped import TORCH_GROUPED
from moestro.bench.peers.transformers_experts import TRANSFORMERS
from moestro.bench.peers.variant import Bind, Call, Cost, Numbers, Variant
from moestro.errors import not_one_of

__all__ = [
    "DENSE",
    "PEERS",
    "Bind",
    "Call",
    "Cost",
    "Numbers",
    "PlainRead",
    "Variant",
    "known_peers",
    "named_peers",
    "ours",
    "plain_reads",
    "tensors_of",
]

PEERS = {p.name: p for p in (*TRANSFORMERS, TORCH_GROUPED)}
"""Those in the package by name: all of Transformers' implementations first."""


def known_peers() -> dict[str, Variant]:
    """Every peer by name: those in the package, then those from outside where their folder is found."""
    return PEERS | {peer.name: peer for peer in outside.peers()}


def named_peers(names: list[str]) -> list[Variant]:
    """The peers of these names, or an InvalidInputError; "all" and "none" mean what they say."""
    if names == ["none"]:
        return []
    known = known_peers()
    if names == ["all"]:
        return list(known.values())
    for name in names:
        if name not in known:
            why = outside.missing()
            fix = "Or 'all', or 'none'." if why is None else f"Or 'all', or 'none'; {why}."
            raise not_one_of("bench layer", "peer", name, known, fix)
    return [known[name] for name in names]
