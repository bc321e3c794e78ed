// Products of rows of integers with weights that are integers, written once against the vector vocabulary and its byte
// part; see integer_rows.h for the order of a row, and kernels.h on sharing.
#pragma once

#include "fetched_rows.h"
#include "integer_rows.h"

namespace MOESTRO_ISA {

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

// One of the eight vectors of codes of a block's four transposed stored ones.
template <Element E> MOESTRO_INLINE I code_at(const I* words, int i) {
    return code_of<E>(i % 2 ? upper_nibbles(words[i / 2]) : words[i / 2]);
}

// Calls `step(block, r, words, scales, zeros)` for every block of each of the four rows but shared ones. A last one
// that is not whole is loaded with masks, or else read from a copy, so that the loop has no branches.
template <Element E, int Parts, ScalesFrom From, class Step>
MOESTRO_INLINE void walk_units(const FourRows& rows, const Scales& scales, const Units (&by)[Parts], bool prefetching,
                               Step step) {
    const int64_t columns = rows.columns, whole = columns / kUnits * kUnits;
    const int64_t stop = kMasks ? whole : whole_columns(columns);
    const int shift = log2_of(scales.group);
    const uint8_t* const* next = rows.next[0] ? rows.next : rows.data;
    Blocks from;
    for (int r = 0; r < kRows; ++r) from.data[r] = rows.data[r], from.scales[r] = rows.scales[r];
    const auto take = [&](int64_t k, int64_t block, const auto& of) __attribute__((always_inline)) {
        const int64_t first = k >> shift;
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
            I words[4], zeros[Parts];
            F s[Parts];
#pragma GCC unroll 4
            for (int64_t line = 0; prefetching && line < kUnits / 2; line += 64) prefetch(next[r] + k / 2 + line);
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) words[i] = of.words(from.data[r] + k / 2 + i * kVectorBytes, i);
            transpose_lanes(words);
#pragma GCC unroll 2
            for (int p = 0; p < Parts; ++p) {
                s[p] = unit_scales<From>(of, from, scales, by, r, first, p);
                if constexpr (E == Element::u4) zeros[p] = to_integers(of_part<Parts>(scales.zero[r] + first, by, p));
            }
            step(block, r, words, s, zeros);
        }
    };
    alignas(64) uint8_t last[kRows][kUnits / 2], last_scales[kRows][4 * W];
    int64_t block = 0;
    for (int64_t k = 0; k < stop;) {
        if constexpr (!kMasks) {
            if (k == whole) copy_last<From>(from, k, columns, last, last_scales);
        }
        for (const int64_t end = k < whole ? whole : stop; k < end; k += kUnits, ++block) take(k, block, WholeBlock());
    }
    if constexpr (kMasks) {
        if (whole < columns) take(whole, block, SomeOfBlock(columns - whole));
    }
}

template <class Rows> MOESTRO_INLINE const int32_t* starts_of(const int8_t* starts, int64_t part) {
    return reinterpret_cast<const int32_t*>(starts) + part * Rows::kStarts * W;
}
// The exact sum of a part begins with what the row holds for it; for u4 that is minus the sum of its integers, which a
// zero point of at most 8 bits multiplies in the end.
template <class Rows, Element E> MOESTRO_INLINE typename Rows::UnitSum start_of(const int32_t* sums) {
    return E == Element::u4 ? Rows::UnitSum::none() : Rows::UnitSum::from(sums);
}
template <class Rows, Element E>
MOESTRO_INLINE F end_of(const typename Rows::UnitSum& sum, const int32_t* sums, I zeros) {
    if constexpr (E == Element::u4) return to_floats(sum.value() + Rows::times_zeros(load_bytes(sums), zeros));
    return to_floats(sum.value());
}

