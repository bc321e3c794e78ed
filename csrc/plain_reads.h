// Memory read and nothing computed: the least time of a call that needs its weights.
#pragma once

#include <cstdint>
#include <vector>

namespace moestro {

struct Piece {
    const uint8_t* data;
    int64_t bytes;
};

// Reads every byte of the pieces once. Threads take parts of them in order, and read each as four streams at once. What
// is returned depends on every byte, but for memory that is listed twice, so that no read is left out.
uint64_t plain_read(const std::vector<Piece>& pieces, int num_threads);

}  // namespace moestro
