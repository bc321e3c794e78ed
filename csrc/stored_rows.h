// Rows of a projection as they are stored, as the kernels take them.
#pragma once

#include <algorithm>
#include <cstring>

#include "engine.h"
#include "row_interleave.h"

namespace moestro {

// The rows `at` of an expert's projection, one step of them; none come next.
inline void take_rows(FourRows& found, const Projection& p, int64_t expert, const ReadRow* at) {
    found.element = p.element;
    found.scale = p.scale;
    found.columns = p.columns;
    found.group_columns = p.group_columns;
    found.row_stride = p.row_stride;
    found.scale_stride = p.group_rows == 1 ? p.scale_row_stride : 0;
    Matrix m = p.matrix(expert, 0);
    found.zero_stride = p.group_rows == 1 && m.zeros ? p.zero_row_stride : 0;
    for (int i = 0; i < 4; ++i) {
        int64_t row = at[i].row;
        if (p.num_blocks > 1) m = p.matrix_of(expert, row);
        const int64_t group = p.group_rows == 1 ? row : p.group_rows ? row / p.group_rows : 0;
        found.data[i] = m.data + row * p.row_stride;
        found.scales[i] = m.scales ? m.scales + group * p.scale_row_stride : nullptr;
        found.zeros[i] = m.zeros ? m.zeros + group * p.zero_row_stride : nullptr;
        found.global_scale[i] = 1.0f;
        if (m.global_scale) std::memcpy(found.global_scale + i, m.global_scale, sizeof(float));  // at any address
    }
    for (const uint8_t*& next : found.next) next = nullptr;
}
// Of `steps` steps from the rows `at` on, how many have each row and its scales where a stride leads.
inline int64_t steps_by_stride(const Projection& p, const ReadRow* at, int64_t steps) {
    if (p.num_blocks > 1) return 1;
    for (int i = 0; i < 4 && p.group_rows > 1; ++i) steps = std::min(steps, p.group_rows - at[i].row % p.group_rows);
    return steps;
}
inline FourRows rows_of(const Projection& p, int64_t expert, const int64_t* at) {
    ReadRow rows[4] = {};
    for (int i = 0; i < 4; ++i) rows[i].row = at[i];
    FourRows found;
    take_rows(found, p, expert, rows);
    return found;
}

// Where a row's elements lie.
inline const uint8_t* data_of(const Projection& p, int64_t expert, int64_t row) {
    const Matrix m = p.matrix_of(expert, row);
    return m.data + row * p.row_stride;
}

// Has the rows say that the rows `at` of an expert's projection come next, and fetches the scales of these.
inline void follow(FourRows& rows, const Projection& p, int64_t expert, const ReadRow* at) {
    Matrix m = p.matrix(expert, 0);
    const int64_t scale_bytes = p.group_rows == 1 ? p.num_groups() * p.scale_size() : 0;
    rows.next_stride = p.row_stride;
    for (int i = 0; i < 4; ++i) {
        int64_t row = at[i].row;
        if (p.num_blocks > 1) m = p.matrix_of(expert, row);
        rows.next[i] = m.data + row * p.row_stride;
        for (int64_t s = 0; s < rows.steps; ++s)
            for (int64_t b = 0; b < scale_bytes; b += 64)
                __builtin_prefetch(m.scales + (row + s) * p.scale_row_stride + b, 0, 2);
    }
}

// Where few enough tokens meet the rows (`tokens`: all that do), has each fetch itself some bytes ahead, and not the
// rows that come next. It fetches as many bytes behind its end.
inline void fetch_ahead_in_row(FourRows& rows, const Isa& isa, int64_t tokens) {
    if (tokens > isa.ahead_in_row.most_tokens(rows.element)) return;
    for (int i = 0; i < 4; ++i) rows.next[i] = rows.data[i] + isa.ahead_in_row.bytes;
    rows.next_stride = rows.row_stride;
}

// `count` rows from each of two rows on: `at` and `at + distance`, one in `every` of them.
inline TileRows tile_rows(const Projection& p, int64_t expert, int64_t at, int64_t distance, int64_t every,
                          const int* count) {
    TileRows found;
    found.element = p.element;
    found.scale = p.scale;
    found.columns = p.columns;
    found.group_columns = p.group_columns;
    for (int i = 0; i < 2; ++i) {
        found.first[i] = data_of(p, expert, at + i * distance);
        found.stride[i] = every * p.row_stride;
        found.count[i] = count[i];
    }
    if (p.scale == Scale::none) return found;
    for (int i = 0; i < 32; i += 4) {
        const int half = i / 16, last = std::max(count[half], 1) - 1;
        int64_t four[4];
        for (int j = 0; j < 4; ++j) four[j] = at + half * distance + std::min(i % 16 + j, last) * every;
        const FourRows rows = rows_of(p, expert, four);
        std::copy(rows.data, rows.data + 4, found.data + i);
        std::copy(rows.scales, rows.scales + 4, found.scales + i);
        std::copy(rows.zeros, rows.zeros + 4, found.zeros + i);
        std::copy(rows.global_scale, rows.global_scale + 4, found.global_scale + i);
    }
    return found;
}

// Has the rows say that those of tile_rows(p, expert, at, distance, every) come next.
inline void follow(TileRows& rows, const Projection& p, int64_t expert, int64_t at, int64_t distance, int64_t every) {
    const bool packed = p.scale != Scale::none;
    for (int i = 0; i < 2; ++i) {
        rows.next[i] = data_of(p, expert, std::min(at + i * distance, p.rows - 1));
        rows.next_stride[i] = every * p.row_stride;
    }
    if (packed && distance == 1)
        rows.next[1] = rows.next[0] + 16 * p.row_stride;  // rows that alternate lie in one place
}

// The 32 values that tile_rows' products take, in `to`; null without a bias.
inline const float* tile_bias(const Isa& isa, const FloatArray& bias, int64_t expert, int64_t at, int64_t distance,
                              int64_t every, const int* count, float* to) {
    if (!bias.data) return nullptr;
    const int64_t size = bias.dtype == Element::f32 ? 4 : 2;
    for (int i = 0; i < 2; ++i)
        for (int r = 0; r < 16; ++r) {
            const auto* from =
                static_cast<const uint8_t*>(bias.data) + (expert * bias.stride + at + i * distance + r * every) * size;
            to[16 * i + r] = 0.0f;
            if (r < count[i]) isa.widen(from, bias.dtype, 1, 1.0f, to + 16 * i + r);
        }
    return to;
}

// Tokens of a tile that n of them fill as far as they go.
inline int tile_width(int64_t n) { return n > 8 ? 16 : n > 4 ? 8 : n > 2 ? 4 : static_cast<int>(n); }

}  // namespace moestro
