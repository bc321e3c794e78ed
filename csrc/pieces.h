// What a call does with its rows, and how many tokens it takes at once.
#pragma once

#include <algorithm>

#include "engine.h"

namespace moestro {

constexpr int64_t kWorkspaceBytes = 256 << 20;  // what a call takes beside its arguments; longer inputs go in pieces

inline bool takes_integers(const Projection& p) {
    return (is_nibble(p.element) || (p.element == Element::i8 && p.group_columns == 0)) && p.columns <= kMostRoundedColumns;
}
// What the rows of a call are rounded by, as asked or, where they have 16 bits, because it is faster; null: by nothing.
inline const RoundedOps* rounding(const Isa& isa, const Call& call) {
    if (call.rounded) return isa.rounded;
    const bool can = call.x.dtype != Element::f32 && takes_integers(call.gate_up) && takes_integers(call.down);
    return can && !call.same_bits ? isa.pairs : nullptr;
}

// What fits into the workspace; 16 always do.
inline int64_t tokens_at_once(const Isa& isa, const Call& call, const RoundedOps* rounded) {
    const int64_t rows = call.all_experts ? call.num_experts + call.top_k : call.top_k;
    const int64_t x_rows = isa.tiles || call.weight_on_input ? std::max<int64_t>(rows, 1) : 1;
    const bool pairs = rounded && !call.rounded && !isa.tiles;  // rows beside tiles are few
    const int64_t h_floats = call.intermediate_size * (pairs ? 3 : call.rounded ? 2 : 1) + 96;
    const int64_t x_floats = call.hidden_size * (pairs ? 2 : 1) + 128;
    const int64_t per_token = 4 * (rows * (h_floats + call.hidden_size + 96) + x_rows * x_floats);
    return std::max<int64_t>(kWorkspaceBytes / per_token, 16);
}

}  // namespace moestro
