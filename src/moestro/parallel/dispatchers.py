"""Dispatchers as values: three ways to bring tokens to the experts of other ranks, and one for a shared batch.

All rewrite the routing to local ids, with -1 for what other ranks compute; a rank then runs the one primitive on its
own experts. Ranks without tokens take part in everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from moestro.errors import invalid_input
from moestro.moe import Dispatcher
from moestro.parallel.exchange import gather_rows, scatter_sums, share, swap_rows
from moestro.parallel.guard import Peers
from moestro.parallel.placement import Placement
from moestro.parallel.same_tokens import add_up_same, join_same, routing_digest
from moestro.parallel.wire import WireFormat, check_wire_format, send_rows
from moestro.types import EMPTY, Routing

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Place:
    """Where a layer's experts are, as its dispatcher sees it from one rank.

    Attributes:
        placement: which rank of `peers` holds which experts.
        peers: the ranks among which tokens travel; for `AllReduceDispatcher` those whose outputs are summed.
        slices: ranks that hold the other slices of these experts, whose outputs are summed too; None for whole ones.
        rank: this rank in the placement, where that is not its place among the peers.
        name: the layer's, for errors.
    """

    placement: Placement
    peers: Peers
    slices: Peers | None = None
    rank: int | None = None
    name: str = ""

    def __post_init__(self) -> None:
        if self.slices is not None:
            self.peers.join(self.slices)

    @property
    def own(self) -> int:
        return self.peers.rank if self.rank is None else self.rank

    def local_ids(self, expert_ids: Tensor, first_token: int | Tensor = 0) -> Tensor:
        """Ids of the layer's experts -> the local ids of those that this rank computes, -1 for all others."""
        ranks, local = self.placement.locate(expert_ids, first_token)
        return torch.where(ranks == self.own, local, EMPTY).to(expert_ids.dtype)

    def local(self, expert_ids: Tensor, routing_weights: Tensor, of: Routing) -> Routing:
        """A routing to the experts of this rank, made of one that the layer's own router checked."""
        held = len(self.placement.experts[self.own])
        return Routing.unchecked(expert_ids, routing_weights, of.weight_on, held)

    def start(self, x: Tensor, routing: Routing, operation: str) -> tuple[Tensor, Tensor, int | None]:
        """x and its routing weights, which the ranks of other slices have too, and a digest for `finish`."""
        weights = routing.routing_weights
        if self.slices is None:
            return x, weights, None
        self.slices.agree_on_tokens(x, operation, self.name)
        digest = routing_digest(self.slices, routing.expert_ids)
        return share(self.slices, x, "rows", self.name), share(self.slices, weights, "routing", self.name), digest

    def finish(self, y: Tensor, dtype: torch.dtype, digest: int | None, operation: str) -> Tensor:
        """Sums [T, H] of this rank's slices -> those of whole experts, in `dtype`."""
        if self.slices is not None:
            y = add_up_same(self.slices, y, digest, (operation, self.name))
        return y.to(dtype)

    def check(self, x: Tensor, routing: Routing, operation: str, option: object = None) -> None:
        """Compare, once for each kind of rows, what the ranks are about to send, and the dispatcher's option."""
        said = {"H": x.shape[1], "dtype": str(x.dtype), "K": routing.top_k, "E": self.placement.num_experts}
        said |= {"operation": operation, "option": option, "weight_on": routing.weight_on}
        self.peers.agree_once(said, operation, self.name)


def wide(dtype: torch.dtype) -> torch.dtype:
    """What rows of a dtype are summed in."""
    return torch.promote_types(dtype, torch.float32)


def _recorded(tensor: Tensor) -> bool:
    return torch.is_grad_enabled() and tensor.requires_grad


@dataclass(frozen=True)
class _Reduced:
    dtype: torch.dtype
    digest: int | None


