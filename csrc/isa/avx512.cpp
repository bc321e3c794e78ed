#define MOESTRO_ISA moestro_avx512
#include "../bytes_avx512.h"
#include "../eight_rows.h"
#include "../epilogue.h"
#include "../int8.h"
#include "shared.h"

namespace MOESTRO_ISA {

constexpr moestro::Isa make_isa() {
    using moestro::Feature;
    moestro::Isa isa = basic_isa(
        "avx512", moestro::all_of({Feature::avx512f, Feature::avx512bw, Feature::avx512dq, Feature::avx512vl}));
    isa.four_rows = moestro::avx512::four_rows;
    isa.eight_rows = moestro::avx512::eight_rows;
    isa.int8 = &kInt8;
    return isa;
}

}  // namespace MOESTRO_ISA

namespace moestro {
namespace avx512 {
void four_rows(const FourRows& rows, const float* const* x, int64_t m, float* out, float* scratch) {
    MOESTRO_ISA::four_rows(rows, x, m, out, scratch);
}
void eight_rows(const FourRows* two, const float* const* x, int64_t m, float* out, float* scratch) {
    MOESTRO_ISA::eight_rows(two, x, m, out, scratch);
}
}  // namespace avx512

extern const Isa kAvx512 = MOESTRO_ISA::make_isa();
}  // namespace moestro
