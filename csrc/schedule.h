// How the work of a call is cut into ranges that threads take in turn.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "engine.h"
#include "rows.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace moestro {

struct Range {
    int32_t expert;  // index among those with rows
    bool down;
    int64_t first, last;  // intermediate columns, or rows of down
};

// Ranges of equal cost: along the intermediate size (gate_up) and the hidden size (down) where experts are few or one
// is hot, and of whole experts where these are many and small. Says of each expert how many its gate_up is cut into.
std::vector<Range> cut(const Call& call, std::vector<Active>& active);
// Those of a matrix by itself.
std::vector<Range> cut(const LinearCall& call);

// Ranges, which threads take in order.
class Queue {
public:
    explicit Queue(std::vector<Range> ranges) : ranges_(std::move(ranges)) {}
    const Range* next() {
        const int64_t i = next_.fetch_add(1, std::memory_order_relaxed);
        return i < static_cast<int64_t>(ranges_.size()) ? &ranges_[static_cast<size_t>(i)] : nullptr;
    }

private:
    const std::vector<Range> ranges_;
    std::atomic<int64_t> next_{0};
};

// What a thread reads. It takes the range that follows when the end of its own comes near, so that it can be fetched.
struct Reader {
    Queue& queue;
    const Range *range = nullptr, *following = nullptr;
    bool last_pass = true, at_end = false;
    bool counts = false;  // the kernels that multiply the range are to be counted

    explicit Reader(Queue& ranges) : queue(ranges) {}
    const Range* take() {
        range = following ? following : at_end ? nullptr : queue.next();
        following = nullptr;
        return range;
    }
    // The range `distance` rows behind i, which is then there: in this range, or in the one that follows; null where
    // there is none.
    const Range* ahead(int64_t& i, int64_t distance) {
        i += distance;
        if (i < range->last) return range;
        if (!last_pass) return nullptr;
        if (!following && !at_end) following = queue.next();
        at_end = !following;
        if (!following) return nullptr;
        i += following->first - range->last;
        return i < following->last ? following : nullptr;
    }
};

inline void wait_for(const std::atomic<int64_t>& count, int64_t wanted) {
    for (int spins = 0; count.load(std::memory_order_acquire) < wanted; ++spins) {
#if defined(__x86_64__)
        _mm_pause();
#elif defined(__aarch64__)
        __asm__ volatile("yield");
#endif
        if (spins > 1000) std::this_thread::yield();
    }
}

}  // namespace moestro
