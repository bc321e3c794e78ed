// Loops of one instruction on independent accumulators. They are assembly throughout: no compiler then decides what is
// timed, and the file needs no flags of an instruction set.

#include "peaks.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <mutex>

#include "team.h"

namespace moestro {
namespace {

#if defined(__x86_64__)

// 14 accumulators: two instructions a cycle whose results take up to six cycles keep 12 under way.
#define FOR_14(one) \
    one(0) one(1) one(2) one(3) one(4) one(5) one(6) one(7) one(8) one(9) one(10) one(11) one(12) one(13)
#define VECTORS                                                                                                \
    "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", \
        "xmm13", "xmm14", "xmm15"

alignas(64) constexpr float kHalf[16] = {.5f, .5f, .5f, .5f, .5f, .5f, .5f, .5f,
                                         .5f, .5f, .5f, .5f, .5f, .5f, .5f, .5f};
alignas(64) constexpr uint8_t kBytes[64] = {3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2,
                                            6, 4, 3, 3, 8, 3, 2, 7, 9, 5, 2, 8, 8, 4, 1, 9, 7, 1, 6, 9, 3, 9,
                                            9, 3, 7, 5, 1, 5, 8, 2, 9, 7, 4, 9, 4, 4, 5, 9, 2, 3, 7, 8};

// acc = acc * 0.5 + 0.5 stays at 1: neither zero nor denormal nor infinite.
#define ZMM_START(i) "vmovups %[constant], %%zmm" #i "\n\t"
#define ZMM_FMA(i) "vfmadd213ps %%zmm14, %%zmm14, %%zmm" #i "\n\t"
#define ZMM_DOT(i) "vpdpbusd %%zmm15, %%zmm14, %%zmm" #i "\n\t"
#define YMM_START(i) "vmovups %[constant], %%ymm" #i "\n\t"
#define YMM_FMA(i) "vfmadd213ps %%ymm14, %%ymm14, %%ymm" #i "\n\t"
#if defined(MOESTRO_AVX_VNNI)
#define YMM_DOT(i) "%{vex%} vpdpbusd %%ymm15, %%ymm14, %%ymm" #i "\n\t"
#endif
#define LOOP(vectors, constants, start, step)                                                            \
    __asm__ volatile(FOR_14(start) start(14)                                                             \
                         start(15) ".p2align 5\n1:\n\t" FOR_14(step) "decq %[n]\n\tjnz 1b\n\tvzeroupper" \
                     : [n] "+r"(vectors)                                                                 \
                     : [constant] "m"(constants)                                                         \
                     : VECTORS, "cc", "memory")

void fma_512(int64_t n) { LOOP(n, kHalf, ZMM_START, ZMM_FMA); }
void fma_256(int64_t n) { LOOP(n, kHalf, YMM_START, YMM_FMA); }
void vnni_512(int64_t n) { LOOP(n, kBytes, ZMM_START, ZMM_DOT); }

#if defined(MOESTRO_AVX_VNNI)
void vnni_256(int64_t n) { LOOP(n, kBytes, YMM_START, YMM_DOT); }
#endif

#if defined(MOESTRO_AMX)
struct alignas(64) Tiles {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// A product takes 16 cycles and its sum is there after 52, so four accumulators keep the unit busy.
#define TILE_LOOP(product)                                                                                       \
    const Tiles tiles;                                                                                           \
    alignas(64) uint8_t data[1024];                                                                              \
    for (int i = 0; i < 1024; ++i) data[i] = i % 2 ? 0x3c : kBytes[i % 64]; /* as bfloat16: 0.0078 to 0.0085 */  \
    __asm__ volatile(                                                                                            \
        "ldtilecfg %[tiles]\n\ttilezero %%tmm0\n\ttilezero %%tmm1\n\ttilezero %%tmm2\n\ttilezero %%tmm3\n\t"     \
        "tileloadd (%[data], %[stride]), %%tmm4\n\ttileloadd (%[data], %[stride]), %%tmm5\n\t"                   \
        "tileloadd (%[data], %[stride]), %%tmm6\n\ttileloadd (%[data], %[stride]), %%tmm7\n\t"                   \
        ".p2align 5\n1:\n\t" product " %%tmm6, %%tmm4, %%tmm0\n\t" product " %%tmm6, %%tmm5, %%tmm1\n\t" product \
        " %%tmm7, %%tmm4, %%tmm2\n\t" product " %%tmm7, %%tmm5, %%tmm3\n\tdecq %[n]\n\tjnz 1b\n\ttilerelease"    \
        : [n] "+r"(n)                                                                                            \
        : [tiles] "m"(tiles), [data] "r"(data), [stride] "r"(int64_t{64})                                        \
        : "cc", "memory")

void amx_bf16(int64_t n) { TILE_LOOP("tdpbf16ps"); }
void amx_int8(int64_t n) { TILE_LOOP("tdpbusd"); }
#endif
#endif

// Seconds that all threads together take for `iterations` each.
double seconds_of(const PeakKernel& kernel, int num_threads, int64_t iterations) {
    using Clock = std::chrono::steady_clock;
    std::mutex both;
    Clock::time_point first = Clock::time_point::max(), last = Clock::time_point::min();
    run_team(num_threads, [&](int, int) {
        const auto start = Clock::now();
        kernel.run(iterations);
        const auto stop = Clock::now();
        const std::lock_guard<std::mutex> lock(both);
        first = std::min(first, start);
        last = std::max(last, stop);
    });
    return std::chrono::duration<double>(last - first).count();
}

}  // namespace

const PeakKernel kPeakKernels[] = {
#if defined(__x86_64__)
    {"fma", 14 * 32, all_of({Feature::avx512f}), fma_512},
    {"fma", 14 * 16, all_of({Feature::avx2, Feature::fma}), fma_256},
    {"vnni", 14 * 128, all_of({Feature::avx512f, Feature::avx512_vnni}), vnni_512},
#if defined(MOESTRO_AVX_VNNI)
    {"vnni", 14 * 64, all_of({Feature::avx2, Feature::fma, Feature::avx_vnni}), vnni_256},
#endif
#if defined(MOESTRO_AMX)
    {"amx-bf16", 4 * 16 * 16 * 64, all_of({Feature::amx_tile, Feature::amx_bf16, Feature::tiles_allowed}), amx_bf16},
    {"amx-int8", 4 * 16 * 16 * 128, all_of({Feature::amx_tile, Feature::amx_int8, Feature::tiles_allowed}), amx_int8},
#endif
#endif
    {"", 0, 0, nullptr}};
const int kNumPeakKernels = sizeof(kPeakKernels) / sizeof(kPeakKernels[0]) - 1;

double peak_rate(const PeakKernel& kernel, int num_threads, double seconds) {
    constexpr double kRun = 4e-3;  // long against the start of a team, short against a slice of the scheduler
    int64_t iterations = 1000;
    double best = 0;
    for (double spent = 0; spent < seconds || best == 0;) {
        const double operations = num_threads * kernel.operations * static_cast<double>(iterations);
        const double taken = seconds_of(kernel, num_threads, iterations);
        spent += taken;
        best = std::max(best, operations / taken);
        // By the best rate so far: a run that other work held up says nothing of how long the next one takes.
        if (operations / best < kRun / 2 && iterations < (int64_t{1} << 40)) iterations *= 2;
    }
    return best;
}

}  // namespace moestro
