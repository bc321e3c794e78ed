// Few tokens and packed weights: elements are multiplied as they are stored, and the sum of each group by its scale, so
// a scale costs one multiplication a group. Included at the end of kernels.h, whose other ways multiply scales into
// elements.
#pragma once

namespace MOESTRO_ISA {

// One block of nibbles of a row and M tokens: adds the products of the elements, eight vectors, to t, in two sums.
template <int M, int J, class Values>
MOESTRO_INLINE void eight_products(const Values& values, I words, const float* const (&x)[M], F (&t)[2][M]) {
    if constexpr (J < 8) {
        const F w = nibble<J>(values, words);
#pragma GCC unroll 8
        for (int i = 0; i < M; ++i) t[J % 2][i] = fma(w, load(x[i] + J * W), t[J % 2][i]);
        eight_products<M, J + 1>(values, words, x, t);
    }
}

// Whether sums of elements left the numbers that a float holds, where scales may have brought them back.
template <int M> MOESTRO_INLINE bool overflowed(const float* out) {
    bool all = true;
    for (int i = 0; i < kRows * M; ++i) all = all && out[i] - out[i] == 0.0f;
    return !all;
}

template <Element E, int M> static void group_scaled_nibbles(const FourRows& rows, const float* const* scales,
                                                             const float* const* zeros, const float* const* tokens,
                                                             float* out) {
    const auto values = values_of<E>();
    const int64_t columns = rows.columns, group = rows.group_columns ? rows.group_columns : round_up(columns, kBlock);
    const Spread by = spread_of(group);
    int shift = 0;
    while ((int64_t{1} << shift) < group) ++shift;
    F sum[kRows][M];
    const float* x[M];
#pragma GCC unroll 8
    for (int t = 0; t < M; ++t) {
        x[t] = tokens[t];
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) sum[r][t] = zero();
    }
    const auto block = [&](int64_t k, auto words_of) __attribute__((always_inline)) {
        F all[M];  // what a zero point is multiplied by
        if constexpr (E == Element::u4) {
            for (int t = 0; t < M; ++t) {
                all[t] = load(x[t]);
                for (int j = 1; j < 8; ++j) all[t] = all[t] + load(x[t] + j * W);
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
            if (rows.next[0]) prefetch(rows.next[r] + k / 2);
            const I words = words_of(rows.data[r] + k / 2);
            F t[2][M];
#pragma GCC unroll 8
            for (int i = 0; i < M; ++i) t[0][i] = t[1][i] = zero();
            eight_products<M, 0>(values, words, x, t);
            const F s = spread(scales[r] + (k >> shift), by);
#pragma GCC unroll 8
            for (int i = 0; i < M; ++i) {
                F each = t[0][i] + t[1][i];
                if constexpr (E == Element::u4) each = each - spread(zeros[r] + (k >> shift), by) * all[i];
                sum[r][i] = fma(each, s, sum[r][i]);
            }
        }
#pragma GCC unroll 8
        for (int t = 0; t < M; ++t) x[t] += kBlock;
    };
    int64_t k = 0;
    for (; k + kBlock <= columns; k += kBlock)
        block(k, [](const uint8_t* p) __attribute__((always_inline)) { return load_words(p); });
    if (k < columns)
        block(k,
              [&](const uint8_t* p) __attribute__((always_inline)) { return load_some_words(p, (columns - k) / 2); });
#pragma GCC unroll 8
    for (int t = 0; t < M; ++t) sums(sum[0][t], sum[1][t], sum[2][t], sum[3][t], out + kRows * t);
    if (overflowed<M>(out)) dots<E, M>(rows, scales, zeros, tokens, out);
}

// Two vectors of 8-bit elements of a row.
template <Element E> MOESTRO_INLINE Two two_of(const uint8_t* p) {
    if constexpr (E == Element::e4m3) return load_two_e4m3_but_nan(p);
    else return {load_i8(p), load_i8(p + W)};
}

// Columns of a row that are multiplied before those of the next of four. With vectors of 16 floats and one token or two
// four rows in turn are no faster where a cache holds them, and slower where memory does (Zen 4).
template <int M> constexpr int kTurn = W < 16 || M > 2 ? 2 * W : 64;

// Adds the products of 64 columns from k on to each row's sums, and sees whether weights among them are NaN.
template <Element E, int M> MOESTRO_INLINE void add_columns(const FourRows& rows, int64_t k, const float* const* x,
                                                            F (&sum)[kRows][M], NanOfE4m3& nan) {
#pragma GCC unroll 8
    for (int begin = 0; begin < 64; begin += kTurn<M>) {
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
            if (begin == 0 && rows.next[0]) prefetch(rows.next[r] + k);
            if constexpr (E == Element::e4m3) {
                if (begin == 0) nan.see(rows.data[r] + k);
            }
#pragma GCC unroll 8
            for (int u = begin; u < begin + kTurn<M>; u += 2 * W) {
                const Two w = two_of<E>(rows.data[r] + k + u);
#pragma GCC unroll 8
                for (int t = 0; t < M; ++t) {
                    sum[r][t] = fma(w.first, load(x[t] + k + u), sum[r][t]);
                    sum[r][t] = fma(w.second, load(x[t] + k + u + W), sum[r][t]);
                }
            }
        }
    }
}

