// Which rows of weights are read together.
#pragma once

#include <algorithm>
#include <cstdint>

namespace moestro {

constexpr int64_t kChunk = 64;  // columns of h between activations; as many rows of down

// Columns of h whose rows of weights are one for each, two by two (gate and up alternate), or two apart from one another; or
// rows of down.
struct Chunk {
    int64_t first, columns;
    bool alternate;
    int64_t apart;
};

// A row of weights, and what it makes up: the gate or the up part of a column of the chunk, counted from its first; nothing
// where a step has more rows than are left.
struct Place {
    int64_t row, column;
    bool up, counts;
};

// The N rows of a chunk (a power of two) that are read in the step that computes column `column` of it. Four rows stand apart,
// so that each goes on in memory where it ended the step before.
template <int N> inline void places(const Chunk& chunk, int64_t column, Place* at) {
    constexpr int kLog = N == 4 ? 2 : N == 8 ? 3 : 5;
    static_assert(N == 1 << kLog);
    const int doubled = chunk.alternate, halved = chunk.apart != 0, each = N >> halved;
    const int64_t rows = chunk.columns << doubled, steps = (rows + each - 1) >> (kLog - halved), step = column << doubled >> (kLog - halved);
    for (int j = 0; j < each; ++j) {
        const int64_t place = N == 4 ? j * steps + step : step * each + j, row = std::min(place, rows - 1);
        at[j] = {(chunk.first << doubled) + row, row >> doubled, chunk.alternate && (row & 1), place < rows};
    }
    for (int j = each; j < N; ++j) at[j] = {at[j - each].row + chunk.apart, at[j - each].column, true, at[j - each].counts};
}

}  // namespace moestro