// Calls `step(block, words, scales, zeros)` for every shared block.
template <Element E, int Parts, ScalesFrom From, class Step>
MOESTRO_INLINE void walk_shared(const FourRows& rows, const Scales& scales, Step step) {
    const int64_t columns = rows.columns, n = (columns + scales.group - 1) >> log2_of(scales.group);
    for (int64_t k = whole_columns(columns), block = k / kUnits; k < columns; k += kBlock, ++block) {
        const int64_t bytes = (columns - k) / 2;
        I words[4], zeros[Parts];
        F s[Parts];
        for (int r = 0; r < kRows; ++r) {
            const uint8_t* from = rows.data[r] + k / 2;
            if (rows.next[0]) prefetch(rows.next[r] + k / 2);
            words[r] = bytes >= kVectorBytes ? load_bytes(from) : load_some_words(from, bytes);
        }
        transpose_lanes(words);
        for (int p = 0; p < Parts; ++p) {
            s[p] = shared_scales<From>(rows, scales, k, n, p);
            if constexpr (E == Element::u4) zeros[p] = to_integers(shared_zeros(scales, k, n, p));
        }
        step(block, words, s, zeros);
    }
}

// Adds what a row's shared blocks add, one after the other.
template <class Rows, Element E, int Parts, ScalesFrom From>
static void add_shared(const FourRows& rows, const Scales& scales, const float* const* x, int64_t m, float* out) {
    constexpr int64_t kStep = Rows::kVectors * kVectorBytes;
    const int64_t row_bytes = padded_columns(E, rows.columns) * Rows::kVectors;
    walk_shared<E, Parts, From>(
        rows, scales, [&](int64_t block, const I* words, const F* s, const I* zeros) __attribute__((always_inline)) {
            for (int64_t t = 0; t < m; ++t) {
                const int8_t* bytes = bytes_of_row(x[t]);
                F sum = zero();
#pragma GCC unroll 2
                for (int p = 0; p < Parts; ++p) {
                    const int32_t* own = starts_of<Rows>(bytes + row_bytes, block * Parts + p);
                    auto acc = start_of<Rows, E>(own);
#pragma GCC unroll 8
                    for (int i = p * 8 / Parts; i < (p + 1) * 8 / Parts; ++i)
                        acc.add(code_at<E>(words, i), Rows::take(bytes + (block * 8 + i) * kStep));
                    sum = fma(end_of<Rows, E>(acc, own, zeros[p]), s[p], sum);
                }
                alignas(64) float lanes[W];
                store(lanes, sum);
                for (int l = 0; l < W; ++l) out[kRows * t + l % 4] += lanes[l];
            }
        });
}

MOESTRO_INLINE float scale_of_row(const float* row) {
    float s;
    std::memcpy(&s, row, sizeof s);
    return s;
}
MOESTRO_INLINE void take_scales(const float* const* x, int64_t m, int64_t steps, float* out) {
    for (int64_t t = 0; t < m; ++t) {
        const float s = scale_of_row(x[t]);
        for (int64_t i = 0; i < steps; ++i)
            for (int r = 0; r < kRows; ++r) out[kRows * (i * m + t) + r] *= s;
    }
}

