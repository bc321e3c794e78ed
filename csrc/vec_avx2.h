// The vector vocabulary on AVX2 with FMA and F16C: 8 lanes.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace MOESTRO_ISA {

constexpr int W = 8;
constexpr int kRegisterTokens = 3;  // 4 * 3 sums, a token and three of weights in 16 registers
constexpr int kRegisters = 16;      // of vectors
constexpr int kDirectTokens = 3;
constexpr int kDirect16BitTokens = 9;  // three tiles: with more, decoding once takes fewer instructions

struct F {
    __m256 v;
};
struct I {
    __m256i v;
};

inline F zero() { return {_mm256_setzero_ps()}; }
inline F set1(float a) { return {_mm256_set1_ps(a)}; }
inline F load(const float* p) { return {_mm256_loadu_ps(p)}; }
// In a register: compilers load it anew for each of its products.
inline __attribute__((always_inline)) void keep(F& a) { __asm__("" : "+x"(a.v)); }
inline void store(float* p, F a) { _mm256_storeu_ps(p, a.v); }
inline F fma(F a, F b, F c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline F operator+(F a, F b) { return {_mm256_add_ps(a.v, b.v)}; }
inline F operator-(F a, F b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline F operator*(F a, F b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline F operator/(F a, F b) { return {_mm256_div_ps(a.v, b.v)}; }
// Of a NaN and a bound both give the NaN: the second operand.
inline F at_most(F a, float bound) { return {_mm256_min_ps(_mm256_set1_ps(bound), a.v)}; }
inline F at_least(F a, float bound) { return {_mm256_max_ps(_mm256_set1_ps(bound), a.v)}; }
inline F round(F a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// n in -126..128, which `exp` keeps to; 128 gives infinity.
inline F times_power_of_2(F a, F n) {
    const __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127));
    return {_mm256_mul_ps(a.v, _mm256_castsi256_ps(_mm256_slli_epi32(e, 23)))};
}

inline __m128i eight_bytes(const uint8_t* p) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)); }
inline __m128i sixteen_bytes(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }

// W stored elements as floats; columns in their order.
inline F load_f32(const uint8_t* p) { return {_mm256_loadu_ps(reinterpret_cast<const float*>(p))}; }
inline F load_f16(const uint8_t* p) { return {_mm256_cvtph_ps(sixteen_bytes(p))}; }
inline F load_bf16(const uint8_t* p) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(sixteen_bytes(p)), 16))};
}
inline F load_i8(const uint8_t* p) { return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight_bytes(p)))}; }
// e4m3 shifted into the bits of a float16 is 2^-8 of its value, subnormals included; 0x7f is NaN.
constexpr float kE4m3Factor = 256.0f;
inline F load_e4m3_parts(const uint8_t* p) {
    const __m128i wide = _mm_cvtepu8_epi16(eight_bytes(p));
    const __m128i magnitude = _mm_and_si128(wide, _mm_set1_epi16(0x7f));
    const __m128i sign = _mm_slli_epi16(_mm_and_si128(wide, _mm_set1_epi16(0x80)), 8);
    const __m128i nan = _mm_and_si128(_mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x7f)), _mm_set1_epi16(0x7fff));
    const __m128i half = _mm_or_si128(_mm_or_si128(_mm_slli_epi16(magnitude, 7), sign), nan);
    return {_mm256_cvtph_ps(half)};
}
inline F load_e4m3(const uint8_t* p) { return load_e4m3_parts(p) * set1(kE4m3Factor); }
struct Two {
    F first, second;
};
inline Two two_of_halves(__m256i half) {
    return {{_mm256_cvtph_ps(_mm256_castsi256_si128(half))}, {_mm256_cvtph_ps(_mm256_extracti128_si256(half, 1))}};
}
inline Two load_two_e4m3(const uint8_t* p) {
    const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(sixteen_bytes(p)), 7);
    const __m256i half = _mm256_and_si256(wide, _mm256_set1_epi16(static_cast<short>(0xbf80)));
    const __m256i nan = _mm256_cmpeq_epi16(_mm256_add_epi16(half, half), _mm256_set1_epi16(0x7f00));
    return two_of_halves(_mm256_or_si256(half, _mm256_and_si256(nan, _mm256_set1_epi16(0x7fff))));
}
// The same, but for NaN, which is not told from 480.
inline Two load_two_e4m3_but_nan(const uint8_t* p) {
    const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(sixteen_bytes(p)), 7);
    return two_of_halves(_mm256_and_si256(wide, _mm256_set1_epi16(static_cast<short>(0xbf80))));
}
struct NanOfE4m3 {
    __m256i most = _mm256_setzero_si256();
    // Without its sign NaN is the largest of bytes.
    inline __attribute__((always_inline)) void see(__m256i codes) {
        most = _mm256_max_epu8(most, _mm256_add_epi8(codes, codes));
    }
    // 64 elements.
    inline __attribute__((always_inline)) void see(const uint8_t* p) {
        see(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
        see(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32)));
    }
    bool seen() const {
        return _mm256_movemask_epi8(_mm256_cmpeq_epi8(most, _mm256_set1_epi8(static_cast<char>(0xfe)))) != 0;
    }
};
// 2^(e - 127); 255 is NaN.
inline F load_e8m0(const uint8_t* p) {
    const __m256i e = _mm256_cvtepu8_epi32(eight_bytes(p));
    const __m256i bits = _mm256_max_epu32(_mm256_slli_epi32(e, 23), _mm256_set1_epi32(1 << 22));
    const __m256i nan = _mm256_and_si256(_mm256_cmpeq_epi32(e, _mm256_set1_epi32(255)), _mm256_set1_epi32(0x7fc00000));
    return {_mm256_castsi256_ps(_mm256_or_si256(bits, nan))};
}
inline F load_u8(const uint8_t* p) { return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(eight_bytes(p)))}; }

