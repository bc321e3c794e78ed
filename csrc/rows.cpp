#include "rows.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace moestro {

ExpertIds read_ids(const Call& call) {
    ExpertIds ids(call.expert_ids, call.ids_are_64_bit, call.num_tokens * call.top_k, call.num_experts);
    if (!call.gate_up.listed && !call.down.listed) return ids;
    for (int64_t s = 0; s < ids.count(); ++s)
        if (const int64_t e = ids[s]; e >= 0 && !(call.gate_up.has(e) && call.down.has(e)))
            throw std::invalid_argument("expert " + std::to_string(e) + " has no weights in the table");
    return ids;
}

// From counts, the experts that have rows, and the row that the next slot of each takes.
void Rows::order(std::vector<int64_t>& next, int64_t fewest_tiled) {
    for (int64_t e = 0; e + 1 < static_cast<int64_t>(next.size()); ++e)
        if (next[e]) active.push_back({e, 0, next[e], 0});
    std::stable_sort(active.begin(), active.end(),
                     [](const Active& a, const Active& b) { return a.num_rows > b.num_rows; });
    for (auto& a : active) {
        next[a.expert] = a.first_row = num_rows, num_rows += a.num_rows;
        a.tiled = a.num_rows >= fewest_tiled;
        a.first_tile = num_tiles;
        if (a.tiled) num_tiles += a.num_tiles(), first_plain = num_rows;
    }
}

Rows::Rows(const Call& call, const ExpertIds& ids, int64_t first_token, int64_t num_tokens, int64_t fewest_tiled) {
    const int64_t slots = num_tokens * call.top_k, first = first_token * call.top_k, experts = call.num_experts;
    std::vector<int64_t> next(static_cast<size_t>(experts) + 1, 0);
    ids.add_to(next.data(), first, first + slots);
    Chosen chosen;
    if (call.all_experts) {
        chosen.assign(static_cast<size_t>(experts), std::vector<bool>(static_cast<size_t>(num_tokens), false));
        for (int64_t s = 0; s < slots; ++s)
            if (const int64_t e = ids[first + s]; e >= 0) chosen[e][s / call.top_k] = true;
        for (int64_t e = 0; e < experts; ++e)
            for (int64_t t = 0; t < num_tokens; ++t) next[e] += !chosen[e][t];
    }
    order(next, fewest_tiled);
    token.resize(static_cast<size_t>(num_rows));
    factor.assign(static_cast<size_t>(num_rows), 1.0f);
    of_slot.assign(static_cast<size_t>(slots), -1);
    for (int64_t s = 0; s < slots; ++s) {
        const int64_t e = ids[first + s];
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
