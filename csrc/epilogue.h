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

static void exponentials(int64_t n, float* row, float* found) {
    constexpr int kOnce = 16;
    const float least = -__builtin_inff();
    float most[kOnce];
    for (int l = 0; l < kOnce; ++l) most[l] = least;
    int64_t i = 0;
    for (; i + kOnce <= n; i += kOnce)
        for (int l = 0; l < kOnce; ++l) most[l] = row[i + l] > most[l] ? row[i + l] : most[l];
    for (; i < n; ++i) most[0] = row[i] > most[0] ? row[i] : most[0];
    float largest = least;
    for (int l = 0; l < kOnce; ++l) largest = most[l] > largest ? most[l] : largest;
    found[0] = largest, found[1] = 0.0f;
    for (; i % W; ++i) row[i] = least;
    if (largest == least) {  // without a number, or NaN
        for (i = 0; i < n; ++i) found[1] += row[i] = row[i] == row[i] ? 0.0f : row[i];
        return;
    }
    F sum = zero();
    for (i = 0; i < n; i += W) {
        const F e = exp(load(row + i) - set1(largest));
        store(row + i, e);
        sum = sum + e;
    }
    alignas(64) float lanes[W];
    store(lanes, sum);
    for (int l = 0; l < W; ++l) found[1] += lanes[l];
}

// Some columns of the weighted rows, for M sums: a vector of columns is widened once for all of them.
template <Element E, int M, int Vectors> static void weigh_columns(const uint8_t* rows, int64_t stride, int64_t n,
                                                                   int64_t left, const float* const* weights,
                                                                   float* const* sums, int64_t at) {
    F sum[M][Vectors];
#pragma GCC unroll 4
    for (int q = 0; q < M; ++q)
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; ++v) sum[q][v] = load(sums[q] + at + v * W);
    for (int64_t t = 0; t < n; ++t, rows += stride) {
        F row[Vectors];
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; ++v) {
            const uint8_t* from = rows + (at + v * W) * bytes_of(E);
            row[v] = left >= (v + 1) * W ? load_element<E>(from) : load_some<E>(from, left - v * W);
        }
#pragma GCC unroll 4
        for (int q = 0; q < M; ++q) {
            const F weight = set1(weights[q][t]);
#pragma GCC unroll 4
            for (int v = 0; v < Vectors; ++v) sum[q][v] = fma(weight, row[v], sum[q][v]);
        }
    }
#pragma GCC unroll 4
    for (int q = 0; q < M; ++q)
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; ++v) store(sums[q] + at + v * W, sum[q][v]);
}

template <Element E, int M> static void weigh_some(const uint8_t* rows, int64_t stride, int64_t n, int64_t columns,
                                                   const float* const* weights, float* const* sums) {
    constexpr int kOnce = W >= 16 ? 4 : 2;  // vectors of columns whose sums stay in registers
    int64_t at = 0;
    for (; at + kOnce * W <= columns; at += kOnce * W)
        weigh_columns<E, M, kOnce>(rows, stride, n, kOnce * W, weights, sums, at);
    for (; at < columns; at += W) weigh_columns<E, M, 1>(rows, stride, n, columns - at, weights, sums, at);
}

template <Element E> static void weigh_of(const void* from, int64_t stride, int64_t n, int64_t columns,
                                          const float* const* weights, int64_t m, float* const* sums) {
    const auto* rows = static_cast<const uint8_t*>(from);
    for (; m >= 4; m -= 4, weights += 4, sums += 4) weigh_some<E, 4>(rows, stride, n, columns, weights, sums);
    if (m >= 2) weigh_some<E, 2>(rows, stride, n, columns, weights, sums), m -= 2, weights += 2, sums += 2;
    if (m) weigh_some<E, 1>(rows, stride, n, columns, weights, sums);
}

static void weigh(const void* rows, Element dtype, int64_t stride, int64_t n, int64_t columns,
                  const float* const* weights, int64_t m, float* const* sums) {
    switch (dtype) {
        case Element::f16: return weigh_of<Element::f16>(rows, stride, n, columns, weights, m, sums);
        case Element::bf16: return weigh_of<Element::bf16>(rows, stride, n, columns, weights, m, sums);
        default: return weigh_of<Element::f32>(rows, stride, n, columns, weights, m, sums);
    }
}

// What every set that is compiled from these files has.
constexpr moestro::Isa basic_isa(const char* name, moestro::Features needs) {
    moestro::Isa isa;
    isa.name = name;
    isa.needs = needs;
    isa.lanes = W;
    isa.direct_tokens = kDirectTokens;
    isa.direct_16_bit_tokens = kDirect16BitTokens;
    isa.widen = widen;
    isa.activate = activate;
    isa.combine = combine;
    isa.exponentials = exponentials;
    isa.weigh = weigh;
    return isa;
}

}  // namespace MOESTRO_ISA
