// Rows of bfloat16 times weights of bfloat16 by dot products of pairs, two columns of each of 16 lanes at once. A sum
// runs over the columns in the same order whatever the number of tokens. Included after kernels.h.
#pragma once

#include "kernels.h"

namespace MOESTRO_ISA {

constexpr int kDotTokens = 4;        // of which four rows of weights have their sums in registers
constexpr int64_t kDotColumns = 32;  // of a vector

// Rounds a row to bfloat16; zeros behind its last column.
static void bfloat16_row(int64_t columns, const float* from, float* to) {
    for (int64_t k = 0; k < columns; k += kDotColumns, to += kDotColumns / 2) {
        const auto some = [&](int64_t first) {
            const int64_t n = columns - first;
            const __mmask16 mask = n >= W ? 0xffff : n <= 0 ? 0 : static_cast<__mmask16>((1 << n) - 1);
            return _mm512_maskz_loadu_ps(mask, from + first);
        };
        _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(some(k + W), some(k)));
    }
}

template <int M> static void bfloat16_dots(const FourRows& rows, const float* const* x, float* out) {
    __m512 sum[kRows][M];
    const uint8_t* token[M];
#pragma GCC unroll 4
    for (int t = 0; t < M; ++t) {
        token[t] = reinterpret_cast<const uint8_t*>(x[t]);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) sum[r][t] = _mm512_setzero_ps();
    }
    const uint8_t *a = rows.data[0], *b = rows.data[1], *c = rows.data[2], *d = rows.data[3];
    const auto step = [&](int64_t at, __m512i wa, __m512i wb, __m512i wc, __m512i wd) __attribute__((always_inline)) {
#pragma GCC unroll 4
        for (int t = 0; t < M; ++t) {
            const __m512bh v = (__m512bh)_mm512_loadu_si512(token[t] + at);
            sum[0][t] = _mm512_dpbf16_ps(sum[0][t], (__m512bh)wa, v);
            sum[1][t] = _mm512_dpbf16_ps(sum[1][t], (__m512bh)wb, v);
            sum[2][t] = _mm512_dpbf16_ps(sum[2][t], (__m512bh)wc, v);
            sum[3][t] = _mm512_dpbf16_ps(sum[3][t], (__m512bh)wd, v);
        }
    };
    const uint8_t* const* next = rows.next[0] ? rows.next : nullptr;
    const int64_t whole = rows.columns / kDotColumns * 64, left = rows.columns % kDotColumns;
    for (int64_t at = 0; at < whole; at += 64) {
        if (next) prefetch(next[0] + at), prefetch(next[1] + at), prefetch(next[2] + at), prefetch(next[3] + at);
        step(at, _mm512_loadu_si512(a + at), _mm512_loadu_si512(b + at), _mm512_loadu_si512(c + at),
             _mm512_loadu_si512(d + at));
    }
    if (left) {
        const __mmask32 mask = (__mmask32{1} << left) - 1;
        step(whole, _mm512_maskz_loadu_epi16(mask, a + whole), _mm512_maskz_loadu_epi16(mask, b + whole),
             _mm512_maskz_loadu_epi16(mask, c + whole), _mm512_maskz_loadu_epi16(mask, d + whole));
    }
#pragma GCC unroll 4
    for (int t = 0; t < M; ++t) sums({sum[0][t]}, {sum[1][t]}, {sum[2][t]}, {sum[3][t]}, out + kRows * t);
}

static void four_bfloat16_rows(const FourRows& rows, const float* const* x, int64_t m, float* out) {
    in_steps(rows, m, out, [&](const FourRows& four, float* to) {
        for (int64_t t = 0, n = 0; t < m; t += n) {
            n = next_tile(m - t, kDotTokens);
            const auto dots = n == 1   ? bfloat16_dots<1>
                              : n == 2 ? bfloat16_dots<2>
                              : n == 3 ? bfloat16_dots<3>
                                       : bfloat16_dots<4>;
            dots(four, x + t, to + kRows * t);
        }
    });
}

}  // namespace MOESTRO_ISA
