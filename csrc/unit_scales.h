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

// Which scale is that of a part of a unit behind column k; the last where there are no columns.
MOESTRO_INLINE int64_t index_of(const Scales& scales, int64_t k, int64_t unit, int64_t part, int64_t n) {
    const int64_t at = (k + 32 * unit + 16 * part) >> log2_of(scales.group);
    return at < n ? at : n - 1;
}

template <int Parts> MOESTRO_INLINE F of_part(const float* p, const Units (&by)[Parts], int part) {
    if constexpr (Parts == 2) return of_half_units(p, by[part]);
    return of_units(load(p), by[part]);
}

// Those of a shared block from column k on, of `n` scales a row: lane 4 * unit + r is of row r.
template <ScalesFrom From> MOESTRO_INLINE F shared_scales(const Scales& scales, int64_t k, int64_t n, int64_t part) {
    alignas(64) uint8_t stored[4 * W];
    alignas(64) float factor[W];
    for (int l = 0; l < W; ++l) {
        const int64_t at = index_of(scales, k, l / 4, part, n);
        if constexpr (From == ScalesFrom::powers)
            stored[l] = scales.stored[l % 4][at], factor[l] = scales.factor[l % 4];
        else factor[l] = scales.scale[l % 4][at];
    }
    if constexpr (From == ScalesFrom::powers) return load_e8m0(stored) * load(factor);
    return load(factor);
}
// Likewise, for u4.
MOESTRO_INLINE F shared_zeros(const Scales& scales, int64_t k, int64_t n, int64_t part) {
    alignas(64) float zeros[W];
    for (int l = 0; l < W; ++l) zeros[l] = scales.zero[l % 4][index_of(scales, k, l / 4, part, n)];
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
