// Rows of 16 bits as pairs of rows of 8: a row rounded to 8-bit integers, and what that leaves of it, rounded again with a
// scale of its own. The products of both with integer weights add up to those of a row of 16-bit integers: off by at most
// 1/64,500 of the row's largest value, where rounding to bfloat16 is off by 2^-9 of each.
#pragma once

#include "int8.h"

namespace MOESTRO_ISA {

constexpr int64_t kPairsAtOnce = 96;

// One of the two; behind both stands what is left of the row meanwhile.
static int64_t pair_step(Element e, int64_t columns) { return round_up(rounded_floats(e, columns), 16); }
static int64_t pair_floats(Element e, int64_t columns) { return 2 * pair_step(e, columns) + round_up(columns, W); }

static void round_pair(Element weights, int64_t columns, int64_t group_columns, const float* from, float* to) {
    const int64_t step = pair_step(weights, columns);
    round_row(weights, columns, group_columns, from, to);
    float* left = to + 2 * step;
    const float s = scale_of_row(to);
    const F scale = set1(s), minus = set1(-s);
    for (int64_t i = 0; i < columns; i += W) {
        F v = zero();
        if (s > 0.0f) {
            const int64_t n = columns - i;
            const F x = n >= W ? load(from + i) : load_some<Element::f32>(reinterpret_cast<const uint8_t*>(from + i), n);
            v = fma(minus, round(at_least(at_most(x / scale, 127.0f), -127.0f)), x);
        }
        store(left + i, v);
    }
    round_row(weights, columns, group_columns, left, to + step);
}

static void pair_rows(const FourRows& rows, const float* const* x, int64_t m, float* out, float* scratch) {
    const int64_t step = pair_step(rows.element, rows.columns);
    const float* both[2 * kPairsAtOnce];
    float sums[2 * kPairsAtOnce * kRows];
    for (int64_t first = 0; first < m; first += kPairsAtOnce) {
        const int64_t n = m - first < kPairsAtOnce ? m - first : kPairsAtOnce;
        for (int64_t t = 0; t < n; ++t) both[2 * t] = x[first + t], both[2 * t + 1] = x[first + t] + step;
        rounded_rows(rows, both, 2 * n, sums, scratch);
        for (int64_t t = 0; t < n; ++t)
            for (int r = 0; r < kRows; ++r) out[kRows * (first + t) + r] = sums[2 * kRows * t + r] + sums[2 * kRows * t + kRows + r];
    }
}

static constexpr moestro::RoundedOps kPairs = {pair_floats, round_pair, pair_rows, rounded_scratch};

}  // namespace MOESTRO_ISA
