// Memory of a call, and how vectors lie in it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

#include "engine.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace moestro {

constexpr int64_t kHugePage = 2 << 20;
constexpr int64_t kKeptBytes = 8 << 20;  // of its workspace that a thread keeps for its next call

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Uninitialised floats, aligned to a cache line and kept from call to call while they are few.
class Arena {
public:
    ~Arena() { std::free(data_); }
    float* reserve(int64_t floats) {
        const int64_t bytes = round_up(floats * 4, 64) + 64;
        if (bytes > size_) {
            free();
            const bool huge = bytes >= 2 * kHugePage;
            const int64_t wanted = huge ? round_up(bytes, kHugePage) : bytes;
            data_ = std::aligned_alloc(huge ? kHugePage : 64, static_cast<size_t>(wanted));
            if (!data_) throw std::bad_alloc();
            size_ = wanted;
#if defined(__linux__)
            if (huge) madvise(data_, static_cast<size_t>(size_), MADV_HUGEPAGE);
#endif
        }
        return static_cast<float*>(data_);
    }
    // Frees what is more than a little.
    void trim() {
        if (size_ > kKeptBytes) free();
    }
    // Keeps it, as memory that the system may take back; where a system has none of that kind, as `trim`.
    void lend() {
#if defined(__linux__) && defined(MADV_FREE)
        if (size_ > kKeptBytes && madvise(data_, static_cast<size_t>(size_), MADV_FREE) == 0) return;
#endif
        trim();
    }

private:
    void free() {
        std::free(data_);
        data_ = nullptr;
        size_ = 0;
    }
    void* data_ = nullptr;
    int64_t size_ = 0;
};

// What each thread keeps for the calls of one kind: `arena` for a call, `scratch` for the thread's own part of it.
template <class Owner> struct Workspace {
    static Arena& arena() {
        static thread_local Arena own;
        return own;
    }
    static Arena& scratch() {
        static thread_local Arena own;
        return own;
    }
    static void release() { arena().trim(), scratch().trim(); }
    static void lend() { arena().lend(), scratch().trim(); }
};

// Where column k of a vector lies for the weights that it meets, as kernels.h walks them.
struct Layout {
    bool nibbles;
    int64_t columns, lanes, padded;

    Layout(Element element, int64_t columns, int lanes)
        : nibbles(is_nibble(element)), columns(columns), lanes(lanes),
          padded(round_up(columns, nibbles ? 8 * lanes : lanes)) {}

    // Rows are apart by this, off a power of two, so that those of a tile do not share cache sets.
    int64_t stride() const { return padded + 16; }
    int64_t position(int64_t k) const {
        if (!nibbles) return k;
        const int64_t block = 8 * lanes, in_block = k % block;
        return k - in_block + in_block % 8 * lanes + in_block / 8;
    }
    // row[position(first + i)] = from[i]
    void place(const float* from, int64_t first, int64_t n, float* row) const {
        if (!nibbles) {
            std::memcpy(row + first, from, static_cast<size_t>(n) * sizeof(float));
            return;
        }
        for (int64_t i = 0; i < n; ++i) row[position(first + i)] = from[i];
    }
    void clear_padding(float* row) const {
        for (int64_t k = columns; k < padded; ++k) row[position(k)] = 0.0f;
    }
};

// From one row of x to the next of a matrix by itself, in floats: as its kernels want it, or as floats.
inline int64_t linear_stride(const RowOps* ops, const Projection& p, const Layout& layout) {
    const int64_t floats = layout.stride();
    return ops ? round_up(std::max(ops->row_floats(p.element, p.columns), floats), 16) : floats;
}

}  // namespace moestro
