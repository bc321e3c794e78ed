// Rows of bfloat16 times weights of e4m3 by dot products of pairs: each code becomes a bfloat16 in two look-ups, one of
// its upper byte and one of its lower.
//
// A vector of 64 codes becomes two of pairs, the lower and the upper halves of its 128-bit lanes, so rows lie in that
// order. A sum runs over the columns in the same order whatever the number of tokens.
#pragma once

#include "bfloat16_dots.h"
#include "e4m3_scales.h"

namespace MOESTRO_ISA {

constexpr int64_t kCodes = 64;                // columns of a vector of codes
constexpr int64_t kE4m3Columns = 2 * kCodes;  // of a group

// The bytes of bfloat16 numbers that stand for codes without their sign, 2^-kDownBy of their values: so many products
// of the largest numbers do not leave a float before scales bring them back.
constexpr int kDownBy = 26;
constexpr float kBack = 1 << kDownBy;
struct E4m3Bytes {
    uint8_t upper[128] = {}, lower[128] = {};
    constexpr E4m3Bytes() {
        for (int code = 0; code < 128; ++code) {
            const int exponent = code >> 3, mantissa = code & 7;
            int lead = 0;  // of a subnormal's highest bit
            while (mantissa >> (lead + 1)) ++lead;
            int bits = (exponent - 7 - kDownBy + 127) << 7 | mantissa << 4;
            if (exponent == 0) bits = (lead - 9 - kDownBy + 127) << 7 | (mantissa << (3 - lead) & 7) << 4;
            if (code == 0) bits = 0;
            if (code == 127) bits = 0x7fc0;  // NaN
            upper[code] = static_cast<uint8_t>(bits >> 8), lower[code] = static_cast<uint8_t>(bits);
        }
    }
};
alignas(64) static constexpr E4m3Bytes kE4m3Bytes;

struct Pairs {
    __m512i first, second;
};
class E4m3Pairs {
    __m512i upper_[2], lower_[2];

public:
    E4m3Pairs() {
        for (int i = 0; i < 2; ++i) {
            upper_[i] = _mm512_load_si512(kE4m3Bytes.upper + 64 * i);
            lower_[i] = _mm512_load_si512(kE4m3Bytes.lower + 64 * i);
        }
    }
    MOESTRO_INLINE Pairs of(__m512i codes) const {
        __asm__("" : "+v"(codes));  // in a register: gcc loads them anew for each look-up
        const __m512i sizes = _mm512_permutex2var_epi8(upper_[0], codes, upper_[1]);
        // 0xf8: a | (b & c), the sign of the code.
        const __m512i upper = _mm512_ternarylogic_epi32(sizes, codes, _mm512_set1_epi8(-128), 0xf8);
        const __m512i lower = _mm512_permutex2var_epi8(lower_[0], codes, lower_[1]);
        return {_mm512_unpacklo_epi8(lower, upper), _mm512_unpackhi_epi8(lower, upper)};
    }
};

static int64_t pairs_row_floats(Element e, int64_t columns) {
    return round_up(columns, e == Element::e4m3 ? kE4m3Columns : kDotColumns) / 2;
}

// Rounds a row to bfloat16, in the order in which it meets weights of a kind; zeros behind its last column.
static bool pairs_row(Element e, int64_t columns, int64_t, const float* from, float* to) {
    bfloat16_row(columns, from, to);
    if (e != Element::e4m3) return true;
    const int64_t written = round_up(columns, kDotColumns), padded = round_up(columns, kE4m3Columns);
    std::memset(to + written / 2, 0, static_cast<size_t>(padded - written) * 2);
    const __m512i even = _mm512_setr_epi64(0, 1, 4, 5, 8, 9, 12, 13),
                  odd = _mm512_setr_epi64(2, 3, 6, 7, 10, 11, 14, 15);
    for (int64_t k = 0; k < padded; k += kCodes, to += kCodes / 2) {
        const __m512i a = _mm512_loadu_si512(to), b = _mm512_loadu_si512(to + W);
        _mm512_storeu_si512(to, _mm512_permutex2var_epi64(a, even, b));
        _mm512_storeu_si512(to + W, _mm512_permutex2var_epi64(a, odd, b));
    }
    return true;
}

// Adds the products of kE4m3Columns columns of a row. `load(p, i)` loads half i of their codes, zeros behind the last.
template <int M, class Load> MOESTRO_INLINE void add_e4m3(const E4m3Pairs& pairs, const uint8_t* row, Load load,
                                                          const uint8_t* const (&token)[M], int64_t k,
                                                          __m512 (&sum)[M]) {
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
        const Pairs w = pairs.of(load(row + k + i * kCodes, i));
#pragma GCC unroll 4
        for (int t = 0; t < M; ++t) {
            const uint8_t* v = token[t] + 2 * (k + i * kCodes);
            sum[t] = _mm512_dpbf16_ps(sum[t], (__m512bh)w.first, (__m512bh)_mm512_loadu_si512(v));
            sum[t] = _mm512_dpbf16_ps(sum[t], (__m512bh)w.second, (__m512bh)_mm512_loadu_si512(v + 64));
        }
    }
}

