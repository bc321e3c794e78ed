// Rows of 8-bit integers times weights that are integers.
#pragma once

#include "integer_dots.h"

namespace MOESTRO_ISA {

struct RowsOfBytes {
    using Integer = int8_t;
    using UnitSum = MOESTRO_ISA::UnitSum;
    static constexpr int kStarts = 1;  // vectors that the sums of units begin with
    static constexpr float kMost = 127.0f;
    static constexpr int kVectors = 1;  // of a row for a vector of weights
    static constexpr int kOffset = kInt8Offset;
    static constexpr int kTileTokens = MOESTRO_ISA::kTileTokens, kUnitTokens = MOESTRO_ISA::kUnitTokens;
    static constexpr int64_t kMostColumns = moestro::kMostInt8Columns;  // of all lanes together

    static MOESTRO_INLINE void store(int8_t* p, I integers) { store_as_bytes(p, integers); }
    static void order(const int8_t* from, int copies, int8_t* to) { order_bytes(from, copies, kVectorBytes, to); }
    static MOESTRO_INLINE I take(const int8_t* from) { return load_bytes(from); }
    // Tiles of many tokens read the same bytes.
    using Tiled = RowsOfBytes;
    static constexpr int64_t tiled_bytes(int64_t) { return 0; }
    static void order_tiled(const int8_t*, int, Element, int64_t, int8_t*, int8_t*) {}
    static MOESTRO_INLINE I vector_of(I codes, int) { return codes; }
    static MOESTRO_INLINE I weights(const uint8_t* from, int) { return int8_codes(load_bytes(from)); }
    static MOESTRO_INLINE I dot_int8(I acc, I codes, I bytes) { return dot4_int8(acc, codes, bytes); }
    static MOESTRO_INLINE I times_zeros(I sums, I zeros) { return times_pairs(sums, zeros); }  // sums of 16 bits
};

static constexpr auto int8_rows = integer_rows<RowsOfBytes>;
static constexpr moestro::RowOps kInt8 = {integer_row_floats<RowsOfBytes>, quantize_row<RowsOfBytes>, int8_rows,
                                          integer_scratch<RowsOfBytes>};

}  // namespace MOESTRO_ISA
