"""Device code of grouping: every program finds where its expert's rows begin, and writes them in order."""

import triton
import triton.language as tl


@triton.jit
def _slots(ids, start, num_pairs, num_experts, TILE: tl.constexpr):
    """Places of a tile of slots and the experts they name: num_experts for slots that name none."""
    place = start + tl.arange(0, TILE)
    expert = tl.load(ids + place, mask=place < num_pairs, other=-1).to(tl.int32)
    return place, tl.where((expert >= 0) & (expert < num_experts), expert, num_experts)


@triton.jit
def _write_blocks(block_expert, block_start, first, count, offset, expert, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """The blocks of one expert: `count` of them from block `first` on, whose rows begin at `offset`."""
    for start in range(0, count, TILE):
        i = start + tl.arange(0, TILE)
        tl.store(block_expert + first + i, tl.full([TILE], 0, tl.int32) + expert, mask=i < count)
        tl.store(block_start + first + i, offset + i * BLOCK, mask=i < count)


@triton.jit(do_not_specialize=["num_pairs", "num_experts", "block_bound"])  # one compilation for all of them
def group_kernel(
    ids,
    pairs,
    offsets,
    block_expert,
    block_start,
    num_blocks,
    num_pairs,
    num_experts,
    block_bound,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program e: the rows and the blocks of expert e; the last expert's also what lies behind them all.

    BINS is a power of two above num_experts. Slots that name no expert are counted in bin num_experts and left out.
    """
    e = tl.program_id(0)
    bins = tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, num_pairs, TILE):
        place, expert = _slots(ids, start, num_pairs, num_experts, TILE)
        counts += tl.histogram(expert, BINS)
    blocks = (counts + BLOCK - 1) // BLOCK
    offset = tl.sum(tl.where(bins < e, counts, 0))
    first = tl.sum(tl.where(bins < e, blocks, 0))
    count = tl.sum(tl.where(bins == e, counts, 0))
    mine = (count + BLOCK - 1) // BLOCK
    tl.store(offsets + e, offset)
    _write_blocks(block_expert, block_start, first, mine, offset, e, BLOCK, TILE)
    if e == num_experts - 1:
        end = offset + count
        tl.store(offsets + num_experts, end)
        tl.store(num_blocks, first + mine)
        _write_blocks(block_expert, block_start, first + mine, block_bound - first - mine, end, -1, 0, TILE)
    if count > 0:
        for start in range(0, num_pairs, TILE):
            place, expert = _slots(ids, start, num_pairs, num_experts, TILE)
            own = (expert == e).to(tl.int32)
            tl.store(pairs + offset + tl.cumsum(own) - 1, place, mask=own > 0)
            offset += tl.sum(own)