// Four rows and M tokens; of groups the sum of each times its scale.
template <int M, bool ByGroup>
static void e4m3_dots(const FourRows& rows, const E4m3Scales& scales, const float* const* x, float* out) {
    const E4m3Pairs pairs;
    __m512 all[kRows][M];
    const uint8_t* token[M];
#pragma GCC unroll 4
    for (int t = 0; t < M; ++t) {
        token[t] = reinterpret_cast<const uint8_t*>(x[t]);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) all[r][t] = _mm512_setzero_ps();
    }
    const auto step = [&](int64_t k, auto load) __attribute__((always_inline)) {
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
            if constexpr (!ByGroup) {
                add_e4m3<M>(pairs, rows.data[r], load, token, k, all[r]);
                continue;
            }
            __m512 sum[M];
#pragma GCC unroll 4
            for (int t = 0; t < M; ++t) sum[t] = _mm512_setzero_ps();
            add_e4m3<M>(pairs, rows.data[r], load, token, k, sum);
            const __m512 scale = set1(scales.of_group(r, k / kE4m3Columns)).v;
#pragma GCC unroll 4
            for (int t = 0; t < M; ++t) all[r][t] = _mm512_fmadd_ps(sum[t], scale, all[r][t]);
        }
    };
    const uint8_t* const* next = rows.next[0] ? rows.next : rows.data;
    const int64_t whole = rows.columns / kE4m3Columns * kE4m3Columns, left = rows.columns - whole;
    for (int64_t k = 0; k < whole; k += kE4m3Columns) {
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) prefetch(next[r] + k), prefetch(next[r] + k + kCodes);
        step(k, [](const uint8_t* p, int) __attribute__((always_inline)) { return _mm512_loadu_si512(p); });
    }
    if (left) {
        const auto mask = [](int64_t n) { return n >= kCodes ? ~__mmask64{0} : n > 0 ? (__mmask64{1} << n) - 1 : 0; };
        const __mmask64 masks[2] = {mask(left), mask(left - kCodes)};
        step(whole, [&](const uint8_t* p, int i)
                        __attribute__((always_inline)) { return _mm512_maskz_loadu_epi8(masks[i], p); });
    }
#pragma GCC unroll 4
    for (int t = 0; t < M; ++t) {
        float* const four = out + kRows * t;
        sums({all[0][t]}, {all[1][t]}, {all[2][t]}, {all[3][t]}, four);
        for (int r = 0; r < kRows; ++r) four[r] = four[r] * scales.factor[r] * kBack;
    }
}

template <int M>
static void e4m3_tile(const FourRows& rows, const E4m3Scales& scales, const float* const* x, float* out) {
    rows.group_columns ? e4m3_dots<M, true>(rows, scales, x, out) : e4m3_dots<M, false>(rows, scales, x, out);
}

static void four_e4m3_rows(const FourRows& asked, const float* const* x, int64_t m, float* out, float* scratch) {
    in_steps(asked, m, out, [&](const FourRows& four, float* to) {
        const E4m3Scales scales(four, scratch);
        for (int64_t t = 0, n = 0; t < m; t += n) {
            n = next_tile(m - t, kDotTokens);
            const auto dots = n == 1 ? e4m3_tile<1> : n == 2 ? e4m3_tile<2> : n == 3 ? e4m3_tile<3> : e4m3_tile<4>;
            dots(four, scales, x + t, to + kRows * t);
        }
    });
}

static void four_pairs_rows(const FourRows& rows, const float* const* x, int64_t m, float* out, float* scratch) {
    if (rows.element == Element::e4m3) return four_e4m3_rows(rows, x, m, out, scratch);
    four_bfloat16_rows(rows, x, m, out);
}

static int64_t pairs_scratch(int64_t columns) { return moestro::scratch_floats(columns, 1); }

static const moestro::RowOps kPairs = {pairs_row_floats, pairs_row, four_pairs_rows,
                                       pairs_scratch,    nullptr,   kE4m3Columns};

}  // namespace MOESTRO_ISA
