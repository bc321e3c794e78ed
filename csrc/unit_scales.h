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
};

// Where they are read: of floats in a scratch; or of the rows themselves, where each unit has one: a power of two in a
// byte, or a float16. Floats are loaded right after they were stored, which takes longer than making them in the
// registers where they are needed.
enum class ScalesFrom { floats, powers, halves };
constexpr float kE2m1Factor = 0.5f;  // codes of e2m1 are of twice the value
// Of the kinds that there are kernels for: powers with e2m1, halves with i4.
template <Element E> constexpr ScalesFrom kStoredScales = ScalesFrom::floats;
template <> inline constexpr ScalesFrom kStoredScales<Element::e2m1> = ScalesFrom::powers;
template <> inline constexpr ScalesFrom kStoredScales<Element::i4> = ScalesFrom::halves;
constexpr int64_t stored_bytes(ScalesFrom from) { return from == ScalesFrom::powers ? 1 : 2; }

template <Element E> MOESTRO_INLINE ScalesFrom scales_from(const FourRows& rows) {
    constexpr ScalesFrom kStored = kStoredScales<E>;
    bool stored = rows.scale == (kStored == ScalesFrom::powers ? Scale::e8m0 : Scale::f16) && rows.group_columns == 32;
    for (float global : rows.global_scale) stored = stored && global == 1.0f;
    return stored ? kStored : ScalesFrom::floats;
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
template <ScalesFrom From>
MOESTRO_INLINE F shared_scales(const FourRows& rows, const Scales& scales, int64_t k, int64_t n, int64_t part) {
    alignas(64) uint8_t stored[2 * W] = {};
    alignas(64) float floats[W] = {};
    for (int l = 0; l < W && From == ScalesFrom::powers; ++l) stored[l] = 127;
    of_shared_lanes(scales, k, n, part, [&](int64_t l, int64_t r, int64_t at) {
        if constexpr (From == ScalesFrom::powers) stored[l] = rows.scales[r][at];
        if constexpr (From == ScalesFrom::halves) std::memcpy(stored + 2 * l, rows.scales[r] + 2 * at, 2);
        if constexpr (From == ScalesFrom::floats) floats[l] = scales.scale[r][at];
    });
    if constexpr (From == ScalesFrom::powers) return load_e8m0(stored) * set1(kE2m1Factor);
    if constexpr (From == ScalesFrom::halves) return load_f16(stored);
    return load(floats);
}
MOESTRO_INLINE F shared_zeros(const Scales& scales, int64_t k, int64_t n, int64_t part) {
    alignas(64) float zeros[W] = {};
    of_shared_lanes(scales, k, n, part, [&](int64_t l, int64_t r, int64_t at) { zeros[l] = scales.zero[r][at]; });
    return load(zeros);
}

// What the four rows hold of a block, at its columns and scales counted from the first of the row.
struct Blocks {
    const uint8_t* data[kRows];
    const uint8_t* scales[kRows];
};

// The last bytes of a row, followed by zeros.
static __attribute__((noinline)) const uint8_t* copied(const uint8_t* from, int64_t n, uint8_t* padded, int64_t size) {
    std::memset(padded, 0, static_cast<size_t>(size));
    std::memcpy(padded, from, static_cast<size_t>(n));
    return padded;
}

// Has `from` hold copies of the last bytes of the rows and of their scales, from column k on.
template <ScalesFrom From> static __attribute__((noinline)) void copy_last(Blocks& from, int64_t k, int64_t columns,
                                                                           uint8_t (&data)[kRows][16 * W],
                                                                           uint8_t (&scales)[kRows][4 * W]) {
    const int64_t first = k / 32, n = (columns - k + 31) / 32;
    for (int r = 0; r < kRows; ++r) {
        from.data[r] = copied(from.data[r] + k / 2, (columns - k) / 2, data[r], 16 * W) - k / 2;
        if (From == ScalesFrom::floats) continue;
        copy_some(scales[r], from.scales[r] + first * stored_bytes(From), n * stored_bytes(From),
                  From == ScalesFrom::powers ? 127 : 0);  // no NaN, no subnormal
        from.scales[r] = scales[r] - first * stored_bytes(From);
    }
}

// Which scale each lane has, of every part of a block.
template <int Parts> struct PartUnits {
    Units by[Parts];
    explicit PartUnits(int64_t group) {
        for (int p = 0; p < Parts; ++p) by[p] = units_of(group, p);
    }
};

// A block of which there are all columns, or a copy that was filled up.
struct WholeBlock {
    MOESTRO_INLINE I words(const uint8_t* p, int) const { return load_bytes(p); }
    MOESTRO_INLINE F powers(const uint8_t* p, Units by) const { return of_unit_powers(p, by); }
    MOESTRO_INLINE F halves(const uint8_t* p) const { return load_f16(p); }
};

// The scales of row r from the one `first` on, of a block.
template <ScalesFrom From, int Parts, class Block>
MOESTRO_INLINE F unit_scales(const Block& of, const Blocks& from, const Scales& scales, const Units (&by)[Parts], int r,
                             int64_t first, int part) {
    if constexpr (From == ScalesFrom::powers) return of.powers(from.scales[r] + first, by[part]) * set1(kE2m1Factor);
    if constexpr (From == ScalesFrom::halves) return of_units(of.halves(from.scales[r] + 2 * first), by[part]);
    return of_part<Parts>(scales.scale[r] + first, by, part);
}

}  // namespace MOESTRO_ISA
