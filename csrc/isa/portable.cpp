#define MOESTRO_ISA moestro_portable
#include "../bytes_portable.h"
#include "../epilogue.h"
#include "../int8.h"

namespace MOESTRO_ISA {

constexpr moestro::Isa make_isa() {
    using moestro::Feature;
    moestro::Isa isa = basic_isa("portable", 0);
    isa.four_rows = four_rows;
    isa.int8 = &kInt8;
    return isa;
}

}  // namespace MOESTRO_ISA

namespace moestro {
extern const Isa kPortable = MOESTRO_ISA::make_isa();
}  // namespace moestro
