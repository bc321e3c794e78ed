"""Whether ranks that are to have the same tokens have them: a digest of their routing travels with what they exchange.

It takes no collective of its own, but beside slices of many bytes: a row more is summed or gathered. Where looking at
it would make the host wait (NCCL) there is none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moestro.parallel.exchange import collective, join_slices
from moestro.parallel.guard import SAME_TOKENS, Peers

SAME_CHOICES = (
    f"{SAME_TOKENS} If they have: use the same kind of processor and as many threads on each, since others round "
    "otherwise and a router close to a tie then chooses other experts."
)

NIBBLES = 16

DIGEST_BYTES = 8
COPIED_BYTES = 1 << 20
"""The most bytes of gathered slices that are copied to be rid of digests among them."""

_FACTORS: dict[int, Tensor] = {}


def has_digest(peers: Peers, device: torch.device) -> bool:
    """Whether ids on this device are compared, which is so on all ranks."""
    return peers.waits and peers.size > 1 and device.type == "cpu"


def routing_digest(peers: Peers, expert_ids: Tensor) -> int | None:
    """64 bits of expert_ids [T, K] in their order; None where nobody would look at it, which is so on all ranks."""
    if not has_digest(peers, expert_ids.device):
        return None
    ids = expert_ids.flatten()
    size = 1 << len(ids).bit_length()
    if size not in _FACTORS:
        # Multiples of one number would be told apart by their small factors only. Odd ones see every single change.
        chance = torch.Generator("cpu").manual_seed(0)
        _FACTORS[size] = torch.randint(-(2**63), 2**63 - 1, (size,), generator=chance, device="cpu") | 1
    return int(((ids + 2) * _FACTORS[size][: len(ids)]).sum()) & (1 << 64) - 1


def add_up_same(peers: Peers, y: Tensor, digest: int | None, place: tuple[str, str]) -> Tensor:
    """The sum over ranks of y [T, H] in float32 or wider, by ranks with the same digest; `place` is for errors.

    What follows is the same on all, and so is its gradient.

    Raises:
        CollectiveError: they have different ones; on every rank.
    """

    def there(t: Tensor) -> Tensor:
        wide = torch.promote_types(t.dtype, torch.float32)
        if digest is None or t.shape[1] < 2:
            return peers.all_reduce(t.to(wide, copy=True), "rows", place[1])
        rows = t.new_empty((len(t) + 1, t.shape[1]), dtype=wide)
        rows[:-1].copy_(t)
        rows[-1] = _summed_row(digest, rows[-1])
        found = peers.all_reduce(rows, "rows", place[1])
        _check_sum(peers, found[-1], digest, place)
        return found[:-1]

    return collective(y, there, lambda g: g.to(y.dtype))


def _summed_row(digest: int, like: Tensor) -> Tensor:
    """A row [H] that, summed over ranks, tells whether all had the same digest; H is at least 2."""
    given = _nibbles(digest)[: len(like) // 2]
    row = torch.zeros_like(like)
    row[: 2 * len(given)] = torch.tensor([*given, *(n * n for n in given)], dtype=like.dtype)
    return row


def _check_sum(peers: Peers, row: Tensor, digest: int, place: tuple[str, str]) -> None:
    each = min(NIBBLES, row.shape[0] // 2)
    found = row[: 2 * each].tolist()
    # R times the sum of squares is the square of the sum only where all are the same; both are exact in float32.
    pairs = zip(found[:each], found[each:], strict=True)
    _compare(peers, all(squares * peers.size == total * total for total, squares in pairs), digest, place)


def scatter_same(peers: Peers, x: Tensor, digest: int | None, kind: str, place: tuple[str, str]) -> Tensor:
    """`scatter_sums` of x [R, n, H] in float32 or wider -> [n, H], by ranks with the same digest; errors as above."""

    def there(t: Tensor) -> Tensor:
        if digest is None or t.shape[2] < 2:
            return peers.reduce_scatter(t.flatten(0, 1), kind, place[1])
        rows = t.new_empty((t.shape[0], t.shape[1] + 1, t.shape[2]))
        rows[:, :-1].copy_(t)
        rows[:, -1] = _summed_row(digest, rows[0, -1])
        found = peers.reduce_scatter(rows.flatten(0, 1), kind, place[1])
        _check_sum(peers, found[-1], digest, place)
        return found[:-1]

    return collective(x, there, lambda g: peers.all_gather(g, f"gradients of {kind}", place[1]).view(x.shape))


def join_same(peers: Peers, y: Tensor, digest: int | None, place: tuple[str, str]) -> Tensor:
    """`join_slices` of y [n, H] by ranks with the same digest; errors as of `add_up_same`.

    Of many bytes the digest has a collective of its own, after the other: a row more has all of y copied twice.
    """
    size = y.shape[1] * y.element_size()
    if digest is None or size < DIGEST_BYTES or len(y) * size * peers.size > COPIED_BYTES:
        out = join_slices(peers, y, "slices", place[1])
        compare_digests(peers, digest, place)
        return out
    own = slice(peers.rank * len(y), (peers.rank + 1) * len(y))
    return collective(y, lambda t: _joined(peers, t, digest, place), lambda g: g[own])


def _joined(peers: Peers, y: Tensor, digest: int, place: tuple[str, str]) -> Tensor:
    """y [n, H] of every rank -> [R * n, H], once it is seen that all have the same digest."""
    rows = y.new_zeros((len(y) + 1, y.shape[1]))
    rows[:-1].copy_(y)
    rows[-1].view(torch.uint8)[:DIGEST_BYTES] = _digest_bytes(digest)
    found = peers.all_gather(rows, "slices", place[1]).view(peers.size, *rows.shape)
    check_gathered(peers, found[:, -1].contiguous().view(torch.uint8)[:, :DIGEST_BYTES], digest, place)
    return found[:, :-1].reshape(peers.size * len(y), -1)


def _digest_bytes(digest: int) -> Tensor:
    return torch.tensor([digest >> 8 * i & 255 for i in range(DIGEST_BYTES)], dtype=torch.uint8, device="cpu")


def digest_row(digest: int, width: int) -> Tensor:
    """int32 [1, width], at least 2, that carries a digest beside rows that are gathered."""
    row = torch.zeros(1, width, dtype=torch.int32, device="cpu")
    row.view(torch.uint8)[0, :DIGEST_BYTES] = _digest_bytes(digest)
    return row


def check_gathered(peers: Peers, told: Tensor, digest: int, place: tuple[str, str]) -> None:
    """Raise `CollectiveError` on every rank where the digests of all ranks, a row each, differ."""
    _compare(peers, bool((told == told[0]).all()), digest, place)


def compare_digests(peers: Peers, digest: int | None, place: tuple[str, str]) -> None:
    """`check_gathered` by a collective of its own; nothing where there is no digest."""
    if digest is not None:
        told = peers.all_gather(torch.tensor([digest >> 32, digest & 2**32 - 1]), "digests", place[1]).view(-1, 2)
        check_gathered(peers, told, digest, place)


def _nibbles(digest: int) -> list[int]:
    """Of 4 bits each, the highest first: low bits of a sum of products say less, and narrow rows carry a few."""
    return [digest >> 60 - 4 * i & 15 for i in range(NIBBLES)]


def _compare(peers: Peers, same: bool, digest: int, place: tuple[str, str]) -> None:
    if not same:
        said = {"experts chosen for the same tokens (digest)": f"{digest:016x}"}
        peers.agree(said, *place, SAME_CHOICES)
