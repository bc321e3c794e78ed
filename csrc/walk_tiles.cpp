// The part of a walk whose experts take tiles of bfloat16.

#include <algorithm>

#include "counts.h"
#include "walk.h"

namespace moestro {

// Has tiles of rows fetch those that follow.
void Walk::follow(TileRows& rows, Reader& reader, int64_t i) const {
    const Activation& act = call_.activation;
    int64_t then = i;
    const Range* range = reader.ahead(then, !reader.range->down && act.gated ? 16 : 32);
    if (!range) return;
    const bool gated = !range->down && act.gated, alternate = gated && act.interleaved;
    const int64_t distance = alternate ? 1 : gated ? call_.intermediate_size : 16;
    const int64_t first = alternate ? 2 * then : then, every = alternate ? 2 : 1;
    moestro::follow(rows, projection(*range), expert(*range), first, distance, every);
}

void Walk::tiled_gate_up(const Active& active, Reader& reader, int64_t first, int64_t n, uint8_t* room) {
    const Activation& act = call_.activation;
    const Range& range = *reader.range;
    if (reader.counts) moestro::count(Stage::gate_up, Kernel::bfloat16_tiles);
    const int64_t step = act.gated ? 16 : 32, every = act.interleaved ? 2 : 1;
    const int64_t distance = !act.gated ? 16 : act.interleaved ? 1 : call_.intermediate_size;
    for (int64_t c = range.first; c < range.last; c += step) {
        const auto left = static_cast<int>(range.last - c);
        const int count[2] = {std::min(left, 16), act.gated ? std::min(left, 16) : std::clamp(left - 16, 0, 16)};
        float values[32];
        const float* bias =
            tile_bias(isa_, call_.gate_up_bias, active.expert, c * every, distance, every, count, values);
        TileRows rows = tile_rows(call_.gate_up, active.expert, c * every, count[1] ? distance : 0, every, count);
        rows.width = active.tile_width();
        rows.last_tokens = active.tokens_of(first + n - 1);
        rows.out_step = tile_words(call_.intermediate_size);
        rows.out_nibbles = is_nibble(call_.down.element);
        follow(rows, reader, c);
        isa_.tiles->gate_up(rows, bias, act, x_tile(first), n, c, h_tile(first), room);
    }
}

void Walk::tiled_down(const Active& active, Reader& reader, int64_t first, int64_t n, uint8_t* room) {
    const Range& range = *reader.range;
    if (reader.counts) moestro::count(Stage::down, Kernel::bfloat16_tiles);
    float* y[kTokenBlock + 32];
    const int64_t before = (first - active.first_tile) * 16;
    for (int64_t i = range.first; i < range.last; i += 32) {
        const auto left = static_cast<int>(range.last - i);
        const int count[2] = {std::min(left, 16), std::clamp(left - 16, 0, 16)};
        for (int64_t t = 0; t < n * 16; ++t)
            y[t] = before + t < active.num_rows ? y_ + (active.first_row + before + t) * y_stride_ + i : nullptr;
        float values[32];
        const float* bias = tile_bias(isa_, call_.down_bias, active.expert, i, 16, 1, count, values);
        TileRows rows = tile_rows(call_.down, active.expert, i, count[1] ? 16 : 0, 1, count);
        rows.width = active.tile_width();
        rows.last_tokens = active.tokens_of(first + n - 1);
        follow(rows, reader, i);
        isa_.tiles->down(rows, bias, h_tile(first), n, y, room);
    }
}

}  // namespace moestro
