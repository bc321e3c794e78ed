// The loops over columns, written once against the vector vocabulary. Included by one file per instruction set; nothing
// here may be shared between them, so everything is in that set's namespace and the standard library stays outside.
#pragma once

#include "engine.h"

namespace MOESTRO_ISA {

using moestro::Activation;
using moestro::Element;
using moestro::FourRows;
using moestro::Kind;
using moestro::Scale;

#define MOESTRO_INLINE inline __attribute__((always_inline))
constexpr int kRows = 4;
constexpr int64_t kBlock = 8 * W;  // columns of a block of nibbles

// The least power of two that reaches n.
inline int log2_of(int64_t n) { return n < 2 ? 0 : 64 - __builtin_clzll(static_cast<unsigned long long>(n - 1)); }
constexpr int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
constexpr int bytes_of(Element e) { return moestro::facts(e).bits / 8; }
constexpr bool has_byte_scale(Element e) { return moestro::facts(e).bits == 8; }

template <Element E> MOESTRO_INLINE F load_element(const uint8_t* p) {
    if constexpr (E == Element::f32) return load_f32(p);
    if constexpr (E == Element::f16) return load_f16(p);
    if constexpr (E == Element::bf16) return load_bf16(p);
    if constexpr (E == Element::e4m3) return load_e4m3_parts(p);  // times kE4m3Factor, which the scales take
    if constexpr (E == Element::i8) return load_i8(p);
}

template <Element E> MOESTRO_INLINE F load_some(const uint8_t* p, int64_t n) {
    alignas(64) uint8_t padded[W * 4] = {};
    std::memcpy(padded, p, static_cast<size_t>(n) * bytes_of(E));
    return load_element<E>(padded);
}

// A row's scales or zeros as floats, and behind them zeros that a whole vector may read.
MOESTRO_INLINE F load_scales(Scale type, const uint8_t* p) {
    switch (type) {
        case Scale::f32: return load_f32(p);
        case Scale::f16: return load_f16(p);
        case Scale::bf16: return load_bf16(p);
        case Scale::e8m0: return load_e8m0(p);
        default: return load_e4m3(p);
    }
}
template <Scale S> static void read_scales_of(const uint8_t* from, int64_t n, float factor, float* to) {
    constexpr int kSize = S == Scale::f32 ? 4 : S == Scale::f16 || S == Scale::bf16 ? 2 : 1;
    int64_t i = 0;
    for (; i + W <= n; i += W) store(to + i, load_scales(S, from + i * kSize) * set1(factor));
    if (i == n) return store(to + i, zero());
    if (S == Scale::f32 && n == 1) {  // without a vector that waits for a smaller store
        store(to, zero());
        float first;
        std::memcpy(&first, from, sizeof first);
        to[0] = first * factor;
        return store(to + 1, zero());
    }
    alignas(64) uint8_t padded[W * 4];
    // 127: of no scale type a subnormal, which processors are slow to multiply.
    copy_some(padded, from + i * kSize, (n - i) * kSize, 127);
    store(to + i, load_scales(S, padded) * set1(factor));
    store(to + n, zero());
}
static void read_scales(Scale type, const uint8_t* from, int64_t n, float factor, float* to, int64_t room) {
    switch (type) {
        case Scale::f32: read_scales_of<Scale::f32>(from, n, factor, to); break;
        case Scale::f16: read_scales_of<Scale::f16>(from, n, factor, to); break;
        case Scale::bf16: read_scales_of<Scale::bf16>(from, n, factor, to); break;
        case Scale::e8m0: read_scales_of<Scale::e8m0>(from, n, factor, to); break;
        default: read_scales_of<Scale::e4m3>(from, n, factor, to);
    }
    int64_t i = n + W;
    for (; i + W <= room; i += W) store(to + i, zero());
    if (i < room) store(to + room - W, zero());
}
// That of a row with one.
inline float one_scale(Scale type, const uint8_t* from) {
    alignas(64) float scale[3 * W];
    if (type == Scale::f32) std::memcpy(scale, from, sizeof(float));
    else read_scales(type, from, 1, 1.0f, scale, 3 * W);
    return scale[0];
}
static void read_zeros(const uint8_t* from, int64_t n, float* to, int64_t room) {
    int64_t i = 0;
    for (; i + W <= n; i += W) store(to + i, load_u8(from + i));
    for (; i < room; ++i) to[i] = i < n ? static_cast<float>(from[i]) : 0.0f;
}

// Calls `step(k, weight)` for every vector of columns, where `weight(r)` is that of row r from column k on.
template <Element E, class Step>
MOESTRO_INLINE void walk_plain(const FourRows& rows, const float* const* scales, bool prefetching, Step step) {
    constexpr int kBytes = bytes_of(E);
    constexpr int kPerLine = 64 / (W * kBytes) > 0 ? 64 / (W * kBytes) : 1;
    const int64_t columns = rows.columns, group = rows.group_columns ? rows.group_columns : columns;
    const uint8_t* const row[kRows] = {rows.data[0], rows.data[1], rows.data[2], rows.data[3]};
    const uint8_t* const* next = prefetching && rows.next[0] ? rows.next : nullptr;
    for (int64_t start = 0, g = 0; start < columns; start += group, ++g) {
        const int64_t stop = start + group < columns ? start + group : columns;
        F scale[kRows];
        if constexpr (has_byte_scale(E)) {
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r) scale[r] = set1(scales[r][g]);
        }
        const auto scaled = [&](F w, int r) __attribute__((always_inline)) {
            if constexpr (has_byte_scale(E)) return w * scale[r];
            return w;
        };
        int64_t k = start;
        for (; k + W * kPerLine <= stop; k += W * kPerLine) {
            if (next) {
                prefetch(next[0] + k * kBytes), prefetch(next[1] + k * kBytes);
                prefetch(next[2] + k * kBytes), prefetch(next[3] + k * kBytes);
            }
            if constexpr (E == Element::e4m3 && kPerLine % 2 == 0) {
#pragma GCC unroll 8
                for (int u = 0; u < kPerLine; u += 2) {
                    const int64_t at = k + u * W;
                    const Two two[kRows] = {load_two_e4m3(row[0] + at), load_two_e4m3(row[1] + at),
                                            load_two_e4m3(row[2] + at), load_two_e4m3(row[3] + at)};
                    step(at, [&](int r) __attribute__((always_inline)) { return two[r].first * scale[r]; });
                    step(at + W, [&](int r) __attribute__((always_inline)) { return two[r].second * scale[r]; });
                }
                continue;
            }
#pragma GCC unroll 8
            for (int u = 0; u < kPerLine; ++u) {
                const int64_t at = (k + u * W) * kBytes;
                step(k + u * W,
                     [&](int r) __attribute__((always_inline)) { return scaled(load_element<E>(row[r] + at), r); });
            }
        }
        for (; k < stop; k += W) {
            const int64_t at = k * kBytes, n = stop - k < W ? stop - k : W;
            step(k, [&](int r) __attribute__((always_inline)) { return scaled(load_some<E>(row[r] + at, n), r); });
        }
    }
}

