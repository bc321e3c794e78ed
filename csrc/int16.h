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
    MOESTRO_INLINE void add(I codes, HighAndLow bytes) {
        __asm__("" : "+x"(codes.v));  // gcc would otherwise load codes from memory twice
        high.add(codes, bytes.high), low.add(codes, bytes.low);
    }
    MOESTRO_INLINE I value() const { return high.value<256>() + low.value(); }
    MOESTRO_INLINE void store_negated(int32_t* start) const { high.store_negated(start), low.store_negated(start + W); }
};

struct RowsOfShorts {
    using Integer = int16_t;
    using UnitSum = UnitSumOfShorts;
    static constexpr int kStarts = 2;
    static constexpr float kMost = 127.0f * 256.0f + 127.0f;
    static constexpr int kVectors = 2;
    static constexpr int kOffset = 0;
    static constexpr int kTileTokens = 2, kUnitTokens = 1;
    static constexpr int64_t kMostColumns = 512 * W;  // 256 steps, each of two products of at most 128 * 32,639
    template <int M> using Total = LanesOfRows<M>;

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
                                           integer_scratch};

}  // namespace MOESTRO_ISA
