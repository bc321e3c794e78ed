// Rows of 8-bit integers times weights that are integers, written once against the vector vocabulary and its byte part.
// Included after epilogue.h by one file per instruction set; see kernels.h on sharing.
//
// A block of nibbles is 32 * W columns. Four vectors of stored bytes, their integers transposed in 128-bit lanes, give
// eight vectors whose every lane holds four columns of one unit of 32; so eight steps of dot4 leave in each lane the
// exact sum of a unit, and one conversion and one multiplication serve W units. Rows lie in that order. Where scales
// are for 16 columns, a lane's first four vectors and its last four are sums of their own: a part each.
#pragma once

#include "unit_scales.h"

namespace MOESTRO_ISA {

constexpr int64_t kUnits = 32 * W;  // columns of a block of nibbles
constexpr int64_t kVectorBytes = 4 * W;

// A row: its scale; what the sums of lanes against int8 weights begin with; its integers; and for nibbles the sums of
// its units, of every part of every block. Sums stand there times minus what codes are larger by than their values.
constexpr int64_t kStartBytes = 64, kHeadBytes = kStartBytes + 64;

MOESTRO_INLINE const int8_t* bytes_of_row(const float* row) {
    return reinterpret_cast<const int8_t*>(row) + kHeadBytes;
}
constexpr int64_t padded_columns(Element e, int64_t columns) {
    return round_up(columns, moestro::is_nibble(e) ? kUnits : kVectorBytes);
}
constexpr int parts_of(int64_t group_columns) { return group_columns == 16 ? 2 : 1; }
constexpr int offset_of(Element e) {
    return e == Element::i4 ? 8 : e == Element::e2m1 ? 12 : 1;
}  // u4: times a zero point

static int64_t int8_row_floats(Element e, int64_t columns) {
    const int64_t padded = padded_columns(e, columns);
    return (kHeadBytes + padded + (moestro::is_nibble(e) ? padded / 32 * 2 * 4 : 0)) / 4;
}

// Two bytes in every four: the even columns of eight, or the odd ones.
MOESTRO_INLINE uint32_t every_second(uint64_t eight, int odd) {
    uint64_t v = (eight >> (8 * odd)) & 0x00ff00ff00ff00ffull;
    v = (v | v >> 8) & 0x0000ffff0000ffffull;
    return static_cast<uint32_t>(v | v >> 16);
}
// Natural order to that of decoded nibbles: 32 * W columns.
static void order_block(const int8_t* from, int8_t* to) {
    constexpr int kLanes = W / 4;
    for (int unit = 0; unit < W; ++unit) {
        const int lane = unit % kLanes * 4 + unit / kLanes;
        for (int i = 0; i < 4; ++i) {
            uint8_t eight[8];
            std::memcpy(eight, from + 32 * unit + 8 * i, 8);
            uint64_t word = 0;
            for (int b = 0; b < 8; ++b) word |= static_cast<uint64_t>(eight[b]) << (8 * b);
            for (int odd = 0; odd < 2; ++odd) {
                const uint32_t four = every_second(word, odd);
                for (int b = 0; b < 4; ++b)
                    to[(2 * i + odd) * kVectorBytes + 4 * lane + b] = static_cast<int8_t>(four >> (8 * b));
            }
        }
    }
}
// The sums of each lane's unit, or of its halves, of an ordered block.
static void sum_units(const int8_t* block, int parts, int offset, int32_t* to) {
    for (int p = 0; p < parts; ++p) {
        I sum = zero_bytes();
        for (int i = p * 8 / parts; i < (p + 1) * 8 / parts; ++i)
            sum = dot4(sum, every_byte(offset), load_bytes(block + i * kVectorBytes));
        store_bytes(to + p * W, zero_bytes() - sum);
    }
}

// max |row| / 127; NaN where a value is not finite.
static float scale_of(const float* from, int64_t n) {
    F most = zero(), bad = zero();
    int64_t i = 0;
    for (; i < n; i += W) {
        const F v =
            i + W <= n ? load(from + i) : load_some<Element::f32>(reinterpret_cast<const uint8_t*>(from + i), n - i);
        most = larger(most, absolute(v));
        bad = fma(v, zero(), bad);
    }
    alignas(64) float lanes[W];
    store(lanes, bad);
    float sum = 0.0f;
    for (int l = 0; l < W; ++l) sum += lanes[l];
    return sum != sum ? sum : largest(most) / 127.0f;
}

// `from` has `columns` floats, `to` room for int8_row_floats; weights that share a scale have `group_columns`.
static bool quantize_row(Element weights, int64_t columns, int64_t group_columns, const float* from, float* to) {
    const int64_t padded = padded_columns(weights, columns),
                  block = moestro::is_nibble(weights) ? kUnits : kVectorBytes;
    auto* bytes = reinterpret_cast<int8_t*>(to) + kHeadBytes;
    auto* sums = reinterpret_cast<int32_t*>(bytes + padded);
    const float s = scale_of(from, columns);
    const bool usable = s > 0.0f;  // not NaN
    const F scale = set1(s);
    const int parts = parts_of(group_columns);
    int32_t start = 0;
    for (int64_t k = 0; k < padded; k += block, bytes += block) {
        alignas(64) int8_t natural[kUnits];
        for (int64_t i = 0; i < block; i += W) {
            const int64_t left = columns - k - i;
            F v = zero();
            if (usable && left >= W) v = load(from + k + i);
            else if (usable && left > 0)
                v = load_some<Element::f32>(reinterpret_cast<const uint8_t*>(from + k + i), left);
            if (usable) v = at_least(at_most(v / scale, 127.0f), -127.0f);
            store_as_bytes(natural + i, to_integers(v));
        }
        if (!moestro::is_nibble(weights)) {
            std::memcpy(bytes, natural, static_cast<size_t>(block));
            for (int64_t i = 0; i < block; ++i) start -= kInt8Offset * natural[i];
            continue;
        }
        order_block(natural, bytes);
        sum_units(bytes, parts, offset_of(weights), sums);
        sums += parts * W;
    }
    int32_t lanes[W] = {start};
    std::memcpy(to, &s, sizeof s);
    std::memcpy(to + kStartBytes / 4, lanes, sizeof lanes);
    return true;
}

// What the lower nibble of each byte stands for, plus offset_of(E).
template <Element E> MOESTRO_INLINE I code_of(I nibbles) {
    constexpr uint8_t kTwice[16] = {12, 13, 14, 15, 16, 18, 20, 24,
                                    12, 11, 10, 9,  8,  6,  4,  0};  // 12 + twice a value of e2m1
    constexpr uint8_t kFromSigned[16] = {8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7};
    if constexpr (E == Element::e2m1) return look_up(bytes_table(kTwice), nibbles);
    if constexpr (E == Element::i4 && kOneStepLookUp) return look_up(bytes_table(kFromSigned), nibbles);
    if constexpr (E == Element::i4) return (nibbles & every_byte(15)) ^ every_byte(8);
    return nibbles & every_byte(15);
}

// Eight vectors of codes of the four stored ones of a row's block.
template <Element E> MOESTRO_INLINE void codes_of(I* words, I* codes) {
    transpose_lanes(words);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        codes[2 * i] = code_of<E>(words[i]);
        codes[2 * i + 1] = code_of<E>(upper_nibbles(words[i]));
    }
}

