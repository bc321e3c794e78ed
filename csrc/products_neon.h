// Products of two rows with two tokens in one instruction (ARMv8.6): four columns of bfloat16 each, or eight of bytes.
// The exact sums of bytes are those of int8.h; a sum of bfloat16 runs over the columns in the same order whatever the
// number of tokens. Included after int8.h.
#pragma once

#include "kernels.h"

namespace MOESTRO_ISA {

constexpr int kPairTokens = 8;         // of which four rows have their sums in registers
constexpr int64_t kVectorColumns = 8;  // of bfloat16

// The lower halves of two vectors, and their upper halves.
struct Halves {
    uint64x2_t low, high;
};
MOESTRO_INLINE Halves halves_of(const uint8_t* a, const uint8_t* b) {
    const uint64x2_t first = vreinterpretq_u64_u8(vld1q_u8(a)), second = vreinterpretq_u64_u8(vld1q_u8(b));
    return {vzip1q_u64(first, second), vzip2q_u64(first, second)};
}

struct OfBfloat16 {
    using Sum = float32x4_t;
    static constexpr int64_t kBytes = 2;  // of a column
    static Sum zero() { return vdupq_n_f32(0.0f); }
    static MOESTRO_INLINE Sum add(Sum sum, uint64x2_t rows, uint64x2_t tokens) {
        return vbfmmlaq_f32(sum, vreinterpretq_bf16_u64(rows), vreinterpretq_bf16_u64(tokens));
    }
};
struct OfBytes {
    using Sum = int32x4_t;
    static constexpr int64_t kBytes = 1;
    static Sum zero() { return vdupq_n_s32(0); }
    static MOESTRO_INLINE Sum add(Sum sum, uint64x2_t rows, uint64x2_t tokens) {
        return vmmlaq_s32(sum, vreinterpretq_s8_u64(rows), vreinterpretq_s8_u64(tokens));
    }
};

// out[pair of rows][pair of tokens]: a vector holds one row's sums for both tokens, then the other row's.
template <class Of, int Pairs>
static void pair_products(const FourRows& rows, const uint8_t* const* tokens, typename Of::Sum (&out)[2][Pairs]) {
    typename Of::Sum low[2][Pairs], high[2][Pairs];
#pragma GCC unroll 4
    for (int p = 0; p < Pairs; ++p)
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) low[i][p] = high[i][p] = Of::zero();
    const int64_t bytes = rows.columns * Of::kBytes, whole = bytes / 16 * 16;
    const uint8_t* from[kRows] = {rows.data[0], rows.data[1], rows.data[2], rows.data[3]};
    alignas(16) uint8_t last[kRows][16];
    int64_t at = 0;
    for (int64_t stop = whole; at < bytes; stop += 16) {  // the whole vectors, then the last columns
        for (; at < stop; at += 16) {
            if (rows.next[0] && at % 64 == 0)
                for (int r = 0; r < kRows; ++r) prefetch(rows.next[r] + at);
            const Halves first = halves_of(from[0] + at, from[1] + at), second = halves_of(from[2] + at, from[3] + at);
#pragma GCC unroll 4
            for (int p = 0; p < Pairs; ++p) {
                const Halves x = halves_of(tokens[2 * p] + at, tokens[2 * p + 1] + at);
                low[0][p] = Of::add(low[0][p], first.low, x.low);
                low[1][p] = Of::add(low[1][p], second.low, x.low);
                high[0][p] = Of::add(high[0][p], first.high, x.high);
                high[1][p] = Of::add(high[1][p], second.high, x.high);
            }
        }
        if (at >= bytes) break;
        for (int r = 0; r < kRows; ++r) from[r] = copied(rows.data[r] + whole, bytes - whole, last[r], 16) - whole;
    }
#pragma GCC unroll 4
    for (int p = 0; p < Pairs; ++p)
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) out[i][p] = low[i][p] + high[i][p];
}

