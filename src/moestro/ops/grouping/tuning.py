"""Order and size of the work: functions of shape and of the machine's measured roof."""

from __future__ import annotations

from collections.abc import Sequence

from moestro.errors import invalid_input
from moestro.ops.grouping.plain import block_bound

BLOCK_SIZES = (16, 32, 64, 128, 256, 512, 1024)
MOST_EXPERTS = 4096
"""That the programs of a GPU order rows by."""
MOST_LOOKS = 1 << 26
"""Slots times experts up to which the public operations use those programs; sorting does not grow with experts."""
MOST_TILE = 4096
"""Slots that one of them looks at together, at most."""
_LEAST_TILE = 128
MANY_PAIRS = 1 << 14
"""Beyond it a GPU orders rows in two launches: chunks count, and then place their own. Reasoned, not measured."""
MANY_EXPERTS = 1024
"""From it on the programs of chunks would spill registers."""
CHUNK_TILE, MOST_CHUNKS, CHUNK_CELLS = 1024, 256, 4096
_MOST_BINS_TIMES_TILE = 1 << 22  # beyond it programs spill registers (ptxas for sm_80 to sm_90)


def too_many(num_experts: int, most: int) -> str | None:
    """Why an implementation that orders by so many experts cannot order by these; None if it can."""
    return f"it orders by at most {most} experts, not {num_experts}" if num_experts > most else None


def launch(num_pairs: int, num_experts: int) -> tuple[int, int, int]:
    """Bins, tile and warps of the GPU's programs, each of which looks at every slot.

    Bins are a power of two above E. A tile takes all slots at once where it can.
    """
    bins = max(1 << num_experts.bit_length(), 32)
    tile = min(max(1 << max(num_pairs - 1, 0).bit_length(), _LEAST_TILE), MOST_TILE, _MOST_BINS_TIMES_TILE // bins)
    return bins, tile, min(max(max(bins, tile) // 256, 1), 16)


def chunks(num_pairs: int, num_experts: int) -> tuple[int, int, int, int]:
    """Slots of a chunk, chunks, bins, warps of a program: a tile a chunk while that makes at most `MOST_CHUNKS`.

    Every chunk reads the counts of all, so that their number is bounded.
    """
    bins = max(1 << num_experts.bit_length(), 32)
    tiles = -(-num_pairs // (CHUNK_TILE * MOST_CHUNKS))
    chunk = CHUNK_TILE * max(tiles, 1)
    return chunk, -(-num_pairs // chunk), bins, min(max(bins // 256, 4), 16)


def largest_first(counts: Sequence[int], num_workers: int | None = None) -> list[int]:
    """Experts that have rows, most rows first, equal ones by id: the order in which to hand them to workers.

    Largest first is within 4/3 of the shortest makespan (Graham 1969), but arrival order can be shorter still, as for
    3 2 2 3 2 rows on two workers. With `num_workers` the shorter of the two orders is returned.
    """
    arrival = [e for e, n in enumerate(counts) if n]
    order = sorted(arrival, key=lambda e: -counts[e])
    if num_workers is None:
        return order
    return min(order, arrival, key=lambda experts: makespan([counts[e] for e in experts], num_workers))


def makespan(counts: Sequence[int], num_workers: int) -> int:
    """Rows of the busiest worker when each takes the next expert of `counts` as soon as it is free.

    Raises:
        InvalidInputError: num_workers < 1.
    """
    if num_workers < 1:
        raise invalid_input("makespan", got=f"num_workers={num_workers}", needs="at least 1", fix="Count the workers.")
    busy = [0] * num_workers
    for count in counts:
        free = min(range(num_workers), key=busy.__getitem__)
        busy[free] += count
    return max(busy)


def choose_block_size(num_rows: int, num_experts: int, balance: float, bytes_per_weight: float = 2.0) -> int:
    """The smallest block size whose arithmetic intensity reaches the machine's balance.

    A block schedule does 2 * B * G / E floating-point operations per weight of the layer, G being `block_bound`: with
    16-bit weights B * G / E per byte. The largest size offered is returned when none reaches the balance.

    Args:
        num_rows, num_experts: R = T * K, and E.
        balance: peak FLOP/s over bytes/s, as `moestro.machine.roof(dtype).balance` measures it.
        bytes_per_weight: as stored.

    Raises:
        InvalidInputError: num_experts < 1, or a balance or bytes_per_weight that is not positive.
    """
    if num_experts < 1 or not balance > 0 or not bytes_per_weight > 0:
        raise invalid_input(
            "choose_block_size",
            got=f"num_experts={num_experts}, balance={balance}, bytes_per_weight={bytes_per_weight}",
            needs="num_experts >= 1, balance > 0 and bytes_per_weight > 0",
            fix="Take the balance from moestro.machine.roof(dtype).",
        )
    for size in BLOCK_SIZES:
        flops_per_weight = 2 * size * block_bound(num_rows, num_experts, size) / num_experts
        if flops_per_weight / bytes_per_weight >= balance:
            return size
    return BLOCK_SIZES[-1]