// The last bytes of a row, followed by zeros.
static __attribute__((noinline)) const uint8_t* copied(const uint8_t* from, int64_t n, uint8_t* padded, int64_t size) {
    std::memset(padded, 0, static_cast<size_t>(size));
    std::memcpy(padded, from, static_cast<size_t>(n));
    return padded;
}

// Calls `step(block, r, codes, scales, zeros)` for every block of each of the four rows.
template <Element E, int Parts, ScalesFrom From, class Step>
MOESTRO_INLINE void walk_units(const FourRows& rows, const Scales& scales, bool prefetching, Step step) {
    const int64_t columns = rows.columns;
    Units by[Parts];
    for (int p = 0; p < Parts; ++p) by[p] = units_of(scales.group, p);
    const int shift = log2_of(scales.group);
    const int64_t n = (columns + scales.group - 1) >> shift;
    for (int64_t k = 0, block = 0; k < columns; k += kUnits, ++block) {
        const int64_t first = k >> shift;
        const bool whole = k + kUnits <= columns;
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
            const uint8_t* from = rows.data[r] + k / 2;
            I words[4], codes[8], zeros[Parts];
            F s[Parts];
            if (whole) {
                if (prefetching && rows.next[0])
                    for (int64_t line = 0; line < kUnits / 2; line += 64) prefetch(rows.next[r] + k / 2 + line);
#pragma GCC unroll 4
                for (int64_t i = 0; i < 4; ++i) words[i] = load_bytes(from + i * kVectorBytes);
            } else {
                const int64_t bytes = (columns - k) / 2;
                for (int64_t line = 0; prefetching && rows.next[0] && line < bytes; line += 64)
                    prefetch(rows.next[r] + k / 2 + line);
#pragma GCC unroll 4
                for (int64_t i = 0, left = bytes; i < 4; ++i, left -= kVectorBytes)
                    words[i] = left >= kVectorBytes ? load_bytes(from + i * kVectorBytes)
                               : left > 0           ? load_some_words(from + i * kVectorBytes, left)
                                                    : zero_bytes();
            }
            codes_of<E>(words, codes);
#pragma GCC unroll 2
            for (int p = 0; p < Parts; ++p) {
                s[p] = unit_scales<From>(scales, by, r, first, n, p);
                if constexpr (E == Element::u4) zeros[p] = to_integers(of_part<Parts>(scales.zero[r] + first, by, p));
            }
            step(block, r, codes, s, zeros);
        }
    }
}

