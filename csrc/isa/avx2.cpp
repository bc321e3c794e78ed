#define MOESTRO_ISA moestro_avx2
#include "../bytes_avx2.h"
#include "../epilogue.h"
#include "../int8.h"

namespace moestro {
static bool runs_here() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
extern const Isa kAvx2 = {"avx2", "AVX2, FMA and F16C", runs_here, MOESTRO_ISA::W, MOESTRO_ISA::four_rows, MOESTRO_ISA::kDirectTokens,
                          MOESTRO_ISA::widen, MOESTRO_ISA::activate, MOESTRO_ISA::combine, nullptr, &MOESTRO_ISA::kRounded};
}  // namespace moestro
