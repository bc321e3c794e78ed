"""Named layers, peers and timed runs: what `moestro bench` calls."""

from moestro.bench.layers import LAYERS, Layer, LayerSpec, make_layer
from moestro.bench.measure import run
from moestro.bench.peers import PEERS, Variant, known_peers, ours
from moestro.bench.records import Plan, Report, Row

__all__ = [
    "LAYERS",
    "PEERS",
    "Layer",
    "LayerSpec",
    "Plan",
    "Report",
    "Row",
    "Variant",
    "known_peers",
    "make_layer",
    "ours",
    "run",
]
