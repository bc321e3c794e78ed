// Rows of 16 bits as int8 with an int8 residual: a row quantized to 8-bit integers, and what that leaves of it,
// quantized again with a scale of its own. The products of both with integer weights add up to those of a row of 16-bit
// integers: off by at most 1/64,500 of the row's largest value, where rounding to bfloat16 is off by 2^-9 of each.
#pragma once

#include "int8.h"

namespace MOESTRO_ISA {

// One of the two; behind both stands what is left of the row meanwhile.
static int64_t residual_step(Element e, int64_t columns) {
    return round_up(integer_row_floats<RowsOfBytes>(e, columns), 16);
}
static int64_t residual_floats(Element e, int64_t columns) {
    return 2 * residual_step(e, columns) + round_up(columns, W);
}

// False, and nothing is written, for a row that is uneven, subnormal or not finite.
static bool quantize_residual_row(Element weights, int64_t columns, int64_t group_columns, const float* from,
                                  float* to) {
    const int64_t step = residual_step(weights, columns);
    if (!holds_16_bits(from, columns, RowsOfBytes::kMost)) return false;
    quantize_row<RowsOfBytes>(weights, columns, group_columns, from, to);
    float* left = to + 2 * step;
    const float s = scale_of_row(to);
    const F scale = set1(s), minus = set1(-s);
    for (int64_t i = 0; i < columns; i += W) {
        F v = zero();
        if (s > 0.0f) {
            const int64_t n = columns - i;
            const F x =
                n >= W ? load(from + i) : load_some<Element::f32>(reinterpret_cast<const uint8_t*>(from + i), n);
            v = fma(minus, round(at_least(at_most(x / scale, 127.0f), -127.0f)), x);
        }
        store(left + i, v);
    }
    return quantize_row<RowsOfBytes>(weights, columns, group_columns, left, to + step);
}

template <auto Int8Rows>
static void residual_rows_of(const FourRows& rows, const float* const* x, int64_t m, float* out, float* scratch) {
    const int64_t step = residual_step(rows.element, rows.columns);
    const float* both[2 * moestro::kTokenBlock];
    float sums[2 * moestro::kTokenBlock * kRows];
    for (int64_t t = 0; t < m; ++t) both[2 * t] = x[t], both[2 * t + 1] = x[t] + step;
    FourRows some = rows;
    for (int64_t left = rows.steps; left > 0; left -= some.steps) {
        some.steps = left * m < moestro::kTokenBlock ? left : moestro::kTokenBlock / m;
        Int8Rows(some, both, 2 * m, sums, scratch);
        for (int64_t i = 0; i < some.steps * m; ++i, out += kRows)
            for (int r = 0; r < kRows; ++r) out[r] = sums[2 * kRows * i + r] + sums[2 * kRows * i + kRows + r];
        for (int64_t i = 0; i < some.steps; ++i) some.go_on();
    }
}

static constexpr moestro::RowOps kInt8Residual = {residual_floats, quantize_residual_row, residual_rows_of<int8_rows>,
                                                  integer_scratch<RowsOfBytes>};

}  // namespace MOESTRO_ISA
