// Rows of floats for weights of e4m3 whose bits are shifted to those of a float, which is 2^-120 of a code's value and
// subnormal where the code is. 32 codes become four vectors, of which the j-th has columns 4 * lane + j: rows lie in
// that order. For processors on which subnormal numbers cost nothing.
#pragma once

#include "e4m3_scales.h"
#include "integer_rows.h"
#include "outer_products.h"

namespace MOESTRO_ISA {

constexpr int kE4m3Tokens = 4;  // of a tile
constexpr int64_t kCodes = 64;  // columns of a step; groups have a multiple of them

// A row's largest value becomes one from 2^kLargest to twice of it, so that no product is subnormal that counts. Behind
// the row's columns stands what undoes that.
constexpr int kLargest = 60;
constexpr float kLeastOfRow = 0x1p-60f, kMostOfRow = 0x1p60f;
constexpr float kBack = 0x1p120f;  // what shifted codes lack

static int64_t e4m3_row_floats(Element, int64_t columns) { return round_up(columns, kCodes) + 16; }

// The power of two that makes a row's largest value, a normal number, one from 2^kLargest on.
static float times_of_row(float most) {
    uint32_t bits;
    std::memcpy(&bits, &most, sizeof bits);
    bits = ((127 + 127 + kLargest) << 23) - (bits & 0x7f800000u);
    std::memcpy(&most, &bits, sizeof bits);
    return most;
}

static bool e4m3_row(Element, int64_t columns, int64_t, const float* from, float* to) {
    const float most = scale_of(from, columns, 1.0f);
    if (most != 0.0f && !(most >= kLeastOfRow && most <= kMostOfRow)) return false;
    const float times = most == 0.0f ? 1.0f : times_of_row(most);
    const int64_t padded = round_up(columns, kCodes);
    for (int64_t k = 0; k < padded; k += 4 * W) {
        alignas(64) float natural[4 * W] = {};
        const float* in = from + k;
        if (k + 4 * W > columns) {
            if (k < columns) std::memcpy(natural, in, static_cast<size_t>(columns - k) * sizeof(float));
            in = natural;
        }
        for (int j = 0; j < 4; ++j)
            for (int l = 0; l < W; ++l) to[k + j * W + l] = in[4 * l + j] * times;
    }
    to[padded] = 1.0f / times;
    return true;
}

// 2^-120 of the values of the even ones of 32 codes, columns 4 * lane and 4 * lane + 2, or of the odd ones behind them;
// 480 for NaN. With the odd ones `nan` sees all 32.
MOESTRO_INLINE Two shifted(const uint8_t* p, int odd, NanOfE4m3& nan) {
    __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    if (odd) nan.see(codes);
    else codes = _mm256_slli_epi16(codes, 8);
    // Of each 16 bits: sign, exponent and mantissa of a bfloat16.
    const __m256i bits = _mm256_set1_epi16(static_cast<short>(0x87f0)), upper = _mm256_set1_epi32(~0xffff);
    const __m256i wide = _mm256_and_si256(_mm256_srai_epi16(codes, 4), bits);
    return {{_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))}, {_mm256_castsi256_ps(_mm256_and_si256(wide, upper))}};
}

// The last n codes of a row, which do not fill kCodes, and zeros behind them.
MOESTRO_INLINE const uint8_t* copied_end(const uint8_t* codes, int64_t n, uint8_t* end) {
    std::memset(end, 0, kCodes);
    std::memcpy(end, codes, static_cast<size_t>(n));
    return end;
}
static bool has_nan(const uint8_t* codes, int64_t n) {
    for (int64_t i = 0; i < n; ++i)
        if ((codes[i] & 127) == 127) return true;
    return false;
}

// Adds the products of kCodes codes of each of four rows, whose columns begin with k, and M tokens.
template <int M> MOESTRO_INLINE void add_codes(const uint8_t* const (&from)[kRows], const uint8_t* const* next,
                                               const float* const* x, int64_t k, F (&sum)[kRows][M], NanOfE4m3& nan) {
#pragma GCC unroll 2
    for (int64_t at = 0; at < kCodes; at += 4 * W) {
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
            if (at == 0) prefetch(next[r] + k);
#pragma GCC unroll 2
            for (int odd = 0; odd < 2; ++odd) {
                const Two w = shifted(from[r] + at, odd, nan);
                const int64_t first = k + at + odd * W, second = first + 2 * W;
#pragma GCC unroll 4
                for (int t = 0; t < M; ++t) sum[r][t] = fma(w.first, load(x[t] + first), sum[r][t]);
#pragma GCC unroll 4
                for (int t = 0; t < M; ++t) sum[r][t] = fma(w.second, load(x[t] + second), sum[r][t]);
            }
        }
    }
}

template <int M, bool ByGroup>
static void e4m3_dots(const FourRows& rows, const E4m3Scales& scales, const float* const* x, float* out) {
    const int64_t columns = rows.columns, padded = round_up(columns, kCodes), whole = columns / kCodes * kCodes;
    const int64_t group = rows.group_columns ? rows.group_columns : padded;
    const uint8_t* const* next = rows.next[0] ? rows.next : rows.data;
    const uint8_t* from[kRows] = {rows.data[0], rows.data[1], rows.data[2], rows.data[3]};
    alignas(64) uint8_t end[kRows][kCodes];
    F all[kRows][M], sum[kRows][M];
    NanOfE4m3 nan;
    const auto each = [&](auto step) __attribute__((always_inline)) {
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
            for (int t = 0; t < M; ++t) step(r, t);
        }
    };
    each([&](int r, int t) __attribute__((always_inline)) { all[r][t] = zero(); });
    for (int64_t k = 0, g = 0; k < padded; ++g) {
        each([&](int r, int t) __attribute__((always_inline)) { sum[r][t] = zero(); });
        const int64_t stop = k + group < padded ? k + group : padded, filled = stop < whole ? stop : whole;
        for (; k < filled; k += kCodes) {
            add_codes<M>(from, next, x, k, sum, nan);
            for (int r = 0; r < kRows; ++r) from[r] += kCodes;
        }
        if (k < stop) {
            for (int r = 0; r < kRows; ++r) from[r] = copied_end(from[r], columns - whole, end[r]);
            add_codes<M>(from, next, x, k, sum, nan);
            k = stop;
        }
        each([&](int r, int t) __attribute__((always_inline)) {
            all[r][t] = ByGroup ? fma(sum[r][t], set1(scales.of_group(r, g)), all[r][t]) : sum[r][t];
        });
    }