@dataclass(frozen=True)
class AllReduceDispatcher(Dispatcher):
    """For ranks that all hold the same tokens: nothing is sent before the experts, outputs are summed over the ranks.

    Sends 2 (R - 1) / R * T * H numbers a rank, in float32 at least. Shapes are fixed; over NCCL the host waits only
    to agree on a new number of tokens. That x and its routing are the same on every rank is asked of the caller: with
    others the sums are wrong. Ranks compare the number of tokens where it changes and, but over NCCL, a digest of
    expert_ids, which travels with the sums as a row more; where these differ every rank has a `CollectiveError`.
    """

    place: Place

    def __post_init__(self) -> None:
        if self.place.slices is not None:
            raise invalid_input(
                "AllReduceDispatcher",
                got="a place whose slices have peers of their own",
                needs="one group of all ranks that hold a part of the experts, slices=None",
                fix="Pass the class, or a partial of it, to parallelize.",
            )

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Tensor, Routing, _Reduced]:
        """x [T, H] of this rank, which all have -> the same rows, with the slots of local experts alone."""
        place = self.place
        place.check(x, routing, "AllReduceDispatcher")
        place.peers.agree_on_tokens(x, "AllReduceDispatcher", place.name)
        digest = routing_digest(place.peers, routing.expert_ids)
        ids = place.local_ids(routing.expert_ids)
        weights = share(place.peers, routing.routing_weights, "routing", place.name)
        rows = share(place.peers, x, "rows", place.name)
        return rows, place.local(ids, weights, routing), _Reduced(x.dtype, digest)

    def combine(self, y: Tensor, handle: _Reduced) -> Tensor:
        """Partial sums [T, H] -> the sums over all ranks."""
        place = ("AllReduceDispatcher", self.place.name)
        return add_up_same(self.place.peers, y, handle.digest, place).to(handle.dtype)


@dataclass(frozen=True)
class _Gathered:
    num_tokens: int
    dtype: torch.dtype
    digest: int | None


@dataclass(frozen=True)
class AllGatherDispatcher(Dispatcher):
    """Every rank gets all tokens, computes the slots of its own experts, and sums go back by a reduce-scatter.

    Each rank sends its T rows to R - 1 others and gets as many sums back: the choice for few ranks.

    Attributes:
        place: where the experts are.
        num_tokens: the most tokens that any rank ever has. Then shapes are fixed and the host never waits. None: the
            ranks tell each other how many they have, at each call.
    """

    place: Place
    num_tokens: int | None = None

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Tensor, Routing, _Gathered]:
        """x [T, H] of this rank -> rows [R * n, H] of all ranks, n each, padded with empty slots."""
        self.place.check(x, routing, "AllGatherDispatcher", self.num_tokens)
        return self.gather(x, routing)

    def gather(self, x: Tensor, routing: Routing, most: int | None = None) -> tuple[Tensor, Routing, _Gathered]:
        """`dispatch` of rows that were compared; `most` is the most tokens of a rank, where that is known."""
        place = self.place
        x, w, digest = place.start(x, routing, "AllGatherDispatcher")
        n = self._rows(x, routing) if most is None else most
        pad = n - x.shape[0]
        ids = F.pad(routing.expert_ids.to(torch.int32), (0, 0, 0, pad), value=EMPTY)
        w, rows = F.pad(w, (0, 0, 0, pad)), F.pad(x, (0, 0, 0, pad))
        rows = gather_rows(place.peers, rows, "rows", place.name)
        if _recorded(w) or w.dtype != torch.float32:
            ids, w = (
                place.peers.all_gather(ids, "routing", place.name),
                gather_rows(place.peers, w, "routing", place.name),
            )
        else:
            both = place.peers.all_gather(torch.cat([ids, w.view(torch.int32)], 1), "routing", place.name)
            ids, w = both[:, : routing.top_k].contiguous(), both[:, routing.top_k :].contiguous().view(torch.float32)
        numbers = torch.arange(len(ids), device=ids.device)
        local = place.local_ids(ids, numbers % n + numbers // n) if n else ids
        return rows, place.local(local, w, routing), _Gathered(x.shape[0], x.dtype, digest)

    def combine(self, y: Tensor, handle: _Gathered) -> Tensor:
        """Partial sums [R * n, H] for all ranks -> [T, H]: the whole sums of this rank's tokens."""
        place = self.place
        sums = scatter_sums(place.peers, y.to(wide(y.dtype)), "rows", place.name)
        return place.finish(sums[: handle.num_tokens], handle.dtype, handle.digest, "AllGatherDispatcher")

    def _rows(self, x: Tensor, routing: Routing) -> int:
        have = x.shape[0]
        if self.num_tokens is None:
            head = torch.tensor([[have, *kind_of(x, routing)]], device=x.device)
            heads = self.place.peers.all_gather(head, "counts", self.place.name).tolist()
            check_heads([head[1:] for head in heads], self.place, "AllGatherDispatcher")
            return max(int(count) for count, *_ in heads)
        if have > self.num_tokens:
            raise invalid_input(
                "AllGatherDispatcher",
                got=f"{have} tokens",
                needs=f"at most num_tokens={self.num_tokens}",
                fix="Raise num_tokens on every rank, or leave it out.",
            )
        return self.num_tokens


Counts = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]
"""Of rows and of slots: how many go to each rank, and how many come from each."""


