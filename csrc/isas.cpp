#include "engine.h"

namespace moestro {

#if defined(MOESTRO_AMX)
extern const Isa kAmx, kAmxInt8, kAvx512Bf16;
#endif
#if defined(__x86_64__)
extern const Isa kAvx512Vnni, kAvx512, kAvx2;
#endif
#if defined(MOESTRO_AVX_VNNI)
extern const Isa kAvx2Vnni;
#endif
#if defined(__aarch64__)
extern const Isa kNeonI8mm, kNeonDotprod, kNeon;
#endif
extern const Isa kPortable;

const Isa* const kIsas[] = {
#if defined(MOESTRO_AMX)
    &kAmx,        &kAmxInt8,     &kAvx512Bf16,
#endif
#if defined(__x86_64__)
    &kAvx512Vnni, &kAvx512,
#endif
#if defined(MOESTRO_AVX_VNNI)
    &kAvx2Vnni,
#endif
#if defined(__x86_64__)
    &kAvx2,
#endif
#if defined(__aarch64__)
    &kNeonI8mm,   &kNeonDotprod, &kNeon,
#endif
    &kPortable};
const int kNumIsas = sizeof(kIsas) / sizeof(kIsas[0]);

}  // namespace moestro
