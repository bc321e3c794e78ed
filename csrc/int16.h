// Rows of 16 bits as integers of 16 bits, where no product of bytes has sums of 32 bits: a product of pairs of integers
// multiplies twice as many numbers as one of floats, and its sums are exact. Off by at most 1/65,278 of a row's largest
// value. Against nibbles each stands as two bytes, 256 times the one plus the other, both from -128 to 127.
#pragma once

#include "integer_dots.h"

namespace MOESTRO_ISA {

struct HighAndLow {
    I high, low;
};
struct UnitSumOfShorts {
    UnitSum high, low;
    static MOESTRO_INLINE UnitSumOfShorts none() { return {UnitSum::none(), UnitSum::none()}; }
    static MOESTRO_INLINE UnitSumOfShorts from(const int32_t* start) {
        return {UnitSum::from(start), UnitSum::from(start + W)};
    }
    MOESTRO_INLINE void add(I codes, HighAndLow bytes) { high.add(codes, bytes.high), low.add(codes, bytes.low); }
    MOESTRO_INLINE I value() const { return high.value<256>() + low.value(); }
    MOESTRO_INLINE void store_negated(int32_t* start) const { high.store_negated(start), low.store_negated(start + W); }
};

// Behind the two bytes whole blocks stand as shorts too, which tiles of many tokens read: their codes are widened to 16
// bits once for all tokens.
struct SumOfShorts {
    I sum;
    static MOESTRO_INLINE SumOfShorts none() { return {zero_bytes()}; }
    static MOESTRO_INLINE SumOfShorts from(const int32_t* start) { return {load_bytes(start)}; }
    MOESTRO_INLINE void add(I codes, I shorts) { sum = plus(sum, times_pairs(codes, shorts)); }
    MOESTRO_INLINE I value() const { return sum; }
};
struct TiledShorts {
    using UnitSum = SumOfShorts;
    static constexpr int kStarts = 1, kVectors = 2, kUnitTokens = 2;
    static MOESTRO_INLINE I take(const int8_t* from) { return load_bytes(from); }
    static MOESTRO_INLINE I vector_of(I codes, int odd) { return odd ? odd_bytes(codes) : even_bytes(codes); }
    static MOESTRO_INLINE I times_zeros(I sums, I zeros) { return times(sums, zeros); }
};

struct RowsOfShorts {
    using Integer = int16_t;
    using UnitSum = UnitSumOfShorts;
    static constexpr int kStarts = 2;
    static constexpr float kMost = 127.0f * 256.0f + 127.0f;
    static constexpr int kVectors = 2;
    static constexpr int kOffset = 0;
    static constexpr int kTileTokens = 2;
    static constexpr int64_t kMostColumns = 512 * W;  // 256 steps, each of two products of at most 128 * 32,639

    static void order(const int16_t* from, int copies, int8_t* to) {
        int8_t high[kUnits], low[kUnits];
        for (int64_t i = 0; i < kUnits / copies; ++i) {
            low[i] = static_cast<int8_t>(from[i] & 255);
            high[i] = static_cast<int8_t>((from[i] - low[i]) / 256);
        }
        order_bytes(high, copies, 2 * kVectorBytes, to);
        order_bytes(low, copies, 2 * kVectorBytes, to + kVectorBytes);
    }
    static MOESTRO_INLINE HighAndLow take(const int8_t* from) {
        return {load_bytes(from), load_bytes(from + kVectorBytes)};
    }
    using Tiled = TiledShorts;
    // Of whole blocks: shorts, and what sums begin with.
    static constexpr int64_t tiled_bytes(int64_t whole) { return 2 * whole + whole / 32 * 2 * 4; }
    // A vector of codes becomes one of its even bytes and one of its odd ones, so a lane's eight columns are the pairs
    // (0, 4), (2, 6), (1, 5) and (3, 7) of four vectors.
    static void order_tiled(const int16_t* from, int parts, Element weights, int64_t part, int8_t* shorts,
                            int8_t* starts) {
        constexpr int kLanes = W / 4, kShorts = 2 * W, kFirst[4] = {0, 2, 1, 3};
        for (int unit = 0; unit < W; ++unit) {
            int16_t* at = reinterpret_cast<int16_t*>(shorts) + 2 * (unit % kLanes * 4 + unit / kLanes);
            for (int i = 0; i < 4; ++i) {
                const int16_t* eight = from + 32 * unit + 8 * i;
                for (int v = 0; v < 4; ++v, at += kShorts) at[0] = eight[kFirst[v]], at[1] = eight[kFirst[v] + 4];
            }
        }
        for (int p = 0; p < parts; ++p) {
            auto sum = SumOfShorts::none();
            for (int i = p * 16 / parts; i < (p + 1) * 16 / parts; ++i)
                sum.add(every_short(offset_of(weights)), load_bytes(shorts + i * kVectorBytes));
            store_bytes(starts + (part + p) * 4 * W, zero_bytes() - sum.value());
        }
    }
    static MOESTRO_INLINE void store(int16_t* p, I integers) { store_as_shorts(p, integers); }
    static MOESTRO_INLINE I weights(const uint8_t* from, int v) { return load_as_shorts(from + 2 * v * W); }
    static MOESTRO_INLINE I dot_int8(I acc, I weights, I shorts) { return plus(acc, times_pairs(weights, shorts)); }
    static MOESTRO_INLINE I times_zeros(I sums, I zeros) { return times(sums, zeros); }
};

// Room for a row that stays floats too.
static int64_t int16_row_floats(Element e, int64_t columns) {
    const int64_t integers = integer_row_floats<RowsOfShorts>(e, columns), floats = round_up(columns, kBlock);
    return integers > floats ? integers : floats;
}

static bool quantize_16_bits(Element weights, int64_t columns, int64_t group_columns, const float* from, float* to) {
    return holds_16_bits(from, columns, RowsOfShorts::kMost) &&
           quantize_row<RowsOfShorts>(weights, columns, group_columns, from, to);
}

static constexpr moestro::RowOps kInt16 = {int16_row_floats, quantize_16_bits, integer_rows<RowsOfShorts>,
                                           integer_scratch<RowsOfShorts>};

}  // namespace MOESTRO_ISA
