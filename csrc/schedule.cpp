#include "schedule.h"

#include <algorithm>

namespace moestro {
namespace {

constexpr int64_t kSmallestRange = 64 << 10;  // bytes of weights, or as much arithmetic
constexpr int64_t kRangesPerThread = 24;
constexpr int64_t kBytesPerFma = 4;  // arithmetic that takes as long as reading a byte, inverted: a coarse balance
constexpr int64_t kLinearRangeBytes = 128 << 10;
constexpr int64_t kLinearRows = 64;  // a range of a matrix by itself is a multiple of it

int64_t cost(const Projection& p, int64_t tokens) {
    return std::max(p.row_bytes(), p.columns * tokens / kBytesPerFma);
}

}  // namespace

std::vector<Range> cut(const Call& call, std::vector<Active>& active) {
    int64_t total = 0;
    for (const auto& a : active)
        total += cost(call.gate_up, a.num_rows) * call.gate_up.rows + cost(call.down, a.num_rows) * call.down.rows;
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
            const int64_t first = i * n / pieces / 16 * 16;
            const int64_t last = i + 1 == pieces ? n : (i + 1) * n / pieces / 16 * 16;
            if (first >= last) continue;
            ranges.push_back({static_cast<int32_t>(index), down, first, last});
            a.num_ranges += !down;
        }
    };
    for (size_t i = 0; i < active.size(); ++i) {
        add(i, false);
        if (i > 0) add(i - 1, true);
    }
    if (!active.empty()) add(active.size() - 1, true);
    return ranges;
}

std::vector<Range> cut(const LinearCall& call) {
    const int64_t bytes = std::max<int64_t>(call.weights.row_bytes(), 1), rows = call.weights.rows;
    const int64_t each = std::max(kLinearRangeBytes / bytes / kLinearRows, int64_t{1}) * kLinearRows;
    std::vector<Range> ranges;
    for (int64_t i = 0; i < rows; i += each) ranges.push_back({0, true, i, std::min(i + each, rows)});
    return ranges;
}

}  // namespace moestro
