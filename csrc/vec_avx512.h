// The vector vocabulary on AVX-512 (F, BW, DQ, VL): 16 lanes.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace MOESTRO_ISA {

constexpr int W = 16;
constexpr int kRegisterTokens = 6;  // token rows of a float32 tile: 4 * 6 sums, 4 weights and a token in 32 registers
constexpr int kRegisters = 32;      // of vectors
constexpr int kDirectTokens = 4;    // of a tile that decodes its weights in registers
constexpr int kDirect16BitTokens = kDirectTokens;

struct F {
    __m512 v;
};
struct I {
    __m512i v;
};

inline F zero() { return {_mm512_setzero_ps()}; }
inline F set1(float a) { return {_mm512_set1_ps(a)}; }
inline F load(const float* p) { return {_mm512_loadu_ps(p)}; }
// In a register: compilers load it anew for each of its products.
inline __attribute__((always_inline)) void keep(F& a) { __asm__("" : "+v"(a.v)); }
inline void store(float* p, F a) { _mm512_storeu_ps(p, a.v); }
inline F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F operator+(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F operator-(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F operator*(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F operator/(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
// Of a NaN and a bound both give the NaN: the second operand.
inline F at_most(F a, float bound) { return {_mm512_min_ps(_mm512_set1_ps(bound), a.v)}; }
inline F at_least(F a, float bound) { return {_mm512_max_ps(_mm512_set1_ps(bound), a.v)}; }
inline F round(F a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline F times_power_of_2(F a, F n) { return {_mm512_scalef_ps(a.v, n.v)}; }

// W stored elements as floats; columns in their order.
inline F load_f32(const uint8_t* p) { return {_mm512_loadu_ps(p)}; }
inline F load_f16(const uint8_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline F load_bf16(const uint8_t* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
inline F load_i8(const uint8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
// e4m3 shifted into the bits of a float16 is 2^-8 of its value, subnormals included; 0x7f is NaN.
constexpr float kE4m3Factor = 256.0f;
struct Two {
    F first, second;
};
inline Two load_two_e4m3(const uint8_t* p) {
    const __m512i wide = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    const __m512i magnitude = _mm512_and_si512(wide, _mm512_set1_epi16(0x7f));
    const __mmask32 nan = _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(0x7f));
    // 0xf8: a | (b & c), the sign from the byte's place in a word's upper half.
    __m512i half = _mm512_ternarylogic_epi32(_mm512_slli_epi16(magnitude, 7), _mm512_slli_epi16(wide, 8),
                                             _mm512_set1_epi16(INT16_MIN), 0xf8);
    half = _mm512_mask_mov_epi16(half, nan, _mm512_set1_epi16(0x7fff));
    return {{_mm512_cvtph_ps(_mm512_castsi512_si256(half))}, {_mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1))}};
}
// The same, but for NaN, which is not told from 480.
inline Two load_two_e4m3_but_nan(const uint8_t* p) {
    const __m512i wide =
        _mm512_slli_epi16(_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 7);
    const __m512i half = _mm512_and_si512(wide, _mm512_set1_epi16(static_cast<short>(0xbf80)));
    return {{_mm512_cvtph_ps(_mm512_castsi512_si256(half))}, {_mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1))}};
}
struct NanOfE4m3 {
    __m512i most = _mm512_setzero_si512();
    // 64 elements: without its sign NaN is the largest of bytes.
    inline __attribute__((always_inline)) void see(const uint8_t* p) {
        const __m512i v = _mm512_loadu_si512(p);
        most = _mm512_max_epu8(most, _mm512_add_epi8(v, v));
    }
    bool seen() const { return _mm512_cmpeq_epi8_mask(most, _mm512_set1_epi8(static_cast<char>(0xfe))) != 0; }
};
inline F load_e4m3_parts(const uint8_t* p) {
    const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m256i magnitude = _mm256_and_si256(wide, _mm256_set1_epi16(0x7f));
    const __m256i sign = _mm256_and_si256(_mm256_slli_epi16(wide, 8), _mm256_set1_epi16(INT16_MIN));
    const __m256i half = _mm256_or_si256(_mm256_slli_epi16(magnitude, 7), sign);
    return {_mm512_cvtph_ps(_mm256_mask_mov_epi16(half, _mm256_cmpeq_epi16_mask(magnitude, _mm256_set1_epi16(0x7f)),
                                                  _mm256_set1_epi16(0x7fff)))};
}
inline F load_e4m3(const uint8_t* p) { return load_e4m3_parts(p) * set1(kE4m3Factor); }
// 2^(e - 127); 255 is NaN.
inline F powers_e8m0(__m128i exponents) {
    const __m512i e = _mm512_cvtepu8_epi32(exponents);
    const __m512i bits = _mm512_max_epu32(_mm512_slli_epi32(e, 23), _mm512_set1_epi32(1 << 22));
    const __mmask16 nan = _mm512_cmpeq_epi32_mask(e, _mm512_set1_epi32(255));
    return {_mm512_castsi512_ps(_mm512_mask_mov_epi32(bits, nan, _mm512_set1_epi32(0x7fc00000)))};
}
inline F load_e8m0(const uint8_t* p) { return powers_e8m0(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline F load_u8(const uint8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}

// W words of 8 nibbles; nibble j of lane l is column 8 * l + j of the block.
inline I load_words(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
// The first n bytes, zeros behind them.
inline I load_some_words(const uint8_t* p, int64_t n) { return {_mm512_maskz_loadu_epi8((__mmask64{1} << n) - 1, p)}; }
// The first n bytes of 4 * W, `fill` behind them.
inline void copy_some(uint8_t* to, const uint8_t* from, int64_t n, uint8_t fill) {
    const __m512i filled = _mm512_set1_epi8(static_cast<char>(fill));
    _mm512_storeu_si512(to, _mm512_mask_loadu_epi8(filled, (__mmask64{1} << n) - 1, from));
}
struct Nibbles {
    __m512 table;
};
inline Nibbles e2m1_values() {
    return {_mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6)};
}
inline Nibbles i4_values() { return {_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1)}; }
inline Nibbles u4_values() { return {_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)}; }
inline Nibbles table_values(const float* sixteen) { return {_mm512_loadu_ps(sixteen)}; }
// vpermps reads the low four bits of a lane.
template <int J> inline F nibble(Nibbles values, I words) {
    return {_mm512_permutexvar_ps(J ? _mm512_srli_epi32(words.v, 4 * J) : words.v, values.table)};
}

// Lane l is p[8 * l / group]: what a block's columns share, eight columns a lane. Reads W floats.
struct Spread {
    __m512i index;
};
inline Spread spread_of(int64_t group) {
    const __m512i lanes = _mm512_setr_epi32(0, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120);
    int shift = 0;
    while ((int64_t{1} << shift) < group) ++shift;
    return {_mm512_srl_epi32(lanes, _mm_cvtsi32_si128(shift))};
}
inline F spread(const float* p, Spread by) { return {_mm512_permutexvar_ps(by.index, _mm512_loadu_ps(p))}; }

// gcc takes a function that only prefetches for one without effects, and drops calls to it unless they are inlined
// first.
inline __attribute__((always_inline)) void prefetch(const void* p) {
    _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1);
}

// Four sums of lanes. Each adds its lanes in the same order, whatever its place.
inline void sums(F a, F b, F c, F d, float* out) {
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a.v, b.v), _mm512_unpackhi_ps(a.v, b.v));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c.v, d.v), _mm512_unpackhi_ps(c.v, d.v));
    const __m512 low = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd)));
    const __m512 high = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd)));
    const __m512 four = _mm512_add_ps(low, high);  // each 128-bit lane: a, b, c, d
    const __m256 two = _mm256_add_ps(_mm512_castps512_ps256(four), _mm512_extractf32x8_ps(four, 1));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(two), _mm256_extractf128_ps(two, 1)));
}

inline void store_f16(uint16_t* p, F a) {
    const __m256i half = _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), half);
}
inline void store_bf16(uint16_t* p, F a) {
    const __m512i bits = _mm512_castps_si512(a.v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    rounded = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(rounded));
}

}  // namespace MOESTRO_ISA