MOESTRO_INLINE float scale_of_row(const float* row) {
    float s;
    std::memcpy(&s, row, sizeof s);
    return s;
}
MOESTRO_INLINE void take_scales(const float* const* x, int64_t m, float* out) {
    for (int64_t t = 0; t < m; ++t)
        for (int r = 0; r < kRows; ++r) out[kRows * t + r] *= scale_of_row(x[t]);
}

// What the exact sum of a part begins with: the row's own sums, which for u4 a zero point of at most 8 bits multiplies.
template <Element E> MOESTRO_INLINE I start_of(const int32_t* sums, I zeros) {
    if constexpr (E == Element::u4) return times_pairs(load_bytes(sums), zeros);
    return load_bytes(sums);
}

// For each output, floats are added block by block and part by part, whatever M and wherever weights are decoded.
template <Element E, int Parts, ScalesFrom From, int M>
static void few(const FourRows& rows, const Scales& scales, const float* const* x, float* out) {
    const int64_t padded = padded_columns(E, rows.columns);
    F sum[kRows][M];
    const int8_t* bytes[M];
#pragma GCC unroll 4
    for (int t = 0; t < M; ++t) {
        bytes[t] = bytes_of_row(x[t]);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) sum[r][t] = zero();
    }
    walk_units<E, Parts, From>(
        rows, scales, true,
        [&](int64_t block, int r, const I* codes, const F* s, const I* zeros) __attribute__((always_inline)) {
#pragma GCC unroll 4
            for (int t = 0; t < M; ++t) {
                const int8_t* row = bytes[t] + block * kUnits;
#pragma GCC unroll 2
                for (int p = 0; p < Parts; ++p) {
                    I acc = start_of<E>(reinterpret_cast<const int32_t*>(bytes[t] + padded) + (block * Parts + p) * W,
                                        zeros[p]);
#pragma GCC unroll 8
                    for (int i = p * 8 / Parts; i < (p + 1) * 8 / Parts; ++i)
                        acc = dot4(acc, codes[i], load_bytes(row + i * kVectorBytes));
                    sum[r][t] = fma(to_floats(acc), s[p], sum[r][t]);
                }
            }
        });