@dataclass(frozen=True)
class SendPlan:
    """Which rows of this rank go where.

    Attributes:
        ranks, local: of every slot, [T, K].
        tokens: of the rows that go out, [n], by rank and then in order.
        here: which slots of such a row are computed where it goes, [n, K].
        counts: rows and slots to each rank, [2, R].
    """

    ranks: Tensor
    local: Tensor
    tokens: Tensor
    here: Tensor
    counts: Tensor


@dataclass(frozen=True)
class Sent:
    """What `combine` needs of a dispatch: rows that went out by rank, what came in, and where each belongs."""

    num_tokens: int
    dtype: torch.dtype
    tokens: Tensor
    back: tuple[Sequence[int], Sequence[int]]
    slots: tuple[Tensor, Tensor] | None
    digest: int | None = None


@dataclass(frozen=True)
class AllToAllDispatcher(Dispatcher):
    """A token goes once to each rank that has experts for it, is summed there, and one row comes back from each.

    No smaller number of rows computes the same: for each pair of ranks it is the tokens of the one that name experts
    of the other. The host waits once, for the counts.

    Attributes:
        place: where the experts are.
        exact: have one row for each slot come back, and sum slots in their order where the token came from. Then a
            result is bit for bit that of one device with all ranks' tokens in the order of the ranks, where the
            implementation computes float32 and where half precision is computed in float32 (the native engine without
            AMX and AVX-512 BF16), in PyTorch's deterministic mode.
        wire_format: how rows travel to the experts: "float", as they are; "int8" or "fp8-e4m3", in 8 bits with a scale
            of 32 bits for each row. Those lose bits (`wire_error` says how many); results come back as they are, and
            gradients pass as if nothing was lost.

    Raises:
        InvalidInputError: exact, and experts in slices, whose sums have no order of slots; exact, and rows in 8 bits;
            another wire_format.
    """

    place: Place
    exact: bool = False
    wire_format: WireFormat = "float"

    def __post_init__(self) -> None:
        check_wire_format(self.wire_format, self.exact)
        if self.exact and self.place.slices is not None:
            raise invalid_input(
                "AllToAllDispatcher",
                got="exact=True and experts that are cut along I",
                needs="whole experts: partial sums of slices are rounded before they are added",
                fix="Use a mesh with tp=1, or leave out exact.",
            )

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Tensor, Routing, Sent]:
        """x [T, H] of this rank -> rows of all ranks, in the order of ranks and tokens, and their local routing."""
        option = self.exact if self.wire_format == "float" else self.wire_format
        self.place.check(x, routing, "AllToAllDispatcher", option)
        return self.send(x, routing, self.plan(routing))

    def plan(self, routing: Routing) -> SendPlan:
        """Which rows go where."""
        place = self.place
        ranks, local = place.placement.locate(routing.expert_ids, place.peers.rank)
        wanted = torch.zeros(len(ranks), place.peers.size + 1, dtype=torch.bool, device=ranks.device)
        wanted.scatter_(1, torch.where(ranks < 0, place.peers.size, ranks), True)
        to, tokens = wanted[:, :-1].t().nonzero(as_tuple=True)
        here = ranks[tokens] == to[:, None]
        slots = here.sum(1).new_zeros(place.peers.size).index_add_(0, to, here.sum(1))
        return SendPlan(ranks, local, tokens, here, torch.stack([to.bincount(minlength=place.peers.size), slots]))

    def send(
        self, x: Tensor, routing: Routing, plan: SendPlan, counts: Counts | None = None
    ) -> tuple[Tensor, Routing, Sent]:
        """`dispatch` of rows that were compared, by a plan; `counts` of rows and of slots, where they are known."""
        place, ranks, tokens, here = self.place, plan.ranks, plan.tokens, plan.here
        x, w, digest = place.start(x, routing, "AllToAllDispatcher")
        rows, pairs = self._counts(plan.counts, x, routing) if counts is None else counts
        ids = torch.where(here, plan.local[tokens], EMPTY).to(torch.int32)
        x_local = send_rows(place.peers, x[tokens], rows, self.wire_format, place.name)
        ids, w_local = self._swap_routing(ids, w[tokens], rows)
        kept = place.local(ids, w_local, routing)
        if not self.exact:
            return x_local, kept, Sent(len(x), x.dtype, tokens, rows[::-1], None, digest)
        position = torch.full(ranks.shape, int(sum(pairs[0])), device=x.device)
        position[(tokens[:, None].expand(here.shape)[here], here.nonzero()[:, 1])] = torch.arange(
            int(sum(pairs[0])), device=x.device
        )
        y_weights = torch.ones_like(w) if routing.weight_on == "input" else w
        y_weights = y_weights.masked_fill(ranks < 0, 0.0)
        x_slots, kept = _one_slot_a_row(x_local, kept)
        return x_slots, kept, Sent(len(x), x.dtype, tokens, pairs[::-1], (position, y_weights))

    def combine(self, y: Tensor, handle: Sent) -> Tensor:
        """Outputs of the rows computed here -> [T, H] for the tokens of this rank."""
        place, send = self.place, handle.back[0]
        assert len(y) == sum(send)
        rows = swap_rows(place.peers, y, handle.back, "rows", place.name)
        if handle.slots is not None:
            return _in_slot_order(rows, *handle.slots).to(handle.dtype)
        sums, start = rows.new_zeros(handle.num_tokens, rows.shape[1], dtype=wide(rows.dtype)), 0
        for count in handle.back[1]:  # of one rank, whose rows are of different tokens: the order of sums is fixed
            part = slice(start, start + count)
            sums = sums.index_add(0, handle.tokens[part], rows[part].to(sums.dtype))
            start += count
        return place.finish(sums, handle.dtype, handle.digest, "AllToAllDispatcher")

    def _counts(self, counts: Tensor, x: Tensor, routing: Routing) -> Counts:
        """Rows and slots to each rank [2, R] -> (to, from) each rank, of rows and of slots."""
        kind = torch.tensor(kind_of(x, routing, self.exact), device=x.device).expand(counts.shape[1], -1)
        head = torch.cat([counts.t(), kind], 1)
        one = [1] * counts.shape[1]
        given = self.place.peers.all_to_all(head, one, one, "counts", self.place.name)
        sent, received = torch.stack([head, given]).tolist()
        check_heads([each[2:] for each in received], self.place, "AllToAllDispatcher")
        rows, slots = (([each[i] for each in sent], [each[i] for each in received]) for i in (0, 1))
        return rows, slots

    def _swap_routing(self, ids: Tensor, w: Tensor, rows: tuple[Any, Any]) -> tuple[Tensor, Tensor]:
        """Local ids and weights [n, K] of the rows that go out -> those of the rows that come in."""
        peers, name = self.place.peers, self.place.name
        if _recorded(w) or w.dtype != torch.float32:
            return peers.all_to_all(ids, *rows, "routing", name), swap_rows(peers, w, rows, "routing", name)
        both = peers.all_to_all(torch.cat([ids, w.view(torch.int32)], 1), *rows, "routing", name)
        ids, bits = both[:, : ids.shape[1]].contiguous(), both[:, ids.shape[1] :].contiguous()
        return ids, bits.view(torch.float32)


