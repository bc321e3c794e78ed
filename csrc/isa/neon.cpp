#define MOESTRO_ISA moestro_neon
#include "../bytes_neon.h"
#include "../epilogue.h"
#include "../int8.h"

namespace MOESTRO_ISA {

constexpr moestro::Isa make_isa() {
    using moestro::Feature;
    moestro::Isa isa = basic_isa("neon", moestro::all_of({Feature::asimd}));
    isa.four_rows = four_rows;
    isa.int8 = &kInt8;
    return isa;
}

}  // namespace MOESTRO_ISA

namespace moestro {
extern const Isa kNeon = MOESTRO_ISA::make_isa();
}  // namespace moestro
