// Root-mean-square normalisation of rows, as models have it beside their matrices.
#pragma once

#include "engine.h"

namespace moestro {

// y = (weight + offset) * x / sqrt(mean of x^2 + epsilon), in float32 and rounded to the dtype of x; `rounds_twice`:
// before the weight, too.
struct RmsNorm {
    FloatArray weight;  // one row
    int64_t columns = 0;
    float epsilon = 0.0f, offset = 0.0f;
    bool rounds_twice = false;
};

// `out` is contiguous and may be `x`, of whose dtype it is.
void rms_norm(const Isa& isa, const RmsNorm& norm, const FloatArray& x, int64_t num_rows, void* out, int num_threads);

}  // namespace moestro
