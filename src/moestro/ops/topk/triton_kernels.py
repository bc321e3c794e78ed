"""Device code of top-k: a score and its index in one integer word, the largest word taken k times."""

import triton
import triton.language as tl

LEAST_32 = tl.constexpr(-(1 << 31))
LEAST_64 = tl.constexpr(-(1 << 63))
MINUS_INFINITY = tl.constexpr(-0x7F800001)
"""What `ordered` makes of float32's -inf."""


@triton.jit
def ordered(bits):
    """Of the bits of float32, integers in the order of the numbers; those of -0.0 become those of 0.0."""
    bits = tl.where(bits == LEAST_32, 0, bits)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def pack_32(bits, index, valid):
    """Words of the bits of float32 and their indices; less than any other where not valid."""
    return tl.where(valid, (ordered(bits).to(tl.int64) << 32) | index.to(tl.int64), LEAST_64)


@triton.jit
def pack_16(bits, index, valid):
    """Words of the bits of float16 or bfloat16, sign-extended to 32, and their indices."""
    bits = tl.where(bits == -0x8000, 0, bits)
    return tl.where(valid, (tl.where(bits < 0, bits ^ 0x7FFF, bits) << 16) | index, LEAST_32)


@triton.jit
def take(words, LEAST: tl.constexpr):
    """The largest word of each row, and the words without it."""
    best = tl.max(words, 1)
    return best, tl.where(words == best[:, None], LEAST, words)


@triton.jit(do_not_specialize=["num_tokens"])
def topk_kernel(
    bits, indices, num_tokens, stride,
    E: tl.constexpr, TOP_K: tl.constexpr, WIDE: tl.constexpr, INFINITY: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile of tokens: the indices of each one's TOP_K largest scores, which are given as integers.

    WIDE: scores of 32 bits, else of 16. INFINITY: the bits of infinity; larger magnitudes are NaN.
    """
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.arange(0, BLOCK_E)[None, :]
    k = tl.arange(0, BLOCK_K)[None, :]
    inside = (t < num_tokens)[:, None]
    valid = inside & (e < E)
    found = tl.load(bits + t[:, None] * stride + e, mask=valid, other=0).to(tl.int32)
    magnitude = found & (0x7FFFFFFF if WIDE else 0x7FFF)
    tl.device_assert(magnitude <= INFINITY, "[topk] scores must not be NaN", mask=valid)
    words = pack_32(found, e, valid) if WIDE else pack_16(found, e, valid)
    chosen = tl.zeros([BLOCK_T, BLOCK_K], tl.int64)
    for i in range(TOP_K):
        best, words = take(words, LEAST_64 if WIDE else LEAST_32)
        index = best.to(tl.int64) & (0xFFFFFFFF if WIDE else 0xFFFF)
        chosen = tl.where(k == i, index[:, None], chosen)
    tl.store(indices + t[:, None] * TOP_K + k, chosen, mask=inside & (k < TOP_K))
