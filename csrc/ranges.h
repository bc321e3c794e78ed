// How the work of a call is cut into pieces that threads take in order.
#pragma once

#include <algorithm>
#include <vector>

#include "engine.h"
#include "rows.h"

namespace moestro {

struct Range {
    int32_t expert;  // index among those with rows
    bool down;
    int64_t first, last;  // intermediate columns, or rows of down
};

constexpr int64_t kSmallestRange = 64 << 10;   // bytes of weights, or as much arithmetic
constexpr int64_t kRangesPerThread = 24;
constexpr int64_t kBytesPerFma = 4;        // arithmetic that takes as long as reading a byte, inverted: a coarse balance

// Ranges of equal cost: along the intermediate size (gate_up) and the hidden size (down) where experts are few or one is
// hot, and of whole experts where these are many and small. Says of each expert how many its gate_up is cut into.
inline std::vector<Range> cut(const Call& call, std::vector<Active>& active) {
    const auto cost = [](const Projection& p, int64_t tokens) { return std::max(p.row_bytes(), p.columns * tokens / kBytesPerFma); };
    int64_t total = 0;
    for (const auto& a : active) total += cost(call.gate_up, a.num_rows) * call.gate_up.rows + cost(call.down, a.num_rows) * call.down.rows;
    const int64_t wanted = std::max(total / (kRangesPerThread * call.num_threads), kSmallestRange);
    const int64_t halves = call.activation.gated ? 2 : 1;
    std::vector<Range> ranges;
    const auto add = [&](size_t index, bool down) {
        Active& a = active[index];
        const int64_t n = down ? call.hidden_size : call.intermediate_size;
        const int64_t each = cost(down ? call.down : call.gate_up, a.num_rows) * (down ? 1 : halves);
        const int64_t asked = call.pieces ? call.pieces : (n * each + wanted - 1) / wanted;
        const int64_t pieces = std::clamp<int64_t>(asked, 1, std::max<int64_t>(n / 16, 1));
        for (int64_t i = 0; i < pieces; ++i) {
            // At multiples of the 16 rows that a tile takes.
            const int64_t first = i * n / pieces / 16 * 16, last = i + 1 == pieces ? n : (i + 1) * n / pieces / 16 * 16;
            if (first < last) ranges.push_back({static_cast<int32_t>(index), down, first, last}), a.num_ranges += !down;
        }
    };
    for (size_t i = 0; i < active.size(); ++i) {
        add(i, false);
        if (i > 0) add(i - 1, true);
    }
    if (!active.empty()) add(active.size() - 1, true);
    return ranges;
}

}  // namespace moestro
