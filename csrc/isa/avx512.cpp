#define MOESTRO_ISA moestro_avx512
#include "../bytes_avx512.h"
#include "../eight_rows.h"
#include "../epilogue.h"
#include "../int8.h"

namespace moestro {
static bool runs_here() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
extern const Isa kAvx512 = {"avx512", "AVX-512 F, BW, DQ and VL", runs_here, MOESTRO_ISA::W, MOESTRO_ISA::four_rows, MOESTRO_ISA::kDirectTokens,
                            MOESTRO_ISA::widen, MOESTRO_ISA::activate, MOESTRO_ISA::combine, nullptr, &MOESTRO_ISA::kRounded, nullptr, MOESTRO_ISA::eight_rows};
}  // namespace moestro
