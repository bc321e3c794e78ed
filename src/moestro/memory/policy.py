"""Which expert goes where another needs its slot: policies as values, and the state that each keeps of a run.

A policy sees the visits of layers, one by one in execution order, and names victims. It decides nothing else, and draws
no random numbers: the same visits give the same victims.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from moestro.errors import InvalidInputError, invalid_input, not_one_of
from moestro.memory.prompts import last_experts
from moestro.memory.sizes import LayerSize

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
WINDOW = 128
"""Steps after which counts are halved; of a prompt at most as many tokens count."""
LEAST_RATE = 1e-4
AGES: Ints = np.array([2, 3, 4, 6, 9, 17, 33])
"""Where the next bin of ages begins."""
RATES, RATES_AN_OCTAVE = 16, 1.5
"""Bins of rates, the last for those near 1, and how many there are for a factor of two."""


@dataclass(frozen=True)
class Visit:
    """One layer in one forward.

    Attributes:
        layer: its index among the expert layers, in execution order.
        experts: by each expert that some token is routed to, how many tokens.
        last: None in decoding; in a prompt the experts of the tokens that it ends with.
    """

    layer: int
    experts: Mapping[int, int]
    last: Collection[int] | None = None


def visit_of(layer: int, ids: Sequence[Sequence[int]], num_experts: int) -> Visit:
    """The visit of a layer by the expert ids [T, K] of its tokens; an id of no expert is an empty slot.

    A live run and a recorded one ask this same function; `last_experts` says what a prompt is.
    """
    flat = np.asarray(ids, np.int64).reshape(-1)
    counts = np.bincount(flat[(flat >= 0) & (flat < num_experts)], minlength=num_experts)
    experts = {int(expert): int(counts[expert]) for expert in np.flatnonzero(counts)}
    return Visit(layer, experts, last_experts(ids, num_experts))


class Ranking:
    """What a policy knows of one run. A key is an expert's number among those of all layers.

    Attributes:
        pinned: keys that are never victims.
    """

    pinned: frozenset[int] = frozenset()

    def __init__(self, layers: Sequence[LayerSize]) -> None:
        counts = [layer.experts for layer in layers]
        self.layers = tuple(layers)
        self.first = [0, *np.cumsum(counts).tolist()]
        self.layer_of: Ints = np.repeat(np.arange(len(layers)), counts)

    def seen(self, visit: Visit) -> None:
        """A layer is visited; called before its victims are asked for."""

    def fetched(self, key: int) -> None:
        """An expert is read before it is asked for."""

    def scores(self, keys: Ints) -> Floats:
        """Of each key; the highest goes first. A new array."""
        raise NotImplementedError

    def victims(self, layer: int, keys: Ints, count: int, protected: Sequence[int]) -> list[int]:
        """Slots to take, of those that hold these keys.

        Args:
            layer: the one that slots are taken for.
            keys: of all slots of its pool, [slots]; -1 in an empty one, which is protected.
            count: at most as many as there are slots that are not protected.
            protected: slots that stay.
        """
        scores = self.scores(keys)
        scores[list(protected)] = -np.inf
        found = []
        for _ in range(count):
            slot = int(scores.argmax())
            scores[slot] = -np.inf
            found.append(slot)
        return found

    def keys_of(self, layer: int, experts: Iterable[int]) -> Ints:
        """The keys of a layer's experts."""
        keys: Ints = np.fromiter(experts, np.int64) + self.first[layer]
        return keys


class Policy(Protocol):
    """A rule, as a value."""

    name: ClassVar[str]

    def start(self, layers: Sequence[LayerSize]) -> Ranking:
        """The state of a run over these layers, at its begin."""
        ...


