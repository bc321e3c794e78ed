// The byte part of the vector vocabulary on AVX2: 32 bytes or 8 integers of 32 bits. See bytes_avx512.h for what each
// does.
#pragma once

#include "vec_avx2.h"

namespace MOESTRO_ISA {

constexpr int kTileTokens = 2;  // 4 * 2 sums, 4 vectors of weights and a token's in 16 registers
constexpr int kUnitTokens = 1;
constexpr int kFewUnitTokens = 4;  // of one that decodes its weights in registers

inline I load_bytes(const void* p) { return {_mm256_loadu_si256(static_cast<const __m256i*>(p))}; }
inline void store_bytes(void* p, I a) { _mm256_storeu_si256(static_cast<__m256i*>(p), a.v); }
inline I zero_bytes() { return {_mm256_setzero_si256()}; }
inline I every_byte(int a) { return {_mm256_set1_epi8(static_cast<char>(a))}; }
inline I operator&(I a, I b) { return {_mm256_and_si256(a.v, b.v)}; }
inline I operator^(I a, I b) { return {_mm256_xor_si256(a.v, b.v)}; }
inline I operator+(I a, I b) { return {_mm256_add_epi32(a.v, b.v)}; }
inline I operator-(I a, I b) { return {_mm256_sub_epi32(a.v, b.v)}; }
// By a product: on Zen 3 shifts and shuffles share their units, and decoding has many shuffles.
inline I upper_nibbles(I a) { return {_mm256_mulhi_epu16(a.v, _mm256_set1_epi16(1 << 12))}; }
struct Bytes {
    __m256i table;
};
inline Bytes bytes_table(const uint8_t* sixteen) { return {_mm256_broadcastsi128_si256(sixteen_bytes(sixteen))}; }
constexpr bool kOneStepLookUp = false;
inline I look_up(Bytes bytes, I nibbles) { return {_mm256_shuffle_epi8(bytes.table, (nibbles & every_byte(15)).v)}; }

inline void transpose_lanes(I* r) {
    const __m256i a = _mm256_unpacklo_epi32(r[0].v, r[1].v), b = _mm256_unpackhi_epi32(r[0].v, r[1].v);
    const __m256i c = _mm256_unpacklo_epi32(r[2].v, r[3].v), d = _mm256_unpackhi_epi32(r[2].v, r[3].v);
    r[0].v = _mm256_unpacklo_epi64(a, c), r[1].v = _mm256_unpackhi_epi64(a, c);
    r[2].v = _mm256_unpacklo_epi64(b, d), r[3].v = _mm256_unpackhi_epi64(b, d);
}

constexpr bool kMasks = false;  // the last block of a row is read from a copy, and no SomeOfBlock is made
struct SomeOfBlock {
    explicit SomeOfBlock(int64_t columns);
};

struct Units {
    __m256i index, exponents;  // by which a lane's scale comes to its highest byte
};
inline Units units_of(int64_t group, int part) {
    int shift = 4;
    while ((int64_t{1} << shift) < group) ++shift;
    const __m256i lanes = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
    const __m256i halves = _mm256_add_epi32(_mm256_slli_epi32(lanes, 1), _mm256_set1_epi32(part));
    const __m256i index = _mm256_srl_epi32(halves, _mm_cvtsi32_si128(shift - 4));
    return {index, _mm256_or_si256(_mm256_slli_epi32(index, 24), _mm256_set1_epi32(0x808080))};
}
// As load_e8m0 and of_units. The exponent of 255 is that of infinity, and one bit more is NaN.
inline F of_unit_powers(const uint8_t* p, Units by) {
    int64_t eight;
    std::memcpy(&eight, p, sizeof eight);
    const __m256i e = _mm256_srli_epi32(_mm256_shuffle_epi8(_mm256_set1_epi64x(eight), by.exponents), 1);
    const __m256i nan = _mm256_cmpeq_epi32(e, _mm256_set1_epi32(0x7f800000));
    return {_mm256_castsi256_ps(_mm256_sub_epi32(_mm256_max_epu32(e, _mm256_set1_epi32(1 << 22)), nan))};
}
inline F of_units(F scales, Units by) { return {_mm256_permutevar8x32_ps(scales.v, by.index)}; }
inline F of_half_units(const float* p, Units by) { return {_mm256_i32gather_ps(p, by.index, 4)}; }

inline F to_floats(I a) { return {_mm256_cvtepi32_ps(a.v)}; }
inline I to_integers(F a) { return {_mm256_cvtps_epi32(a.v)}; }
inline I times_pairs(I a, I b) { return {_mm256_madd_epi16(a.v, b.v)}; }
inline void integer_sums(I a, I b, I c, I d, float* out) {
    const __m256i four = _mm256_hadd_epi32(_mm256_hadd_epi32(a.v, b.v), _mm256_hadd_epi32(c.v, d.v));
    const __m128i one = _mm_add_epi32(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1));
    _mm_storeu_ps(out, _mm_cvtepi32_ps(one));
}
inline F absolute(F a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
inline F larger(F a, F b) { return {_mm256_max_ps(a.v, b.v)}; }
inline float largest(F a) {
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
inline void store_as_bytes(int8_t* p, I a) {
    const __m128i half = _mm_packs_epi32(_mm256_castsi256_si128(a.v), _mm256_extracti128_si256(a.v, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(half, half));
}

// As 16-bit integers: the even bytes of codes, the odd ones, bytes from memory; and sums and products of integers.
inline I even_bytes(I a) { return {_mm256_and_si256(a.v, _mm256_set1_epi16(255))}; }
inline I odd_bytes(I a) { return {_mm256_srli_epi16(a.v, 8)}; }
inline I every_short(int a) { return {_mm256_set1_epi16(static_cast<short>(a))}; }
inline I load_as_shorts(const uint8_t* p) { return {_mm256_cvtepi8_epi16(sixteen_bytes(p))}; }
// gcc 12 would otherwise make all products first and keep them in memory.
inline I plus(I sum, I product) {
    __asm__("vpaddd %1, %0, %0" : "+x"(sum.v) : "x"(product.v));
    return sum;
}
inline I times(I a, I b) { return {_mm256_mullo_epi32(a.v, b.v)}; }
inline void store_as_shorts(int16_t* p, I a) {
    const __m128i eight = _mm_packs_epi32(_mm256_castsi256_si128(a.v), _mm256_extracti128_si256(a.v, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), eight);
}

#if defined(MOESTRO_VNNI_256)
constexpr int kInt8Offset = 128;
inline I int8_codes(I a) { return a ^ every_byte(0x80); }
inline I dot4(I acc, I codes, I bytes) {
    __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc.v) : "x"(codes.v), "x"(bytes.v));
    return acc;
}
inline I dot4_int8(I acc, I codes, I bytes) { return dot4(acc, codes, bytes); }
#else
constexpr int kInt8Offset = 0;
inline I int8_codes(I a) { return a; }
inline I dot4(I acc, I codes, I bytes) {
    const __m256i pairs = _mm256_maddubs_epi16(codes.v, bytes.v);
    return plus(acc, {_mm256_madd_epi16(pairs, _mm256_set1_epi16(1))});
}
// |weight| times the row's byte with the weight's sign: two such products fit 16 bits.
inline I dot4_int8(I acc, I codes, I bytes) {
    return dot4(acc, {_mm256_abs_epi8(codes.v)}, {_mm256_sign_epi8(bytes.v, codes.v)});
}
// As of unit_sum.h, by two sums of 16 bits in each lane. Begun with minus what codes are larger by than their values,
// which are within +-12 or in 0..15, the sum of 16 products with bytes fits at the end, whatever came between.
struct UnitSum {
    __m256i pairs;
    static inline UnitSum none() { return {_mm256_setzero_si256()}; }
    static inline UnitSum from(const int32_t* start) { return {load_bytes(start).v}; }
    inline void add(I codes, I bytes) {
        const __m256i products = _mm256_maddubs_epi16(codes.v, bytes.v);
        __asm__("vpaddw %1, %0, %0" : "+x"(pairs) : "x"(products));  // as `plus`
    }
    template <int Factor = 1> inline I value() const { return {_mm256_madd_epi16(pairs, _mm256_set1_epi16(Factor))}; }
    inline void store_negated(int32_t* start) const {
        store_bytes(start, {_mm256_sub_epi16(_mm256_setzero_si256(), pairs)});
    }
};
#endif

}  // namespace MOESTRO_ISA

#if defined(MOESTRO_VNNI_256)
#include "unit_sum.h"
#endif
