// Rows of tokens as integers of 8 or of 16 bits, each with one scale, laid out for the weights that they meet: int8
// ones, or nibbles. Included after epilogue.h by the files of such products. `Rows` of a template is RowsOfBytes
// (int8.h) or RowsOfShorts (int16.h): what stands in a row and how it is multiplied.
//
// A block of nibbles is 32 * W columns. Four vectors of stored bytes, their integers transposed in 128-bit lanes, give
// eight vectors whose every lane holds four columns of one unit of 32; so the products of all eight leave in each lane
// the exact sum of a unit, and one conversion and one multiplication serve W units. Rows lie in that order. Where
// scales are for 16 columns, a lane's first four vectors and its last four are sums of their own: a part each.
#pragma once

#include "unit_scales.h"

namespace MOESTRO_ISA {

constexpr int64_t kUnits = 32 * W;  // columns of a block of nibbles
// Few columns behind the last whole block are in shared blocks of kBlock columns: the four stored vectors are of one
// row of weights each, and a lane holds a unit of one of four rows. Each takes as many bytes of a token's row as a
// whole block, and about half as long as one block of each of the four rows. So two at most.
constexpr int64_t kSharedBlocks = W < 16 ? 2 : 0;
constexpr int64_t kVectorBytes = 4 * W;

// A row: its scale; what the sums of lanes against int8 weights begin with; its integers; and for nibbles the sums of
// its units, of every part of every block, times minus what codes are larger by than their values: what the exact sum
// of a part begins with, kStarts vectors. For u4 the first of them has minus the sum, as 32-bit integers. Behind them,
// where Rows::tiled_bytes says so, whole blocks as tiles of many tokens read them, and what their sums begin with.
constexpr int64_t kStartBytes = 64, kHeadBytes = kStartBytes + 64;

// The integers of a row, as bytes.
MOESTRO_INLINE const int8_t* bytes_of_row(const float* row) {
    return reinterpret_cast<const int8_t*>(row) + kHeadBytes;
}
// Those in front of shared blocks.
constexpr int64_t whole_columns(int64_t columns) {
    return columns % kUnits <= kSharedBlocks * kBlock ? columns / kUnits * kUnits : columns;
}
constexpr int64_t padded_columns(Element e, int64_t columns) {
    if (!moestro::is_nibble(e)) return round_up(columns, kVectorBytes);
    const int64_t whole = whole_columns(columns);
    return round_up(whole, kUnits) + round_up(columns - whole, kBlock) / kBlock * kUnits;
}
constexpr int parts_of(int64_t group_columns) { return group_columns == 16 ? 2 : 1; }
constexpr int offset_of(Element e) {
    return e == Element::i4 ? 8 : e == Element::e2m1 ? 12 : 1;
}  // u4: times a zero point

template <class Rows> static int64_t integer_row_floats(Element e, int64_t columns) {
    const int64_t padded = padded_columns(e, columns), size = sizeof(typename Rows::Integer);
    if (!moestro::is_nibble(e)) return (kHeadBytes + padded * size) / 4;
    const int64_t tiled = Rows::tiled_bytes(round_up(whole_columns(columns), kUnits));
    return (kHeadBytes + padded * size + padded / 32 * 2 * 4 * Rows::kStarts + tiled) / 4;
}

// Two bytes in every four: the even columns of eight, or the odd ones.
MOESTRO_INLINE uint32_t every_second(uint64_t eight, int odd) {
    uint64_t v = (eight >> (8 * odd)) & 0x00ff00ff00ff00ffull;
    v = (v | v >> 8) & 0x0000ffff0000ffffull;
    return static_cast<uint32_t>(v | v >> 16);
}
// Bytes in natural order to that of decoded nibbles, vectors `step` bytes apart and each unit in `copies` lanes: of a
// block, or of a shared one.
static void order_bytes(const int8_t* from, int copies, int64_t step, int8_t* to) {
    constexpr int kLanes = W / 4;
    for (int unit = 0; unit < W / copies; ++unit) {
        const int lane = unit % kLanes * 4 + unit / kLanes;
        for (int i = 0; i < 4; ++i) {
            uint8_t eight[8];
            std::memcpy(eight, from + 32 * unit + 8 * i, 8);
            uint64_t word = 0;
            for (int b = 0; b < 8; ++b) word |= static_cast<uint64_t>(eight[b]) << (8 * b);
            for (int odd = 0; odd < 2; ++odd) {
                const uint32_t four = every_second(word, odd);
                uint8_t bytes[4];
                for (int b = 0; b < 4; ++b) bytes[b] = static_cast<uint8_t>(four >> (8 * b));
                for (int c = 0; c < copies; ++c) std::memcpy(to + (2 * i + odd) * step + 4 * (lane + c), bytes, 4);
            }
        }
    }
}
// What the sums of each lane's unit begin with, or of its halves, of an ordered block; for zero points one of integers.
template <class Rows> static void start_units(const int8_t* block, int parts, Element weights, int32_t* to) {
    constexpr int64_t kStep = Rows::kVectors * kVectorBytes;
    for (int p = 0; p < parts; ++p, to += Rows::kStarts * W) {
        auto sum = Rows::UnitSum::none();
        for (int i = p * 8 / parts; i < (p + 1) * 8 / parts; ++i)
            sum.add(every_byte(offset_of(weights)), Rows::take(block + i * kStep));
        if (weights == Element::u4) store_bytes(to, zero_bytes() - sum.value());
        else sum.store_negated(to);
    }
}

// max |row| / most; NaN where a value is not finite.
static float scale_of(const float* from, int64_t n, float most_of_integers) {
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
    return sum != sum ? sum : largest(most) / most_of_integers;
}

// `from` has `columns` floats, `to` room for integer_row_floats; weights that share a scale have `group_columns`.
template <class Rows>
static bool quantize_row(Element weights, int64_t columns, int64_t group_columns, const float* from, float* to) {
    using Integer = typename Rows::Integer;
    const bool nibbles = moestro::is_nibble(weights);
    const int64_t padded = padded_columns(weights, columns), block = nibbles ? kUnits : kVectorBytes;
    auto* integers = reinterpret_cast<Integer*>(reinterpret_cast<int8_t*>(to) + kHeadBytes);
    auto* sums = reinterpret_cast<int32_t*>(integers + padded);
    auto* const tiled = reinterpret_cast<int8_t*>(sums + padded / 32 * 2 * Rows::kStarts);
    const int64_t whole = round_up(whole_columns(columns), kUnits);
    const float s = scale_of(from, columns, Rows::kMost);
    const bool usable = s > 0.0f;  // not NaN
    const F scale = set1(s);
    const int parts = parts_of(group_columns);
    int32_t start = 0;
    for (int64_t k = 0, at = 0; at < padded; at += block, integers += block) {
        alignas(64) Integer natural[kUnits];
        const bool shared = nibbles && k >= whole_columns(columns);
        const int64_t taken = shared ? kBlock : block;
        for (int64_t i = 0; i < taken; i += W) {
            const int64_t left = columns - k - i;
            F v = zero();
            if (usable && left >= W) v = load(from + k + i);
            else if (usable && left > 0)
                v = load_some<Element::f32>(reinterpret_cast<const uint8_t*>(from + k + i), left);
            if (usable) v = at_least(at_most(v / scale, Rows::kMost), -Rows::kMost);
            Rows::store(natural + i, to_integers(v));
        }
        k += taken;
        if (!nibbles) {
            std::memcpy(integers, natural, static_cast<size_t>(block) * sizeof(Integer));
            for (int64_t i = 0; i < block; ++i) start -= Rows::kOffset * natural[i];
            continue;
        }
        auto* const bytes = reinterpret_cast<int8_t*>(integers);
        Rows::order(natural, shared ? 4 : 1, bytes);
        start_units<Rows>(bytes, parts, weights, sums);
        sums += parts * Rows::kStarts * W;
        if (!shared) Rows::order_tiled(natural, parts, weights, at / block * parts, tiled + 2 * at, tiled + 2 * whole);
    }
    int32_t lanes[W] = {start};
    std::memcpy(to, &s, sizeof s);
    std::memcpy(to + kStartBytes / 4, lanes, sizeof lanes);
    return true;
}

// Whether a row is all but its largest values to 8 bits, or none: more than half of what is not zero is zero to the
// first. `scale` is that of 8 bits.
static bool is_uneven(const float* from, int64_t n, float scale) {
    const float half = 0.5f * scale;
    int64_t small = 0, all = 0;
    for (int64_t i = 0; i < n; ++i) {
        const float size = from[i] < 0.0f ? -from[i] : from[i];
        all += size > 0.0f;
        small += size > 0.0f && size < half;
    }
    return 2 * small > all || (scale == 0.0f && all);
}

constexpr float kSmallestScale = 1.17549435e-38f;  // a normal number

// Whether more than 8 bits of a row are worth keeping, as integers up to `most`: not if it is uneven, not finite or so
// small that its scale is subnormal.
[[maybe_unused]] static bool holds_16_bits(const float* from, int64_t n, float most) {
    const float size = scale_of(from, n, 1.0f);
    return (size == 0.0f || size / most >= kSmallestScale) && !is_uneven(from, n, size / 127.0f);
}

}  // namespace MOESTRO_ISA
