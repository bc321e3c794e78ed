"""A layer for ranks that have the same tokens: cut along the sequence for prompts, along I for a few tokens."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from moestro.errors import invalid_input, unsupported
from moestro.moe import MoE
from moestro.ops.inputs import no_rows, no_tensor
from moestro.parallel.dispatchers import AllGatherDispatcher, Place, wide
from moestro.parallel.exchange import collective, join_slices, scatter_sums
from moestro.parallel.guard import DEFAULT_TIMEOUT, Peers
from moestro.parallel.mesh import check_mesh, mesh_place, ranks_along
from moestro.parallel.parallelize import Cut, agree_on, describe_shared, keep_own
from moestro.parallel.placement import Placement
from moestro.parallel.same_tokens import (
    DIGEST_BYTES,
    add_up_same,
    check_gathered,
    digest_row,
    has_digest,
    routing_digest,
)
from moestro.parallel.shared_slice import SharedSlice
from moestro.types import EMPTY, Routing

OPERATION = "SequenceParallel"
SHARD_TOKENS = 16
"""Fewest tokens of a shard: of fewer, reading the weights of a whole router and shared experts is most of the work."""

PROBES = 4
"""Tokens of a prompt that all ranks route, to see that they have the same one: the last of each quarter."""


class SequenceParallel(nn.Module):
    """A layer whose experts are cut along ep and tp, for inference; `SequenceParallel.of` makes it.

    Of many tokens (a prompt) each rank routes a shard, with the whole router. The ranks gather what was selected, 8
    bytes for each of K slots and not the E logits, compute their own experts, and reduce-scatter the sums to the
    shards. Shared experts are whole on each rank, and see its shard. The shards' outputs are gathered.

    Of few tokens (a step of generating) each rank routes all. Shared experts are cut along I, by views of the same
    parameters, and their sums are added up with those of the routed ones in one all-reduce.

    Attributes:
        layer: the router and the shared experts, whole; the routed experts of this rank.
        place: the ranks that have the same tokens, and where the experts are.
        shard_tokens: the fewest tokens of a shard; with fewer, all ranks compute all tokens.
    """

    def __init__(self, layer: MoE, place: Place, shard_tokens: int = SHARD_TOKENS) -> None:
        super().__init__()
        self.layer, self.place, self.shard_tokens = layer, place, shard_tokens
        shared, peers = layer.shared_experts, place.peers
        self._slice = (None if shared is None else SharedSlice.of(shared, peers.rank, peers.size),)

    @classmethod
    def of(
        cls,
        layer: MoE,
        mesh: DeviceMesh,
        placement: Placement | None = None,
        shard_tokens: int = SHARD_TOKENS,
        timeout: float = DEFAULT_TIMEOUT,
        name: str = "",
    ) -> SequenceParallel:
        """Cut a layer's experts along ep and tp of a mesh; collective. The layer itself stays as it is.

        Args:
            layer: on one device; all ranks pass the same weights.
            mesh: of `make_mesh`.
            placement: along ep; contiguous ranges if None.
            shard_tokens: as the attribute.
            timeout: seconds that a collective may take.
            name: the layer's, for errors.

        Raises:
            InvalidInputError: a layer with a dispatcher, shard_tokens below 1, and what `parallelize` refuses.
            UnsupportedError: shared experts of another class than `moestro.SharedExperts`, or experts that cannot be
                cut along I so often.
            CollectiveError: ranks differ in sizes, formats or placement, or one does not come.
        """
        check_mesh(mesh, OPERATION)
        if layer.dispatcher is not None or shard_tokens < 1:
            raise invalid_input(
                OPERATION,
                got=f"shard_tokens={shard_tokens}" if shard_tokens < 1 else "a layer that has a dispatcher",
                needs="a layer on one device, and shards of at least one token",
                fix="Build the layer without a dispatcher, and leave shard_tokens out.",
            )
        cut = Cut.of(name, layer.experts.weights, mesh, placement)
        agree_on({name: {**cut.said, **describe_shared(layer), "shard_tokens": shard_tokens}}, mesh, timeout)
        peers = Peers.of(ranks_along(mesh, "ep", "tp"), timeout)
        place = Place(cut.placement, peers, None, mesh_place(mesh, "ep"), name)
        own = keep_own(layer.experts, cut)
        given = layer.shared_experts, layer.rewrite, AllGatherDispatcher(place), layer.balance
        made = MoE(layer.router, own, *given)
        return cls(made.train(layer.training), place, shard_tokens)

    def mode(self, num_tokens: int) -> Literal["shards", "slices"]:
        """How so many tokens are computed: "shards" of the sequence, or "slices" of the shared experts."""
        return "shards" if num_tokens >= self.shard_tokens * self.place.peers.size else "slices"

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H], which all ranks have -> the layer's output, on all ranks.

        Raises:
            InvalidInputError: x is no floating-point [..., H].
            CollectiveError: ranks have other numbers of tokens or another dtype, or chose other experts for them; of a
                prompt for its last token, or the last of another quarter.
            UnsupportedError: in the backward pass.
        """
        hidden = self.layer.experts.hidden_size
        if not isinstance(x, Tensor):
            raise no_tensor(OPERATION, "x", x)
        if x.dim() < 1 or x.shape[-1] != hidden or not x.is_floating_point():
            raise no_rows(OPERATION, x, hidden)
        flat = x.flatten(0, -2) if x.dim() > 1 else x[None]
        self.place.peers.agree_on_tokens(flat, OPERATION, self.place.name)
        y = self._by_shards(flat) if self.mode(len(flat)) == "shards" else self._by_slices(flat)
        return collective(y, lambda t: t.view_as(t), _refuse_gradients).view(x.shape)

    def on_shard(self, x: Tensor) -> Tensor:
        """This rank's shard [T, H] -> its output, for a model whose hidden states stay cut along the sequence.

        Rows are gathered beside what was selected of them, and sums are reduce-scattered. Shards may differ in size.
        """
        y: Tensor = self.layer(x)
        return y

    def _by_shards(self, x: Tensor) -> Tensor:
        layer, peers, name = self.layer, self.place.peers, self.place.name
        each = -(-len(x) // peers.size)
        own = x[peers.rank * each : (peers.rank + 1) * each]
        digest = self._probed(x)
        selected = layer.route(own)
        self.place.check(own, selected, OPERATION)
        pad = (0, 0, 0, each - len(own))
        ids = F.pad(selected.expert_ids.to(torch.int32), pad, value=EMPTY)
        bits = F.pad(selected.routing_weights, pad).float().view(torch.int32)
        rows = torch.cat([ids, bits], 1)
        rows = rows if digest is None else torch.cat([rows, digest_row(digest, rows.shape[1])])
        both = peers.all_gather(rows, "routing", name).view(peers.size, *rows.shape)
        if digest is not None:
            told = both[:, -1].contiguous().view(torch.uint8)[:, :DIGEST_BYTES]
            check_gathered(peers, told, digest, (OPERATION, name))
        both = both[:, :each].flatten(0, 1)[: len(x)]
        ids, bits = (part.contiguous() for part in torch.split(both, selected.top_k, 1))
        y = self._own_experts(x, Routing.unchecked(ids, bits.view(torch.float32), selected.weight_on))
        padded = F.pad(y.to(wide(y.dtype)), (0, 0, 0, each * peers.size - len(x)))
        sums = scatter_sums(peers, padded, "rows", name)[: len(own)].to(x.dtype)
        shared = layer.shared_experts
        sums = sums if shared is None else sums + shared(own)
        return join_slices(peers, F.pad(sums, pad), "slices", name)[: len(x)]

    def _by_slices(self, x: Tensor) -> Tensor:
        routing, (shared,) = self.layer.route(x), self._slice
        self.place.check(x, routing, OPERATION)
        digest = routing_digest(self.place.peers, routing.expert_ids)
        y = self._own_experts(x, routing)
        y = y if shared is None else y + shared(x)
        return add_up_same(self.place.peers, y, digest, (OPERATION, self.place.name)).to(x.dtype)

    def _probed(self, x: Tensor) -> int | None:
        """A digest of the experts of a few tokens, which all ranks route; None where nobody would look at it."""
        if not has_digest(self.place.peers, x.device):
            return None
        last = [len(x) * (i + 1) // PROBES - 1 for i in range(PROBES)]
        with torch.no_grad():  # which balances nothing
            routing = self.layer.route(x[[i for i in last if i >= 0]])
        return routing_digest(self.place.peers, routing.expert_ids)

    def _own_experts(self, x: Tensor, routing: Routing) -> Tensor:
        """What this rank's experts add to all tokens."""
        place = self.place
        local = place.local(place.local_ids(routing.expert_ids), routing.routing_weights, routing)
        y: Tensor = self.layer.experts(x, local)
        return y


def _refuse_gradients(gradient: Tensor) -> Tensor:
    raise unsupported(
        OPERATION,
        got="a backward pass",
        needs="inference: a rank has a part of the gradients only",
        fix="Train with parallelize(layer, mesh, AllGatherDispatcher), or on_shard, and load the weights here.",
    )
