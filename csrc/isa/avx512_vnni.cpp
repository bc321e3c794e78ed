// Rows of float32 have no use for VNNI; those of 16 bits may be pairs of rows of 8.
#define MOESTRO_ISA moestro_avx512_vnni
#include "../bytes_avx512.h"
#include "../eight_rows.h"
#include "../epilogue.h"
#include "../pairs.h"

namespace moestro {
static bool runs_here() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
}
extern const Isa kAvx512Vnni = {"avx512-vnni", "AVX-512 F, BW, DQ, VL and VNNI", runs_here, MOESTRO_ISA::W, MOESTRO_ISA::four_rows, MOESTRO_ISA::kDirectTokens,
                                MOESTRO_ISA::widen, MOESTRO_ISA::activate, MOESTRO_ISA::combine, nullptr, &MOESTRO_ISA::kRounded, &MOESTRO_ISA::kPairs, MOESTRO_ISA::eight_rows};
}  // namespace moestro