#pragma GCC unroll 4
    for (int t = 0; t < M; ++t) sums(sum[0][t], sum[1][t], sum[2][t], sum[3][t], out + kRows * t);
    take_scales(x, M, out);
}

// Four rows decoded for many tokens: codes [row][block][vector], scales and zeros [block][row][part].
struct Panel {
    uint8_t* codes[kRows];
    float* scales;
    int32_t* zeros;
    int64_t padded;
};

template <Element E, int Parts, ScalesFrom From>
static void decode_units(const FourRows& rows, const Scales& scales, const Panel& panel) {
    walk_units<E, Parts, From>(
        rows, scales, false,
        [&](int64_t block, int r, const I* codes, const F* s, const I* zeros) __attribute__((always_inline)) {
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) store_bytes(panel.codes[r] + block * kUnits + i * kVectorBytes, codes[i]);
#pragma GCC unroll 2
            for (int p = 0; p < Parts; ++p) {
                store(panel.scales + ((block * kRows + r) * Parts + p) * W, s[p]);
                if constexpr (E == Element::u4)
                    store_bytes(panel.zeros + ((block * kRows + r) * Parts + p) * W, zeros[p]);
            }
        });
}

// One step of columns: a vector of codes of each row, one of bytes of each token.
template <int M, class Dot> MOESTRO_INLINE void add_integers(I (&acc)[kRows][M], const I (&w)[kRows],
                                                             const int8_t* const (&bytes)[M], int64_t at, Dot dot) {
#pragma GCC unroll 8
    for (int t = 0; t < M; ++t) {
        const I v = load_bytes(bytes[t] + at);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) acc[r][t] = dot(acc[r][t], w[r], v);
    }
}

// Every float sum of a tile stays in a register, beside the exact ones of a block.
template <Element E, int Parts, int M> static void tile(const Panel& panel, const float* const* x, float* out) {
    const int8_t* bytes[M];
    F sum[kRows][M];
#pragma GCC unroll 8
    for (int t = 0; t < M; ++t) {
        bytes[t] = bytes_of_row(x[t]);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) sum[r][t] = zero();
    }
    const uint8_t* codes = panel.codes[0];
    const int64_t row_step = panel.codes[1] - codes;
    for (int64_t first = 0, at = 0; first < panel.padded; first += kUnits / Parts, at += W) {
        // Parts of one block follow one another; each has its scales of four rows.
        const int64_t part = Parts == 2 ? first / (kUnits / Parts) % Parts : 0;
        const int64_t place = (at / W - part) * kRows + part;
        I acc[kRows][M], w[kRows];
#pragma GCC unroll 8
        for (int t = 0; t < M; ++t) {
            const auto* own = reinterpret_cast<const int32_t*>(bytes[t] + panel.padded) + at;
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r)
                acc[r][t] = start_of<E>(
                    own, E == Element::u4 ? load_bytes(panel.zeros + (place + r * Parts) * W) : zero_bytes());
        }
#pragma GCC unroll 8
        for (int i = 0; i < 8 / Parts; ++i) {
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r) w[r] = load_bytes(codes + r * row_step + first + i * kVectorBytes);
            add_integers(acc, w, bytes, first + i * kVectorBytes,
                         [](I a, I b, I c) __attribute__((always_inline)) { return dot4(a, b, c); });
        }
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
            const F s = load(panel.scales + (place + r * Parts) * W);
#pragma GCC unroll 8
            for (int t = 0; t < M; ++t) sum[r][t] = fma(to_floats(acc[r][t]), s, sum[r][t]);
        }
    }
#pragma GCC unroll 8
    for (int t = 0; t < M; ++t) sums(sum[0][t], sum[1][t], sum[2][t], sum[3][t], out + kRows * t);
    take_scales(x, M, out);
}