#pragma GCC unroll 4
    for (int t = 0; t < M; ++t) {
        sums(all[0][t], all[1][t], all[2][t], all[3][t], out + kRows * t);
        for (int r = 0; r < kRows; ++r)  // the factor last: it may be large where the sum is 0
            out[kRows * t + r] = out[kRows * t + r] * (x[t][padded] * kBack) * scales.factor[r];
    }
    for (int r = 0; r < kRows && nan.seen(); ++r)
        for (int t = 0; t < M && has_nan(rows.data[r], columns); ++t) out[kRows * t + r] = __builtin_nanf("");
}

template <int M>
static void e4m3_tile(const FourRows& rows, const E4m3Scales& scales, const float* const* x, float* out) {
    rows.group_columns ? e4m3_dots<M, true>(rows, scales, x, out) : e4m3_dots<M, false>(rows, scales, x, out);
}

// Four rows as floats, in the order of rows of tokens; a row with NaN has one in its first column.
static void decode_e4m3(FourRows& rows, const float* const* scales, float* panel) {
    const int64_t columns = rows.columns, padded = round_up(columns, kCodes), whole = columns / kCodes * kCodes;
    const int64_t group = rows.group_columns ? rows.group_columns : padded;
    for (int r = 0; r < kRows; ++r) {
        float* const to = panel + r * (padded + W);
        alignas(64) uint8_t end[kCodes];
        NanOfE4m3 nan;
        for (int64_t k = 0; k < padded; k += kCodes) {
            if (rows.next[0]) prefetch(rows.next[r] + k);
            const uint8_t* const codes = rows.data[r] + k;
            const uint8_t* const from = k < whole ? codes : copied_end(codes, columns - whole, end);
            const F scale = set1(scales[r][k / group]);
#pragma GCC unroll 2
            for (int64_t at = 0; at < kCodes; at += 4 * W) {
                const Two even = shifted(from + at, 0, nan), odd = shifted(from + at, 1, nan);
                const F w[4] = {even.first, odd.first, even.second, odd.second};
#pragma GCC unroll 4
                for (int j = 0; j < 4; ++j) store(to + k + at + j * W, w[j] * set1(kBack / kE4m3Factor) * scale);
            }
        }
        if (nan.seen()) to[0] = __builtin_nanf("");
        rows.data[r] = reinterpret_cast<const uint8_t*>(to);
    }
    rows.element = Element::f32;
    rows.columns = padded;
    rows.group_columns = 0;
    rows.next[0] = nullptr;
}

static void few_e4m3(const FourRows& rows, const float* const* x, int64_t m, float* out, float* scratch) {
    const E4m3Scales scales(rows, scratch);
    for (int64_t n = 0; m > 0; x += n, out += kRows * n, m -= n) {
        n = next_tile(m, kE4m3Tokens);
        const auto tile = n == 1 ? e4m3_tile<1> : n == 2 ? e4m3_tile<2> : n == 3 ? e4m3_tile<3> : e4m3_tile<4>;
        tile(rows, scales, x, out);
    }
}

static void four_e4m3_rows(const FourRows& asked, const float* const* x, int64_t m, float* out, float* scratch) {
    const int64_t padded = round_up(asked.columns, kCodes);
    in_steps(asked, m, out, [&](const FourRows& rows, float* to) {
        if (!rows.decoded || rows.columns == 0) return few_e4m3(rows, x, m, to, scratch);
        in_pieces<Element::e4m3>(rows, x, m, to, scratch,
                                 [](FourRows& piece, const float* const* scales, const float* const*, float* panel) {
                                     decode_e4m3(piece, scales, panel);
                                 });
        for (int64_t t = 0; t < m; ++t)
            for (int r = 0; r < kRows; ++r) to[kRows * t + r] *= x[t][padded];
    });
}

static void e4m3_outer_products(const FourRows* four, const float* const* x, int64_t m, float* out, float* scratch) {
    const int64_t padded = round_up(four->columns, kCodes);
    outer<Element::e4m3>(four, x, m, out, scratch,
                         [](FourRows& rows, const float* const* scales, const float* const*, float* panel) {
                             decode_e4m3(rows, scales, panel);
                             return rows.columns;
                         });
    for (int64_t t = 0; t < m; ++t)
        for (int r = 0; r < kOuterRows; ++r) out[kOuterRows * t + r] *= x[t][padded];
}

static int64_t e4m3_scratch(int64_t columns) { return moestro::scratch_floats(columns, moestro::kTokenBlock); }

constexpr moestro::RowOps e4m3_ops() {
    moestro::RowOps ops = {e4m3_row_floats, e4m3_row, four_e4m3_rows, e4m3_scratch};
    ops.outer_products = e4m3_outer_products;
    return ops;
}
static constexpr moestro::RowOps kE4m3 = e4m3_ops();

}  // namespace MOESTRO_ISA
