// The byte part of the vector vocabulary in plain C++: 16 bytes or 4 integers of 32 bits. See bytes_avx512.h for what
// each does. The bytes of an integer stand in its memory in order, whatever the processor's.
#pragma once

#include "vec_portable.h"

namespace MOESTRO_ISA {

constexpr int kTileTokens = 2;
constexpr int kUnitTokens = 1;
constexpr int kFewUnitTokens = 4;  // of one that decodes its weights in registers

template <class Make> inline I each_byte(Make make) {
    uint8_t bytes[4 * W];
    for (int i = 0; i < 4 * W; ++i) bytes[i] = static_cast<uint8_t>(make(i));
    I r;
    std::memcpy(r.v, bytes, sizeof r.v);
    return r;
}
struct ByteView {
    uint8_t v[4 * W];
    explicit ByteView(I a) { std::memcpy(v, a.v, sizeof v); }
};
template <class Make> inline I each_integer(Make make) {
    I r;
    for (int l = 0; l < W; ++l) r.v[l] = static_cast<uint32_t>(make(l));
    return r;
}

inline I load_bytes(const void* p) {
    I r;
    std::memcpy(r.v, p, sizeof r.v);
    return r;
}
inline void store_bytes(void* p, I a) { std::memcpy(p, a.v, sizeof a.v); }
inline I zero_bytes() { return {}; }
inline I every_byte(int a) {
    return each_byte([=](int) { return a; });
}
inline I operator&(I a, I b) {
    return each_integer([&](int l) { return a.v[l] & b.v[l]; });
}
inline I operator^(I a, I b) {
    return each_integer([&](int l) { return a.v[l] ^ b.v[l]; });
}
inline I operator-(I a, I b) {
    return each_integer([&](int l) { return a.v[l] - b.v[l]; });
}
inline I upper_nibbles(I a) {
    const ByteView from(a);
    return each_byte([&](int i) { return from.v[i] >> 4; });
}
struct Bytes {
    uint8_t table[16];
};
inline Bytes bytes_table(const uint8_t* sixteen) {
    Bytes bytes;
    std::memcpy(bytes.table, sixteen, 16);
    return bytes;
}
constexpr bool kOneStepLookUp = false;
inline I look_up(const Bytes& bytes, I nibbles) {
    const ByteView at(nibbles);
    return each_byte([&](int i) { return bytes.table[at.v[i] & 15]; });
}

inline void transpose_lanes(I* r) {
    const I from[4] = {r[0], r[1], r[2], r[3]};
    for (int i = 0; i < 4; ++i)
        for (int l = 0; l < 4; ++l) r[i].v[l] = from[l].v[i];
}

struct Units {
    int index[W];
};
inline Units units_of(int64_t group, int part) {
    Units by;
    for (int l = 0; l < W; ++l) by.index[l] = static_cast<int>((32 * l + 16 * part) / group);
    return by;
}
inline F of_units(const float* p, const Units& by) {
    return each([&](int l) { return p[by.index[l]]; });
}
inline F of_half_units(const float* p, const Units& by) { return of_units(p, by); }

inline int32_t signed_of(uint32_t a) {
    int32_t r;
    std::memcpy(&r, &a, 4);
    return r;
}
inline F to_floats(I a) {
    return each([&](int l) { return static_cast<float>(signed_of(a.v[l])); });
}
inline I to_integers(F a) {
    return each_integer([&](int l) { return static_cast<int32_t>(std::nearbyint(a.v[l])); });
}
inline I times_pairs(I a, I b) {
    const auto half = [](uint32_t word, int i) { return static_cast<int32_t>(static_cast<int16_t>(word >> (16 * i))); };
    return each_integer([&](int l) { return half(a.v[l], 0) * half(b.v[l], 0) + half(a.v[l], 1) * half(b.v[l], 1); });
}
inline void integer_sums(I a, I b, I c, I d, int32_t* out) {
    const I* all[4] = {&a, &b, &c, &d};
    for (int i = 0; i < 4; ++i) out[i] = signed_of(all[i]->v[0] + all[i]->v[1] + all[i]->v[2] + all[i]->v[3]);
}
inline F absolute(F a) {
    return each([&](int l) { return std::fabs(a.v[l]); });
}
inline F larger(F a, F b) {
    return each([&](int l) { return a.v[l] > b.v[l] ? a.v[l] : b.v[l]; });
}
inline float largest(F a) { return std::fmax(std::fmax(a.v[0], a.v[1]), std::fmax(a.v[2], a.v[3])); }
inline void store_as_bytes(int8_t* p, I a) {
    for (int l = 0; l < W; ++l) p[l] = static_cast<int8_t>(signed_of(a.v[l]));
}

constexpr int kInt8Offset = 0;
inline I int8_codes(I a) { return a; }
template <class Byte> inline I dot4_of(I acc, I codes, I bytes) {
    const ByteView w(codes), x(bytes);
    return each_integer([&](int l) {
        int32_t sum = 0;
        for (int i = 4 * l; i < 4 * l + 4; ++i) sum += static_cast<Byte>(w.v[i]) * static_cast<int8_t>(x.v[i]);
        return acc.v[l] + static_cast<uint32_t>(sum);
    });
}
inline I dot4(I acc, I codes, I bytes) { return dot4_of<uint8_t>(acc, codes, bytes); }
inline I dot4_int8(I acc, I codes, I bytes) { return dot4_of<int8_t>(acc, codes, bytes); }

}  // namespace MOESTRO_ISA
