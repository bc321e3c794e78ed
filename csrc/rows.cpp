#include "rows.h"

#include <algorithm>

namespace moestro {
namespace {

int64_t id_of(const Call& call, int64_t first, int64_t slot) {
    return call.ids_are_64_bit ? static_cast<const int64_t*>(call.expert_ids)[first + slot]
                               : static_cast<const int32_t*>(call.expert_ids)[first + slot];
}

}  // namespace

Rows::Rows(const Call& call, int64_t first_token, int64_t num_tokens, int64_t fewest_tiled) {
    const int64_t slots = num_tokens * call.top_k, first = first_token * call.top_k, experts = call.num_experts;
    std::vector<int64_t> next(static_cast<size_t>(experts), 0);
    for (int64_t s = 0; s < slots; ++s)
        if (const int64_t e = id_of(call, first, s); e >= 0) ++next[e];
    std::vector<std::vector<bool>> chosen;
    if (call.all_experts) {
        chosen.assign(static_cast<size_t>(experts), std::vector<bool>(static_cast<size_t>(num_tokens), false));
        for (int64_t s = 0; s < slots; ++s)
            if (const int64_t e = id_of(call, first, s); e >= 0) chosen[e][s / call.top_k] = true;
        for (int64_t e = 0; e < experts; ++e)
            for (int64_t t = 0; t < num_tokens; ++t) next[e] += !chosen[e][t];
    }
    for (int64_t e = 0; e < experts; ++e)
        if (next[e]) active.push_back({e, 0, next[e], 0});
    std::stable_sort(active.begin(), active.end(), [](const Active& a, const Active& b) { return a.num_rows > b.num_rows; });
    for (auto& a : active) {
        next[a.expert] = a.first_row = num_rows, num_rows += a.num_rows;
        a.tiled = a.num_rows >= fewest_tiled;
        a.first_tile = num_tiles;
        if (a.tiled) num_tiles += a.num_tiles(), first_plain = num_rows;
    }
    token.resize(static_cast<size_t>(num_rows));
    factor.assign(static_cast<size_t>(num_rows), 1.0f);
    of_slot.assign(static_cast<size_t>(slots), -1);
    for (int64_t s = 0; s < slots; ++s) {
        const int64_t e = id_of(call, first, s);
        if (e < 0) continue;
        const int64_t row = of_slot[s] = next[e]++;
        token[row] = s / call.top_k;
        if (call.weight_on_input) factor[row] = call.routing_weights[first + s];
    }
    if (!call.all_experts) return;
    for (int64_t e = 0; e < experts; ++e)
        for (int64_t t = 0; t < num_tokens; ++t)
            if (!chosen[e][t]) token[next[e]++] = t;
}

}  // namespace moestro
