// AVX2 with VNNI in vectors of 256 bits: processors without AVX-512 that multiply bytes, from Alder Lake on.
#define MOESTRO_ISA moestro_avx2_vnni
#define MOESTRO_VNNI_256
#include "../bytes_avx2.h"
#include "../epilogue.h"
#include "../int8_residual.h"
#include "shared.h"

namespace MOESTRO_ISA {

constexpr moestro::Isa make_isa() {
    using moestro::Feature;
    moestro::Isa isa =
        basic_isa("avx2-vnni", moestro::all_of({Feature::avx2, Feature::fma, Feature::f16c, Feature::avx_vnni}));
    isa.four_rows = moestro::avx2::four_rows;
    isa.outer_products = moestro::avx2::outer_products;
    isa.int8 = &kInt8;
    isa.int8_residual = &kInt8Residual;
    isa.e4m3 = &moestro::avx2::kE4m3;
    return isa;
}

}  // namespace MOESTRO_ISA

namespace moestro {
extern const Isa kAvx2Vnni = MOESTRO_ISA::make_isa();
}  // namespace moestro
