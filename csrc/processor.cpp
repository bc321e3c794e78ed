#include "processor.h"

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace moestro {
namespace {

#if defined(__x86_64__)
struct Registers {
    unsigned a, b, c, d;
};
Registers cpuid(unsigned leaf, unsigned part) {
    Registers r{leaf, 0, part, 0};
    __asm__ volatile("cpuid" : "+a"(r.a), "=b"(r.b), "+c"(r.c), "=d"(r.d));
    return r;
}
// Of features that compilers cannot be asked for by name: a bit of the register EDX, and one of EAX of the part behind.
bool has_extended(int bit) { return cpuid(0, 0).a >= 7 && (cpuid(7, 0).d >> bit & 1); }
bool has_avx_vnni() { return cpuid(0, 0).a >= 7 && cpuid(7, 0).a >= 1 && (cpuid(7, 1).a >> 4 & 1); }
// Whether the system lets this process use tiles; nothing is refused where the processor has none.
bool tiles_allowed() {
    if (!has_extended(24)) return true;
#if defined(__linux__) && defined(SYS_arch_prctl)
    constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
    return false;
#endif
}
#define MOESTRO_HAS(feature) [] { return __builtin_cpu_supports(feature) != 0; }
#define MOESTRO_LEAF7(bit) [] { return has_extended(bit); }
#define MOESTRO_AVX_VNNI_HERE has_avx_vnni
#define MOESTRO_TILES_ALLOWED tiles_allowed
#else
#define MOESTRO_HAS(feature) [] { return false; }
#define MOESTRO_LEAF7(bit) [] { return false; }
#define MOESTRO_AVX_VNNI_HERE [] { return false; }
#define MOESTRO_TILES_ALLOWED [] { return false; }
#endif

struct FeatureTest {
    Feature feature;
    const char* name;
    bool (*is_here)();
};

const FeatureTest kFeatures[] = {
    {Feature::avx2, "AVX2", MOESTRO_HAS("avx2")},
    {Feature::fma, "FMA", MOESTRO_HAS("fma")},
    {Feature::f16c, "F16C", MOESTRO_HAS("f16c")},
    {Feature::avx_vnni, "AVX-VNNI", MOESTRO_AVX_VNNI_HERE},
    {Feature::avx512f, "AVX-512F", MOESTRO_HAS("avx512f")},
    {Feature::avx512bw, "AVX-512BW", MOESTRO_HAS("avx512bw")},
    {Feature::avx512dq, "AVX-512DQ", MOESTRO_HAS("avx512dq")},
    {Feature::avx512vl, "AVX-512VL", MOESTRO_HAS("avx512vl")},
    {Feature::avx512_vnni, "AVX-512 VNNI", MOESTRO_HAS("avx512vnni")},
    {Feature::avx512_bf16, "AVX-512 BF16", MOESTRO_HAS("avx512bf16")},
    {Feature::avx512_vbmi, "AVX-512 VBMI", MOESTRO_HAS("avx512vbmi")},
    {Feature::amx_tile, "AMX-TILE", MOESTRO_LEAF7(24)},
    {Feature::amx_bf16, "AMX-BF16", MOESTRO_LEAF7(22)},
    {Feature::amx_int8, "AMX-INT8", MOESTRO_LEAF7(25)},
    {Feature::tiles_allowed, "a system that lets tiles be used", MOESTRO_TILES_ALLOWED},
};

// Asked once: cpuid leaves a virtual machine, which takes microseconds.
Features features_here() {
#if defined(__x86_64__)
    __builtin_cpu_init();
#endif
    Features found = 0;
    for (const FeatureTest& test : kFeatures)
        if (test.is_here()) found |= all_of({test.feature});
    return found;
}

}  // namespace

const int kNumFeatures = sizeof(kFeatures) / sizeof(kFeatures[0]);

const char* name_of(Feature feature) { return kFeatures[static_cast<int>(feature)].name; }

Features lacking(Features needed) {
    static const Features here = features_here();
    return needed & ~here;
}

}  // namespace moestro
