#define MOESTRO_ISA moestro_neon
#include "../bytes_neon.h"
#include "../epilogue.h"
#include "../int8.h"
#include "shared.h"

namespace MOESTRO_ISA {

constexpr moestro::Isa make_isa() {
    using moestro::Feature;
    moestro::Isa isa = basic_isa("neon", moestro::all_of({Feature::asimd}));
    isa.four_rows = moestro::neon::four_rows;
    isa.int8 = &kInt8;
    return isa;
}

}  // namespace MOESTRO_ISA

namespace moestro {
namespace neon {
void four_rows(const FourRows& rows, const float* const* x, int64_t m, float* out, float* scratch) {
    MOESTRO_ISA::four_rows(rows, x, m, out, scratch);
}
}  // namespace neon

extern const Isa kNeon = MOESTRO_ISA::make_isa();
}  // namespace moestro
