// The byte part of the vector vocabulary on AVX-512: 64 bytes or 16 integers of 32 bits. See vec_avx512.h.
#pragma once

#include "vec_avx512.h"

namespace MOESTRO_ISA {

constexpr int kTileTokens = 6;  // 4 * 6 sums, 4 vectors of weights and a token's in 32 registers
constexpr int kUnitTokens = 3;
constexpr int kFewUnitTokens = 8;  // of one that decodes its weights in registers
// Of eight tokens 32 sums of floats do not fit into registers; each is used once for 512 columns.

inline I load_bytes(const void* p) { return {_mm512_loadu_si512(p)}; }
inline void store_bytes(void* p, I a) { _mm512_storeu_si512(p, a.v); }
inline I zero_bytes() { return {_mm512_setzero_si512()}; }
inline I every_byte(int a) { return {_mm512_set1_epi8(static_cast<char>(a))}; }
inline I operator&(I a, I b) { return {_mm512_and_si512(a.v, b.v)}; }
inline I operator^(I a, I b) { return {_mm512_xor_si512(a.v, b.v)}; }
inline I operator+(I a, I b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline I operator-(I a, I b) { return {_mm512_sub_epi32(a.v, b.v)}; }
inline I upper_nibbles(I a) { return {_mm512_srli_epi16(a.v, 4)}; }  // beside them, what has to be masked
struct Bytes {
    __m512i table;
};
inline Bytes bytes_table(const uint8_t* sixteen) {
    return {_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(sixteen)))};
}
// By the lower four bits of each byte, whatever stands above them.
#if defined(__AVX512VBMI__)
constexpr bool kOneStepLookUp = true;
inline I look_up(Bytes bytes, I nibbles) { return {_mm512_permutexvar_epi8(nibbles.v, bytes.table)}; }
#else
constexpr bool kOneStepLookUp = false;
inline I look_up(Bytes bytes, I nibbles) { return {_mm512_shuffle_epi8(bytes.table, (nibbles & every_byte(15)).v)}; }
#endif

// Of four vectors, in each 128-bit lane: the first integers of all, the second, the third, the fourth.
inline void transpose_lanes(I* r) {
    const __m512i a = _mm512_unpacklo_epi32(r[0].v, r[1].v), b = _mm512_unpackhi_epi32(r[0].v, r[1].v);
    const __m512i c = _mm512_unpacklo_epi32(r[2].v, r[3].v), d = _mm512_unpackhi_epi32(r[2].v, r[3].v);
    r[0].v = _mm512_unpacklo_epi64(a, c), r[1].v = _mm512_unpackhi_epi64(a, c);
    r[2].v = _mm512_unpacklo_epi64(b, d), r[3].v = _mm512_unpackhi_epi64(b, d);
}

// Lane l is scale (32 * unit + 16 * part) / group for the unit that lane stands for; where groups have 16, of 2 * W.
struct Units {
    __m512i index;
};
inline Units units_of(int64_t group, int part) {
    int shift = 4;
    while ((int64_t{1} << shift) < group) ++shift;
    const __m512i lanes = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i halves = _mm512_add_epi32(_mm512_slli_epi32(lanes, 1), _mm512_set1_epi32(part));
    return {_mm512_srl_epi32(halves, _mm_cvtsi32_si128(shift - 4))};
}
inline F of_units(F scales, Units by) { return {_mm512_permutexvar_ps(by.index, scales.v)}; }
// The same of scales e8m0.
inline F of_unit_powers(const uint8_t* p, Units by) { return of_units(load_e8m0(p), by); }
inline F of_half_units(const float* p, Units by) {
    return {_mm512_permutex2var_ps(_mm512_loadu_ps(p), by.index, _mm512_loadu_ps(p + W))};
}

// The last block of a row, of which there are `columns` columns, a scale for each 32. Behind them are zeros, and ones
// as scales that are powers: a half of the least is subnormal, which takes longer.
constexpr bool kMasks = true;
class SomeOfBlock {
    __mmask64 bytes_[4];
    __mmask16 scales_;

public:
    explicit SomeOfBlock(int64_t columns) : scales_(static_cast<__mmask16>((1 << (columns + 31) / 32) - 1)) {
        for (int i = 0; i < 4; ++i) {
            const int64_t n = columns / 2 - 64 * i;
            bytes_[i] = n >= 64 ? ~__mmask64{0} : n > 0 ? (__mmask64{1} << n) - 1 : 0;
        }
    }
    inline __attribute__((always_inline)) I words(const uint8_t* p, int i) const {
        return {_mm512_maskz_loadu_epi8(bytes_[i], p)};
    }
    inline __attribute__((always_inline)) F powers(const uint8_t* p, Units by) const {
        return of_units(powers_e8m0(_mm_mask_loadu_epi8(_mm_set1_epi8(127), scales_, p)), by);
    }
    inline __attribute__((always_inline)) F halves(const uint8_t* p) const {
        return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(scales_, p))};
    }
};

inline F to_floats(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline I to_integers(F a) { return {_mm512_cvtps_epi32(a.v)}; }           // to nearest, ties to even
inline I times_pairs(I a, I b) { return {_mm512_madd_epi16(a.v, b.v)}; }  // of 16 bits, the products of two added
// Four sums of lanes, rounded to floats.
inline void integer_sums(I a, I b, I c, I d, float* out) {
    const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a.v, b.v), _mm512_unpackhi_epi32(a.v, b.v));
    const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c.v, d.v), _mm512_unpackhi_epi32(c.v, d.v));
    const __m512i four = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    const __m256i two = _mm256_add_epi32(_mm512_castsi512_si256(four), _mm512_extracti64x4_epi64(four, 1));
    const __m128i one = _mm_add_epi32(_mm256_castsi256_si128(two), _mm256_extracti128_si256(two, 1));
    _mm_storeu_ps(out, _mm_cvtepi32_ps(one));
}
inline F absolute(F a) { return {_mm512_abs_ps(a.v)}; }
inline F larger(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
inline float largest(F a) { return _mm512_reduce_max_ps(a.v); }
// W integers within +-127 as bytes.
inline void store_as_bytes(int8_t* p, I a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v));
}

// acc + the products of four neighbours, weights' codes below 32 unsigned, rows' bytes signed. `dot4_int8` takes
// weights of all 256 values as `int8_codes` gives them, which are larger by kInt8Offset.
#if defined(__AVX512VNNI__)
constexpr int kInt8Offset = 128;
inline I int8_codes(I a) { return a ^ every_byte(0x80); }
// Not by its intrinsic, whose sums gcc 12 keeps in memory where a loop has many of them.
inline I dot4(I acc, I codes, I bytes) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(acc.v) : "v"(codes.v), "v"(bytes.v));
    return acc;
}
inline I dot4_int8(I acc, I codes, I bytes) { return dot4(acc, codes, bytes); }
#else
constexpr int kInt8Offset = 0;
inline I int8_codes(I a) { return a; }
inline I dot4(I acc, I codes, I bytes) {
    const __m512i pairs = _mm512_maddubs_epi16(codes.v, bytes.v);
    return {_mm512_add_epi32(acc.v, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))};
}
// |weight| times the row's byte with the weight's sign: two such products fit 16 bits.
inline I dot4_int8(I acc, I codes, I bytes) {
    const __m512i turned = _mm512_mask_sub_epi8(bytes.v, _mm512_movepi8_mask(codes.v), _mm512_setzero_si512(), bytes.v);
    return dot4(acc, {_mm512_abs_epi8(codes.v)}, {turned});
}
#endif

}  // namespace MOESTRO_ISA

#include "unit_sum.h"
