// Which kernel runs when: the one table. The walks ask it before they multiply, and `plan` asks it without multiplying.
#pragma once

#include <string>
#include <vector>

#include "engine.h"

namespace moestro {

// How rows of tokens meet weights.
enum class Input : int { floats, bfloat16, int8, int8_residual, int16, e4m3 };

enum class Kernel : int {
    bfloat16_tiles,
    int8_tiles,
    int8_dots,
    int8_residual_dots,
    int16_dots,
    bfloat16_dots,
    e4m3_dots,
    outer_products,
    decoded_e4m3_dots,
    eight_row_dots,
    group_scaled_dots,
    direct_dots,
    decoded_dots,
};
constexpr int kNumKernels = 13;

// The products of one matrix of weights with a block of token rows.
struct Case {
    const Isa& isa;
    const Projection& weights;
    Input input = Input::floats;
    bool takes_tiles = false;    // of bfloat16: `takes_tiles` of the call and the expert's rows
    bool may_take_more = false;  // than four rows of weights at once
    bool same_bits = false;      // of the call
    bool group_scales = false;   // the expert's rows are few and the bits may depend on how many they are
    int64_t rows = 0;            // of the block
    int64_t expert_rows = 0;     // all of the expert's, or of a linear call: outer products are in every block or none
    int64_t wide_rows = 0;       // of the call
};
Kernel choose(const Case& asked);
// Of an expert that takes no tiles of bfloat16, and of a matrix by itself, but for the rows of a block.
Case expert_case(const Isa& isa, const Call& call, const Projection& weights, int64_t expert_rows);
Case linear_case(const Isa& isa, const LinearCall& call);

// Whether codes of e4m3 become floats by a shift: the set can do that, and the processor takes subnormal numbers at no
// cost.
bool shifts_e4m3(const Isa& isa);

// What the rows of a call become.
Input input_of(const Isa& isa, const Call& call);
Input input_of(const Isa& isa, const LinearCall& call);
const RowOps* row_ops(const Isa& isa, Input input);  // null for floats

// Rows from which on an expert takes tiles of bfloat16; INT64_MAX where there are none.
int64_t fewest_tiled(const Isa& isa, const Call& call, Input input);
bool takes_tiles(const Isa& isa, const LinearCall& call);
// Whether scales multiply the sums of their groups, for an expert with so many rows.
bool group_scales(const Isa& isa, Input input, bool same_bits, int64_t expert_rows);
// Token rows that meet a range of weights in tiles before the next ones do.
int64_t token_block(const Call& call);
// Token rows of the next block where so many are left: at most `most`, or with 0 what the kernel wants. Blocks of outer
// products are near-equal, since weights are transposed for each of them.
int64_t next_block(const Case& asked, int64_t left, int64_t most);
// Tokens that fit into the workspace at once; 16 always do.
int64_t tokens_at_once(const Isa& isa, const Call& call, Input input);
int64_t tokens_at_once(const LinearCall& call);

const char* name_of(Kernel kernel);

// A line of the table in words: the kernel and when it runs. The first line that applies is taken.
struct KernelRule {
    const char* kernel;
    std::string when;
};
std::vector<KernelRule> kernel_rules();
// Rows from which on an expert takes tiles of bfloat16, by what its weights are stored in.
struct TileRule {
    std::string weights;
    int64_t with_floats, with_int8_residual;  // for the rows that take no tiles
};
std::vector<TileRule> tile_rules();

}  // namespace moestro
