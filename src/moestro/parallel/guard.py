"""The ranks of one process group, and the rules under which they talk.

Every collective has a timeout, is counted, and fails with an error that names the operation, the layer and the ranks
that did not answer. Those are found through the store that torch.distributed keeps: whoever fails says so there.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moestro.errors import CollectiveError, no_answer

POLL = 0.25
"""Seconds between looks at whether another rank has failed; a collective that takes less is never looked at."""

GRACE = 2.0
"""Seconds that a failed rank waits for the others to say that they failed too; those that do not are named."""

SAME_START = "Start every rank with the same model, mesh and versions."
SAME_TOKENS = "Give every rank of the group the same batch; ranks along dp may have others."

ASKED = 10.0
"""Seconds, at most a quarter of the timeout, that a collective goes on after another rank has asked something else."""

_ASKED = "asked"

SAID = 3
"""The most differences that an error lists."""

DEFAULT_TIMEOUT = 120.0

_WIRE = {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu}
"""Dtypes that gloo does not send, as bytes."""

_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""PyTorch 2.13 gave both other names."""


class Peers:
    """A process group with its guard; `Peers.of` makes one a group of ranks.

    Attributes:
        ranks: of the whole job, in the order of the group.
        rank: of this process within the group.
        timeout: seconds that a collective may take.
        sent: bytes that this rank has sent to each rank of the group, by what they are: "rows", "routing", "counts".
            What stays on the rank is not counted. Of reductions, what the textbook's ring sends.
    """

    def __init__(self, ranks: Sequence[int], timeout: float = DEFAULT_TIMEOUT) -> None:
        self.ranks, self.timeout = tuple(ranks), timeout
        self.rank = self.ranks.index(dist.get_rank())
        self.sent: dict[str, Counter[int]] = {}
        self._world = dist.group.WORLD
        self._agreements, self._failed = 0, ""
        self._agreed: set[tuple[Any, ...]] = set()
        self._partners: set[Peers] = set()
        self._batch: tuple[int, str] | None = None
        self._store = self._own_store()
        self.agree({"ranks": list(self.ranks), "timeout": timeout}, "process group", "")
        limit = timedelta(seconds=timeout)
        self.group = dist.new_group(list(self.ranks), timeout=limit, use_local_synchronization=True)

    def _own_store(self) -> dist.distributed_c10d.PrefixStore:
        """A part of the job's store for this group alone, of which the store counts how many this rank has made.

        A process that has taken the place of another in a new job has made none, the others perhaps some.
        """
        store, ranks = dist.distributed_c10d._get_default_store(), "-".join(map(str, self.ranks))
        number = 0
        with suppress(RuntimeError):  # of which the agreement that follows tells
            number = store.add(f"moestro/{ranks}/made by {self.rank}", 1)
        return dist.distributed_c10d.PrefixStore(f"moestro/{number}/{ranks}", store)

    @classmethod
    def of(cls, ranks: Sequence[int], timeout: float = DEFAULT_TIMEOUT) -> Peers:
        """The one value for these ranks and this timeout; the first call is collective over them.

        Raises:
            CollectiveError: a rank did not come, or wants another group.
        """
        key = (tuple(ranks), timeout)
        kept = _PEERS.get(key)
        if kept is None or kept._world is not dist.group.WORLD or kept._failed:
            _PEERS.pop(key, None)
            kept = _PEERS[key] = cls(ranks, timeout)
        return kept

    def __deepcopy__(self, memo: dict[int, Any]) -> Peers:
        """Itself: a copy of a model talks to the same ranks."""
        return self

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def waits(self) -> bool:
        """Whether waiting blocks the host anyway, so that looking up costs nothing. NCCL has a watchdog of its own."""
        return dist.get_backend(self.group) != "nccl"

    def agree(self, said: Mapping[str, Any], operation: str, where: str, fix: str = SAME_START) -> None:
        """Compare what every rank says; collective over the group, through the store, before any data moves.

        `fix` is what the error advises.

        Raises:
            CollectiveError: ranks differ, and in what; or one did not answer within the timeout.
        """
        self._check_alive(operation, where)
        self._agreements += 1
        prefix = f"agree/{self._agreements}"
        told, missing = self._exchange(prefix, json.dumps(said), self.timeout, asks=True)
        if missing and self._another_failed():
            raise self._broken(operation, where, TimeoutError(f"no answer from {_named(missing)}"))
        if missing:
            raise self._no_answer(operation, where, missing, f"{self.timeout:g} s")
        values = [json.loads(text) for text in told]
        differing = {
            field: text
            for field in dict.fromkeys(name for v in values for name in v)
            if (text := self._differs(values, field))
        }
        if differing:
            raise no_answer(
                _place(operation, where),
                got="; ".join(f"different {field}: {text}" for field, text in [*differing.items()][:SAID]),
                needs="the same on every rank of the group",
                fix=fix,
            )

    def _differs(self, values: Sequence[Mapping[str, Any]], field: str) -> str:
        """What each rank says of a field; empty where all say the same."""
        found: dict[str, list[int]] = {}
        for rank, value in zip(self.ranks, values, strict=True):
            found.setdefault(json.dumps(value.get(field)), []).append(rank)
        return ", ".join(f"{value} on {_named(r)}" for value, r in found.items()) if len(found) > 1 else ""

    def agree_once(self, said: Mapping[str, Any], operation: str, where: str) -> None:
        """`agree` the first time that this very thing is said in the group."""
        key = tuple(sorted((name, str(value)) for name, value in said.items()))
        if key not in self._agreed:
            self.agree(said, operation, where)
            self._agreed.add(key)

    def agree_on_tokens(self, x: Tensor, operation: str, where: str) -> None:
        """`agree` on the number of rows and their dtype where they are not those of the call before.

        For ranks that have the same ones.

        A rank alone with another number asks, while the others wait in the next collective: they fail after `ASKED`
        seconds, and sums of different sizes never begin.
        """
        batch = (len(x), str(x.dtype))
        if batch != self._batch:
            said = {"number of tokens": batch[0], "dtype of tokens": batch[1]}
            self.agree(said, f"{operation} with {batch[0]} tokens", where, SAME_TOKENS)
            self._batch = batch

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int], kind: str, where: str) -> Tensor:
        """Rows of x [sum(send), ...], of which the first send[0] go to rank 0 and so on -> [sum(receive), ...]."""
        out = x.new_empty((sum(receive), *x.shape[1:]))
        row = x[:1].numel() * x.element_size() if len(x) else 0
        self._count(kind, {r: n * row for r, n in enumerate(send)})
        given, taken = x.contiguous(), out
        if x.dtype in _WIRE:
            given, taken = given.view(torch.uint8), out.view(torch.uint8)
        self._run(
            lambda: dist.all_to_all_single(taken, given, [*receive], [*send], group=self.group, async_op=True),
            f"all-to-all of {kind}",
            where,
        )
        return out

    def all_gather(self, x: Tensor, kind: str, where: str) -> Tensor:
        """x [n, ...] of every rank -> [R * n, ...], in the order of the group."""
        out = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        self._count(kind, dict.fromkeys(range(self.size), x.nbytes))
        given, taken = x.contiguous(), out
        if x.dtype in _WIRE:
            given, taken = given.view(torch.uint8), out.view(torch.uint8)
        self._run(
            lambda: _GATHER(taken, given, group=self.group, async_op=True),
            f"all-gather of {kind}",
            where,
        )
        return out

    def reduce_scatter(self, x: Tensor, kind: str, where: str) -> Tensor:
        """x [R * n, ...] of every rank -> [n, ...]: the sum over ranks of this rank's part."""
        n = x.shape[0] // self.size
        if self.waits:  # gloo's own ends neither at its timeout nor where a rank is gone
            parts = self.all_to_all(x, [n] * self.size, [n] * self.size, kind, where)
            return parts.view(self.size, n, *x.shape[1:]).sum(0)
        out = x.new_empty((n, *x.shape[1:]))
        self._count(kind, dict.fromkeys(range(self.size), out.nbytes))
        given = x.contiguous()
        self._run(
            lambda: _SCATTER(out, given, group=self.group, async_op=True),
            f"reduce-scatter of {kind}",
            where,
        )
        return out

    def all_reduce(self, x: Tensor, kind: str, where: str) -> Tensor:
        """x of every rank -> their sum; x itself is overwritten where it is contiguous."""
        out = x.contiguous()
        part = 2 * x.nbytes // self.size
        self._count(kind, dict.fromkeys(range(self.size), part))
        self._run(lambda: dist.all_reduce(out, group=self.group, async_op=True), f"all-reduce of {kind}", where)
        return out

    def broadcast(self, x: Tensor, kind: str, where: str) -> Tensor:
        """x of the group's first rank, on every rank; all have as much."""
        out = x.contiguous()
        self._count(kind, dict.fromkeys(range(self.size), out.nbytes) if self.rank == 0 else {})
        self._run(
            lambda: dist.broadcast(out, self.ranks[0], group=self.group, async_op=True), f"broadcast of {kind}", where
        )
        return out

    def barrier(self, where: str) -> None:
        """Return when all ranks are here."""
        self._run(lambda: dist.barrier(group=self.group, async_op=True), "barrier", where)

    def join(self, other: Peers) -> None:
        """Have either told what fails in the other, for what needs both: who waits there would name the wrong rank."""
        if other is not self:
            self._partners.add(other)
            other._partners.add(self)

    def give_up(self, why: str) -> None:
        """Refuse all collectives from now on, here, and have the other ranks told, who would wait for this one.

        For what went wrong outside the group, and leaves this rank unable to go on with the others.
        """
        if not self._failed:
            self._say(why)
            with suppress(RuntimeError):
                self._store.set("failed", why)
            self._fail(why, why)

    def _say(self, where: str) -> None:
        """What those are told who miss this rank in a collective that failed."""
        if not self._failed:
            with suppress(RuntimeError):
                self._store.set(f"failed at/{self.rank}", where)

    def _fail(self, why: str, place: str) -> None:
        """Refuse all collectives from now on; `place` is what partners are told."""
        self._failed = why
        for each in self._partners:
            each.give_up(place)

    def _count(self, kind: str, sent: Mapping[int, int]) -> None:
        counts = self.sent.setdefault(kind, Counter())
        for rank, number in sent.items():
            if rank != self.rank:
                counts[rank] += number

    def _run(self, start: Callable[[], Any], operation: str, where: str) -> None:
        self._check_alive(operation, where)
        began = time.monotonic()
        try:
            work = start()
        except RuntimeError as error:
            raise self._broken(operation, where, error) from error
        if not self.waits:
            self._end(work, operation, where)
            return
        until = began + self.timeout
        while True:
            left = until - time.monotonic()
            try:
                work.wait(timedelta(seconds=max(min(POLL, left), 0.001)))
                return
            except RuntimeError as error:
                if work.is_completed():  # perhaps since that wait gave up: the next one does not wait
                    self._end(work, operation, where)
                    return
                if left <= 0 or self._another_failed():
                    raise self._broken(operation, where, error) from error
                if self._another_asks():
                    until = min(until, time.monotonic() + min(ASKED, self.timeout / 4))

    def _end(self, work: Any, operation: str, where: str) -> None:
        """Wait for what has ended already, or will end by itself."""
        try:
            work.wait()
        except RuntimeError as error:
            raise self._broken(operation, where, error) from error

    def _another_asks(self) -> bool:
        """Whether a rank has come to an agreement that this one has not: it is behind this collective, or astray."""
        try:
            return self._store.check([_ASKED]) and int(self._store.get(_ASKED)) > self._agreements
        except RuntimeError:
            return False

    def _another_failed(self) -> bool:
        try:
            return bool(self._store.check(["failed"]))
        except RuntimeError:
            return True

    def _check_alive(self, operation: str, where: str) -> None:
        if self._failed:
            raise no_answer(
                _place(operation, where),
                got=f"a group that has failed before: {self._failed}",
                needs="a group whose ranks all answer",
                fix="Start the job again; torchrun --max-restarts does so by itself.",
            )

    def _broken(self, operation: str, where: str, error: BaseException) -> CollectiveError:
        """The error of a collective that failed, after all who failed in it have said so."""
        place = _place(operation, where)
        for each in self._partners:  # who may miss this rank at this very time
            each._say(self._among(place))
        try:
            self._store.set("failed", place)
        except RuntimeError:
            return self._no_store(place, error)
        told, missing = self._exchange("failed at", place, min(GRACE, self.timeout))
        if self.ranks[self.rank] in missing:  # what this rank itself has said is not there
            return self._no_store(place, error)
        if missing:
            return self._no_answer(operation, where, missing, f"{self.timeout:g} s, nor when asked again")
        elsewhere = [(r, text) for r, text in zip(self.ranks, told, strict=True) if text != place]
        got = "; ".join(f"rank {r} at {text}" for r, text in elsewhere) or _first_line(error)
        self._fail(f"{place} ({_first_line(error)})", f"{self._among(place)}: {got}")
        return no_answer(
            place,
            got=got,
            needs=f"every rank of {_named(self.ranks)} in the same collective within {self.timeout:g} s",
            fix="Look at what those ranks did instead; then start the job again.",
        )

    def _among(self, place: str) -> str:
        return f"{place} of {_named(self.ranks)}"

    def _no_store(self, place: str, error: BaseException) -> CollectiveError:
        self._fail(f"{place} (the store is gone)", f"{place} (the store is gone)")
        return no_answer(
            place,
            got="no answer from the process that keeps the store, rank 0 or the agent of torchrun",
            needs=f"every rank of {_named(self.ranks)}",
            fix=f"Look at what became of it, and start the job again. It began with: {_first_line(error)}.",
        )

    def _no_answer(self, operation: str, where: str, missing: Sequence[int], limit: str) -> CollectiveError:
        place = _place(operation, where)
        self._fail(
            f"no answer from {_named(missing)} at {place}", f"{self._among(place)}: no answer from {_named(missing)}"
        )
        return no_answer(
            place,
            got=f"no answer from {_named(missing)}",
            needs=f"every rank of {_named(self.ranks)} within {limit}",
            fix="Look at what became of it, and start the job again; a slow rank needs a longer timeout.",
        )

    def _exchange(self, prefix: str, text: str, seconds: float, asks: bool = False) -> tuple[list[str], list[int]]:
        """What every rank of the group says under a prefix; or none of it, and who said nothing in so many seconds.

        Ranks in a collective may see who `asks`, who waits no longer than a second after another has failed: the
        others wait `GRACE` for it, however many do not come.
        """
        keys = [f"{prefix}/{i}" for i in range(self.size)]
        try:
            if asks:  # before this rank's own word, without which nobody comes to the next: it never goes back
                self._store.set(_ASKED, str(self._agreements))
                # All have ended the agreement before the last: its words would stay in the store for ever.
                self._store.delete_key(f"agree/{self._agreements - 2}/{self.rank}")
            self._store.set(keys[self.rank], text)
            self._wait(keys, time.monotonic() + seconds, asks)
        except RuntimeError:
            missing = [rank for rank, key in zip(self.ranks, keys, strict=True) if not self._has(key)]
            if missing:
                return [], missing
        try:
            extended = self._store.has_extended_api()  # type: ignore[attr-defined]
            said = self._store.multi_get(keys) if extended else [self._store.get(key) for key in keys]
            return [text.decode() for text in said], []
        except RuntimeError:
            return [], [*self.ranks]

    def _has(self, key: str) -> bool:
        try:
            return bool(self._store.check([key]))
        except RuntimeError:
            return False

    def _wait(self, keys: list[str], until: float, looks: bool) -> None:
        """Wait for all keys; a RuntimeError when the time is over, or, for who looks, once another rank has failed."""
        while True:
            left = until - time.monotonic()
            try:
                self._store.wait(keys, timedelta(seconds=max(min(left, 4 * POLL), 0.05)))
                return
            except RuntimeError:
                if left <= 4 * POLL or (looks and self._another_failed()):
                    raise


def bytes_sent() -> dict[str, int]:
    """Bytes that this rank has sent to others so far, in all groups that are in use, by what they are."""
    total: Counter[str] = Counter()
    for peers in _PEERS.values():
        for kind, counts in peers.sent.items():
            total[kind] += counts.total()
    return dict(total)


def set_job_timeout(timeout: float) -> None:
    """The timeout of groups of this job for which nobody gives one."""
    _JOB[:] = [dist.group.WORLD, timeout]


def job_timeout() -> float:
    """What `set_job_timeout` was given last in this job."""
    return float(_JOB[1]) if _JOB[0] is dist.group.WORLD else DEFAULT_TIMEOUT


_JOB: list[Any] = [None, DEFAULT_TIMEOUT]
_PEERS: dict[tuple[tuple[int, ...], float], Peers] = {}


def _place(operation: str, where: str) -> str:
    return f"{operation}, {where}" if where else operation


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
