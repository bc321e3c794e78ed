"""Device code of grouping: every program finds where its expert's rows begin, and writes them in order."""

import triton
import triton.language as tl


@triton.jit
def _slots(ids, start, num_pairs, num_experts, TILE: tl.constexpr):
    """Places of a tile of slots and the experts they name: num_experts for slots that name none."""
    place = start + tl.arange(0, TILE)
    expert = tl.load(ids + place, mask=place < num_pairs, other=-1)
    return place, tl.where((expert >= 0) & (expert < num_experts), expert, num_experts).to(tl.int32)


@triton.jit
def _begin(ids, e, num_pairs, num_experts, BLOCK: tl.constexpr, BINS: tl.constexpr, TILE: tl.constexpr):
    """Of bin e: its first row, its first block and its count of rows. Slots without an expert are bin num_experts."""
    bins = tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, num_pairs, TILE):
        _, expert = _slots(ids, start, num_pairs, num_experts, TILE)
        counts += tl.histogram(expert, BINS)
    counts -= tl.where(bins == num_experts, tl.cdiv(num_pairs, TILE) * TILE - num_pairs, 0)  # behind the last slot
    blocks = (counts + BLOCK - 1) // BLOCK
    offset = tl.sum(tl.where(bins < e, counts, 0))
    first = tl.sum(tl.where(bins < e, blocks, 0))
    return offset, first, tl.sum(tl.where(bins == e, counts, 0))


@triton.jit
def _own(ids, start, e, rank, num_pairs, num_experts, TILE: tl.constexpr):
    """The slots of bin e in a tile: their places, which they are, their ranks in the bin, and the next tile's first."""
    place, expert = _slots(ids, start, num_pairs, num_experts, TILE)
    own = (expert == e) & (place < num_pairs)
    count = own.to(tl.int32)
    return place, own, rank + tl.cumsum(count) - 1, rank + tl.sum(count)


@triton.jit
def _fill(out, first, count, value, step, TILE: tl.constexpr):
    """out[first + i] = value + i * step for i below count."""
    for start in range(0, count, TILE):
        i = start + tl.arange(0, TILE)
        tl.store(out + first + i, value + i * step, mask=i < count)


