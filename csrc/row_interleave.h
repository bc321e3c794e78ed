// Row interleave: which rows of weights are read in turn.
#pragma once

#include <algorithm>
#include <cstdint>

namespace moestro {

constexpr int64_t kChunk = 64;  // columns of h between activations; as many rows of down, or of a linear module
constexpr int64_t kAheadBytes = 8 << 10;  // of weights are fetched before they are read

// Columns of h, or rows of down. The rows of weights of a column of h are one, two neighbours (gate and up alternate),
// or two that are `up_distance` rows from one another.
struct Chunk {
    int64_t first, columns;
    bool alternate;
    int64_t up_distance;
};

// A row of weights, and what it computes: the gate or the up part of a column of the chunk, counted from its first;
// nothing where a step has more rows than are left.
struct ReadRow {
    int64_t row, column;
    bool up, counts;
};

// Where the chunk begins in which `i` is, of those from `first` on.
inline int64_t first_of_chunk(int64_t first, int64_t i) { return first + ((i - first) & -kChunk); }
// How many steps of so many rows are at least kAheadBytes of weights.
inline int64_t steps_ahead(int64_t row_bytes, int rows) { return kAheadBytes / (rows * row_bytes + 1) + 1; }

// The N rows of a chunk (a power of two) that are read in the step that computes column `column` of it. Four rows are
// from four quarters of the chunk, so that each goes on in memory where it ended the step before.
template <int N> inline void interleave(const Chunk& chunk, int64_t column, ReadRow* to) {
    constexpr int kLog = N == 4 ? 2 : N == 8 ? 3 : N == 16 ? 4 : 5;
    static_assert(N == 1 << kLog);
    const int doubled = chunk.alternate, halved = chunk.up_distance != 0, each = N >> halved;
    const int64_t rows = chunk.columns << doubled, steps = (rows + each - 1) >> (kLog - halved);
    const int64_t step = column << doubled >> (kLog - halved);
    for (int j = 0; j < each; ++j) {
        const int64_t index = N == 4 ? j * steps + step : step * each + j, row = std::min(index, rows - 1);
        to[j] = {(chunk.first << doubled) + row, row >> doubled, chunk.alternate && (row & 1), index < rows};
    }
    for (int j = each; j < N; ++j) {
        const ReadRow& gate = to[j - each];
        to[j] = {gate.row + chunk.up_distance, gate.column, true, gate.counts};
    }
}

// The row that is read in place of `at` so many steps in line behind its own.
inline ReadRow in_line_behind(const Chunk& chunk, const ReadRow& at, int64_t steps) {
    if (!chunk.alternate) return {at.row + steps, at.column + steps, at.up, at.counts};
    const int64_t index = 2 * at.column + at.up + steps;
    return {at.row + steps, index >> 1, (index & 1) != 0, at.counts};
}

// How many steps of four rows, from that of `column` on, read the row behind each of those of the step before.
inline int64_t steps_in_line(const Chunk& chunk, int64_t column) {
    const int doubled = chunk.alternate, halved = chunk.up_distance != 0, each = 4 >> halved;
    const int64_t rows = chunk.columns << doubled, steps = (rows + each - 1) >> (2 - halved);
    const int64_t step = column << doubled >> (2 - halved);
    return std::max<int64_t>(1, std::min(steps, rows - (each - 1) * steps) - step);
}

}  // namespace moestro
