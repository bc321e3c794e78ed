#include "processor.h"

#include <algorithm>
#include <stdexcept>

#include "subnormals.h"

#if defined(__linux__)
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
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
#define has_named(feature) (__builtin_cpu_supports(feature) != 0)

// The least time that multiply-adds of a number take, of some runs.
uint64_t time_of_products(float number) {
    const float other = 1e20f;
    uint64_t least = ~uint64_t{0};
    for (int run = 0; run < 4; ++run) {
        int64_t n = 4096;
        const uint64_t start = __builtin_ia32_rdtsc();
        __asm__ volatile(
            "vbroadcastss %[number], %%ymm1\n\tvbroadcastss %[other], %%ymm2\n\tvxorps %%xmm3, %%xmm3, %%xmm3\n"
            "1:\n\tvmovaps %%ymm3, %%ymm0\n\tvfmadd231ps %%ymm1, %%ymm2, %%ymm0\n\t"
            "decq %[n]\n\tjnz 1b\n\tvzeroupper"
            : [n] "+r"(n)
            : [number] "m"(number), [other] "m"(other)
            : "xmm0", "xmm1", "xmm2", "xmm3", "cc");
        least = std::min<uint64_t>(least, __builtin_ia32_rdtsc() - start);
    }
    return least;
}
// At most some cycles longer, or a hundred and more for each where microcode multiplies them.
bool multiplies_subnormals() {
    if (!has_named("avx2") || !has_named("fma")) return false;
    const KeepSubnormals keep;
    return time_of_products(1e-40f) < 4 * time_of_products(1.0f);
}
#else
#define has_named(feature) false
constexpr bool has_extended(int) { return false; }
constexpr bool has_avx_vnni() { return false; }
constexpr bool tiles_allowed() { return false; }
constexpr bool multiplies_subnormals() { return false; }
#endif

#if defined(__aarch64__)
constexpr bool has_asimd() { return true; }  // a part of the architecture
// By a bit of one of Linux's two words, or by Apple's name.
bool has_arm(unsigned long word, int bit, const char* name) {
#if defined(__linux__)
    (void)name;
    return getauxval(word) >> bit & 1;
#elif defined(__APPLE__)
    (void)word, (void)bit;
    int found = 0;
    size_t size = sizeof found;
    return sysctlbyname(name, &found, &size, nullptr, 0) == 0 && found;
#else
    return (void)word, (void)bit, (void)name, false;
#endif
}
constexpr unsigned long kHwcap = 16, kHwcap2 = 26;  // AT_HWCAP, AT_HWCAP2
bool has_asimddp() { return has_arm(kHwcap, 20, "hw.optional.arm.FEAT_DotProd"); }
bool has_i8mm() { return has_arm(kHwcap2, 13, "hw.optional.arm.FEAT_I8MM"); }
bool has_bf16() { return has_arm(kHwcap2, 14, "hw.optional.arm.FEAT_BF16"); }
#else
constexpr bool has_asimd() { return false; }
constexpr bool has_asimddp() { return false; }
constexpr bool has_i8mm() { return false; }
constexpr bool has_bf16() { return false; }
#endif

struct FeatureTest {
    Feature feature;
    const char *name, *text;
    bool (*is_here)();
};

#define MOESTRO_FEATURE(name, text, test) {Feature::name, #name, text, [] { return test; }},
const FeatureTest kFeatures[] = {MOESTRO_FEATURES(MOESTRO_FEATURE)};
#undef MOESTRO_FEATURE

Features g_masked = 0;

// Asked once: cpuid leaves a virtual machine, which takes microseconds.
Features features_here() {
#if defined(__x86_64__)
    __builtin_cpu_init();
#endif
    Features found = 0;
    for (const FeatureTest& test : kFeatures)
        if (!(g_masked & all_of({test.feature})) && test.is_here()) found |= all_of({test.feature});
    return found;
}

}  // namespace

std::vector<std::string> names_of(Features features) {
    std::vector<std::string> found;
    for (const FeatureTest& test : kFeatures)
        if (features & all_of({test.feature}))
            found.push_back(g_masked & all_of({test.feature}) ? std::string(test.text) + " (masked)" : test.text);
    return found;
}

Features lacking(Features needed) {
    static const Features here = features_here();
    return needed & ~here;
}

void mask(const std::vector<std::string>& names) {
    Features found = 0;
    for (const std::string& name : names) {
        Features one = 0;
        std::string all;
        for (const FeatureTest& test : kFeatures) {
            if (name == test.name) one = all_of({test.feature});
            all += (all.empty() ? "" : ", ") + std::string(test.name);
        }
        if (!one) throw std::invalid_argument(all);
        found |= one;
    }
    g_masked = found;
}

}  // namespace moestro