// W words of 8 nibbles; nibble j of lane l is column 8 * l + j of the block.
inline I load_words(const uint8_t* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
// The first n bytes, zeros behind them.
inline I load_some_words(const uint8_t* p, int64_t n) {
    alignas(64) uint8_t padded[4 * W] = {};
    std::memcpy(padded, p, static_cast<size_t>(n));
    return load_words(padded);
}
// The first n bytes of 4 * W, `fill` behind them.
inline void copy_some(uint8_t* to, const uint8_t* from, int64_t n, uint8_t fill) {
    std::memset(to, fill, 4 * W);
    std::memcpy(to, from, static_cast<size_t>(n));
}
struct E2m1 {
    __m256 magnitudes;
};
struct I4 {};
struct U4 {};
inline E2m1 e2m1_values() { return {_mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6)}; }
inline I4 i4_values() { return {}; }
inline U4 u4_values() { return {}; }
// vpermps reads the low three bits of a lane; the fourth is the sign.
template <int J> inline F nibble(E2m1 values, I words) {
    const __m256i at = J ? _mm256_srli_epi32(words.v, 4 * J) : words.v;
    const __m256i sign = _mm256_and_si256(_mm256_slli_epi32(words.v, 28 - 4 * J), _mm256_set1_epi32(INT32_MIN));
    return {_mm256_or_ps(_mm256_permutevar8x32_ps(values.magnitudes, at), _mm256_castsi256_ps(sign))};
}
template <int J> inline F nibble(I4, I words) {
    return {_mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(words.v, 28 - 4 * J), 28))};
}
template <int J> inline F nibble(U4, I words) {
    return {_mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(words.v, 4 * J), _mm256_set1_epi32(15)))};
}
struct TableOf16 {
    __m256 lower, upper;
};
inline TableOf16 table_values(const float* sixteen) { return {_mm256_loadu_ps(sixteen), _mm256_loadu_ps(sixteen + 8)}; }
// The fourth bit chooses one of two look-ups.
template <int J> inline F nibble(TableOf16 values, I words) {
    const __m256i at = J ? _mm256_srli_epi32(words.v, 4 * J) : words.v;
    const __m256 half = _mm256_castsi256_ps(_mm256_slli_epi32(words.v, 28 - 4 * J));
    return {
        _mm256_blendv_ps(_mm256_permutevar8x32_ps(values.lower, at), _mm256_permutevar8x32_ps(values.upper, at), half)};
}

// Lane l is p[8 * l / group]: what a block's columns share, eight columns a lane. Reads W floats.
struct Spread {
    __m256i index;
};
inline Spread spread_of(int64_t group) {
    int shift = 0;
    while ((int64_t{1} << shift) < group) ++shift;
    return {_mm256_srl_epi32(_mm256_setr_epi32(0, 8, 16, 24, 32, 40, 48, 56), _mm_cvtsi32_si128(shift))};
}
inline F spread(const float* p, Spread by) { return {_mm256_permutevar8x32_ps(_mm256_loadu_ps(p), by.index)}; }

// gcc takes a function that only prefetches for one without effects, and drops calls to it unless they are inlined
// first.
inline __attribute__((always_inline)) void prefetch(const void* p) {
    _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0);
}

// Four sums of lanes. Each adds its lanes in the same order, whatever its place.
inline void sums(F a, F b, F c, F d, float* out) {
    const __m256 four = _mm256_hadd_ps(_mm256_hadd_ps(a.v, b.v), _mm256_hadd_ps(c.v, d.v));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(four), _mm256_extractf128_ps(four, 1)));
}

inline void store_f16(uint16_t* p, F a) {
    const __m128i half = _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), half);
}
inline void store_bf16(uint16_t* p, F a) {
    const __m256i bits = _mm256_castps_si256(a.v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i sum = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256 nan = _mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q);
    const __m256 chosen =
        _mm256_blendv_ps(_mm256_castsi256_ps(sum), _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000)), nan);
    const __m256i high = _mm256_srli_epi32(_mm256_castps_si256(chosen), 16);
    const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
}

}  // namespace MOESTRO_ISA
