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
