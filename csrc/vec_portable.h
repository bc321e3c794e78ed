// The vector vocabulary for any processor: 4 lanes, in vectors of the compiler (an extension of gcc and clang), which
// it puts into those of the processor (SSE2, NEON).
#pragma once

#include <cstdint>
#include <cstring>

namespace MOESTRO_ISA {

constexpr int W = 4;
constexpr int kRegisterTokens = 3;
constexpr int kRegisters = 16;  // of vectors
constexpr int kDirectTokens = 3;
constexpr int kDirect16BitTokens = kDirectTokens;

// Vectors of the compiler: gcc and clang know their arithmetic, and choose by lanes with `mask ? a : b`.
template <class Lane> struct VectorOf;
template <> struct VectorOf<float> {
    using type = float __attribute__((vector_size(4 * W)));
};
template <> struct VectorOf<uint32_t> {
    using type = uint32_t __attribute__((vector_size(4 * W)));
};
template <> struct VectorOf<int32_t> {
    using type = int32_t __attribute__((vector_size(4 * W)));
};
template <> struct VectorOf<uint16_t> {
    using type = uint16_t __attribute__((vector_size(2 * W)));
};
template <> struct VectorOf<int8_t> {
    using type = int8_t __attribute__((vector_size(W)));
};
template <> struct VectorOf<uint8_t> {
    using type = uint8_t __attribute__((vector_size(W)));
};
using Floats = VectorOf<float>::type;
using Words = VectorOf<uint32_t>::type;
using Integers = VectorOf<int32_t>::type;

struct F {
    Floats v;
};
struct I {
    Words v;
};

template <class Make> inline F each(Make make) {
    F r;
    for (int l = 0; l < W; ++l) r.v[l] = make(l);
    return r;
}
inline F from_bits(Words bits) { return {reinterpret_cast<Floats>(bits)}; }
inline Words to_bits(F a) { return reinterpret_cast<Words>(a.v); }
// W stored elements as words or floats.
template <class Lane> inline typename VectorOf<Lane>::type load_as(const void* p) {
    typename VectorOf<Lane>::type r;
    std::memcpy(&r, p, sizeof r);
    return r;
}
template <class Lane> inline Words load_wide(const void* p) { return __builtin_convertvector(load_as<Lane>(p), Words); }

inline F zero() { return {Floats{}}; }
inline F set1(float a) { return {Floats{} + a}; }
inline F load(const float* p) { return {load_as<float>(p)}; }
inline void keep(F&) {}
inline void store(float* p, F a) { std::memcpy(p, &a.v, sizeof a.v); }
inline F fma(F a, F b, F c) { return {a.v * b.v + c.v}; }
inline F operator+(F a, F b) { return {a.v + b.v}; }
inline F operator-(F a, F b) { return {a.v - b.v}; }
inline F operator*(F a, F b) { return {a.v * b.v}; }
inline F operator/(F a, F b) { return {a.v / b.v}; }
inline F at_most(F a, float bound) { return {a.v > bound ? set1(bound).v : a.v}; }
inline F at_least(F a, float bound) { return {a.v < bound ? set1(bound).v : a.v}; }
// Magnitudes below 2^22: the sum has no bits behind the point, and its low bits are the integer.
constexpr float kNoFraction = 0x1.8p23f;
inline F round(F a) { return {(a.v + kNoFraction) - kNoFraction}; }
inline I to_integers(F a) { return {to_bits({a.v + kNoFraction}) - 0x4b400000u}; }
// n in -126..128, which `exp` keeps to; 128 gives infinity.
inline F times_power_of_2(F a, F n) { return a * from_bits((to_integers(n).v + 127) << 23); }

inline F half_values(Words h) {
    const Words magnitude = h & 0x7fff;
    const Words wide = (magnitude << 13) + (magnitude < 0x7c00 ? Words{} + (112u << 23) : Words{} + (224u << 23));
    const Floats small = __builtin_convertvector(magnitude, Floats) * 0x1p-24f;
    const Words bits = magnitude < 0x400 ? to_bits({small}) : wide;
    return from_bits(bits | (h & 0x8000) << 16);
}
inline Words half_bits(F a) {
    const Words bits = to_bits(a), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
    const Words rounded = magnitude + 0xfff + ((magnitude >> 13) & 1);
    const Words normal = (rounded >> 13) - (112u << 10);
    // Subnormal: the sum's last bit counts 2^-24.
    const Words small = to_bits(from_bits(magnitude) + set1(0.5f)) - 0x3f000000;
    const Words finite = magnitude < 0x38800000 ? small : normal;
    const Words large = magnitude > 0x7f800000 ? Words{} + 0x7e00 : Words{} + 0x7c00;
    return sign | (magnitude < 0x477ff000 ? finite : large);  // from 65520 on it rounds beyond 65504
}

inline F load_f32(const uint8_t* p) { return {load_as<float>(p)}; }
inline F load_f16(const uint8_t* p) { return half_values(load_wide<uint16_t>(p)); }
inline F load_bf16(const uint8_t* p) { return from_bits(load_wide<uint16_t>(p) << 16); }
inline F load_i8(const uint8_t* p) { return {__builtin_convertvector(load_as<int8_t>(p), Floats)}; }
inline F load_u8(const uint8_t* p) { return {__builtin_convertvector(load_as<uint8_t>(p), Floats)}; }
// e4m3 shifted into the bits of a float16 is 2^-8 of its value, subnormals included; 0x7f is NaN.
constexpr float kE4m3Factor = 256.0f;
inline F load_e4m3_parts(const uint8_t* p) {
    const Words byte = load_wide<uint8_t>(p), magnitude = byte & 0x7f;
    const Floats small = __builtin_convertvector(magnitude, Floats) * 0x1p-17f;
    const Words wide = magnitude == 0x7f ? Words{} + 0x7fc00000 : (magnitude << 20) + (112u << 23);
    return from_bits((magnitude < 8 ? to_bits({small}) : wide) | (byte & 0x80) << 24);
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
// 2^(e - 127); 255 is NaN.
inline F load_e8m0(const uint8_t* p) {
    const Words e = load_wide<uint8_t>(p);
    const Words bits = e == 0 ? Words{} + (1u << 22) : e << 23;
    return from_bits(e == 255 ? Words{} + 0x7fc00000 : bits);
}

inline I load_words(const uint8_t* p) { return {load_as<uint32_t>(p)}; }
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
struct E2m1 {};
struct I4 {};
struct U4 {};
inline E2m1 e2m1_values() { return {}; }
inline I4 i4_values() { return {}; }
inline U4 u4_values() { return {}; }
template <int J> inline F nibble(E2m1, I words) {
    const Words magnitude = (words.v >> (4 * J)) & 7;
    const Words half = magnitude == 1 ? Words{} + 0x3f000000 : Words{};
    const Words bits = magnitude < 2 ? half : (magnitude << 22) + (126u << 23);
    return from_bits(bits | (words.v << (28 - 4 * J) & 0x80000000));
}
template <int J> inline F nibble(I4, I words) {
    return {__builtin_convertvector(reinterpret_cast<Integers>(words.v << (28 - 4 * J)) >> 28, Floats)};
}
template <int J> inline F nibble(U4, I words) {
    return {__builtin_convertvector(reinterpret_cast<Integers>((words.v >> (4 * J)) & 15), Floats)};
}
struct TableOf16 {
    float table[16];
};
inline TableOf16 table_values(const float* sixteen) {
    TableOf16 values;
    std::memcpy(values.table, sixteen, sizeof values.table);
    return values;
}
template <int J> inline F nibble(const TableOf16& values, I words) {
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
    const F all[4] = {a, b, c, d};
    for (int i = 0; i < 4; ++i) out[i] = (all[i].v[0] + all[i].v[1]) + (all[i].v[2] + all[i].v[3]);
}

inline void store_low_halves(uint16_t* p, Words words) {
    const auto halves = __builtin_convertvector(words, VectorOf<uint16_t>::type);
    std::memcpy(p, &halves, sizeof halves);
}
inline void store_f16(uint16_t* p, F a) { store_low_halves(p, half_bits(a)); }
inline void store_bf16(uint16_t* p, F a) {
    const Words bits = to_bits(a), rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    store_low_halves(p, a.v != a.v ? Words{} + 0x7fc0 : rounded);
}

}  // namespace MOESTRO_ISA
