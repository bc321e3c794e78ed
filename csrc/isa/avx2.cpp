#define MOESTRO_ISA moestro_avx2
#include "../bytes_avx2.h"
#include "../epilogue.h"
#include "../e4m3_rows.h"
#include "../int16.h"
#include "../int8.h"
#include "../outer_products.h"

namespace MOESTRO_ISA {

constexpr moestro::Isa make_isa() {
    using moestro::Feature;
    moestro::Isa isa = basic_isa("avx2", moestro::all_of({Feature::avx2, Feature::fma, Feature::f16c}));
    isa.four_rows = four_rows;
    isa.outer_products = outer_products;
    isa.int8 = &kInt8;
    isa.int16 = &kInt16;
    isa.e4m3 = &kE4m3;
    return isa;
}

}  // namespace MOESTRO_ISA

namespace moestro {
extern const Isa kAvx2 = MOESTRO_ISA::make_isa();
}  // namespace moestro