@triton.jit(do_not_specialize=["num_pairs", "num_experts", "block_bound"])  # one compilation for all of them
def rows_kernel(
    ids, pairs, offsets, block_expert, block_start, num_blocks, num_pairs, num_experts, block_bound,
    BLOCK: tl.constexpr, BINS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program e: the rows and the blocks of expert e; the last expert's also what lies behind them all.

    BINS is a power of two above num_experts.
    """
    e = tl.program_id(0)
    offset, first, count = _begin(ids, e, num_pairs, num_experts, BLOCK, BINS, TILE)
    mine = (count + BLOCK - 1) // BLOCK
    tl.store(offsets + e, offset)
    _fill(block_expert, first, mine, e, 0, TILE)
    _fill(block_start, first, mine, offset, BLOCK, TILE)
    if e == num_experts - 1:
        tl.store(offsets + num_experts, offset + count)
        tl.store(num_blocks, first + mine)
        _fill(block_expert, first + mine, block_bound - first - mine, -1, 0, TILE)
        _fill(block_start, first + mine, block_bound - first - mine, 0, 0, TILE)
    if count > 0:
        for start in range(0, num_pairs, TILE):
            place, own, row, offset = _own(ids, start, e, offset, num_pairs, num_experts, TILE)
            tl.store(pairs + row, place, mask=own)


@triton.jit(do_not_specialize=["top_k", "num_pairs", "num_experts"])
def order_kernel(
    ids, token_ids, slots, offsets, inverse, top_k, num_pairs, num_experts,
    BINS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program e: the rows of expert e, or, e being num_experts, of the empty slots, which stand last."""
    e = tl.program_id(0)
    offset, _, count = _begin(ids, e, num_pairs, num_experts, 1, BINS, TILE)
    tl.store(offsets + e, offset)
    if count > 0:
        for start in range(0, num_pairs, TILE):
            place, own, row, offset = _own(ids, start, e, offset, num_pairs, num_experts, TILE)
            tl.store(token_ids + row, place // top_k, mask=own)
            tl.store(slots + row, place % top_k, mask=own)
            tl.store(inverse + place, row, mask=own)


@triton.jit(do_not_specialize=["num_pairs", "num_experts", "block_bound", "BLOCK"])
def schedule_kernel(
    ids, block_experts, pair_ids, scatter_index, counts, num_pairs, num_experts, block_bound, BLOCK,
    BINS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program e: the blocks of expert e, or, e being num_experts, those that nobody needs."""
    e = tl.program_id(0)
    _, first, count = _begin(ids, e, num_pairs, num_experts, BLOCK, BINS, TILE)
    cell = first * BLOCK
    if e < num_experts:
        mine = (count + BLOCK - 1) // BLOCK
        tl.store(counts + e, count)
        _fill(block_experts, first, mine, e, 0, TILE)
        _fill(pair_ids, cell + count, mine * BLOCK - count, -1, 0, TILE)
    else:
        _fill(block_experts, first, block_bound - first, -1, 0, TILE)
        _fill(pair_ids, cell, (block_bound - first) * BLOCK, -1, 0, TILE)
    if count > 0:
        for start in range(0, num_pairs, TILE):
            place, own, at, cell = _own(ids, start, e, cell, num_pairs, num_experts, TILE)
            tl.store(scatter_index + place, tl.where(e < num_experts, at, -1), mask=own)
            tl.store(pair_ids + at, place, mask=own & (e < num_experts))


@triton.jit(do_not_specialize=["num_pairs", "num_experts", "chunk"])
def count_kernel(ids, counts, num_pairs, num_experts, chunk, BINS: tl.constexpr, TILE: tl.constexpr):
    """Program c: how many slots of chunk c name each expert; of none, in bin num_experts."""
    c = tl.program_id(0)
    found = tl.zeros([BINS], tl.int32)
    for start in range(c * chunk, tl.minimum((c + 1) * chunk, num_pairs), TILE):
        _, expert = _slots(ids, start, num_pairs, num_experts, TILE)
        found += tl.histogram(expert, BINS)
    tl.store(counts + c * BINS + tl.arange(0, BINS), found)


@triton.jit
def _sums(counts, c, chunks, BINS: tl.constexpr, ROWS: tl.constexpr):
    """Of each bin: the count of all chunks, and that of those before chunk c."""
    bins = tl.arange(0, BINS)[None, :]
    total = tl.zeros([BINS], tl.int32)
    before = tl.zeros([BINS], tl.int32)
    for start in range(0, chunks, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        found = tl.load(counts + row * BINS + bins, mask=row < chunks, other=0)
        total += tl.sum(found, 0)
        before += tl.sum(tl.where(row < c, found, 0), 0)
    return total, before


@triton.jit(do_not_specialize=["num_pairs", "num_experts", "block_bound", "chunk", "chunks"])
def place_kernel(
    ids, counts, pairs, offsets, block_expert, block_start, num_blocks,
    num_pairs, num_experts, block_bound, chunk, chunks,
    BLOCK: tl.constexpr, BINS: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Program c: the rows of chunk c, and the blocks of every expert that leaves c when divided by the chunks."""
    c = tl.program_id(0)
    bins = tl.arange(0, BINS)
    total, before = _sums(counts, c, chunks, BINS, ROWS)
    offset = tl.cumsum(total) - total
    blocks = tl.where(bins < num_experts, (total + BLOCK - 1) // BLOCK, 0)
    first = tl.cumsum(blocks) - blocks
    if c == 0:
        used = tl.sum(blocks)
        tl.store(offsets + bins, offset, mask=bins <= num_experts)
        tl.store(num_blocks, used)
        _fill(block_expert, used, block_bound - used, -1, 0, TILE)
        _fill(block_start, used, block_bound - used, 0, 0, TILE)
    for e in range(c, num_experts, chunks):
        own = bins == e
        at, mine = tl.sum(tl.where(own, first, 0)), tl.sum(tl.where(own, blocks, 0))
        _fill(block_expert, at, mine, e, 0, TILE)
        _fill(block_start, at, mine, tl.sum(tl.where(own, offset, 0)), BLOCK, TILE)
    following = offset + before
    for start in range(c * chunk, tl.minimum((c + 1) * chunk, num_pairs), TILE):
        _, expert = _slots(ids, start, num_pairs, num_experts, TILE)
        place = tl.arange(0, TILE)
        ordered = tl.sort(expert * TILE + place)
        found = tl.histogram(expert, BINS)
        shift = following - (tl.cumsum(found) - found)
        named = ordered // TILE
        tl.store(pairs + tl.gather(shift, named, 0) + place, start + ordered % TILE, mask=named < num_experts)
        following += found
