// Many tokens and sixteen rows of weights: a piece of the rows is transposed, so that a vector is a column of eight of
// them, and each number of a token multiplies two such vectors. It is loaded once for sixteen rows, where dots load it
// for each four. A dot has a sum in each lane and adds the lanes up at its end, so these sums have other bits. Included
// after kernels.h on AVX2.
#pragma once

#include "kernels.h"

namespace MOESTRO_ISA {

using moestro::kOuterColumns;
using moestro::kOuterRows;
constexpr int kOuterTokens = 6;  // 6 * 2 sums, two vectors of weights and a number of a token in 16 registers

// Columns of eight rows of eight floats, kOuterRows apart.
MOESTRO_INLINE void transpose_eight(const __m256 (&row)[8], float* to) {
    __m256 pairs[8], fours[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        pairs[i] = _mm256_unpacklo_ps(row[i], row[i + 1]);
        pairs[i + 1] = _mm256_unpackhi_ps(row[i], row[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {  // of rows 0 to 3, and of 4 to 7
        const int from = i / 2;
        fours[i] = i % 2 ? _mm256_shuffle_ps(pairs[from], pairs[from + 2], 0xee)
                         : _mm256_shuffle_ps(pairs[from], pairs[from + 2], 0x44);
        fours[i + 4] = i % 2 ? _mm256_shuffle_ps(pairs[from + 4], pairs[from + 6], 0xee)
                             : _mm256_shuffle_ps(pairs[from + 4], pairs[from + 6], 0x44);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        store(to + i * kOuterRows, {_mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20)});
        store(to + (i + 4) * kOuterRows, {_mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31)});
    }
}

// n columns of eight rows of floats to a half of a panel, which has room for whole vectors.
static void transpose_rows(const uint8_t* const* rows, int64_t n, float* panel) {
    const float* row[8];
    for (int r = 0; r < 8; ++r) row[r] = reinterpret_cast<const float*>(rows[r]);
    __m256 some[8];
    int64_t k = 0;
    for (; k + W <= n; k += W) {
#pragma GCC unroll 8
        for (int r = 0; r < 8; ++r) some[r] = load(row[r] + k).v;
        transpose_eight(some, panel + k * kOuterRows);
    }
    if (k == n) return;
    for (int r = 0; r < 8; ++r)
        some[r] = load_some<Element::f32>(reinterpret_cast<const uint8_t*>(row[r] + k), n - k).v;
    transpose_eight(some, panel + k * kOuterRows);
}

// The weights that come next, if any do. Some lines of them are fetched into the second cache after every eight
// columns.
struct NextPiece {
    const uint8_t* row[kOuterRows];
    int64_t lines = 0, each = 0, r = 0, line = 0;  // of a row; after eight columns; what is next

    NextPiece(const FourRows* four, int64_t bytes, int64_t times)
        : lines((bytes + 63) / 64), each((kOuterRows * lines + times - 1) / times) {
        for (int i = 0; i < kOuterRows; ++i) row[i] = four[i / kRows].next[i % kRows];
        if (!row[0]) r = kOuterRows;
    }
    MOESTRO_INLINE void some() {
        for (int64_t i = 0; i < each && r < kOuterRows; ++i) {
            __builtin_prefetch(row[r] + line * 64, 0, 2);
            if (++line == lines) line = 0, ++r;
        }
    }
};

// Adds the products of n columns, of x from `before` on, to sums[t][16], or begins these. What a piece adds is summed
// up by itself first, which errs less than one sum of all columns.
template <int M> static void outer_tile(const float* panel, int64_t n, const float* const* x, int64_t before,
                                        NextPiece& next, float* sums) {
    F low[M], high[M];
    const float* token[M];
#pragma GCC unroll 6
    for (int t = 0; t < M; ++t) token[t] = x[t] + before, low[t] = high[t] = zero();
    const auto column = [&](int64_t k) __attribute__((always_inline)) {
        const F a = load(panel + k * kOuterRows), b = load(panel + k * kOuterRows + W);
#pragma GCC unroll 6
        for (int t = 0; t < M; ++t) {
            const F value = set1(token[t][k]);
            low[t] = fma(a, value, low[t]), high[t] = fma(b, value, high[t]);
        }
    };
    int64_t k = 0;
    for (; k + W <= n; k += W) {
#pragma GCC unroll 8
        for (int64_t j = k; j < k + W; ++j) column(j);
        next.some();
    }
    for (; k < n; ++k) column(k);
#pragma GCC unroll 6
    for (int t = 0; t < M; ++t) {
        float* const to = sums + t * kOuterRows;
        store(to, before ? load(to) + low[t] : low[t]);
        store(to + W, before ? load(to + W) + high[t] : high[t]);
    }
}
using OuterTile = void (*)(const float*, int64_t, const float* const*, int64_t, NextPiece&, float*);
template <int M> static void fill_outer(OuterTile* table) {
    table[M] = outer_tile<M>;
    if constexpr (M > 1) fill_outer<M - 1>(table);
}

// Has `next` of four times four rows be their columns from k on, behind the last the rows that come next, or null.
template <Element E> static void follow(const FourRows* asked, int64_t k, FourRows* four) {
    for (int i = 0; i < kOuterRows; ++i) {
        const FourRows& rows = asked[i / kRows];
        const bool ends = k >= rows.columns;
        const uint8_t* const then = asked->next[0] ? rows.next[i % kRows] : nullptr;
        four[i / kRows].next[i % kRows] = ends ? then : rows.data[i % kRows] + moestro::bytes_of(E, k);
    }
}

// `decode(rows, scales, zeros, panel)` has the rows be floats and returns for how many columns of theirs tokens have
// numbers.
template <Element E, class Decode>
static void outer(const FourRows* asked, const float* const* x, int64_t m, float* out, float* scratch, Decode decode) {
    constexpr int kFours = kOuterRows / kRows;
    OuterTile table[kOuterTokens + 1];
    fill_outer<kOuterTokens>(table);
    const float *scales[kFours][kRows] = {}, *zeros[kFours][kRows] = {};
    for (int q = 0; q < kFours; ++q) scratch = read_groups<E>(asked[q], scales[q], zeros[q], scratch);
    float *const panel = scratch, *const decoded = panel + kOuterColumns * kOuterRows;
    constexpr int64_t kDecoded = kRows * (kOuterColumns + W);
    const int64_t columns = asked->columns, tiles = (m + kOuterTokens - 1) / kOuterTokens;
    for (int64_t k = 0; k < columns; k += kOuterColumns) {
        const int64_t asked_columns = k + kOuterColumns < columns ? kOuterColumns : columns - k;
        int64_t n = asked_columns;
        const uint8_t* row[kOuterRows];
        FourRows four[kFours];
        for (int q = 0; q < kFours; ++q) {
            const float *s[kRows], *z[kRows];
            std::memcpy(s, scales[q], sizeof s), std::memcpy(z, zeros[q], sizeof z);
            four[q] = piece_of<E>(asked[q], k, asked_columns, s, z);
            four[q].next[0] = nullptr;
            if constexpr (E != Element::f32) n = decode(four[q], s, z, decoded + q * kDecoded);
            for (int r = 0; r < kRows; ++r) row[q * kRows + r] = four[q].data[r];
        }
        follow<E>(asked, k + kOuterColumns, four);
        transpose_rows(row, n, panel);
        transpose_rows(row + W, n, panel + W);
        NextPiece next(four, moestro::bytes_of(E, kOuterColumns), tiles * (n / W) + 1);
        for (int64_t t = 0, tile = 0; t < m; t += tile) {
            tile = next_tile(m - t, kOuterTokens);
            table[tile](panel, n, x + t, k, next, out + t * kOuterRows);
        }
    }
}

// As four_rows of one step, for four times four; of at least one column.
static void outer_products(const FourRows* four, const float* const* x, int64_t m, float* out, float* scratch) {
    moestro::with_element(four->element, [&](auto e) {
        constexpr Element E = decltype(e)::value;
        outer<E>(four, x, m, out, scratch,
                 [](FourRows& rows, const float* const* scales, const float* const* zeros, float* panel) {
                     const int64_t n = rows.columns;
                     if constexpr (E != Element::f32) decode<E>(rows, scales, zeros, panel);
                     return moestro::is_nibble(E) ? rows.columns : n;  // zeros of tokens stand behind nibbles
                 });
    });
}

}  // namespace MOESTRO_ISA
