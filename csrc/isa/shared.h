// Functions of one instruction set that others use too: code that more instructions do not change is compiled once.
// Each is defined in the file of its set; a set that uses it needs all that the other needs.
#pragma once

#include "../engine.h"

namespace moestro {

namespace avx2 {
void four_rows(const FourRows& rows, const float* const* x, int64_t m, float* out, float* scratch);
void outer_products(const FourRows* four, const float* const* x, int64_t m, float* out, float* scratch);
extern const RowOps kE4m3;
}  // namespace avx2

namespace avx512 {
void four_rows(const FourRows& rows, const float* const* x, int64_t m, float* out, float* scratch);
void eight_rows(const FourRows* two, const float* const* x, int64_t m, float* out, float* scratch);
}  // namespace avx512

// In avx512_bf16.cpp; they need VNNI and VBMI, and no instruction for bfloat16.
namespace avx512_vbmi {
void int8_rows(const FourRows& rows, const float* const* x, int64_t m, float* out, float* scratch);
extern const RowOps kInt8Residual;
}  // namespace avx512_vbmi

namespace neon {
void four_rows(const FourRows& rows, const float* const* x, int64_t m, float* out, float* scratch);
}  // namespace neon

}  // namespace moestro