@dataclass(frozen=True)
class SlicedDispatcher(Dispatcher):
    """Another dispatcher for a batch that several ranks share: each sends a slice of it, and outputs are gathered.

    Attributes:
        inner: what brings a rank's slice to the experts.
        batch: the ranks that have the same tokens.
        name: the layer's, for errors.
    """

    inner: Dispatcher
    batch: Peers
    name: str = ""

    def __post_init__(self) -> None:
        place = getattr(self.inner, "place", None)
        if isinstance(place, Place):
            self.batch.join(place.peers)

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Tensor, Routing, tuple[int, int, int | None, Any]]:
        """x [T, H], which all ranks of the batch have -> what the inner one makes of this rank's slice."""
        self.batch.agree_on_tokens(x, "SlicedDispatcher", self.name)
        digest = routing_digest(self.batch, routing.expert_ids)
        each = -(-x.shape[0] // self.batch.size)
        own = slice(self.batch.rank * each, (self.batch.rank + 1) * each)
        x, w = share(self.batch, x, "rows", self.name), share(self.batch, routing.routing_weights, "routing", self.name)
        part = Routing.unchecked(routing.expert_ids[own], w[own], routing.weight_on)
        rows, local, handle = self.inner.dispatch(x[own], part)
        return rows, local, (x.shape[0], each, digest, handle)

    def combine(self, y: Tensor, handle: tuple[int, int, int | None, Any]) -> Tensor:
        """The outputs of all slices, [T, H], on every rank of the batch."""
        num_tokens, each, digest, inner = handle
        own = self.inner.combine(y, inner)
        padded = F.pad(own, (0, 0, 0, each - own.shape[0]))
        return join_same(self.batch, padded, digest, ("SlicedDispatcher", self.name))[:num_tokens]


def _one_slot_a_row(x: Tensor, routing: Routing) -> tuple[Tensor, Routing]:
    """A row for each slot in use, of float32 at least, with that slot alone; its weight is 1 if it weights outputs."""
    row, slot = (routing.expert_ids >= 0).nonzero(as_tuple=True)
    w = routing.routing_weights[row, slot][:, None]
    w = w if routing.weight_on == "input" else torch.ones_like(w)
    ids = routing.expert_ids[row, slot][:, None]
    return x[row].to(wide(x.dtype)), Routing.unchecked(ids, w, routing.weight_on, routing.checked_for)


def _in_slot_order(rows: Tensor, position: Tensor, weights: Tensor) -> Tensor:
    """y[t] = sum over k of weights[t, k] * rows[position[t, k]] in the order of k; a position past the rows adds 0."""
    rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    weights = weights.to(rows.dtype)
    if _recorded(rows) or _recorded(weights):
        return (rows[position] * weights[..., None]).sum(1)
    return F.embedding_bag(position, rows, per_sample_weights=weights, mode="sum")


def kind_of(x: Tensor, routing: Routing, exact: bool = False) -> list[int]:
    """What rows are, in three numbers that ranks compare before they send any."""
    return [x.shape[1], routing.top_k, DTYPES.index(x.dtype) + len(DTYPES) * exact]


def check_heads(kinds: Sequence[Sequence[int]], place: Place, operation: str) -> None:
    """Raise where ranks sent counts for other kinds of rows than others: all of them find the same."""
    if len({tuple(kind) for kind in kinds}) > 1:
        h, k, kind = kinds[place.peers.rank]
        exact, dtype = divmod(kind, len(DTYPES))
        said = {"H": h, "K": k, "dtype": str(DTYPES[dtype]), "exact": bool(exact)}
        place.peers.agree(said, operation, place.name)