template <Element E, int M> static void group_scaled_bytes(const FourRows& rows, const float* const* scales,
                                                           const float* const* zeros, const float* const* x,
                                                           float* out) {
    const int64_t columns = rows.columns, group = rows.group_columns ? rows.group_columns : columns;
    const bool one_group = group >= columns;
    F sum[kRows][M], all[kRows][M];
    NanOfE4m3 nan;
    const auto each = [&](auto step) __attribute__((always_inline)) {
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
            for (int t = 0; t < M; ++t) step(r, t);
        }
    };
    each([&](int r, int t) __attribute__((always_inline)) { sum[r][t] = all[r][t] = zero(); });
    for (int64_t start = 0, g = 0; start < columns; start += group, ++g) {
        const int64_t stop = start + group < columns ? start + group : columns;
        each([&](int r, int t) __attribute__((always_inline)) { sum[r][t] = zero(); });
        int64_t k = start;
        for (; k + 64 <= stop; k += 64) add_columns<E, M>(rows, k, x, sum, nan);
        for (; k < stop; k += W) {
            const int64_t n = stop - k < W ? stop - k : W;
            each([&](int r, int t) __attribute__((always_inline)) {
                sum[r][t] = fma(load_some<E>(rows.data[r] + k, n), load(x[t] + k), sum[r][t]);
            });
        }
        if (one_group) break;
        each([&](int r, int t)
                 __attribute__((always_inline)) { all[r][t] = fma(sum[r][t], set1(scales[r][g]), all[r][t]); });
    }
    if (E == Element::e4m3 && nan.seen()) return dots<E, M>(rows, scales, zeros, x, out);
    if (!one_group) each([&](int r, int t) __attribute__((always_inline)) { sum[r][t] = all[r][t]; });
#pragma GCC unroll 8
    for (int t = 0; t < M; ++t) {
        sums(sum[0][t], sum[1][t], sum[2][t], sum[3][t], out + kRows * t);
        for (int r = 0; r < kRows && one_group; ++r) out[kRows * t + r] *= scales[r][0];
    }
    if (overflowed<M>(out)) dots<E, M>(rows, scales, zeros, x, out);
}

template <Element E, int M> static void fill_group_scaled(Dots* table) {
    if constexpr (moestro::is_nibble(E)) table[M] = group_scaled_nibbles<E, M>;
    else table[M] = group_scaled_bytes<E, M>;
    if constexpr (M > 1) fill_group_scaled<E, M - 1>(table);
}
template <Element E> static void group_scaled_dots(const FourRows& rows, const float* const* scales,
                                                   const float* const* zeros, const float* const* x, int64_t m,
                                                   float* out) {
    Dots table[kDirectTokens + 1];
    fill_group_scaled<E, kDirectTokens>(table);
    if (m > 0 && rows.columns > 0) return table[m](rows, scales, zeros, x, out);
    for (int64_t i = 0; i < kRows * m; ++i) out[i] = 0.0f;
}

}  // namespace MOESTRO_ISA