// Calls `one(rows of a step, where their sums go)` for each of the steps.
template <class One> MOESTRO_INLINE void in_steps(const FourRows& rows, int64_t m, float* out, One one) {
    FourRows four = rows;
    four.steps = 1;
    for (int64_t s = 0; s < rows.steps; ++s, four.go_on(), out += kRows * m) one(four, out);
}

template <Element E> MOESTRO_INLINE auto values_of() {
    if constexpr (E == Element::e2m1) return e2m1_values();
    else if constexpr (E == Element::i4) return i4_values();
    else if constexpr (E == Element::u4) return u4_values();
    else return table_values(moestro::Codes<E>::values);
}

template <Element E, int J, class Values, class Step> MOESTRO_INLINE void eight_nibbles(const Values& values, int64_t k,
                                                                                        const I* words, const F* scales,
                                                                                        const F* zeros, Step step) {
    if constexpr (J < 8) {
        const auto weight = [&](int r) __attribute__((always_inline)) {
            const F value = nibble<J>(values, words[r]);
            if constexpr (E == Element::u4) return (value - zeros[r]) * scales[r];
            return value * scales[r];
        };
        step(k + J * W, weight);
        eight_nibbles<E, J + 1>(values, k, words, scales, zeros, step);
    }
}

// The same for nibbles: eight vectors a block, each of every eighth column.
template <Element E, class Step> MOESTRO_INLINE void walk_nibbles(const FourRows& rows, const float* const* scales,
                                                                  const float* const* zeros, bool prefetching,
                                                                  Step step) {
    const auto values = values_of<E>();
    const int64_t columns = rows.columns, group = rows.group_columns ? rows.group_columns : round_up(columns, kBlock);
    const Spread by = spread_of(group);
    const uint8_t* const* next = prefetching && rows.next[0] ? rows.next : nullptr;
    for (int64_t k = 0; k < columns; k += kBlock) {
        const int64_t first = k / group;
        I words[kRows];
        F s[kRows], z[kRows];
        if (k + kBlock <= columns) {
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r) {
                if (next) prefetch(next[r] + k / 2);
                words[r] = load_words(rows.data[r] + k / 2);
            }
        } else {
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r) words[r] = load_some_words(rows.data[r] + k / 2, (columns - k) / 2);
        }
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
            s[r] = spread(scales[r] + first, by);
            if constexpr (E == Element::u4) z[r] = spread(zeros[r] + first, by);
        }
        eight_nibbles<E, 0>(values, k, words, s, z, step);
    }
}

