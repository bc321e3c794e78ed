// The byte part of the vector vocabulary for any processor: 16 bytes or 4 integers of 32 bits. See bytes_avx512.h for
// what each does. The bytes of an integer stand in its memory in order, whatever the processor's.
#pragma once

#include <cmath>

#include "vec_portable.h"

namespace MOESTRO_ISA {

constexpr int kTileTokens = 2;
constexpr int kUnitTokens = 1;
constexpr int kFewUnitTokens = 4;  // of one that decodes its weights in registers

using Unsigned = uint8_t __attribute__((vector_size(4 * W)));
inline I of_bytes(Unsigned bytes) { return {reinterpret_cast<Words>(bytes)}; }
inline Unsigned to_bytes(I a) { return reinterpret_cast<Unsigned>(a.v); }

inline I load_bytes(const void* p) { return {load_as<uint32_t>(p)}; }
inline void store_bytes(void* p, I a) { std::memcpy(p, &a.v, sizeof a.v); }
inline I zero_bytes() { return {Words{}}; }
inline I every_byte(int a) { return of_bytes(Unsigned{} + static_cast<uint8_t>(a)); }
inline I operator&(I a, I b) { return {a.v & b.v}; }
inline I operator^(I a, I b) { return {a.v ^ b.v}; }
inline I operator+(I a, I b) { return {a.v + b.v}; }
inline I operator-(I a, I b) { return {a.v - b.v}; }
inline I upper_nibbles(I a) { return {(a.v >> 4) & 0x0f0f0f0f}; }
struct Bytes {
    uint8_t table[16];
};
inline Bytes bytes_table(const uint8_t* sixteen) {
    Bytes bytes;
    std::memcpy(bytes.table, sixteen, 16);
    return bytes;
}
constexpr bool kOneStepLookUp = false;
// Sixteen loads: inlined into every loop they would only make it longer.
static __attribute__((noinline)) I look_up(const Bytes& bytes, I nibbles) {
    const Unsigned at = to_bytes(nibbles) & 15;
    Unsigned found;
    for (int i = 0; i < 4 * W; ++i) found[i] = bytes.table[at[i]];
    return of_bytes(found);
}

inline void transpose_lanes(I* r) {
    const I from[4] = {r[0], r[1], r[2], r[3]};
    for (int i = 0; i < 4; ++i) r[i].v = Words{from[0].v[i], from[1].v[i], from[2].v[i], from[3].v[i]};
}

constexpr bool kMasks = false;  // the last block of a row is read from a copy, and no SomeOfBlock is made
struct SomeOfBlock {
    explicit SomeOfBlock(int64_t columns);
};

struct Units {
    int index[W];
};
inline Units units_of(int64_t group, int part) {
    Units by;
    for (int l = 0; l < W; ++l) by.index[l] = static_cast<int>((32 * l + 16 * part) / group);
    return by;
}
inline F of_units(F scales, const Units& by) {
    return each([&](int l) { return scales.v[by.index[l]]; });
}
inline F of_unit_powers(const uint8_t* p, const Units& by) { return of_units(load_e8m0(p), by); }
inline F of_half_units(const float* p, const Units& by) {
    return each([&](int l) { return p[by.index[l]]; });
}

inline Integers as_signed(Words a) { return reinterpret_cast<Integers>(a); }
inline F to_floats(I a) { return {__builtin_convertvector(as_signed(a.v), Floats)}; }
// Of the two signed halves of each word.
inline Integers lower_halves(Words a) { return as_signed(a << 16) >> 16; }
inline Integers upper_halves(Words a) { return as_signed(a) >> 16; }
inline I times_pairs(I a, I b) {
    return {reinterpret_cast<Words>(lower_halves(a.v) * lower_halves(b.v) + upper_halves(a.v) * upper_halves(b.v))};
}
inline void integer_sums(I a, I b, I c, I d, float* out) {
    const I all[4] = {a, b, c, d};
    for (int i = 0; i < 4; ++i) {
        const uint32_t sum = all[i].v[0] + all[i].v[1] + all[i].v[2] + all[i].v[3];
        int32_t exact;
        std::memcpy(&exact, &sum, sizeof exact);
        out[i] = static_cast<float>(exact);
    }
}
inline F absolute(F a) { return from_bits(to_bits(a) & 0x7fffffff); }
inline F larger(F a, F b) { return {a.v > b.v ? a.v : b.v}; }
inline float largest(F a) { return std::fmax(std::fmax(a.v[0], a.v[1]), std::fmax(a.v[2], a.v[3])); }
inline void store_as_bytes(int8_t* p, I a) {
    const auto bytes = __builtin_convertvector(as_signed(a.v), VectorOf<int8_t>::type);
    std::memcpy(p, &bytes, sizeof bytes);
}

constexpr int kInt8Offset = 0;
inline I int8_codes(I a) { return a; }
// Even and odd bytes as halves of 16 bits, which a product of a byte and a signed byte fits.
using Halves = int16_t __attribute__((vector_size(4 * W)));
inline Integers sums_of_halves(Halves products) {
    const Words words = reinterpret_cast<Words>(products);
    return lower_halves(words) + upper_halves(words);
}
inline I dot4_of(I acc, Halves even, Halves odd, I bytes) {
    const Halves x = reinterpret_cast<Halves>(bytes.v), even_x = (x << 8) >> 8, odd_x = x >> 8;
    return {acc.v + reinterpret_cast<Words>(sums_of_halves(even * even_x) + sums_of_halves(odd * odd_x))};
}
inline I dot4(I acc, I codes, I bytes) {
    const Words even = codes.v & 0x00ff00ff, odd = (codes.v >> 8) & 0x00ff00ff;
    return dot4_of(acc, reinterpret_cast<Halves>(even), reinterpret_cast<Halves>(odd), bytes);
}
inline I dot4_int8(I acc, I codes, I bytes) {
    const Halves w = reinterpret_cast<Halves>(codes.v);
    return dot4_of(acc, (w << 8) >> 8, w >> 8, bytes);
}

}  // namespace MOESTRO_ISA

#include "unit_sum.h"
