// What this processor, and the system on it, can do: one list of features, each with its test.
#pragma once

#include <cstdint>
#include <initializer_list>

namespace moestro {

enum class Feature : int {
    avx2,
    fma,
    f16c,
    avx_vnni,
    avx512f,
    avx512bw,
    avx512dq,
    avx512vl,
    avx512_vnni,
    avx512_bf16,
    avx512_vbmi,
    amx_tile,
    amx_bf16,
    amx_int8,
    tiles_allowed,
};

using Features = uint32_t;  // a bit each
constexpr Features all_of(std::initializer_list<Feature> list) {
    Features bits = 0;
    for (const Feature f : list) bits |= Features{1} << static_cast<int>(f);
    return bits;
}

extern const int kNumFeatures;
const char* name_of(Feature feature);
// Those of `needed` that are not here.
Features lacking(Features needed);

}  // namespace moestro