template <Element E, class Step> MOESTRO_INLINE void walk(const FourRows& rows, const float* const* scales,
                                                          const float* const* zeros, bool prefetching, Step step) {
    if constexpr (moestro::is_nibble(E)) walk_nibbles<E>(rows, scales, zeros, prefetching, step);
    else walk_plain<E>(rows, scales, prefetching, step);
}

// One vector of columns, from `k`, of four rows and M tokens. Where registers do not hold all sums, four vectors of
// weights and one of a token, they hold the tokens', and `weight` is asked for one row at a time. Weights that are
// floats are operands in memory.
template <Element E, int M, class Weight>
MOESTRO_INLINE void add_products(F (&sum)[kRows][M], const float* const (&token)[M], int64_t k, Weight weight) {
    if constexpr (E != Element::f32 && kRows * M + kRows + 1 > kRegisters) {
        F v[M];
#pragma GCC unroll 8
        for (int t = 0; t < M; ++t) v[t] = load(token[t] + k), keep(v[t]);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
            F w = weight(r);
            keep(w);
#pragma GCC unroll 8
            for (int t = 0; t < M; ++t) sum[r][t] = fma(w, v[t], sum[r][t]);
        }
    } else {
        const F w[kRows] = {weight(0), weight(1), weight(2), weight(3)};
#pragma GCC unroll 8
        for (int t = 0; t < M; ++t) {
            F v = load(token[t] + k);
            keep(v);
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r) sum[r][t] = fma(w[r], v, sum[r][t]);
        }
    }
}

// Every sum runs over the columns in their decoded order, whatever M.
template <Element E, int M> static void dots(const FourRows& rows, const float* const* scales,
                                             const float* const* zeros, const float* const* x, float* out) {
    F sum[kRows][M];
    const float* token[M];
#pragma GCC unroll 8
    for (int t = 0; t < M; ++t) {
        token[t] = x[t];
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) sum[r][t] = zero();
    }
    walk<E>(rows, scales, zeros, true,
            [&](int64_t k, auto weight) __attribute__((always_inline)) { add_products<E>(sum, token, k, weight); });
#pragma GCC unroll 8
    for (int t = 0; t < M; ++t) sums(sum[0][t], sum[1][t], sum[2][t], sum[3][t], out + kRows * t);
}

using Dots = void (*)(const FourRows&, const float* const*, const float* const*, const float* const*, float*);
template <Element E, int M> struct Table {
    static void fill(Dots* table) {
        table[M] = dots<E, M>;
        if constexpr (M > 1) Table<E, M - 1>::fill(table);
    }
};

// In group_scaled_dots.h.
template <Element E> static void group_scaled_dots(const FourRows& rows, const float* const* scales,
                                                   const float* const* zeros, const float* const* x, int64_t m,
                                                   float* out);

// Four rows of floats and M tokens: goes on with the sums in `partial`, or begins them where no columns of x are before
// those of the rows.
template <int M> static void partial_dots(const FourRows& rows, const float* const* x, int64_t before, float* partial) {
    const float* row[kRows];
    for (int r = 0; r < kRows; ++r) row[r] = reinterpret_cast<const float*>(rows.data[r]);
    F sum[kRows][M];
    const float* token[M];
#pragma GCC unroll 8
    for (int t = 0; t < M; ++t) {
        token[t] = x[t] + before;
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) sum[r][t] = before ? load(partial + (kRows * t + r) * W) : zero();
    }
    const int64_t stop = rows.columns;
    int64_t k = 0;
    for (; k + W <= stop; k += W)
        add_products<Element::f32>(sum, token, k,
                                   [&](int r) __attribute__((always_inline)) { return load(row[r] + k); });
    if (k < stop)
        add_products<Element::f32>(sum, token, k, [&](int r) __attribute__((always_inline)) {
            return load_some<Element::f32>(reinterpret_cast<const uint8_t*>(row[r] + k), stop - k);
        });
