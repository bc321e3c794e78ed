#define MOESTRO_ISA moestro_avx2
#include "../bytes_avx2.h"
#include "../epilogue.h"
#include "../e4m3_rows.h"
#include "../int16.h"
#include "../int8.h"
#include "../outer_products.h"
#include "shared.h"

namespace MOESTRO_ISA {

constexpr int kAheadInRow = 512;
constexpr int kAheadInRowTokens = 4;  // with more it is no faster

constexpr moestro::Isa make_isa() {
    using moestro::Feature;
    moestro::Isa isa = basic_isa("avx2", moestro::all_of({Feature::avx2, Feature::fma, Feature::f16c}));
    isa.four_rows = moestro::avx2::four_rows;
    isa.ahead_in_row.bytes = kAheadInRow;
    isa.ahead_in_row.f32 = isa.ahead_in_row.i8 = kAheadInRowTokens;
    isa.ahead_in_row.bf16 = 1;  // a matrix by itself is no faster with two
    isa.outer_products = moestro::avx2::outer_products;
    isa.int8 = &kInt8;
    isa.int16 = &kInt16;
    isa.e4m3 = &moestro::avx2::kE4m3;
    return isa;
}

}  // namespace MOESTRO_ISA

namespace moestro {
namespace avx2 {
void four_rows(const FourRows& rows, const float* const* x, int64_t m, float* out, float* scratch) {
    MOESTRO_ISA::four_rows(rows, x, m, out, scratch);
}
void outer_products(const FourRows* four, const float* const* x, int64_t m, float* out, float* scratch) {
    MOESTRO_ISA::outer_products(four, x, m, out, scratch);
}
extern const RowOps kE4m3 = MOESTRO_ISA::kE4m3;
}  // namespace avx2

extern const Isa kAvx2 = MOESTRO_ISA::make_isa();
}  // namespace moestro
