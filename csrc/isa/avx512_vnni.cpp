// Rows of float32 have no use for VNNI; those of 16 bits may be int8 with an int8 residual.
#define MOESTRO_ISA moestro_avx512_vnni
#include "../bytes_avx512.h"
#include "../epilogue.h"
#include "../int8_residual.h"
#include "shared.h"

namespace MOESTRO_ISA {

constexpr moestro::Isa make_isa() {
    using moestro::Feature;
    moestro::Isa isa = basic_isa("avx512-vnni", moestro::all_of({Feature::avx512f, Feature::avx512bw, Feature::avx512dq,
                                                                 Feature::avx512vl, Feature::avx512_vnni}));
    isa.four_rows = moestro::avx512::four_rows;
    isa.eight_rows = moestro::avx512::eight_rows;
    isa.int8 = &kInt8;
    isa.int8_residual = &kInt8Residual;
    return isa;
}

}  // namespace MOESTRO_ISA

namespace moestro {
extern const Isa kAvx512Vnni = MOESTRO_ISA::make_isa();
}  // namespace moestro
