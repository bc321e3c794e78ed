"""What ranks do in the tests of rows in 8 bits and of the dispatcher that is chosen by cost."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist

import moestro
from moestro import MoE
from moestro.parallel import AllToAllDispatcher, CheapestDispatcher, LinkRates, parallelize, wire_error
from moestro.parallel.guard import Peers
from moestro.parallel.wire import decode, encode
from moestro.tolerances import disagreement
from parallel.cases import FixedRouter, build, joined, mesh_of, place_of

SLOW_START, SLOW_BYTES = LinkRates((1.0, 1e12), (0.1, 1e12)), LinkRates((1e-6, 1e6), (1e-6, 1e6))


def layer_of(case, dispatcher):
    whole, batches, routings = build(case)
    mesh = mesh_of(*case.mesh)
    layer = parallelize(MoE(FixedRouter(case.num_experts), whole), mesh, dispatcher)
    number, group = place_of(case, mesh)
    layer.router.routing = routings[number]
    routing = joined([routings[i] for i in group])
    start = sum(len(batches[i]) for i in group if i < number)
    own = slice(start, start + len(batches[number]))
    return layer, batches[number], (whole, torch.cat([batches[i] for i in group]), routing, own)


@torch.no_grad()
def in_bits(case, wire_format):
    """How far from one device on rows that were encoded there; the error of rows; bytes that went out."""
    layer, x, (whole, rows, routing, own) = layer_of(case, partial(AllToAllDispatcher, wire_format=wire_format))
    arrived = rows if wire_format == "float" else decode(encode(rows, wire_format), wire_format, rows.dtype)
    expected = whole(arrived, routing)[own]
    peers = layer.dispatcher.place.peers
    before = dict(peers.sent.get("rows", {}))
    y = layer(x)
    sent = {r: n - before.get(r, 0) for r, n in peers.sent.get("rows", {}).items()}
    return disagreement(y, expected), wire_error(rows, wire_format), sent, float((y - whole(rows, routing)[own]).norm())


def gradient_in_bits(case):
    """The gradient of x through rows in 8 bits, and whether it is finite and not zero."""
    layer, x, _ = layer_of(case, partial(AllToAllDispatcher, wire_format="int8"))
    x = x.clone().requires_grad_()
    layer(x).square().sum().backward()
    return bool(x.grad.isfinite().all()), float(x.grad.abs().sum()) > 0


@torch.no_grad()
def chosen(case, rates):
    """What is predicted and chosen, how the output differs, and the collectives of one call."""
    layer, x, (whole, rows, routing, own) = layer_of(case, partial(CheapestDispatcher, rates=rates))
    _, _, handle = layer.dispatcher.dispatch(x, layer.router.routing)
    said, run = [], Peers._run
    try:
        Peers._run = lambda self, start, operation, where: (said.append(operation), run(self, start, operation, where))[
            1
        ]
        y = layer(x)
    finally:
        Peers._run = run
    return disagreement(y, whole(rows, routing)[own]), handle.predictions, said, str(moestro.explain(layer, x))


@torch.no_grad()
def measured():
    """The rates of this group, twice; and those that a dispatcher has when nobody gives any."""
    peers = Peers.of(range(dist.get_world_size()))
    return LinkRates.measured(peers), LinkRates.measured(peers) is LinkRates.measured(peers)


@torch.no_grad()
def other_rates(case):
    """Rank 1 is given other rates than the others."""
    return layer_of(case, partial(CheapestDispatcher, rates=SLOW_START if dist.get_rank() == 1 else SLOW_BYTES))[0](
        torch.zeros(3, case.hidden_size)
    ).shape
