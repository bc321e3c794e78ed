#include "plan.h"

#include <algorithm>

#include "layout.h"
#include "rows.h"

namespace moestro {

std::atomic<bool> counting{false};
std::atomic<int64_t> kernel_counts[kNumStages][kNumKernels];

namespace {

class Sums {
public:
    void add(Stage stage, Kernel kernel, int64_t rows) {
        Planned& own = of_[static_cast<int>(stage)][static_cast<int>(kernel)];
        own.units += 1, own.rows += rows;
    }
    std::vector<Planned> list() const {
        std::vector<Planned> found;
        for (int s = 0; s < kNumStages; ++s)
            for (int k = 0; k < kNumKernels; ++k) {
                const Planned& own = of_[s][k];
                if (own.units) found.push_back({static_cast<Stage>(s), static_cast<Kernel>(k), own.units, own.rows});
            }
        return found;
    }

private:
    Planned of_[kNumStages][kNumKernels] = {};
};

void add_expert(const Isa& isa, const Call& call, const Active& active, Sums& sums) {
    // Tiles of tokens are whole.
    const int64_t block = active.tiled ? (token_block(call) + 15) / 16 * 16 : call.token_block;
    for (const Stage stage : {Stage::gate_up, Stage::down}) {
        const Projection& p = stage == Stage::down ? call.down : call.gate_up;
        if (p.rows == 0) continue;
        Case asked = expert_case(isa, call, p, active.num_rows);
        asked.takes_tiles = active.tiled;
        for (int64_t r = 0, m = 0; r < active.num_rows; r += m) {
            m = next_block(asked, active.num_rows - r, block);
            asked.rows = m;
            sums.add(stage, choose(asked), m);
        }
    }
}

}  // namespace

std::vector<Planned> plan(const Isa& isa, const Call& call) {
    const Input input = input_of(isa, call);
    const int64_t most = tokens_at_once(isa, call, input), fewest = fewest_tiled(isa, call, input);
    const ExpertIds ids = read_ids(call);
    Sums sums;
    for (int64_t t = 0; t < call.num_tokens; t += most) {
        const Rows rows(call, ids, t, std::min(most, call.num_tokens - t), fewest);
        for (const Active& active : rows.active) add_expert(isa, call, active, sums);
    }
    return sums.list();
}

std::vector<Planned> plan(const Isa& isa, const LinearCall& call) {
    const int64_t most = tokens_at_once(call);
    Sums sums;
    for (int64_t first = 0; first < call.num_tokens && call.weights.rows > 0; first += most) {
        const int64_t n = std::min(most, call.num_tokens - first);
        Case asked = linear_case(isa, call);
        asked.takes_tiles = takes_tiles(isa, call);
        for (int64_t t = 0; t < n; t += asked.rows) {
            asked.rows = next_block(asked, n - t, 0);
            sums.add(Stage::linear, choose(asked), asked.rows);
        }
    }
    return sums.list();
}

int64_t workspace_bytes(const Isa& isa, const Call& call) {
    const Input input = input_of(isa, call);
    const RowOps* int8 = row_ops(isa, input);
    const int64_t n = std::min(call.num_tokens, tokens_at_once(isa, call, input));
    const int64_t experts = call.all_experts ? call.num_experts : 0, rows = n * (call.top_k + experts);
    const int64_t hidden = call.hidden_size, inner = call.intermediate_size;
    const Layout x_layout(call.gate_up.element, hidden, isa.lanes), h_layout(call.down.element, inner, isa.lanes);
    const int64_t x_row = int8 ? int8->row_floats(call.gate_up.element, hidden) + 16 : x_layout.stride();
    const int64_t h_row = int8 ? int8->row_floats(call.down.element, inner) + 16 : h_layout.stride();
    const int64_t x_rows = call.weight_on_input ? rows : n;
    int64_t floats = x_rows * x_row + rows * (h_row + hidden + 32);
    if (int8) floats += rows * (inner + 16);
    if (isa.tiles) {
        const int64_t fewest = fewest_tiled(isa, call, input);
        const int64_t tiles = fewest > rows ? 0 : rows / 16 + std::min(call.num_experts, rows / fewest);
        floats += tiles * (tile_words(hidden) + tile_words(inner));
    }
    return 4 * floats;
}

int64_t workspace_bytes(const Isa& isa, const LinearCall& call) {
    const int64_t n = std::min(call.num_tokens, tokens_at_once(call));
    const int64_t columns = call.weights.columns;
    const RowOps* ops = row_ops(isa, input_of(isa, call));
    const Layout layout(call.weights.element, columns, isa.lanes);
    const int64_t row = linear_stride(ops, call.weights, layout);
    return 4 * (takes_tiles(isa, call) ? (n + 15) / 16 * tile_words(columns) : n * row);
}

}  // namespace moestro
