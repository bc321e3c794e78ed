// Rows of bfloat16 and of bytes meet weights in products of two rows with two tokens.
#define MOESTRO_ISA moestro_neon_i8mm
#include "../bytes_neon.h"
#include "../epilogue.h"
#include "../int8_residual.h"
#include "../products_neon.h"
#include "shared.h"

namespace MOESTRO_ISA {

static constexpr moestro::RowOps kResidualByProducts = {
    residual_floats, quantize_residual_row, residual_rows_of<int8_rows_by_products>, integer_scratch<RowsOfBytes>};

constexpr moestro::Isa make_isa() {
    using moestro::Feature;
    moestro::Isa isa =
        basic_isa("neon-i8mm", moestro::all_of({Feature::asimd, Feature::asimddp, Feature::i8mm, Feature::bf16}));
    isa.four_rows = moestro::neon::four_rows;
    isa.bfloat16 = &kBfloat16;
    isa.int8 = &kInt8ByProducts;
    isa.int8_residual = &kResidualByProducts;
    return isa;
}

}  // namespace MOESTRO_ISA

namespace moestro {
extern const Isa kNeonI8mm = MOESTRO_ISA::make_isa();
}  // namespace moestro
