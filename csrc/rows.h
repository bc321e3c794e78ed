// Which expert computes which token: the routing, turned around.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "counting_sort.h"
#include "engine.h"
#include "stored_rows.h"

namespace moestro {

// An expert that has rows.
struct Active {
    int64_t expert, first_row, num_rows;
    int64_t num_ranges = 0;  // that its gate_up is cut into
    int64_t first_tile = 0;
    bool tiled = false;

    int64_t num_tiles() const { return (num_rows + 15) / 16; }
    int tile_width() const { return moestro::tile_width(num_rows); }
    // Of a tile, which is numbered among those of all experts.
    int tokens_of(int64_t tile) const {
        return static_cast<int>(std::min<int64_t>(num_rows - (tile - first_tile) * 16, 16));
    }
};

// Rows in the order of experts, those with most rows first; of one expert in the order of slots.
struct Rows {
    // An expert takes tiles of tokens if it has `fewest_tiled` rows.
    Rows(const Call& call, const ExpertIds& ids, int64_t first_token, int64_t num_tokens, int64_t fewest_tiled);

    std::vector<Active> active;
    std::vector<int64_t> token;    // of a row, counted from the first token
    std::vector<float> factor;     // that its input is multiplied by
    std::vector<int64_t> of_slot;  // -1 where a slot is empty
    int64_t num_rows = 0, num_tiles = 0;
    int64_t first_plain = 0;  // row of those that stand in no tile

private:
    using Chosen = std::vector<std::vector<bool>>;  // [expert][token]
    void order(std::vector<int64_t>& next, int64_t fewest_tiled);
};

// The ids of a call. Throws std::invalid_argument where one names an expert that a table does not list.
ExpertIds read_ids(const Call& call);

}  // namespace moestro