// Calls `take(t, r, sum)` for m tokens, up to kPairTokens; the last of an odd number meets the first.
template <class Of, int Pairs, class Take>
static void each_product(const FourRows& rows, const uint8_t* const* x, int64_t m, Take take) {
    const uint8_t* tokens[2 * Pairs];
    for (int64_t t = 0; t < 2 * Pairs; ++t) tokens[t] = x[t < m ? t : 0];
    typename Of::Sum sums[2][Pairs];
    pair_products<Of, Pairs>(rows, tokens, sums);
    for (int64_t t = 0; t < m; ++t)
        for (int r = 0; r < kRows; ++r) take(t, r, sums[r / 2][t / 2][r % 2 * 2 + t % 2]);
}
template <class Of, class Take>
static void products(const FourRows& rows, const uint8_t* const* x, int64_t m, Take take) {
    switch ((m + 1) / 2) {
        case 1: return each_product<Of, 1>(rows, x, m, take);
        case 2: return each_product<Of, 2>(rows, x, m, take);
        case 3: return each_product<Of, 3>(rows, x, m, take);
        default: return each_product<Of, 4>(rows, x, m, take);
    }
}
// Tokens in tiles; rows that come next are fetched with the first.
template <class Tile> static void in_tiles(const FourRows& rows, int64_t m, Tile tile) {
    FourRows alone = rows;
    for (int64_t t = 0, n = 0; t < m; t += n) {
        n = next_tile(m - t, kPairTokens);
        tile(alone, t, n);
        alone.next[0] = nullptr;
    }
}

static int64_t bfloat16_row_floats(Element, int64_t columns) { return round_up(columns, kVectorColumns) / 2; }

// Rounds a row to bfloat16; zeros behind its last column.
static bool bfloat16_row(Element, int64_t columns, int64_t, const float* from, float* to) {
    auto* words = reinterpret_cast<uint16_t*>(to);
    for (int64_t k = 0; k < round_up(columns, kVectorColumns); k += W) {
        const int64_t left = columns - k;
        const F v = left >= W  ? load(from + k)
                    : left > 0 ? load_some<Element::f32>(reinterpret_cast<const uint8_t*>(from + k), left)
                               : zero();
        store_bf16(words + k, v);
    }
    return true;
}

static void four_bfloat16_rows(const FourRows& rows, const float* const* x, int64_t m, float* out, float*) {
    in_steps(rows, m, out, [&](const FourRows& four, float* sums) {
        in_tiles(four, m, [&](const FourRows& some, int64_t first, int64_t n) {
            const uint8_t* tokens[kPairTokens];
            for (int64_t t = 0; t < n; ++t) tokens[t] = reinterpret_cast<const uint8_t*>(x[first + t]);
            float* to = sums + kRows * first;
            products<OfBfloat16>(some, tokens, n, [&](int64_t t, int r, float sum) { to[kRows * t + r] = sum; });
        });
    });
}

static int64_t no_scratch(int64_t) { return 0; }

static const moestro::RowOps kBfloat16 = {bfloat16_row_floats, bfloat16_row, four_bfloat16_rows, no_scratch};

static void int8_products(const FourRows& rows, const float* const* x, int64_t m, float* out) {
    float own[kRows];
    for (int r = 0; r < kRows; ++r) own[r] = rows.global_scale[r] * one_scale(rows.scale, rows.scales[r]);
    in_tiles(rows, m, [&](const FourRows& some, int64_t first, int64_t n) {
        const uint8_t* tokens[kPairTokens];
        float scales[kPairTokens];
        for (int64_t t = 0; t < n; ++t) {
            tokens[t] = reinterpret_cast<const uint8_t*>(bytes_of_row(x[first + t]));
            scales[t] = scale_of_row(x[first + t]);
        }
        float* to = out + kRows * first;
        products<OfBytes>(some, tokens, n, [&](int64_t t, int r, int32_t sum) {
            to[kRows * t + r] = static_cast<float>(sum) * own[r] * scales[t];
        });
    });
}
// As int8_rows, whose sums these are. One token has no other to share a product with.
static void int8_rows_by_products(const FourRows& rows, const float* const* x, int64_t m, float* out, float* scratch) {
    if (rows.element != Element::i8 || m < 2) return int8_rows(rows, x, m, out, scratch);
    in_steps(rows, m, out, [&](const FourRows& four, float* to) { int8_products(four, x, m, to); });
}

static const moestro::RowOps kInt8ByProducts = {integer_row_floats<RowsOfBytes>, quantize_row<RowsOfBytes>,
                                                int8_rows_by_products, integer_scratch<RowsOfBytes>};

}  // namespace MOESTRO_ISA
