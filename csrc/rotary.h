// Rotary positions: the two halves of a head's columns turned by the angles of a token's position.
#pragma once

#include "engine.h"

namespace moestro {

// Of a head x of `columns` columns or more, with h = columns / 2 and i < h:
//     y[i] = x[i] cos[i] - x[i + h] sin[i],  y[i + h] = x[i + h] cos[i + second] + x[i] sin[i + second];
// columns beyond stay. Each product and each sum is rounded to the dtype of x, as models in PyTorch have it.
struct Rotary {
    const void *cos = nullptr, *sin = nullptr;  // rows of the dtype of x
    int64_t stride = 0;                         // elements from one token's angles to the next; 0: they share them
    int64_t columns = 0, second = 0;
};

// Turns the heads of a token in place: `num_heads` times `head_size` values of a dtype.
void rotate(const Isa& isa, const Rotary& rotary, int64_t token, void* heads, int64_t num_heads, int64_t head_size,
            Element dtype);

}  // namespace moestro