#pragma GCC unroll 8
    for (int t = 0; t < M; ++t) {
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) store(partial + (kRows * t + r) * W, sum[r][t]);
    }
}
using PartialDots = void (*)(const FourRows&, const float* const*, int64_t, float*);
template <int M> static void fill_partial(PartialDots* table) {
    table[M] = partial_dots<M>;
    if constexpr (M > 1) fill_partial<M - 1>(table);
}

// Near-equal tiles of tokens: a last one of a single token would wait for its additions.
MOESTRO_INLINE int64_t next_tile(int64_t m, int64_t most) {
    const int64_t left = (m + most - 1) / most;
    return (m + left - 1) / left;
}

// Long rows of floats and many tokens: a piece of the four rows stays in the first cache while all tokens pass.
constexpr int64_t kPiece = 512;

// Fetches the rows of floats that come next, a share before each tile of tokens.
template <int N> struct NextRows {
    const FourRows* rows;
    int64_t lines, share, line = 0;

    NextRows(const FourRows* asked, int64_t num_tiles)
        : rows(asked), lines(asked->next[0] ? asked->columns * 4 / 64 : 0), share(lines / num_tiles + 1) {}
    MOESTRO_INLINE void some() {
        for (const int64_t last = line + share < lines ? line + share : lines; line < last; ++line)
            for (int r = 0; r < N; ++r) prefetch(rows[r / kRows].next[r % kRows] + line * 64);
    }
};

template <Element E> static void tiles(const FourRows& rows, const float* const* scales, const float* const* zeros,
                                       const float* const* x, int64_t m, float* out) {
    constexpr int kMost = E == Element::f32 ? kRegisterTokens : kDirectTokens;
    Dots table[kMost + 1];
    Table<E, kMost>::fill(table);
    if (m > kMost) {
        FourRows alone = rows;  // the last tile fetches the rows that come next
        alone.next[0] = nullptr;
        while (m > kMost) {
            const int64_t n = next_tile(m, kMost);
            table[n](alone, scales, zeros, x, out);
            x += n, out += kRows * n, m -= n;
        }
    }
    if (m > 0) table[m](rows, scales, zeros, x, out);
}

template <Element E>
static void decode(FourRows& rows, const float* const* scales, const float* const* zeros, float* panel) {
    const int64_t width = round_up(rows.columns, moestro::is_nibble(E) ? kBlock : W), stride = width + W;
    float* to[kRows] = {panel, panel + stride, panel + 2 * stride, panel + 3 * stride};
    walk<E>(rows, scales, zeros, true, [&](int64_t k, auto weight) __attribute__((always_inline)) {
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) store(to[r] + k, weight(r));
    });
    rows.element = Element::f32;
    rows.columns = width;
    rows.group_columns = 0;
    rows.next[0] = nullptr;
    for (int r = 0; r < kRows; ++r) rows.data[r] = reinterpret_cast<const uint8_t*>(to[r]);
}

// The scales and zero points of four rows, in `scratch`; what is left of it.
template <Element E>
static float* read_groups(const FourRows& asked, const float** scales, const float** zeros, float* scratch) {
    if constexpr (moestro::has_scale(E)) {
        const int64_t n = asked.group_columns ? (asked.columns + asked.group_columns - 1) / asked.group_columns : 1;
        const int64_t room = round_up(n + 1, W) + W;
        for (int r = 0; r < kRows; ++r) {
            if (r > 0 && asked.scales[r] == asked.scales[r - 1] && asked.global_scale[r] == asked.global_scale[r - 1]) {
                scales[r] = scales[r - 1];  // rows of a block share them
                continue;
            }
            read_scales(asked.scale, asked.scales[r], n,
                        asked.global_scale[r] * (E == Element::e4m3 ? kE4m3Factor : 1.0f), scratch, room);
            scales[r] = scratch;
            scratch += room;
        }
        if constexpr (moestro::has_zeros(E)) {
            for (int r = 0; r < kRows; ++r, scratch += room) {
                read_zeros(asked.zeros[r], n, scratch, room);
                zeros[r] = scratch;
            }
        }
    }
    return scratch;
}

