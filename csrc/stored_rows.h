// Rows of a projection as they are stored, as the kernels take them.
#pragma once

#include <algorithm>
#include <cstring>

#include "engine.h"

namespace moestro {

// The rows `at` of an expert's projection; `ahead` rows further on are those that come next.
inline FourRows rows_of(const Projection& p, int64_t expert, const int64_t* at, int64_t ahead) {
    FourRows found;
    found.element = p.element;
    found.scale = p.scale;
    found.columns = p.columns;
    found.group_columns = p.group_columns;
    found.ahead = ahead * p.row_stride;
    const int64_t block_rows = p.rows / p.num_blocks;
    for (int i = 0; i < 4; ++i) {
        const int64_t block = at[i] / block_rows, row = at[i] - block * block_rows;
        const Matrix m = p.matrix(expert, block);
        const int64_t group = p.group_rows == 1 ? row : p.group_rows ? row / p.group_rows : 0;
        found.data[i] = m.data + row * p.row_stride;
        found.scales[i] = m.scales ? m.scales + group * p.scale_row_stride : nullptr;
        found.zeros[i] = m.zeros ? m.zeros + group * p.zero_row_stride : nullptr;
        found.global_scale[i] = 1.0f;
        if (m.global_scale) std::memcpy(found.global_scale + i, m.global_scale, sizeof(float));  // at any address
    }
    return found;
}

// `count` rows from each of two places: `at` and `at + apart`, one in `every` of them.
inline TileRows tile_rows(const Projection& p, int64_t expert, int64_t at, int64_t apart, int64_t every, const int* count) {
    TileRows found;
    found.element = p.element;
    found.scale = p.scale;
    found.columns = p.columns;
    found.group_columns = p.group_columns;
    found.ahead = (apart == 16 ? 32 : 16 * every) * p.row_stride;
    const int64_t block_rows = p.rows / p.num_blocks;
    for (int i = 0; i < 2; ++i) {
        const int64_t row = at + i * apart, block = std::min(row / block_rows, p.num_blocks - 1);
        found.first[i] = p.matrix(expert, block).data + (row - block * block_rows) * p.row_stride;
        found.stride[i] = every * p.row_stride;
        found.count[i] = count[i];
    }
    if (p.scale == Scale::none) return found;
    // Two rows that alternate lie in one place.
    found.next[0] = found.first[0] + found.ahead;
    found.next[1] = apart == 1 ? found.next[0] + 16 * p.row_stride : found.first[1] + found.ahead;
    for (int i = 0; i < 32; i += 4) {
        const int half = i / 16, last = std::max(count[half], 1) - 1;
        int64_t four[4];
        for (int j = 0; j < 4; ++j) four[j] = at + half * apart + std::min(i % 16 + j, last) * every;
        const FourRows rows = rows_of(p, expert, four, 0);
        std::copy(rows.data, rows.data + 4, found.data + i);
        std::copy(rows.scales, rows.scales + 4, found.scales + i);
        std::copy(rows.zeros, rows.zeros + 4, found.zeros + i);
        std::copy(rows.global_scale, rows.global_scale + 4, found.global_scale + i);
    }
    return found;
}

// The 32 values that tile_rows' products take, in `to`; null without a bias.
inline const float* tile_bias(const Isa& isa, const FloatArray& bias, int64_t expert, int64_t at, int64_t apart, int64_t every, const int* count, float* to) {
    if (!bias.data) return nullptr;
    const int64_t size = bias.dtype == Element::f32 ? 4 : 2;
    for (int i = 0; i < 2; ++i)
        for (int r = 0; r < 16; ++r) {
            const auto* from = static_cast<const uint8_t*>(bias.data) + (expert * bias.stride + at + i * apart + r * every) * size;
            to[16 * i + r] = 0.0f;
            if (r < count[i]) isa.widen(from, bias.dtype, 1, 1.0f, to + 16 * i + r);
        }
    return to;
}

// Tokens of a tile that n of them fill as far as they go.
inline int tile_width(int64_t n) { return n > 8 ? 16 : n > 4 ? 8 : n > 2 ? 4 : static_cast<int>(n); }

}  // namespace moestro
