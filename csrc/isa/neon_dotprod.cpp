// Rows of 16 bits may be int8 with an int8 residual: four products of bytes cost as much as one of floats.
#define MOESTRO_ISA moestro_neon_dotprod
#include "../bytes_neon.h"
#include "../epilogue.h"
#include "../int8_residual.h"
#include "shared.h"

namespace MOESTRO_ISA {

constexpr moestro::Isa make_isa() {
    using moestro::Feature;
    moestro::Isa isa = basic_isa("neon-dotprod", moestro::all_of({Feature::asimd, Feature::asimddp}));
    isa.four_rows = moestro::neon::four_rows;
    isa.int8 = &kInt8;
    isa.int8_residual = &kInt8Residual;
    return isa;
}

}  // namespace MOESTRO_ISA

namespace moestro {
extern const Isa kNeonDotprod = MOESTRO_ISA::make_isa();
}  // namespace moestro
