// Many tokens and eight rows of weights: with half of the tokens in a tile, half as much of them is loaded for each product
// as four rows take. Included after kernels.h where there are registers for 24 sums.
#pragma once

#include "kernels.h"

namespace MOESTRO_ISA {

constexpr int kEight = 8, kEightTokens = 3;
constexpr int64_t kEightPiece = 1024;  // columns of the rows that stay in the first cache while all tokens pass

// Columns k to stop for M tokens: goes on with the sums in `partial`, or begins them at column 0.
template <int M> static void partial_eight(const float* const* row, const float* const* x, int64_t k, int64_t stop, float* partial) {
    F sum[kEight][M];
#pragma GCC unroll 8
    for (int r = 0; r < kEight; ++r) {
#pragma GCC unroll 3
        for (int t = 0; t < M; ++t) sum[r][t] = k ? load(partial + (kEight * t + r) * W) : zero();
    }
    const auto step = [&](int64_t at, auto weights) __attribute__((always_inline)) {
        F v[M];
#pragma GCC unroll 3
        for (int t = 0; t < M; ++t) v[t] = load(x[t] + at);
#pragma GCC unroll 8
        for (int r = 0; r < kEight; ++r) {
            F w = weights(row[r] + at);
            keep(w);
#pragma GCC unroll 3
            for (int t = 0; t < M; ++t) sum[r][t] = fma(w, v[t], sum[r][t]);
        }
    };
    for (; k + W <= stop; k += W) step(k, [](const float* p) __attribute__((always_inline)) { return load(p); });
    if (k < stop) step(k, [&](const float* p) __attribute__((always_inline)) { return load_some<Element::f32>(reinterpret_cast<const uint8_t*>(p), stop - k); });
#pragma GCC unroll 8
    for (int r = 0; r < kEight; ++r) {
#pragma GCC unroll 3
        for (int t = 0; t < M; ++t) store(partial + (kEight * t + r) * W, sum[r][t]);
    }
}

static void eight_floats(const FourRows* two, const float* const* x, int64_t m, float* out, float* partial) {
    using Partial = void (*)(const float* const*, const float* const*, int64_t, int64_t, float*);
    static constexpr Partial kPartial[kEightTokens + 1] = {nullptr, partial_eight<1>, partial_eight<2>, partial_eight<3>};
    const float* row[kEight];
    for (int r = 0; r < kEight; ++r) row[r] = reinterpret_cast<const float*>(two[r / kRows].data[r % kRows]);
    NextRows<kEight> next(two, (two->columns + kEightPiece - 1) / kEightPiece * ((m + kEightTokens - 1) / kEightTokens));
    for (int64_t k = 0; k < two->columns; k += kEightPiece) {
        const int64_t stop = k + kEightPiece < two->columns ? k + kEightPiece : two->columns;
        for (int64_t t = 0, n = 0; t < m; t += n) {
            n = next_tile(m - t, kEightTokens);
            next.some();
            kPartial[n](row, x + t, k, stop, partial + t * kEight * W);
        }
    }
    for (int64_t t = 0; t < m; ++t)
        for (int r = 0; r < kEight; r += kRows) {
            const float* p = partial + (kEight * t + r) * W;
            sums(load(p), load(p + W), load(p + 2 * W), load(p + 3 * W), out + kEight * t + r);
        }
}

template <Element E> static void eight(const FourRows* asked, const float* const* x, int64_t m, float* out, float* scratch) {
    FourRows rows[2] = {asked[0], asked[1]};
    if constexpr (E != Element::f32) {
        for (FourRows& four : rows) {
            const float* scales[kRows] = {};
            const float* zeros[kRows] = {};
            scratch = read_groups<E>(four, scales, zeros, scratch);
            decode<E>(four, scales, zeros, scratch);
            scratch += kRows * (round_up(four.columns, kBlock) + W);
        }
    }
    eight_floats(rows, x, m, out, scratch);
}

// As four_rows, for eight, out[t][i] with eight values a token; of at least one column.
static void eight_rows(const FourRows* two, const float* const* x, int64_t m, float* out, float* scratch) {
    moestro::with_element(two->element, [&](auto e) { eight<decltype(e)::value>(two, x, m, out, scratch); });
}

}  // namespace MOESTRO_ISA
