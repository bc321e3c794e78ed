// What this processor, and the system on it, can do: one list of features, each with its test.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

namespace moestro {

// An entry is FEATURE(name, name in sentences, test); names but the last two are those that Linux lists in
// /proc/cpuinfo, and processor.cpp has the words that a test is made of.
#define MOESTRO_FEATURES(FEATURE)                                               \
    FEATURE(avx2, "AVX2", has_named("avx2"))                                    \
    FEATURE(fma, "FMA", has_named("fma"))                                       \
    FEATURE(f16c, "F16C", has_named("f16c"))                                    \
    FEATURE(avx_vnni, "AVX-VNNI", has_avx_vnni())                               \
    FEATURE(avx512f, "AVX-512F", has_named("avx512f"))                          \
    FEATURE(avx512bw, "AVX-512BW", has_named("avx512bw"))                       \
    FEATURE(avx512dq, "AVX-512DQ", has_named("avx512dq"))                       \
    FEATURE(avx512vl, "AVX-512VL", has_named("avx512vl"))                       \
    FEATURE(avx512_vnni, "AVX-512 VNNI", has_named("avx512vnni"))               \
    FEATURE(avx512_bf16, "AVX-512 BF16", has_named("avx512bf16"))               \
    FEATURE(avx512vbmi, "AVX-512 VBMI", has_named("avx512vbmi"))                \
    FEATURE(amx_tile, "AMX-TILE", has_extended(24))                             \
    FEATURE(amx_bf16, "AMX-BF16", has_extended(22))                             \
    FEATURE(amx_int8, "AMX-INT8", has_extended(25))                             \
    FEATURE(asimd, "NEON", has_asimd())                                         \
    FEATURE(asimddp, "NEON dot products", has_asimddp())                        \
    FEATURE(i8mm, "NEON I8MM", has_i8mm())                                      \
    FEATURE(bf16, "NEON BF16", has_bf16())                                      \
    FEATURE(tiles_allowed, "a system that lets tiles be used", tiles_allowed()) \
    FEATURE(subnormals, "subnormal numbers at no cost", multiplies_subnormals())

#define MOESTRO_FEATURE(name, text, test) name,
enum class Feature : int { MOESTRO_FEATURES(MOESTRO_FEATURE) };
#undef MOESTRO_FEATURE

using Features = uint32_t;  // a bit each
constexpr Features all_of(std::initializer_list<Feature> list) {
    Features bits = 0;
    for (const Feature f : list) bits |= Features{1} << static_cast<int>(f);
    return bits;
}

// Their names in sentences; of one that is masked it says so.
std::vector<std::string> names_of(Features features);
// Those of `needed` that are not here.
Features lacking(Features needed);
// From now on the features of these names are lacking. To be called before anything has been prepared.
// Throws std::invalid_argument, with all names there are, for one that is none.
void mask(const std::vector<std::string>& names);

}  // namespace moestro