// For each output, floats are added block by block and part by part, whatever M and wherever weights are decoded.
template <class Rows, Element E, int Parts, ScalesFrom From, int M>
static void few(FourRows rows, const Scales& scales, const float* const* x, float* out) {
    constexpr int64_t kStep = Rows::kVectors * kVectorBytes;
    const int64_t row_bytes = padded_columns(E, rows.columns) * Rows::kVectors;
    const PartUnits<Parts> units(scales.group);
    const int8_t* bytes[M];
#pragma GCC unroll 8
    for (int t = 0; t < M; ++t) bytes[t] = bytes_of_row(x[t]);
    for (int64_t step = 0; step < rows.steps; ++step, rows.go_on(), out += kRows * M) {
        F sum[kRows][M];
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
            for (int t = 0; t < M; ++t) sum[r][t] = zero();
        }
        walk_units<E, Parts, From>(
            rows, scales, units.by, true,
            [&](int64_t block, int r, const I* words, const F* s, const I* zeros) __attribute__((always_inline)) {
#pragma GCC unroll 2
                for (int p = 0; p < Parts; ++p) {
                    typename Rows::UnitSum acc[M];
                    const auto own = [&](int t) __attribute__((always_inline)) {
                        return starts_of<Rows>(bytes[t] + row_bytes, block * Parts + p);
                    };
#pragma GCC unroll 8
                    for (int t = 0; t < M; ++t) acc[t] = start_of<Rows, E>(own(t));
#pragma GCC unroll 8
                    for (int i = p * 8 / Parts; i < (p + 1) * 8 / Parts; ++i) {
                        const I w = code_at<E>(words, i);
#pragma GCC unroll 8
                        for (int t = 0; t < M; ++t) acc[t].add(w, Rows::take(bytes[t] + (block * 8 + i) * kStep));
                    }
#pragma GCC unroll 8
                    for (int t = 0; t < M; ++t)
                        sum[r][t] = fma(end_of<Rows, E>(acc[t], own(t), zeros[p]), s[p], sum[r][t]);
                }
            });
#pragma GCC unroll 8
        for (int t = 0; t < M; ++t) sums(sum[0][t], sum[1][t], sum[2][t], sum[3][t], out + kRows * t);
    }
}

// Four rows decoded for many tokens: codes [row][block][vector], scales and zeros [block][row][part].
struct Panel {
    uint8_t* codes[kRows];
    float* scales;
    int32_t* zeros;
    int64_t parts;          // of blocks but shared ones
    int64_t first, starts;  // bytes of a token's row in front of what tiles read, and of that in front of the starts
};

