// The vector vocabulary in plain C++: 4 lanes, which compilers put into whatever vectors there are (SSE2, NEON).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace MOESTRO_ISA {

constexpr int W = 4;
constexpr int kRegisterTokens = 2;
constexpr int kDirectTokens = 2;

struct F {
    float v[W];
};
struct I {
    uint32_t v[W];
};

template <class Make> inline F each(Make make) {
    F r;
    for (int l = 0; l < W; ++l) r.v[l] = make(l);
    return r;
}
inline float from_bits(uint32_t bits) {
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}
inline uint32_t to_bits(float f) {
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    return bits;
}

inline F zero() { return {}; }
inline F set1(float a) {
    return each([=](int) { return a; });
}
inline F load(const float* p) {
    F r;
    std::memcpy(r.v, p, sizeof r.v);
    return r;
}
inline void keep(F&) {}
inline void store(float* p, F a) { std::memcpy(p, a.v, sizeof a.v); }
inline F fma(F a, F b, F c) {
    return each([&](int l) { return a.v[l] * b.v[l] + c.v[l]; });
}
inline F operator+(F a, F b) {
    return each([&](int l) { return a.v[l] + b.v[l]; });
}
inline F operator-(F a, F b) {
    return each([&](int l) { return a.v[l] - b.v[l]; });
}
inline F operator*(F a, F b) {
    return each([&](int l) { return a.v[l] * b.v[l]; });
}
inline F operator/(F a, F b) {
    return each([&](int l) { return a.v[l] / b.v[l]; });
}
inline F at_most(F a, float bound) {
    return each([&](int l) { return a.v[l] > bound ? bound : a.v[l]; });
}
inline F at_least(F a, float bound) {
    return each([&](int l) { return a.v[l] < bound ? bound : a.v[l]; });
}
inline F round(F a) {
    return each([&](int l) { return std::nearbyint(a.v[l]); });
}
inline F times_power_of_2(F a, F n) {
    return each([&](int l) { return std::ldexp(a.v[l], static_cast<int>(n.v[l])); });
}

inline float half_value(uint16_t h) {
    const uint32_t sign = (h & 0x8000u) << 16, exponent = (h >> 10) & 31, mantissa = h & 0x3ffu;
    if (exponent == 31) return from_bits(sign | 0x7f800000u | (mantissa << 13));
    if (exponent) return from_bits(sign | ((exponent + 112) << 23) | (mantissa << 13));
    return from_bits(sign | to_bits(static_cast<float>(mantissa) * 0x1p-24f));
}
inline uint16_t half_bits(float f) {
    const uint32_t bits = to_bits(f), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
    if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds beyond 65504
    if (magnitude < 0x38800000u) {  // subnormal: the sum's last bit counts 2^-24
        return static_cast<uint16_t>(sign | (to_bits(from_bits(magnitude) + 0.5f) - to_bits(0.5f)));
    }
    const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1);
    return static_cast<uint16_t>(sign | ((rounded >> 13) - (112u << 10)));
}
inline uint16_t word(const uint8_t* p) {
    uint16_t w;
    std::memcpy(&w, p, 2);
    return w;
}

inline F load_f32(const uint8_t* p) {
    F r;
    std::memcpy(r.v, p, sizeof r.v);
    return r;
}
inline F load_f16(const uint8_t* p) {
    return each([=](int l) { return half_value(word(p + 2 * l)); });
}
inline F load_bf16(const uint8_t* p) {
    return each([=](int l) { return from_bits(uint32_t{word(p + 2 * l)} << 16); });
}
inline F load_i8(const uint8_t* p) {
    return each([=](int l) { return static_cast<float>(static_cast<int8_t>(p[l])); });
}
inline F load_u8(const uint8_t* p) {
    return each([=](int l) { return static_cast<float>(p[l]); });
}
// e4m3 shifted into the bits of a float16 is 2^-8 of its value, subnormals included; 0x7f is NaN.
constexpr float kE4m3Factor = 256.0f;
inline float e4m3_value(uint8_t b) {  // over kE4m3Factor
    const uint16_t magnitude = b & 0x7f;
    if (magnitude == 0x7f) return from_bits(0x7fc00000u);
    return half_value(static_cast<uint16_t>(((b & 0x80) << 8) | (magnitude << 7)));
}
inline F load_e4m3_parts(const uint8_t* p) {
    return each([=](int l) { return e4m3_value(p[l]); });
}
inline F load_e4m3(const uint8_t* p) { return load_e4m3_parts(p) * set1(kE4m3Factor); }
struct Two {
    F first, second;
};
inline Two load_two_e4m3(const uint8_t* p) { return {load_e4m3_parts(p), load_e4m3_parts(p + W)}; }
inline Two load_two_e4m3_but_nan(const uint8_t* p) { return load_two_e4m3(p); }  // NaN too
struct NanOfE4m3 {
    void see(const uint8_t*) {}
    bool seen() const { return false; }
};
inline F load_e8m0(const uint8_t* p) {
    return each([=](int l) {
        const uint32_t e = p[l];
        return from_bits(e == 255 ? 0x7fc00000u : e ? e << 23 : 1u << 22);
    });
}

inline I load_words(const uint8_t* p) {
    I r;
    std::memcpy(r.v, p, sizeof r.v);
    return r;
}
// The first n bytes, zeros behind them.
inline I load_some_words(const uint8_t* p, int64_t n) {
    alignas(64) uint8_t padded[4 * W] = {};
    std::memcpy(padded, p, static_cast<size_t>(n));
    return load_words(padded);
}
struct Nibbles {
    float table[16];
};
inline Nibbles e2m1_values() { return {{0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6}}; }
inline Nibbles i4_values() { return {{0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1}}; }
inline Nibbles u4_values() { return {{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}}; }
inline Nibbles table_values(const float* sixteen) {
    Nibbles values;
    std::memcpy(values.table, sixteen, sizeof values.table);
    return values;
}
template <int J> inline F nibble(const Nibbles& values, I words) {
    return each([&](int l) { return values.table[(words.v[l] >> (4 * J)) & 15]; });
}

struct Spread {
    int index[W];
};
inline Spread spread_of(int64_t group) {
    Spread by;
    for (int l = 0; l < W; ++l) by.index[l] = static_cast<int>(8 * l / group);
    return by;
}
inline F spread(const float* p, const Spread& by) {
    return each([&](int l) { return p[by.index[l]]; });
}

inline void prefetch(const void*) {}

inline void sums(F a, F b, F c, F d, float* out) {
    const F* all[4] = {&a, &b, &c, &d};
    for (int i = 0; i < 4; ++i) out[i] = (all[i]->v[0] + all[i]->v[1]) + (all[i]->v[2] + all[i]->v[3]);
}

inline void store_f16(uint16_t* p, F a) {
    for (int l = 0; l < W; ++l) p[l] = half_bits(a.v[l]);
}
inline void store_bf16(uint16_t* p, F a) {
    for (int l = 0; l < W; ++l) {
        const uint32_t bits = to_bits(a.v[l]);
        p[l] = static_cast<uint16_t>(a.v[l] != a.v[l] ? 0x7fc0u : (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
    }
}

}  // namespace MOESTRO_ISA
