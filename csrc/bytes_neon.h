// The byte part of the vector vocabulary on NEON: 16 bytes or 4 integers of 32 bits. See bytes_avx512.h for what each
// does.
#pragma once

#include "vec_neon.h"

namespace MOESTRO_ISA {

constexpr int kTileTokens = 5;  // 4 * 5 sums, 4 vectors of weights and a token's in 32 registers
constexpr int kUnitTokens = 3;
constexpr int kFewUnitTokens = 4;  // of one that decodes its weights in registers

inline int8x16_t as_bytes(I a) { return vreinterpretq_s8_s32(a.v); }
inline uint8x16_t as_codes(I a) { return vreinterpretq_u8_s32(a.v); }

inline I load_bytes(const void* p) { return {vreinterpretq_s32_u8(vld1q_u8(static_cast<const uint8_t*>(p)))}; }
inline void store_bytes(void* p, I a) { vst1q_u8(static_cast<uint8_t*>(p), as_codes(a)); }
inline I zero_bytes() { return {vdupq_n_s32(0)}; }
inline I every_byte(int a) { return {vreinterpretq_s32_s8(vdupq_n_s8(static_cast<int8_t>(a)))}; }
inline I operator&(I a, I b) { return {vandq_s32(a.v, b.v)}; }
inline I operator^(I a, I b) { return {veorq_s32(a.v, b.v)}; }
inline I operator+(I a, I b) { return {vaddq_s32(a.v, b.v)}; }
inline I operator-(I a, I b) { return {vsubq_s32(a.v, b.v)}; }
inline I upper_nibbles(I a) { return {vreinterpretq_s32_u8(vshrq_n_u8(as_codes(a), 4))}; }
struct Bytes {
    uint8x16_t table;
};
inline Bytes bytes_table(const uint8_t* sixteen) { return {vld1q_u8(sixteen)}; }
constexpr bool kOneStepLookUp = false;
inline I look_up(Bytes bytes, I nibbles) {
    return {vreinterpretq_s32_u8(vqtbl1q_u8(bytes.table, as_codes(nibbles & every_byte(15))))};
}

inline void transpose_lanes(I* r) {
    const int32x4x2_t a = vtrnq_s32(r[0].v, r[1].v), b = vtrnq_s32(r[2].v, r[3].v);
    r[0].v = vcombine_s32(vget_low_s32(a.val[0]), vget_low_s32(b.val[0]));
    r[1].v = vcombine_s32(vget_low_s32(a.val[1]), vget_low_s32(b.val[1]));
    r[2].v = vcombine_s32(vget_high_s32(a.val[0]), vget_high_s32(b.val[0]));
    r[3].v = vcombine_s32(vget_high_s32(a.val[1]), vget_high_s32(b.val[1]));
}

constexpr bool kMasks = false;  // the last block of a row is read from a copy, and no SomeOfBlock is made
struct SomeOfBlock {
    explicit SomeOfBlock(int64_t columns);
};

struct Units {
    uint8x16_t bytes;
};
inline Units units_of(int64_t group, int part) {
    uint32_t index[W];
    for (int l = 0; l < W; ++l) index[l] = static_cast<uint32_t>((32 * l + 16 * part) / group);
    return {bytes_of_lanes(vld1q_u32(index))};
}
inline F of_units(F scales, Units by) {
    return {vreinterpretq_f32_u8(vqtbl1q_u8(vreinterpretq_u8_f32(scales.v), by.bytes))};
}
inline F of_unit_powers(const uint8_t* p, Units by) { return of_units(load_e8m0(p), by); }
inline F of_half_units(const float* p, Units by) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(p);
    return {vreinterpretq_f32_u8(vqtbl2q_u8({{vld1q_u8(bytes), vld1q_u8(bytes + 16)}}, by.bytes))};
}

inline F to_floats(I a) { return {vcvtq_f32_s32(a.v)}; }
inline I to_integers(F a) { return {vcvtnq_s32_f32(a.v)}; }
inline I times_pairs(I a, I b) {
    const int16x8_t x = vreinterpretq_s16_s32(a.v), y = vreinterpretq_s16_s32(b.v);
    return {vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y))};
}
inline void integer_sums(I a, I b, I c, I d, float* out) {
    vst1q_f32(out, vcvtq_f32_s32(vpaddq_s32(vpaddq_s32(a.v, b.v), vpaddq_s32(c.v, d.v))));
}
inline F absolute(F a) { return {vabsq_f32(a.v)}; }
inline F larger(F a, F b) { return {vmaxq_f32(a.v, b.v)}; }
inline float largest(F a) { return vmaxvq_f32(a.v); }
inline void store_as_bytes(int8_t* p, I a) {
    const int16x4_t halves = vmovn_s32(a.v);
    const int8x8_t bytes = vmovn_s16(vcombine_s16(halves, halves));
    std::memcpy(p, &bytes, W);
}

constexpr int kInt8Offset = 0;
inline I int8_codes(I a) { return a; }
inline I dot4_int8(I acc, I codes, I bytes) {
#if defined(__ARM_FEATURE_DOTPROD)
    return {vdotq_s32(acc.v, as_bytes(codes), as_bytes(bytes))};
#else
    const int16x8_t low = vmull_s8(vget_low_s8(as_bytes(codes)), vget_low_s8(as_bytes(bytes)));
    const int16x8_t high = vmull_high_s8(as_bytes(codes), as_bytes(bytes));
    return {vpadalq_s16(acc.v, vpaddq_s16(low, high))};  // rows' bytes are within +-127: two products fit 16 bits
#endif
}
inline I dot4(I acc, I codes, I bytes) { return dot4_int8(acc, codes, bytes); }

}  // namespace MOESTRO_ISA

#include "unit_sum.h"