template <class Tiled, Element E, int Parts, ScalesFrom From>
static void decode_units(const FourRows& rows, const Scales& scales, const Panel& panel) {
    walk_units<E, Parts, From>(
        rows, scales, PartUnits<Parts>(scales.group).by, false,
        [&](int64_t block, int r, const I* words, const F* s, const I* zeros) __attribute__((always_inline)) {
#pragma GCC unroll 16
            for (int i = 0; i < 8 * Tiled::kVectors; ++i)
                store_bytes(panel.codes[r] + (block * 8 * Tiled::kVectors + i) * kVectorBytes,
                            Tiled::vector_of(code_at<E>(words, i / Tiled::kVectors), i % Tiled::kVectors));
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

// Float sums of a tile, beside the exact ones of a block.
template <class Tiled, Element E, int Parts, int M>
static void tile(const Panel& panel, const float* const* x, float* out) {
    const int8_t* bytes[M];
    F sum[kRows][M];
#pragma GCC unroll 8
    for (int t = 0; t < M; ++t) {
        bytes[t] = bytes_of_row(x[t]) + panel.first;
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) sum[r][t] = zero();
    }
    const uint8_t* codes = panel.codes[0];
    const int64_t row_step = panel.codes[1] - codes;
    constexpr int kSteps = 8 / Parts * Tiled::kVectors;
    for (int64_t n = 0; n < panel.parts; ++n, codes += kSteps * kVectorBytes) {
        // Parts of one block follow one another; each has its scales of four rows.
        const int64_t part = n % Parts, place = (n - part) * kRows + part;
        const auto own = [&](int t)
                             __attribute__((always_inline)) { return starts_of<Tiled>(bytes[t] + panel.starts, n); };
        typename Tiled::UnitSum acc[kRows][M];
        I w[kRows];
#pragma GCC unroll 8
        for (int t = 0; t < M; ++t)
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r) acc[r][t] = start_of<Tiled, E>(own(t));
#pragma GCC unroll 16
        for (int i = 0; i < kSteps; ++i) {
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r) w[r] = load_bytes(codes + r * row_step + i * kVectorBytes);
#pragma GCC unroll 8
            for (int t = 0; t < M; ++t) {
                const auto v = Tiled::take(bytes[t] + (n * kSteps + i) * kVectorBytes);
#pragma GCC unroll 4
                for (int r = 0; r < kRows; ++r) acc[r][t].add(w[r], v);
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
            const F s = load(panel.scales + (place + r * Parts) * W);
            const I zeros = E == Element::u4 ? load_bytes(panel.zeros + (place + r * Parts) * W) : zero_bytes();
#pragma GCC unroll 8
            for (int t = 0; t < M; ++t) sum[r][t] = fma(end_of<Tiled, E>(acc[r][t], own(t), zeros), s, sum[r][t]);
        }
    }
#pragma GCC unroll 8
    for (int t = 0; t < M; ++t) sums(sum[0][t], sum[1][t], sum[2][t], sum[3][t], out + kRows * t);
}

// The lanes of sums of four rows and M tokens, as floats where more columns would leave 32 bits.
template <int M> struct LanesOfRows {
    F lanes[kRows][M];
    MOESTRO_INLINE void clear() {
        for (int r = 0; r < kRows; ++r)
            for (int t = 0; t < M; ++t) lanes[r][t] = zero();
    }
    MOESTRO_INLINE void add(const I (&acc)[kRows][M]) {
        for (int r = 0; r < kRows; ++r)
            for (int t = 0; t < M; ++t) lanes[r][t] = lanes[r][t] + to_floats(acc[r][t]);
    }
    MOESTRO_INLINE void of_token(int t, float* four) const {
        sums(lanes[0][t], lanes[1][t], lanes[2][t], lanes[3][t], four);
    }
};

// Integers all along the row: weights of a scale a row. A lane's sum of kMostColumns does not leave 32 bits.
template <class Rows, int M>
static void int8_dots(const FourRows& rows, const float* scales, const float* const* x, float* out) {
    const int8_t* bytes[M];
#pragma GCC unroll 8
    for (int t = 0; t < M; ++t) bytes[t] = bytes_of_row(x[t]);
    const uint8_t* from[kRows] = {rows.data[0], rows.data[1], rows.data[2], rows.data[3]};
    alignas(64) uint8_t last[kRows][kVectorBytes];
    const int64_t columns = rows.columns, whole = columns / kVectorBytes * kVectorBytes;
    if (whole < columns)
        for (int r = 0; r < kRows; ++r) copied(rows.data[r] + whole, columns - whole, last[r], kVectorBytes);
    constexpr bool kPieces = Rows::kMostColumns < moestro::kMostInt8Columns;
    LanesOfRows<M> pieces;
    if constexpr (kPieces) pieces.clear();
    I acc[kRows][M], w[kRows];
    int64_t k = 0;
    do {  // once without pieces: in a loop that may repeat gcc 12 keeps weights in memory
#pragma GCC unroll 8
        for (int t = 0; t < M; ++t) {
            const I start = load_bytes(bytes[t] - kHeadBytes + kStartBytes);
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r) acc[r][t] = start;
        }
        const int64_t end = kPieces && k + Rows::kMostColumns < columns ? k + Rows::kMostColumns : columns;
        for (int64_t stop = end < whole ? end : whole; k < end; stop += kVectorBytes) {
            for (; k < stop; k += kVectorBytes) {
#pragma GCC unroll 2
                for (int v = 0; v < Rows::kVectors; ++v) {
#pragma GCC unroll 4
                    for (int r = 0; r < kRows; ++r) {
                        if (v == 0 && rows.next[0] && (kVectorBytes >= 64 || k % 64 == 0)) prefetch(rows.next[r] + k);
                        w[r] = Rows::weights(from[r] + k, v);
                    }
                    add_integers(acc, w, bytes, k * Rows::kVectors + v * kVectorBytes,
                                 [](I a, I b, I c) __attribute__((always_inline)) { return Rows::dot_int8(a, b, c); });
                }
            }
            for (int r = 0; r < kRows && k == whole; ++r) from[r] = last[r] - whole;
        }
        if constexpr (kPieces) pieces.add(acc);
    } while (kPieces && k < columns);
    float own[kRows];  // by themselves, so that a compiler knows that `out` does not change them
    std::memcpy(own, scales, sizeof own);
#pragma GCC unroll 8
    for (int t = 0; t < M; ++t) {
        float four[kRows];
        if constexpr (kPieces) pieces.of_token(t, four);
        else integer_sums(acc[0][t], acc[1][t], acc[2][t], acc[3][t], four);
        const float s = scale_of_row(x[t]);
        for (int r = 0; r < kRows; ++r) out[kRows * t + r] = four[r] * own[r] * s;
    }
}

