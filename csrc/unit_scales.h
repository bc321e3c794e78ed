// The scales of the units of a block of nibbles, a lane each: read into floats before a row's blocks, or as they are
// stored, with the block. Included by integer_rows.h.
#pragma once

#include "kernels.h"

namespace MOESTRO_ISA {

// Of four rows, in the order in which they are stored.
struct Scales {
    int64_t group;
    const float* scale[kRows];
    const float* zero[kRows];
    const uint8_t* stored[kRows];  // where each unit has a scale that is a power of two, a byte
    float factor[kRows];           // of those
};

// Which of the two. Scales as floats of a scratch are loaded right after they were stored, which takes longer than
// making them of bytes in the registers where they are needed; of other kinds that is not measured.
enum class ScalesFrom { floats, powers };
MOESTRO_INLINE ScalesFrom scales_from(const FourRows& rows) {
    return rows.scale == Scale::e8m0 && rows.group_columns == 32 ? ScalesFrom::powers : ScalesFrom::floats;
}

template <int Parts> MOESTRO_INLINE F of_part(const float* p, const Units (&by)[Parts], int part) {
    if constexpr (Parts == 2) return of_half_units(p, by[part]);
    return of_units(load(p), by[part]);
}

// Calls `put(l, r, at)` for each lane l with columns of a shared block from column k on: it is of row r, and `at` says
// which of the row's n scales its part of a unit has.
template <class Put>
MOESTRO_INLINE void of_shared_lanes(const Scales& scales, int64_t k, int64_t n, int64_t part, Put put) {
    const int shift = log2_of(scales.group);
    for (int64_t unit = 0; unit < W / 4; ++unit) {
        const int64_t at = (k + 32 * unit + 16 * part) >> shift;
        for (int64_t r = 0; r < kRows && at < n; ++r) put(4 * unit + r, r, at);
    }
}
template <ScalesFrom From> MOESTRO_INLINE F shared_scales(const Scales& scales, int64_t k, int64_t n, int64_t part) {
    alignas(64) uint8_t stored[W];
    alignas(64) float factor[W] = {};
    for (int l = 0; l < W; ++l) stored[l] = 127;
    of_shared_lanes(scales, k, n, part, [&](int64_t l, int64_t r, int64_t at) {
        if constexpr (From == ScalesFrom::powers) stored[l] = scales.stored[r][at], factor[l] = scales.factor[r];
        else factor[l] = scales.scale[r][at];
    });
    if constexpr (From == ScalesFrom::powers) return load_e8m0(stored) * load(factor);
    return load(factor);
}
MOESTRO_INLINE F shared_zeros(const Scales& scales, int64_t k, int64_t n, int64_t part) {
    alignas(64) float zeros[W] = {};
    of_shared_lanes(scales, k, n, part, [&](int64_t l, int64_t r, int64_t at) { zeros[l] = scales.zero[r][at]; });
    return load(zeros);
}

// Those of row r from the scale `first` of `n` on.
template <ScalesFrom From, int Parts> MOESTRO_INLINE F unit_scales(const Scales& scales, const Units (&by)[Parts],
                                                                   int r, int64_t first, int64_t n, int part) {
    if constexpr (From == ScalesFrom::floats) return of_part<Parts>(scales.scale[r] + first, by, part);
    const uint8_t* from = scales.stored[r] + first;
    alignas(64) uint8_t padded[4 * W];
    if (n - first < W) {
        copy_some(padded, from, n - first, 127);
        from = padded;
    }
    return of_units(load_e8m0(from) * set1(scales.factor[r]), by[part]);
}

}  // namespace MOESTRO_ISA
