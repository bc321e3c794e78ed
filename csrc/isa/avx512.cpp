#define MOESTRO_ISA moestro_avx512
#include "../bytes_avx512.h"
#include "../eight_rows.h"
#include "../epilogue.h"
#include "../int8.h"

namespace MOESTRO_ISA {

constexpr moestro::Isa make_isa() {
    using moestro::Feature;
    moestro::Isa isa = basic_isa("avx512", moestro::all_of({Feature::avx512f, Feature::avx512bw, Feature::avx512dq, Feature::avx512vl}));
    isa.four_rows = four_rows;
    isa.eight_rows = eight_rows;
    isa.int8 = &kInt8;
    return isa;
}

}  // namespace MOESTRO_ISA

namespace moestro {
extern const Isa kAvx512 = MOESTRO_ISA::make_isa();
}  // namespace moestro