using Int8Dots = void (*)(const FourRows&, const float*, const float* const*, float*);
using Few = void (*)(FourRows, const Scales&, const float* const*, float*);
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
template <class Rows> struct MakeInt8 {
    template <int M> static constexpr Int8Dots of() { return int8_dots<Rows, M>; }
};
template <class Rows, Element E, int Parts, ScalesFrom From> struct MakeFew {
    template <int M> static constexpr Few of() { return few<Rows, E, Parts, From, M>; }
};
template <class Tiled, Element E, int Parts> struct MakeTile {
    template <int M> static constexpr Tile of() { return tile<Tiled, E, Parts, M>; }
};

template <class Rows, Element E, int Parts, ScalesFrom From>
static void many(const FourRows& rows, const Scales& scales, const float* const* x, int64_t m, float* out,
                 float* scratch) {
    using Tiled = typename Rows::Tiled;
    Panel panel;
    const int64_t whole = round_up(whole_columns(rows.columns), kUnits);
    panel.parts = whole / kUnits * Parts;
    const int64_t padded = padded_columns(E, rows.columns), row_bytes = padded * Rows::kVectors;
    constexpr bool kBehind = Rows::tiled_bytes(kUnits) > 0;
    panel.first = kBehind ? row_bytes + padded / 32 * 2 * 4 * Rows::kStarts : 0;
    panel.starts = kBehind ? whole * Tiled::kVectors : row_bytes;
    const int64_t of_units = panel.parts * kRows * W;
    panel.scales = scratch;
    panel.zeros = reinterpret_cast<int32_t*>(scratch + of_units);
    for (int r = 0; r < kRows; ++r)
        panel.codes[r] = reinterpret_cast<uint8_t*>(scratch + 2 * of_units) + r * (whole * Tiled::kVectors + 64);
    decode_units<Tiled, E, Parts, From>(rows, scales, panel);
    static constexpr ByTokens<Tile, Tiled::kUnitTokens, MakeTile<Tiled, E, Parts>> kTile;
    Prefetched next(rows, rows.columns / 2, m, Tiled::kUnitTokens);
    for (int64_t n = 0; m > 0; x += n, out += kRows * n, m -= n) {
        n = next_tile(m, Tiled::kUnitTokens);
        next.some();
        kTile.of[n](panel, x, out);
    }
}

template <class Rows, Element E, int Parts, ScalesFrom From = ScalesFrom::floats>
static void units(const FourRows& rows, const Scales& scales, const float* const* x, int64_t m, float* out,
                  float* scratch) {
    static constexpr ByTokens<Few, kFewUnitTokens, MakeFew<Rows, E, Parts, From>> kFew;
    if (m <= kFewUnitTokens) kFew.of[m](rows, scales, x, out);
    else
        in_steps(rows, m, out,
                 [&](const FourRows& four, float* to) { many<Rows, E, Parts, From>(four, scales, x, m, to, scratch); });
    if (whole_columns(rows.columns) < rows.columns)
        in_steps(rows, m, out,
                 [&](const FourRows& four, float* to) { add_shared<Rows, E, Parts, From>(four, scales, x, m, to); });
    take_scales(x, m, rows.steps, out);
}

