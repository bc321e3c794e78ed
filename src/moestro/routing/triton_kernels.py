"""Device code of routing: what `selection.route` does with logits, for a tile of tokens in one program."""

import triton
import triton.language as tl

from moestro.ops.topk.triton_kernels import LEAST_64, MINUS_INFINITY, pack_32, take
from moestro.ops.triton_kernels import tanh

SOFTMAX = tl.constexpr(0)
SIGMOID = tl.constexpr(1)
SQRTSOFTPLUS = tl.constexpr(2)
SPARSEMIXER = tl.constexpr(3)
TINY = tl.constexpr(1.1754943508222875e-38)
LEAST_FLOAT = tl.constexpr(-3.4028234663852886e38)
LOW = tl.constexpr(-1e30)
UNDERFLOW = tl.constexpr(-88.72283)
"""Below it 1 + exp(-z) overflows, and the sigmoid is 0 as it is for PyTorch."""


@triton.jit
def _softplus(z):
    """log(1 + exp(z)), which is z above 20 and keeps its digits where exp(z) is small."""
    e = tl.exp(tl.minimum(z, 20.0))
    u = 1 + e
    log = tl.where(u == 1, e, tl.log(u) * e / tl.where(u == 1, 1.0, u - 1))
    return tl.where(z > 20, z, log)


@triton.jit
def _softmax(z, valid):
    """Over the valid of each row, the others 0."""
    z = tl.where(valid, z, LEAST_FLOAT)
    below = tl.maximum(z * 0.5 - tl.max(z, 1)[:, None] * 0.5, -75.0)  # halves, whose difference cannot overflow
    e = tl.where(valid, tl.exp(below * 2), 0.0)  # exp(-150) is 0
    total = tl.sum(e, 1)[:, None]
    return e / tl.where(total == 0, 1.0, total)  # 0 in rows without a token


@triton.jit
def _score(z, valid, SCORE: tl.constexpr):
    if SCORE == SOFTMAX:
        return _softmax(z, valid)
    elif SCORE == SIGMOID:
        e = tl.exp(-tl.abs(z))
        return tl.where(z < UNDERFLOW, 0.0, tl.where(z < 0, e, 1.0) / (1 + e))
    else:
        return tl.sqrt_rn(tl.maximum(_softplus(z), TINY))


@triton.jit
def _sparsemixer(z, mine, free, tolerance):
    """The weight of the one that is `mine`: a softmax over the free whose logit is near enough."""
    chosen = tl.sum(tl.where(mine, z, 0.0), 1)[:, None]
    far = chosen - z > 2 * tolerance * tl.maximum(tl.abs(z), chosen)
    scores = _softmax(z, free & (far == 0))
    return tl.sum(tl.where(mine, scores, 0.0), 1)


@triton.jit
def _limit(choice, words, excluded, GROUPS: tl.constexpr, TOP: tl.constexpr, BEST: tl.constexpr, SIZE: tl.constexpr):
    """Choice with the excluded score in all but the best groups, which lie SIZE columns apart; -inf stays so."""
    rows: tl.constexpr = choice.shape[0]
    all_groups: tl.constexpr = choice.shape[1] // SIZE
    by_group = tl.reshape(words, (rows * all_groups, SIZE))
    values = tl.reshape(tl.maximum(choice, LOW), (rows * all_groups, SIZE))
    best = tl.zeros([rows * all_groups], tl.float32)
    for _ in range(BEST):
        word, left = take(by_group, LEAST_64)
        best += tl.sum(tl.where(by_group == word[:, None], values, 0.0), 1)
        by_group = left
    best = tl.reshape(best, (rows, all_groups))
    group = tl.arange(0, all_groups)[None, :]
    words_of_groups = pack_32(best.to(tl.int32, bitcast=True), group, group < GROUPS)
    kept = tl.zeros([rows, all_groups], tl.int32)
    for _ in range(TOP):
        word, left = take(words_of_groups, LEAST_64)
        kept += (words_of_groups == word[:, None]).to(tl.int32)
        words_of_groups = left
    spread = tl.broadcast_to(tl.reshape(kept, (rows * all_groups, 1)), (rows * all_groups, SIZE))
    out = (tl.reshape(spread, choice.shape) == 0) & (choice > -float("inf"))
    return tl.where(out, excluded, choice)


@triton.jit
def _norm(weights, power, NORM: tl.constexpr):
    """Of weights that are not negative: their sum, or their `power`-norm."""
    if NORM == 1:
        return tl.sum(weights, 1)
    else:
        powers = tl.where(weights > 0, tl.exp2(power * tl.log2(tl.maximum(weights, TINY))), 0.0)
        total = tl.sum(powers, 1)
        return tl.where(total > 0, tl.exp2(tl.log2(tl.maximum(total, TINY)) / power), 0.0)