// Integers all along the row: weights of a scale a row.
template <int M>
static void int8_dots(const FourRows& rows, const float* const* scales, const float* const* x, float* out) {
    const int8_t* bytes[M];
    I acc[kRows][M], w[kRows];
#pragma GCC unroll 8
    for (int t = 0; t < M; ++t) {
        bytes[t] = bytes_of_row(x[t]);
        const I start = load_bytes(bytes[t] - kHeadBytes + kStartBytes);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) acc[r][t] = start;
    }
    const uint8_t* from[kRows] = {rows.data[0], rows.data[1], rows.data[2], rows.data[3]};
    alignas(64) uint8_t last[kRows][kVectorBytes];
    const int64_t whole = rows.columns / kVectorBytes * kVectorBytes;
    if (whole < rows.columns)
        for (int r = 0; r < kRows; ++r) copied(rows.data[r] + whole, rows.columns - whole, last[r], kVectorBytes);
    int64_t k = 0;
    for (int64_t stop = whole; k < rows.columns; stop += kVectorBytes) {  // the whole vectors, then the last columns
        for (; k < stop; k += kVectorBytes) {
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r) {
                if (rows.next[0]) prefetch(rows.next[r] + k);
                w[r] = int8_codes(load_bytes(from[r] + k));
            }
            add_integers(acc, w, bytes, k,
                         [](I a, I b, I c) __attribute__((always_inline)) { return dot4_int8(a, b, c); });
        }
        for (int r = 0; r < kRows; ++r) from[r] = last[r] - whole;
    }
    const float own[kRows] = {scales[0][0], scales[1][0], scales[2][0], scales[3][0]};
#pragma GCC unroll 8
    for (int t = 0; t < M; ++t) {
        int32_t exact[kRows];
        integer_sums(acc[0][t], acc[1][t], acc[2][t], acc[3][t], exact);
        const float s = scale_of_row(x[t]);
        for (int r = 0; r < kRows; ++r) out[kRows * t + r] = static_cast<float>(exact[r]) * own[r] * s;
    }
}

using Int8Dots = void (*)(const FourRows&, const float* const*, const float* const*, float*);
using Few = void (*)(const FourRows&, const Scales&, const float* const*, float*);
using Tile = void (*)(const Panel&, const float* const*, float*);
// One function for each number of tokens up to `Most`.
template <class Function, int Most, class Make> struct ByTokens {
    Function of[Most + 1] = {};
    constexpr ByTokens() { fill<Most>(); }
    template <int M> constexpr void fill() {
        of[M] = Make::template of<M>();
        if constexpr (M > 1) fill<M - 1>();
    }
};
struct MakeInt8 {
    template <int M> static constexpr Int8Dots of() { return int8_dots<M>; }
};
template <Element E, int Parts, ScalesFrom From> struct MakeFew {
    template <int M> static constexpr Few of() { return few<E, Parts, From, M>; }
};
template <Element E, int Parts> struct MakeTile {
    template <int M> static constexpr Tile of() { return tile<E, Parts, M>; }
};

// The rows that come next, a share of them before each tile of tokens: all at once they would hold up what is loaded
// now.
struct Prefetched {
    const FourRows& rows;
    int64_t at = 0, bytes, share;

    Prefetched(const FourRows& asked, int64_t row_bytes, int64_t m, int64_t most)
        : rows(asked), bytes(asked.next[0] ? row_bytes : 0),
          share(round_up(row_bytes / ((m + most - 1) / most) + 1, 64)) {}
    MOESTRO_INLINE void some() {
        const int64_t stop = at + share < bytes ? at + share : bytes;
        for (; at < stop; at += 64)
            for (int r = 0; r < kRows; ++r) prefetch(rows.next[r] + at);
    }
};