// Weights of int8, one step of them.
template <class Rows> static void bytes_of_step(const FourRows& rows, const float* const* x, int64_t m, float* out) {
    static constexpr ByTokens<Int8Dots, Rows::kTileTokens, MakeInt8<Rows>> kDots;
    float scales[kRows];
    for (int r = 0; r < kRows; ++r) scales[r] = rows.global_scale[r] * one_scale(rows.scale, rows.scales[r]);
    if (m <= Rows::kTileTokens) return m > 0 ? kDots.of[m](rows, scales, x, out) : void();
    const int64_t tiles = (m + Rows::kTileTokens - 1) / Rows::kTileTokens;
    for (int64_t tile = 0, t = 0; m > 0; ++tile, x += t, out += kRows * t, m -= t) {
        t = next_tile(m, Rows::kTileTokens);
        kDots.of[t](fetching_share(rows, tile, tiles), scales, x, out);
    }
}

// Nibbles, one step of them, whose scales and zero points are read first.
template <class Rows, Element E>
static void nibbles_of_step(const FourRows& rows, const float* const* x, int64_t m, float* out, float* scratch) {
    const int64_t n = rows.group_columns ? (rows.columns + rows.group_columns - 1) / rows.group_columns : 1;
    const int64_t room = round_up(n, W) + 2 * W;
    const float factor = E == Element::e2m1 ? kE2m1Factor : 1.0f;
    Scales scales = {};
    scales.group = rows.group_columns ? rows.group_columns : round_up(rows.columns, kUnits);
    for (int r = 0; r < kRows; ++r, scratch += room) {
        read_scales(rows.scale, rows.scales[r], n, rows.global_scale[r] * factor, scratch, room);
        scales.scale[r] = scratch;
    }
    if constexpr (E == Element::u4) {
        for (int r = 0; r < kRows; ++r, scratch += room) {
            read_zeros(rows.zeros[r], n, scratch, room);
            scales.zero[r] = scratch;
        }
    }
    if (parts_of(rows.group_columns) == 2) return units<Rows, E, 2>(rows, scales, x, m, out, scratch);
    units<Rows, E, 1>(rows, scales, x, m, out, scratch);
}

template <class Rows, Element E>
static void run_integers(const FourRows& rows, const float* const* x, int64_t m, float* out, float* scratch) {
    if constexpr (kStoredScales<E> != ScalesFrom::floats) {
        if (scales_from<E>(rows) == kStoredScales<E>) {
            const Scales scales = {rows.group_columns, {}, {}};
            return units<Rows, E, 1, kStoredScales<E>>(rows, scales, x, m, out, scratch);
        }
    }
    in_steps(rows, m, out, [&](const FourRows& four, float* to) {
        if constexpr (E == Element::i8) bytes_of_step<Rows>(four, x, m, to);
        else nibbles_of_step<Rows, E>(four, x, m, to, scratch);
    });
}

template <class Rows>
static void integer_rows(const FourRows& rows, const float* const* x, int64_t m, float* out, float* scratch) {
    switch (rows.element) {  // with_integer was up to 2% slower here
        case Element::i8: return run_integers<Rows, Element::i8>(rows, x, m, out, scratch);
        case Element::e2m1: return run_integers<Rows, Element::e2m1>(rows, x, m, out, scratch);
        case Element::i4: return run_integers<Rows, Element::i4>(rows, x, m, out, scratch);
        default: return run_integers<Rows, Element::u4>(rows, x, m, out, scratch);
    }
}

template <class Rows> static int64_t integer_scratch(int64_t columns) {
    const int64_t padded = round_up(columns, kUnits), natural = 2 * kRows * (columns / 16 + 3 * W + 1);
    return natural + 2 * (padded / 16 * kRows) + kRows * (padded * Rows::Tiled::kVectors + 64) / 4;
}

}  // namespace MOESTRO_ISA
