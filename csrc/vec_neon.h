// The vector vocabulary on NEON (ARM64): 4 lanes. What each does is said in vec_avx512.h and vec_avx2.h.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace MOESTRO_ISA {

constexpr int W = 4;
constexpr int kRegisterTokens = 6;  // 4 * 6 sums, 4 weights and a token in 32 registers
constexpr int kRegisters = 32;      // of vectors
constexpr int kDirectTokens = 4;
constexpr int kDirect16BitTokens = kDirectTokens;

struct F {
    float32x4_t v;
};
struct I {
    int32x4_t v;
};

inline F zero() { return {vdupq_n_f32(0.0f)}; }
inline F set1(float a) { return {vdupq_n_f32(a)}; }
inline F load(const float* p) { return {vld1q_f32(p)}; }
// In a register: compilers load it anew for each of its products.
inline __attribute__((always_inline)) void keep(F& a) { __asm__("" : "+w"(a.v)); }
inline void store(float* p, F a) { vst1q_f32(p, a.v); }
inline F fma(F a, F b, F c) { return {vfmaq_f32(c.v, a.v, b.v)}; }
inline F operator+(F a, F b) { return {vaddq_f32(a.v, b.v)}; }
inline F operator-(F a, F b) { return {vsubq_f32(a.v, b.v)}; }
inline F operator*(F a, F b) { return {vmulq_f32(a.v, b.v)}; }
inline F operator/(F a, F b) { return {vdivq_f32(a.v, b.v)}; }
// Of a NaN and a bound both give the NaN.
inline F at_most(F a, float bound) { return {vminq_f32(a.v, vdupq_n_f32(bound))}; }
inline F at_least(F a, float bound) { return {vmaxq_f32(a.v, vdupq_n_f32(bound))}; }
inline F round(F a) { return {vrndnq_f32(a.v)}; }
inline F of_bits(uint32x4_t bits) { return {vreinterpretq_f32_u32(bits)}; }
inline uint32x4_t as_words(I a) { return vreinterpretq_u32_s32(a.v); }
// n in -126..128, which `exp` keeps to; 128 gives infinity.
inline F times_power_of_2(F a, F n) {
    const int32x4_t e = vaddq_s32(vcvtnq_s32_f32(n.v), vdupq_n_s32(127));
    return a * F{vreinterpretq_f32_s32(vshlq_n_s32(e, 23))};
}

// W bytes, and behind them what is not read.
inline uint8x8_t four_bytes(const uint8_t* p) {
    uint32_t word;
    std::memcpy(&word, p, sizeof word);
    return vreinterpret_u8_u32(vdup_n_u32(word));
}
inline uint16x8_t wide_bytes(const uint8_t* p) { return vmovl_u8(four_bytes(p)); }

inline F load_f32(const uint8_t* p) { return {vreinterpretq_f32_u8(vld1q_u8(p))}; }
inline F load_f16(const uint8_t* p) { return {vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p)))}; }
inline F load_bf16(const uint8_t* p) { return of_bits(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(p)), 16)); }
inline F load_i8(const uint8_t* p) {
    return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(four_bytes(p))))))};
}
inline F load_u8(const uint8_t* p) { return {vcvtq_f32_u32(vmovl_u16(vget_low_u16(wide_bytes(p))))}; }
// e4m3 shifted into the bits of a float16 is 2^-8 of its value, subnormals included; 0x7f is NaN.
constexpr float kE4m3Factor = 256.0f;
struct Two {
    F first, second;
};
inline float16x8_t e4m3_halves(uint16x8_t bytes) {
    const uint16x8_t magnitude = vandq_u16(bytes, vdupq_n_u16(0x7f));
    const uint16x8_t sign = vshlq_n_u16(vandq_u16(bytes, vdupq_n_u16(0x80)), 8);
    const uint16x8_t nan = vandq_u16(vceqq_u16(magnitude, vdupq_n_u16(0x7f)), vdupq_n_u16(0x7fff));
    return vreinterpretq_f16_u16(vorrq_u16(vorrq_u16(vshlq_n_u16(magnitude, 7), sign), nan));
}
inline F load_e4m3_parts(const uint8_t* p) { return {vcvt_f32_f16(vget_low_f16(e4m3_halves(wide_bytes(p))))}; }
inline F load_e4m3(const uint8_t* p) { return load_e4m3_parts(p) * set1(kE4m3Factor); }
inline Two load_two_e4m3(const uint8_t* p) {
    const float16x8_t halves = e4m3_halves(vmovl_u8(vld1_u8(p)));
    return {{vcvt_f32_f16(vget_low_f16(halves))}, {vcvt_high_f32_f16(halves)}};
}
inline Two load_two_e4m3_but_nan(const uint8_t* p) { return load_two_e4m3(p); }  // NaN too
struct NanOfE4m3 {
    void see(const uint8_t*) {}
    bool seen() const { return false; }
};
// 2^(e - 127); 255 is NaN.
inline F load_e8m0(const uint8_t* p) {
    const uint32x4_t e = vmovl_u16(vget_low_u16(wide_bytes(p)));
    const uint32x4_t bits = vmaxq_u32(vshlq_n_u32(e, 23), vdupq_n_u32(1u << 22));
    return of_bits(vorrq_u32(bits, vandq_u32(vceqq_u32(e, vdupq_n_u32(255)), vdupq_n_u32(0x7fc00000))));
}