template <Element E, int Parts, ScalesFrom From = ScalesFrom::floats>
static void units(const FourRows& rows, const Scales& scales, const float* const* x, int64_t m, float* out,
                  float* scratch) {
    if (m <= kFewUnitTokens) {
        static constexpr ByTokens<Few, kFewUnitTokens, MakeFew<E, Parts, From>> kFew;
        return kFew.of[m](rows, scales, x, out);
    }
    Panel panel;
    panel.padded = padded_columns(E, rows.columns);
    const int64_t of_units = panel.padded / kUnits * kRows * Parts * W;
    panel.scales = scratch;
    panel.zeros = reinterpret_cast<int32_t*>(scratch + of_units);
    for (int r = 0; r < kRows; ++r)
        panel.codes[r] = reinterpret_cast<uint8_t*>(scratch + 2 * of_units) + r * (panel.padded + 64);
    decode_units<E, Parts, From>(rows, scales, panel);
    static constexpr ByTokens<Tile, kUnitTokens, MakeTile<E, Parts>> kTile;
    Prefetched next(rows, rows.columns / 2, m, kUnitTokens);
    for (int64_t n = 0; m > 0; x += n, out += kRows * n, m -= n) {
        n = next_tile(m, kUnitTokens);
        next.some();
        kTile.of[n](panel, x, out);
    }
}

template <Element E>
static void run_int8(const FourRows& rows, const float* const* x, int64_t m, float* out, float* scratch) {
    const int64_t n = rows.group_columns ? (rows.columns + rows.group_columns - 1) / rows.group_columns : 1;
    const int64_t room = round_up(n, W) + 2 * W;
    const float factor = E == Element::e2m1 ? 0.5f : 1.0f;  // codes are of twice the value
    Scales scales = {};
    scales.group = rows.group_columns ? rows.group_columns : round_up(rows.columns, kUnits);
    if constexpr (E == Element::e2m1) {
        if (scales_from(rows) == ScalesFrom::powers) {
            for (int r = 0; r < kRows; ++r)
                scales.stored[r] = rows.scales[r], scales.factor[r] = rows.global_scale[r] * factor;
            return units<E, 1, ScalesFrom::powers>(rows, scales, x, m, out, scratch);
        }
    }
    for (int r = 0; r < kRows; ++r, scratch += room) {
        read_scales(rows.scale, rows.scales[r], n, rows.global_scale[r] * factor, scratch, room);
        scales.scale[r] = scratch;
    }
    if constexpr (E == Element::i8) {
        static constexpr ByTokens<Int8Dots, kTileTokens, MakeInt8> kDots;
        if (m <= kTileTokens) return m > 0 ? kDots.of[m](rows, scales.scale, x, out) : void();
        Prefetched next(rows, rows.columns, m, kTileTokens);
        FourRows alone = rows;
        alone.next[0] = nullptr;
        for (int64_t t = 0; m > 0; x += t, out += kRows * t, m -= t) {
            t = next_tile(m, kTileTokens);
            next.some();
            kDots.of[t](alone, scales.scale, x, out);
        }
    } else {
        if constexpr (E == Element::u4) {
            for (int r = 0; r < kRows; ++r, scratch += room) {
                read_zeros(rows.zeros[r], n, scratch, room);
                scales.zero[r] = scratch;
            }
        }
        if (parts_of(rows.group_columns) == 2) return units<E, 2>(rows, scales, x, m, out, scratch);
        units<E, 1>(rows, scales, x, m, out, scratch);
    }
}

static void int8_rows(const FourRows& rows, const float* const* x, int64_t m, float* out, float* scratch) {
    switch (rows.element) {  // with_integer was up to 2% slower here
        case Element::i8: return run_int8<Element::i8>(rows, x, m, out, scratch);
        case Element::e2m1: return run_int8<Element::e2m1>(rows, x, m, out, scratch);
        case Element::i4: return run_int8<Element::i4>(rows, x, m, out, scratch);
        default: return run_int8<Element::u4>(rows, x, m, out, scratch);
    }
}

static int64_t int8_scratch(int64_t columns) {
    const int64_t padded = round_up(columns, kUnits), natural = 2 * kRows * (columns / 16 + 3 * W + 1);
    return natural + 2 * (padded / 16 * kRows) + kRows * (padded + 64) / 4;
}

static const moestro::RowOps kInt8 = {int8_row_floats, quantize_row, int8_rows, int8_scratch};

}  // namespace MOESTRO_ISA