// Columns k to k + n, and what their groups have.
template <Element E>
static FourRows piece_of(const FourRows& rows, int64_t k, int64_t n, const float** scales, const float** zeros) {
    FourRows piece = rows;
    piece.columns = n;
    const int64_t group = rows.group_columns ? k / rows.group_columns : 0;
    for (int r = 0; r < kRows; ++r) {
        piece.data[r] += moestro::bytes_of(E, k);
        if (rows.next[0]) piece.next[r] += moestro::bytes_of(E, k);
        if constexpr (moestro::has_scale(E)) scales[r] += group;
        if constexpr (moestro::has_zeros(E)) zeros[r] += group;
    }
    return piece;
}

// Many tokens: a piece of the four rows is decoded into the first cache and stays there while all tokens pass. It is
// all columns where a shorter one would cut a group. `decode(rows, scales, zeros, panel)` has the rows be those of the
// panel.
template <Element E, class Decode> static void in_pieces(const FourRows& asked, const float* const* x, int64_t m,
                                                         float* out, float* scratch, Decode decode) {
    PartialDots table[kRegisterTokens + 1];
    fill_partial<kRegisterTokens>(table);
    const float *scales[kRows] = {}, *zeros[kRows] = {};
    scratch = read_groups<E>(asked, scales, zeros, scratch);
    const int64_t columns = asked.columns, group = asked.group_columns;
    const int64_t most = columns > kPiece && (group == 0 || kPiece % group == 0) ? kPiece : columns;
    float* const partial = scratch + (E == Element::f32 ? 0 : kRows * (round_up(most, kBlock) + W));
    NextRows<kRows> next(&asked, (columns + most - 1) / most * ((m + kRegisterTokens - 1) / kRegisterTokens));
    for (int64_t k = 0; k < columns; k += most) {
        const float *s[kRows], *z[kRows];
        std::memcpy(s, scales, sizeof s), std::memcpy(z, zeros, sizeof z);
        FourRows rows = piece_of<E>(asked, k, k + most < columns ? most : columns - k, s, z);
        if constexpr (E != Element::f32) decode(rows, s, z, scratch);
        for (int64_t t = 0, n = 0; t < m; t += n) {
            n = next_tile(m - t, kRegisterTokens);
            if constexpr (E == Element::f32) next.some();
            table[n](rows, x + t, k, partial + t * kRows * W);
        }
    }
    for (const float* p = partial; m > 0; --m, p += kRows * W, out += kRows)
        sums(load(p), load(p + W), load(p + 2 * W), load(p + 3 * W), out);
}

template <Element E>
static void run(const FourRows& asked, const float* const* x, int64_t m, float* out, float* scratch) {
    const bool many = m > 2 * kRegisterTokens || (m > kRegisterTokens && asked.columns > 2 * kPiece);
    if (many && asked.columns > 0 && (E == Element::f32 || asked.decoded))
        return in_pieces<E>(asked, x, m, out, scratch, decode<E>);
    const float* scales[kRows] = {};
    const float* zeros[kRows] = {};
    scratch = read_groups<E>(asked, scales, zeros, scratch);
    if constexpr (moestro::has_scale(E)) {
        if (asked.group_scaled) return group_scaled_dots<E>(asked, scales, zeros, x, m, out);
    }
    if constexpr (E != Element::f32) {
        if (asked.decoded) {
            FourRows rows = asked;
            decode<E>(rows, scales, zeros, scratch);
            return tiles<Element::f32>(rows, scales, zeros, x, m, out);
        }
    }
    tiles<E>(asked, scales, zeros, x, m, out);
}

[[maybe_unused]] static void four_rows(const FourRows& rows, const float* const* x, int64_t m, float* out,
                                       float* scratch) {
    moestro::with_element(rows.element, [&](auto e) {
        in_steps(rows, m, out,
                 [&](const FourRows& four, float* to) { run<decltype(e)::value>(four, x, m, to, scratch); });
    });
}

}  // namespace MOESTRO_ISA

#include "group_scaled_dots.h"