// W words of 8 nibbles; nibble j of lane l is column 8 * l + j of the block.
inline I load_words(const uint8_t* p) { return {vreinterpretq_s32_u8(vld1q_u8(p))}; }
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
    uint8x16_t doubled;
};
struct I4 {};
struct U4 {};
inline E2m1 e2m1_values() {
    alignas(16) static constexpr int8_t kDoubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    return {vreinterpretq_u8_s8(vld1q_s8(kDoubled))};
}
inline I4 i4_values() { return {}; }
inline U4 u4_values() { return {}; }
template <int J> inline uint32x4_t nibble_index(I words) {
    if constexpr (J == 0) return vandq_u32(as_words(words), vdupq_n_u32(15));
    else return vandq_u32(vshrq_n_u32(as_words(words), 4 * (J ? J : 1)), vdupq_n_u32(15));
}
// Above what stood below it.
template <int J> inline uint32x4_t nibble_on_top(I words) {
    if constexpr (J == 7) return as_words(words);
    else return vshlq_n_u32(as_words(words), 28 - 4 * (J < 7 ? J : 0));
}
// Twice the value in the upper byte of a lane: 2^25 of them are one. Nibble 8 is minus zero.
template <int J> inline F nibble(E2m1 values, I words) {
    const uint8x16_t at = vreinterpretq_u8_u32(nibble_index<J>(words));
    const int32x4_t found = vreinterpretq_s32_u8(vqtbl1q_u8(values.doubled, at));
    const uint32x4_t sign = vandq_u32(nibble_on_top<J>(words), vdupq_n_u32(0x80000000));
    const F value = {vcvtq_n_f32_s32(vshlq_n_s32(found, 24), 25)};
    return of_bits(vorrq_u32(vreinterpretq_u32_f32(value.v), sign));
}
template <int J> inline F nibble(I4, I words) {
    const uint32x4_t alone = vandq_u32(nibble_on_top<J>(words), vdupq_n_u32(0xf0000000));
    return {vcvtq_n_f32_s32(vreinterpretq_s32_u32(alone), 28)};
}
template <int J> inline F nibble(U4, I words) { return {vcvtq_f32_u32(nibble_index<J>(words))}; }
struct TableOf16 {
    uint8x16x4_t bytes;
};
inline TableOf16 table_values(const float* sixteen) {
    const auto* p = reinterpret_cast<const uint8_t*>(sixteen);
    return {{{vld1q_u8(p), vld1q_u8(p + 16), vld1q_u8(p + 32), vld1q_u8(p + 48)}}};
}
// The four bytes of lane i of a table of words, by their index.
inline uint8x16_t bytes_of_lanes(uint32x4_t index) {
    return vreinterpretq_u8_u32(vmlaq_n_u32(vdupq_n_u32(0x03020100), index, 0x04040404));
}
template <int J> inline F nibble(const TableOf16& values, I words) {
    return {vreinterpretq_f32_u8(vqtbl4q_u8(values.bytes, bytes_of_lanes(nibble_index<J>(words))))};
}

// Lane l is p[8 * l / group]: what a block's columns share, eight columns a lane. Reads W floats.
struct Spread {
    uint8x16_t bytes;
};
inline Spread spread_of(int64_t group) {
    uint32_t index[W];
    for (int l = 0; l < W; ++l) index[l] = static_cast<uint32_t>(8 * l / group);
    return {bytes_of_lanes(vld1q_u32(index))};
}
inline F spread(const float* p, Spread by) {
    return {vreinterpretq_f32_u8(vqtbl1q_u8(vreinterpretq_u8_f32(vld1q_f32(p)), by.bytes))};
}

inline __attribute__((always_inline)) void prefetch(const void* p) { __builtin_prefetch(p); }

// Four sums of lanes. Each adds its lanes in the same order, whatever its place.
inline void sums(F a, F b, F c, F d, float* out) {
    vst1q_f32(out, vpaddq_f32(vpaddq_f32(a.v, b.v), vpaddq_f32(c.v, d.v)));
}

inline void store_f16(uint16_t* p, F a) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(a.v))); }
inline void store_bf16(uint16_t* p, F a) {
    const uint32x4_t bits = vreinterpretq_u32_f32(a.v);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t sum = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    const uint32x4_t number = vceqq_f32(a.v, a.v);
    vst1_u16(p, vshrn_n_u32(vbslq_u32(number, sum, vdupq_n_u32(0x7fc00000)), 16));
}

}  // namespace MOESTRO_ISA
