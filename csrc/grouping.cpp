// Rows in the order of experts: a counting sort, which is stable.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "counting_sort.h"
#include "routing.h"
#include "team.h"

namespace moestro {
namespace {

constexpr int64_t kWorthThreads = 1 << 16;

// The slots of a thread, and how many of them each expert has; empty ones count for expert E.
struct Part {
    int64_t start, stop;
    std::vector<int64_t> next;  // at first counts, then the row that an expert's next slot takes
};

template <class Id> bool fits_of(const Slots& s, const void* weights) {
    bool good = true;
    for (int64_t i = 0; i < s.count(); ++i) {
        const Id id = value_at<Id>(s.ids, i);
        good &= id >= -1 && id < s.num_experts;
        good &= !weights || id == -1 || std::fabs(value_at<float>(weights, i)) <= std::numeric_limits<float>::max();
    }
    return good;
}

}  // namespace

bool group(const Slots& slots, const Grouped& to, int num_threads) {
    const int64_t count = slots.count(), experts = slots.num_experts;
    const int64_t worth = std::min<int64_t>(num_threads, count / (experts + 1));
    const int64_t most = count < kWorthThreads ? 1 : std::max<int64_t>(1, worth);
    ExpertIds ids(count, experts);
    std::vector<Part> parts(static_cast<size_t>(most));
    const auto bins = static_cast<size_t>(experts) + 1;
    for (int64_t p = 0; p < most; ++p)
        parts[p] = {count * p / most, count * (p + 1) / most, std::vector<int64_t>(bins)};
    std::vector<char> good(static_cast<size_t>(most), 0);
    // A team may be smaller than was asked for; the parts are as many as they are.
    run_team(static_cast<int>(most), [&](int thread, int threads) {
        for (int64_t p = thread; p < most; p += threads) {
            Part& part = parts[p];
            good[p] = ids.read(slots.ids, slots.are_64_bit, part.start, part.stop);
            ids.add_to(part.next.data(), part.start, part.stop);
        }
    });
    int64_t row = 0;
    for (int64_t e = 0; e <= experts; ++e) {
        to.offsets[e] = row;
        for (auto& part : parts) {
            const int64_t own = part.next[e];
            part.next[e] = row;
            row += own;
        }
    }
    run_team(static_cast<int>(most), [&](int thread, int threads) {
        for (int64_t p = thread; p < most; p += threads) {
            Part& part = parts[p];
            int64_t token = slots.top_k ? part.start / slots.top_k : 0, slot = slots.top_k ? part.start % slots.top_k : 0;
            for (int64_t i = part.start; i < part.stop; ++i) {
                const int64_t own = part.next[ids.bin(i)]++;
                to.token_ids[own] = token;
                to.slots[own] = slot;
                to.inverse[i] = own;
                if (++slot == slots.top_k) slot = 0, ++token;
            }
        }
    });
    return std::count(good.begin(), good.end(), 0) == 0;
}

bool schedule(const Slots& slots, const Schedule& to) {
    const int64_t count = slots.count(), experts = slots.num_experts, size = to.block_size;
    ExpertIds ids(count, experts);
    const bool good = ids.read(slots.ids, slots.are_64_bit, 0, count);
    std::vector<int64_t> next(static_cast<size_t>(experts) + 1);
    ids.add_to(next.data(), 0, count);
    std::copy_n(next.begin(), experts, to.counts);
    int64_t block = 0;
    for (int64_t e = 0; e < experts; ++e) {
        const int64_t own = (to.counts[e] + size - 1) / size;
        if (own > to.num_blocks - block) return false;
        next[e] = block * size;
        std::fill_n(to.block_experts + block, own, e);
        block += own;
    }
    std::fill(to.block_experts + block, to.block_experts + to.num_blocks, -1);
    std::fill_n(to.pair_ids, to.num_blocks * size, -1);
    for (int64_t i = 0; i < count; ++i) {
        to.scatter_index[i] = ids[i] < 0 ? -1 : next[ids[i]]++;
        if (ids[i] >= 0) to.pair_ids[to.scatter_index[i]] = i;
    }
    return good;
}

bool fits(const Slots& slots, const void* weights) {
    return slots.are_64_bit ? fits_of<int64_t>(slots, weights) : fits_of<int32_t>(slots, weights);
}

}  // namespace moestro
