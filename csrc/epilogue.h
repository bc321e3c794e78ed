// Activations, sums over slots and conversions, written once against the vector vocabulary. See kernels.h on sharing.
#pragma once

#include <cmath>

#include "kernels.h"

namespace MOESTRO_ISA {

// Cephes' expf: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2]; relative error about 1e-7. NaN stays NaN;
// from 88.4 on infinity, so that the sigmoid of -infinity is 0.
MOESTRO_INLINE F exp(F x) {
    x = at_least(at_most(x, 89.0f), -87.0f);  // 89: infinity
    const F n = round(x * set1(1.44269504088896341f));
    const F r = fma(n, set1(2.12194440e-4f), fma(n, set1(-0.693359375f), x));
    F p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    return times_power_of_2(fma(p, r * r, r + set1(1.0f)), n);
}
MOESTRO_INLINE F sigmoid(F x) { return set1(1.0f) / (set1(1.0f) + exp(zero() - x)); }

template <class Function> MOESTRO_INLINE F lanewise(F x, Function function) {
    alignas(64) float lanes[W];
    store(lanes, x);
    for (int l = 0; l < W; ++l) lanes[l] = function(lanes[l]);
    return load(lanes);
}

MOESTRO_INLINE F gelu(F z) {
    return lanewise(z, [](float v) { return 0.5f * v * (1.0f + ::erff(v * 0.70710678118654752f)); });
}
MOESTRO_INLINE F gelu_tanh(F z) {
    const F inner = set1(0.79788456080286536f) * fma(set1(0.044715f) * z * z, z, z);
    return z * sigmoid(inner + inner);  // (1 + tanh(u)) / 2 is sigmoid(2 u)
}
MOESTRO_INLINE F tanh(F z) {
    return lanewise(z, [](float v) { return ::tanhf(v); });
}

MOESTRO_INLINE F apply(Kind kind, [[maybe_unused]] float alpha, F z) {
#define MOESTRO_KIND(name, text, formula) \
    case Kind::name: return formula;
    switch (kind) { MOESTRO_KINDS(MOESTRO_KIND) }
#undef MOESTRO_KIND
    return z;
}

// What the down projection is given for gate values, and for up values where the activation is gated.
MOESTRO_INLINE F activated(const Activation& a, F gate, F up) {
    if (a.limited) gate = at_most(gate, a.limit);
    gate = apply(a.kind, a.alpha, gate);
    if (!a.gated) return gate;
    if (a.limited) up = at_least(at_most(up, a.limit), -a.limit);
    return gate * (up + set1(a.up_offset));
}

static void activate(const Activation& a, int64_t n, float* gate, const float* up) {
    for (int64_t i = 0; i < n; i += W) store(gate + i, activated(a, load(gate + i), a.gated ? load(up + i) : zero()));
}

template <Element E> static void widen_from(const uint8_t* from, int64_t n, float factor, float* to) {
    int64_t i = 0;
    for (; i + W <= n; i += W) store(to + i, load_element<E>(from + i * bytes_of(E)) * set1(factor));
    if (i == n) return;
    alignas(64) float last[W];
    store(last, load_some<E>(from + i * bytes_of(E), n - i) * set1(factor));
    for (int64_t l = 0; i + l < n; ++l) to[i + l] = last[l];
}

static void widen(const void* from, Element dtype, int64_t n, float factor, float* to) {
    const auto* bytes = static_cast<const uint8_t*>(from);
    switch (dtype) {
        case Element::f16: return widen_from<Element::f16>(bytes, n, factor, to);
        case Element::bf16: return widen_from<Element::bf16>(bytes, n, factor, to);
        default: return widen_from<Element::f32>(bytes, n, factor, to);
    }
}

MOESTRO_INLINE void write(void* out, Element dtype, int64_t i, F value) {
    switch (dtype) {
        case Element::f16: return store_f16(static_cast<uint16_t*>(out) + i, value);
        case Element::bf16: return store_bf16(static_cast<uint16_t*>(out) + i, value);
        default: return store(static_cast<float*>(out) + i, value);
    }
}

static void combine(const float* const* rows, const float* weights, int64_t num_rows, int64_t n, void* out,
                    Element dtype) {
    for (int64_t i = 0; i < n; i += W) {
        const int64_t left = n - i < W ? n - i : W;
        F sum = zero();
        for (int64_t k = 0; k < num_rows; ++k) {
            if (!rows[k]) continue;
            const auto* row = reinterpret_cast<const uint8_t*>(rows[k] + i);
            sum = fma(set1(weights[k]), left == W ? load_f32(row) : load_some<Element::f32>(row, left), sum);
        }
        if (left == W) {
            write(out, dtype, i, sum);
            continue;
        }
        alignas(64) uint8_t last[W * 4];
        write(last, dtype, 0, sum);
        std::memcpy(static_cast<uint8_t*>(out) + i * bytes_of(dtype), last,
                    static_cast<size_t>(left) * bytes_of(dtype));
    }
}

// What every set that is compiled from these files has.
constexpr moestro::Isa basic_isa(const char* name, moestro::Features needs) {
    moestro::Isa isa;
    isa.name = name;
    isa.needs = needs;
    isa.lanes = W;
    isa.direct_tokens = kDirectTokens;
    isa.widen = widen;
    isa.activate = activate;
    isa.combine = combine;
    return isa;
}

}  // namespace MOESTRO_ISA