def num_tokens(visit: Visit, top_k: int) -> int:
    """Tokens of a visit, as far as its counts tell: where no slot is empty, exactly."""
    counts = visit.experts.values()
    return max(1, -(-sum(counts) // top_k), *counts)


class _LruRanking(Ranking):
    def __init__(self, layers: Sequence[LayerSize]) -> None:
        super().__init__(layers)
        self._clock = 0
        self._used: Ints = np.zeros(self.first[-1], np.int64)

    def seen(self, visit: Visit) -> None:
        self._clock += 1
        self._used[self.keys_of(visit.layer, visit.experts)] = self._clock

    def fetched(self, key: int) -> None:
        self._used[key] = self._clock

    def scores(self, keys: Ints) -> Floats:
        scores: Floats = -self._used[keys].astype(np.float64)
        return scores


class _LfuRanking(_LruRanking):
    """By uses, and among equal ones by the last. A layer's counts are halved every `WINDOW` visits of it."""

    def __init__(self, layers: Sequence[LayerSize]) -> None:
        super().__init__(layers)
        self._counts: Ints = np.zeros(self.first[-1], np.int64)
        self._visits = [0] * len(layers)

    def seen(self, visit: Visit) -> None:
        super().seen(visit)
        layer = visit.layer
        tokens = max(num_tokens(visit, self.layers[layer].top_k), WINDOW)
        self._visits[layer] += 1
        if self._visits[layer] % WINDOW == 0:
            self._counts[self.first[layer] : self.first[layer + 1]] //= 2
        uses = np.fromiter(visit.experts.values(), np.int64)
        self._counts[self.keys_of(layer, visit.experts)] += np.maximum(uses * WINDOW // tokens, 1)

    def scores(self, keys: Ints) -> Floats:
        scores: Floats = (self._counts[keys] * 2.0**32 + self._used[keys]).astype(np.float64)
        return -scores


class _LayerLfuRanking(_LfuRanking):
    """Each layer of a pool has an equal share of the slots, and gives of its own where it is over it."""

    def __init__(self, layers: Sequence[LayerSize]) -> None:
        super().__init__(layers)
        kinds = [(size.expert_bytes, size.pool_key) for size in layers]
        self._sharing = [kinds.count(kind) for kind in kinds]

    def victims(self, layer: int, keys: Ints, count: int, protected: Sequence[int]) -> list[int]:
        """Of the layer that is furthest over its share, those that come included; the least used of it."""
        owners = self.layer_of[keys]
        open_slots = np.ones(len(keys), bool)
        open_slots[list(protected)] = False
        held = np.bincount(owners[keys >= 0], minlength=len(self.layers)).astype(np.float64)
        held[layer] += count
        over = held - len(keys) / self._sharing[layer]
        over[layer] += 0.5  # of equal ones its own layer gives first
        found: list[int] = []
        falling: dict[int, list[int]] = {}
        while len(found) < count:
            fullest = int(over.argmax())
            if fullest not in falling:
                own = np.flatnonzero(open_slots & (owners == fullest))
                falling[fullest] = own[np.argsort(self.scores(keys[own]), kind="stable")].tolist()
            if not falling[fullest]:  # all that is left of it stays
                over[fullest] = -np.inf
                continue
            found.append(falling[fullest].pop())
            over[fullest] -= 1
        return found


class _ExpectedRanking(Ranking):
    """By the visits until an expert is expected to be used: layers until its own comes, and passes until it is routed.

    A pass is routed to it at a rate p, so that 1/p - 1 passes go by without it. p is an average of two. One is the
    expert's own average over tokens, which decays and begins as if routing were even; it has the weight of `prior`
    observations. The other is how often, in this run and over all layers, the next pass was routed to experts that had
    such an average and were last used as long ago.
    """

    def __init__(self, layers: Sequence[LayerSize], decay: float, prior: float) -> None:
        super().__init__(layers)
        self._decay, self._prior = decay, prior
        self._rates: Floats = np.concatenate([np.full(size.experts, size.top_k / size.experts) for size in layers])
        self._passes: Floats = self._waits(self._rates)
        self._ages: Ints = np.full(self.first[-1], AGES[-1])
        self._bins: Ints = self._binned(self._rates, self._ages)
        self._asked: Floats = np.zeros((len(AGES) + 1) * RATES)
        self._routed: Floats = np.zeros_like(self._asked)
        self._now = 0
        along = np.arange(len(layers))
        self._until: Ints = (along[None, :] - along[:, None] - 1) % len(layers) + 1

    def seen(self, visit: Visit) -> None:
        self._now = visit.layer
        own = slice(self.first[visit.layer], self.first[visit.layer + 1])
        used = np.fromiter(visit.experts, np.int64)
        tokens = num_tokens(visit, self.layers[visit.layer].top_k)
        if visit.last is None and self._prior < np.inf:
            bins = self._bins[own]
            self._asked += np.bincount(bins, minlength=len(self._asked))
            self._routed += np.bincount(bins[used], minlength=len(self._asked))
        rates = self._rates[own]
        self._average(rates, used, visit, tokens)
        self._age(self._ages[own], used, visit, tokens)
        if self._prior < np.inf:
            bins = self._bins[own] = self._binned(rates, self._ages[own])
            rates = (self._routed[bins] + self._prior * rates) / (self._asked[bins] + self._prior)
        self._passes[own] = self._waits(rates)

    def _average(self, rates: Floats, used: Ints, visit: Visit, tokens: int) -> None:
        kept = (1 - self._decay) ** tokens
        rates *= kept
        rates[used] += np.fromiter(visit.experts.values(), np.float64) * ((1 - kept) / tokens)
        if visit.last:
            rates *= 1 - self._decay
            rates[np.fromiter(visit.last, np.int64)] += self._decay

    def _age(self, ages: Ints, used: Ints, visit: Visit, tokens: int) -> None:
        """Passes since an expert was used, the next included; within a prompt as if its uses were evenly spread."""
        if visit.last is None:
            ages += 1
            ages[used] = 1
        else:
            ages += tokens
            ages[used] = np.maximum(tokens // np.fromiter(visit.experts.values(), np.int64), 1)
            ages[np.fromiter(visit.last, np.int64)] = 1

    def _binned(self, rates: Floats, ages: Ints) -> Ints:
        """The number of the bin of each, by logarithms of its rate and its age."""
        by_rate = (np.log2(np.maximum(rates, LEAST_RATE)) * RATES_AN_OCTAVE).astype(np.int64) + RATES - 1
        bins: Ints = np.searchsorted(AGES, ages, side="right") * RATES + np.maximum(by_rate, 0)
        return bins

    def _waits(self, rates: Floats) -> Floats:
        waits: Floats = len(self.layers) * (1 / np.maximum(rates, LEAST_RATE) - 1)
        return waits

    def scores(self, keys: Ints) -> Floats:
        scores: Floats = self._passes[keys] + self._until[self._now][self.layer_of[keys]]
        return scores


class _PinnedRanking(Ranking):
    def __init__(self, layers: Sequence[LayerSize], pinned: Iterable[tuple[int, int]], then: Ranking) -> None:
        super().__init__(layers)
        self._then = then
        self.pinned = frozenset(self.first[layer] + expert for layer, expert in pinned)

    def seen(self, visit: Visit) -> None:
        self._then.seen(visit)

    def fetched(self, key: int) -> None:
        self._then.fetched(key)

    def victims(self, layer: int, keys: Ints, count: int, protected: Sequence[int]) -> list[int]:
        return self._then.victims(layer, keys, count, protected)


class _BeladyRanking(Ranking):
    def __init__(self, layers: Sequence[LayerSize], future: Sequence[Visit]) -> None:
        super().__init__(layers)
        self._future = future
        self._at = 0
        self._next: Floats = np.full(self.first[-1], float(len(future)))
        self._after: list[Floats] = []
        for index in range(len(future) - 1, -1, -1):
            keys = self.keys_of(future[index].layer, future[index].experts)
            self._after.append(self._next[keys])
            self._next[keys] = index

    def seen(self, visit: Visit) -> None:
        if self._at == len(self._future) or not _same(visit, self._future[self._at]):
            raise invalid_input(
                "belady",
                got=f"visit {self._at} of layer {visit.layer} of experts {sorted(visit.experts)}",
                needs=f"the {len(self._future)} visits that it was given, in their order",
                fix="It can only replay; use another policy where the future is open.",
            )
        self._next[self.keys_of(visit.layer, self._future[self._at].experts)] = self._after.pop()
        self._at += 1

    def scores(self, keys: Ints) -> Floats:
        scores: Floats = self._next[keys]
        return scores


def _same(one: Visit, other: Visit) -> bool:
    return one is other or (one.layer == other.layer and one.experts.keys() == other.experts.keys())


@dataclass(frozen=True)
class Expected:
    """What is expected to be used last goes first: layers until its layer comes again, and one over its rate.

    Attributes:
        decay: of an expert's own rate, at each token.
        prior: observations that its own rate counts as beside what experts of such a rate and age did in this run;
            inf to take its own alone.
    """

    name: ClassVar[str] = "expected"
    decay: float = 1 / 32
    prior: float = 16

    def __post_init__(self) -> None:
        if not (0 < self.decay < 1 and self.prior > 0):
            raise invalid_input(
                "expected",
                got=f"decay={self.decay}, prior={self.prior}",
                needs="0 < decay < 1, and prior above 0",
                fix="Leave them out.",
            )

    def start(self, layers: Sequence[LayerSize]) -> Ranking:
        """The state of a run over these layers, at its begin."""
        return _ExpectedRanking(layers, self.decay, self.prior)


@dataclass(frozen=True)
class Lru:
    """What was used longest ago goes first. With fewer slots than a token's experts in all layers it hits nothing."""

    name: ClassVar[str] = "lru"

    def start(self, layers: Sequence[LayerSize]) -> Ranking:
        """The state of a run over these layers, at its begin."""
        return _LruRanking(layers)


@dataclass(frozen=True)
class Lfu:
    """What was used least goes first, counts halved every 128 visits of a layer; of equal ones the older use."""

    name: ClassVar[str] = "lfu"

    def start(self, layers: Sequence[LayerSize]) -> Ranking:
        """The state of a run over these layers, at its begin."""
        return _LfuRanking(layers)


@dataclass(frozen=True)
class LayerLfu:
    """As `Lfu`, with an equal share of the slots for each layer. One beyond its share gives first."""

    name: ClassVar[str] = "layer_lfu"

    def start(self, layers: Sequence[LayerSize]) -> Ranking:
        """The state of a run over these layers, at its begin."""
        return _LayerLfuRanking(layers)


@dataclass(frozen=True)
class Pinned:
    """Experts (layer, expert) that stay once they were read; another policy for the rest."""

    name: ClassVar[str] = "pinned"
    keys: frozenset[tuple[int, int]] = frozenset()
    then: Policy = field(default_factory=Expected)

    def start(self, layers: Sequence[LayerSize]) -> Ranking:
        """The state of a run over these layers, at its begin.

        Raises:
            InvalidInputError: an expert that is none of theirs.
        """
        strange = [k for k in sorted(self.keys) if not (0 <= k[0] < len(layers) and 0 <= k[1] < layers[k[0]].experts)]
        if strange:
            raise invalid_input(
                "pinned",
                got=f"expert {strange[0][1]} of layer {strange[0][0]}",
                needs=f"experts of {len(layers)} layers, counted from 0",
                fix="Drop it.",
            )
        return _PinnedRanking(layers, self.keys, self.then.start(layers))


@dataclass(frozen=True)
class Belady:
    """What is used last in the future that it is given goes first: no policy that protects a visit hits more."""

    name: ClassVar[str] = "belady"
    future: tuple[Visit, ...] = field(default=(), repr=False)

    def start(self, layers: Sequence[LayerSize]) -> Ranking:
        """The state of a run over these layers, at its begin."""
        return _BeladyRanking(layers, self.future)


POLICIES: Mapping[str, Policy] = {policy.name: policy for policy in (Expected(), Lru(), Lfu(), LayerLfu())}
"""Those that need neither experts nor a future to be given."""


def policy_named(operation: str, name: str) -> Policy:
    """One of `POLICIES`.

    Raises:
        InvalidInputError: another name.
    """
    if name not in POLICIES:
        raise not_one_of(operation, "policy", name, POLICIES)
    return POLICIES[name]


def check_visit(operation: str, layers: Sequence[LayerSize], visit: Visit) -> None:
    """Refuse a visit of another layer or of other experts than there are.

    Raises:
        InvalidInputError: so.
    """
    if not 0 <= visit.layer < len(layers):
        raise _no_visit(operation, f"layer {visit.layer}", f"a layer of {len(layers)}, counted from 0")
    experts = layers[visit.layer].experts
    if any(not (0 <= e < experts and count >= 1) for e, count in visit.experts.items()):
        got = f"experts {dict(visit.experts)} of layer {visit.layer}"
        raise _no_visit(operation, got, f"ids below {experts}, each of at least one token")
    if visit.last is not None and not visit.experts.keys() >= set(visit.last):
        got = f"last {sorted(visit.last)} with experts {sorted(visit.experts)}"
        raise _no_visit(operation, got, "experts of this visit")


def _no_visit(operation: str, got: str, needs: str) -> InvalidInputError:
    return invalid_input(operation, got=got, needs=needs, fix="Pass a visit of the model that the layers are of.")
