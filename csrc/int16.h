// Rows of 16 bits as integers of 16 bits, where no product of bytes has sums of 32 bits: a product of pairs of integers
// multiplies twice as many numbers as one of floats, and its sums are exact. Off by at most 1/65,534 of a row's largest
// value.
#pragma once

#include "integer_dots.h"

namespace MOESTRO_ISA {

struct RowsOfShorts {
    using Integer = int16_t;
    static constexpr float kMost = 32767.0f;
    static constexpr int kVectors = 2;
    static constexpr int kOffset = 0;
    static constexpr int kTileTokens = 2, kUnitTokens = 2;
    static constexpr int64_t kMostColumns = 512 * W;  // 256 steps, each of two products of at most 128 * 32,767
    template <int M> using Total = LanesOfRows<M>;

    static MOESTRO_INLINE I every(int code) { return every_short(code); }
    static MOESTRO_INLINE void store(int16_t* p, I integers) { store_as_shorts(p, integers); }
    static MOESTRO_INLINE I vector_of(I codes, int odd) { return odd ? odd_bytes(codes) : even_bytes(codes); }
    static MOESTRO_INLINE I dot(I acc, I codes, I shorts) { return plus(acc, times_pairs(codes, shorts)); }
    static MOESTRO_INLINE I weights(const uint8_t* from, int v) { return load_as_shorts(from + 2 * v * W); }
    static MOESTRO_INLINE I dot_int8(I acc, I codes, I shorts) { return dot(acc, codes, shorts); }
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