@triton.jit
def _prepare(raw, scale, cap, valid, HAS_CAP: tl.constexpr, TAKES_INFINITY: tl.constexpr):
    """Logits after scale and soft-cap, and which of them are masked; those have the least finite value."""
    if TAKES_INFINITY:
        tl.device_assert(raw <= float("inf"), "[route] logits must not be NaN", mask=valid)
    else:
        tl.device_assert(raw < float("inf"), "[route] logits must not be NaN or +inf", mask=valid)
    z = raw * scale
    if HAS_CAP:
        z = cap * tanh(z / cap)
    masked = raw == -float("inf")
    return tl.where(masked, LEAST_FLOAT, z), masked


@triton.jit
def _choice(ranked, masked, correction, e, routed, HAS_CORRECTION: tl.constexpr):
    """What is ranked: ranked plus the correction, and -inf for the masked."""
    if HAS_CORRECTION:
        bias = tl.load(correction + e, mask=routed, other=0.0).to(tl.float32)
        tl.device_assert(tl.abs(bias) < float("inf"), "[route] the correction bias must be finite", mask=routed)
        ranked += bias
    choice = tl.where(masked, -float("inf"), ranked)
    tl.device_assert(choice == choice, "[route] scores plus correction must not be NaN", mask=routed)
    return choice


@triton.jit
def _pick(
    words, ranked, z, e, k, valid, tolerance,
    E: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr, SPARSE: tl.constexpr,
):  # fmt: skip
    """Slots [T, K]: experts in falling order of words (-1 where the choice is -inf) and then the shared ones."""
    ids = tl.zeros([words.shape[0], k.shape[1]], tl.int64)
    weights = tl.zeros([words.shape[0], k.shape[1]], tl.float32)
    for i in range(TOP_K):
        best, left = take(words, LEAST_64)
        mine = words == best[:, None]
        if SPARSE:
            value = _sparsemixer(z, mine, valid & (words > LEAST_64), tolerance)
        else:
            value = tl.sum(tl.where(mine, ranked, 0.0), 1)
        expert = tl.where((best >> 32) == MINUS_INFINITY, -1, best & 0xFFFFFFFF)
        ids = tl.where(k == i, expert[:, None], ids)
        weights = tl.where(k == i, value[:, None], weights)
        words = left
    for s in range(SHARED):
        value = tl.sum(tl.where(e == E + s, ranked, 0.0), 1)
        ids = tl.where(k == TOP_K + s, E + s, ids)
        weights = tl.where(k == TOP_K + s, value[:, None], weights)
    return ids, weights


@triton.jit(do_not_specialize=["num_tokens"])
def route_kernel(
    logits, correction, ids, weights, num_tokens, stride,
    logit_scale, cap, tolerance, excluded, power, epsilon, floor, scale,
    E: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr, SCORE: tl.constexpr, ON_LOGITS: tl.constexpr,
    NORM: tl.constexpr, HAS_CAP: tl.constexpr, HAS_CORRECTION: tl.constexpr, TAKES_INFINITY: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BEST: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile of tokens. GROUPS groups of experts lie BLOCK_G columns apart; SHARED logits follow the E ranked."""
    SIZE: tl.constexpr = E // GROUPS if GROUPS > 1 else E + SHARED
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = (t < num_tokens)[:, None]
    column = tl.arange(0, BLOCK_E)[None, :]
    e = column // BLOCK_G * SIZE + column % BLOCK_G
    valid = inside & (column % BLOCK_G < SIZE) & (e < E + SHARED)
    routed = valid & (e < E)
    raw = tl.load(logits + t[:, None] * stride + e, mask=valid, other=0.0)
    z, masked = _prepare(raw, logit_scale, cap, valid, HAS_CAP, TAKES_INFINITY)
    ranked = z if ON_LOGITS else _score(z, valid, SCORE)
    choice = _choice(ranked, masked, correction, e, routed, HAS_CORRECTION)
    words = pack_32(choice.to(tl.int32, bitcast=True), e, routed)
    if GROUPS > 1:
        choice = _limit(choice, words, excluded, GROUPS, TOP_GROUPS, BEST, BLOCK_G)
        words = pack_32(choice.to(tl.int32, bitcast=True), e, routed)
    k = tl.arange(0, BLOCK_K)[None, :]
    slot = k < TOP_K + SHARED
    found, w = _pick(words, ranked, z, e, k, valid, tolerance, E, TOP_K, SHARED, SCORE == SPARSEMIXER)
    if ON_LOGITS and SCORE != SPARSEMIXER:
        w = _score(w, slot, SCORE)
    w = tl.where(slot & (found >= 0), w, 0.0)
    if NORM > 0:
        w = w / tl.maximum(_norm(w, power, NORM) + epsilon, floor)[:, None]
    at = t[:, None] * (TOP_K + SHARED) + k
    tl.store(ids + at, found, mask=inside & slot)
    tl.store(weights + at, w * scale, mask=inside & slot)
