// What the engine is asked to do, and the table of instruction sets that can do it. No torch, no Python.
#pragma once

#include <cstdint>

#include "elements.h"
#include "processor.h"

namespace moestro {

constexpr int64_t kTokenBlock = 96;        // the most at once: so many rows of 2048 floats fill half of an L2 cache
constexpr int64_t kOuterTokenBlock = 192;  // of outer products, whose weights are transposed once for all of them
constexpr int64_t kMostSlots = 256;        // of a token
constexpr int64_t kMostExperts = 1 << 20;
constexpr int64_t kMostInt8Columns = 1 << 17;  // so many products of two signed bytes cannot leave 32 bits
constexpr int kMostThreads = 1 << 16;

// A float32, float16 or bfloat16 tensor of which only the last dimension is known to be contiguous.
struct FloatArray {
    const void* data = nullptr;
    Element dtype = Element::f32;
    int64_t stride = 0;  // elements between rows
};

// One expert's rows, or a part of them, as stored.
struct Matrix {
    const uint8_t* data = nullptr;
    const uint8_t* scales = nullptr;
    const uint8_t* zeros = nullptr;
    const float* global_scale = nullptr;
};

// E experts of one projection. Strides are bytes. Either stacked (`base` and `step`), or unstacked: `table` then holds
// E * num_blocks matrices of rows / num_blocks rows each, and `listed` says of each expert whether it has any.
struct Projection {
    Element element = Element::f32;
    Scale scale = Scale::none;
    int64_t rows = 0, columns = 0;
    int64_t group_rows = 1, group_columns = 0;  // weights that share a scale; 0: all
    int64_t row_stride = 0, scale_row_stride = 0, zero_row_stride = 0;
    Matrix base;
    int64_t step[4] = {0, 0, 0, 0};  // from one expert to the next: data, scales, zeros, global scale
    int64_t num_blocks = 1;
    const Matrix* table = nullptr;
    const uint8_t* listed = nullptr;

    int64_t row_bytes() const { return bytes_of(element, columns); }
    int64_t scale_size() const { return bytes_of(scale); }
    bool has(int64_t expert) const { return !table || !listed || listed[expert]; }
    int64_t num_groups() const { return group_columns ? (columns + group_columns - 1) / group_columns : 1; }

    Matrix matrix(int64_t expert, int64_t block) const {
        if (table) return table[expert * num_blocks + block];
        Matrix m = base;
        m.data += expert * step[0];
        if (m.scales) m.scales += expert * step[1];
        if (m.zeros) m.zeros += expert * step[2];
        if (m.global_scale)
            m.global_scale =
                reinterpret_cast<const float*>(reinterpret_cast<const uint8_t*>(m.global_scale) + expert * step[3]);
        return m;
    }
    // The matrix that holds a row, which is then counted from its first.
    Matrix matrix_of(int64_t expert, int64_t& row) const {
        if (num_blocks == 1) return matrix(expert, 0);
        const int64_t block_rows = rows / num_blocks, most = num_blocks - 1,
                      block = row / block_rows < most ? row / block_rows : most;
        row -= block * block_rows;
        return matrix(expert, block);
    }
};

struct Activation {
    Kind kind = Kind::silu;
    bool gated = true, interleaved = false, limited = false;
    float alpha = 1.0f, limit = 0.0f, up_offset = 0.0f;
};

// One call: out[t] = sum over slots k of w[t, k] * E_{id[t, k]}(x[t]).
struct Call {
    int64_t num_tokens = 0, top_k = 0, num_experts = 0, hidden_size = 0, intermediate_size = 0;
    FloatArray x;
    const void* expert_ids = nullptr;  // contiguous [T, K]; one outside [0, E) is an empty slot
    bool ids_are_64_bit = true;
    const float* routing_weights = nullptr;  // contiguous [T, K]
    bool weight_on_input = false;
    Projection gate_up, down;
    FloatArray gate_up_bias, down_bias;  // stride: from one expert to the next
    Activation activation;
    void* out = nullptr;  // contiguous [T, H]
    Element out_dtype = Element::f32;
    float* rows = nullptr;     // contiguous [T, K, H]: then each pair's row goes there, and no sum to `out`
    bool int8_input = false;   // rows are quantized to int8 before each product
    bool all_experts = false;  // compute every expert on every token, and sum those that were chosen
    bool same_bits = false;    // a token's bits do not depend on how many there are
    int64_t token_block = 0;   // token rows that meet a range of weights before the next ones; 0: see choose.cpp
    int64_t pieces = 0;        // that each projection of an expert is cut into, for the threads; 0: by its cost
    int64_t wide_rows = 0;     // from which on the kernels for many rows are taken; 0: see choose.cpp
    int num_threads = 1;
};

// One matrix by itself: out[t] = W x[t] + bias.
struct LinearCall {
    int64_t num_tokens = 0;
    FloatArray x, bias;
    Projection weights;
    void* out = nullptr;  // contiguous [T, rows]
    Element out_dtype = Element::f32;
    bool same_bits = false;  // as of a Call
    int64_t wide_rows = 0;   // likewise
    int num_threads = 1;
};

// Four rows of weights as stored, and what their elements are; and for more than one step the rows behind each of them.
struct FourRows {
    Element element = Element::f32;
    Scale scale = Scale::none;
    int64_t columns = 0, group_columns = 0;  // group_columns 0: one scale for all columns
    const uint8_t* data[4];
    const uint8_t* scales[4];
    const uint8_t* zeros[4];
    float global_scale[4];
    const uint8_t* next[4];  // what is fetched as these are read, and never read; the first is null without
    int64_t steps = 1, row_stride = 0, scale_stride = 0, zero_stride = 0, next_stride = 0;  // bytes from step to step
    bool group_scaled = false;  // scales multiply the sums of their groups: faster for few tokens, and other bits
    bool decoded = false;       // weights are decoded once for all tokens, and not in registers

    // To the rows of the next step.
    __attribute__((always_inline)) void go_on() {
        for (int i = 0; i < 4; ++i)
            data[i] += row_stride, scales[i] += scale_stride, zeros[i] += zero_stride, next[i] += next_stride;
    }
};

// Two times up to 16 rows of weights: of bfloat16 each with its own distance between rows, in bytes; packed ones one by
// one, the last of them repeated.
struct TileRows {
    Element element = Element::bf16;
    Scale scale = Scale::none;
    const uint8_t* first[2];
    int64_t stride[2];
    int count[2];
    int64_t columns = 0, group_columns = 0;  // group_columns 0: one scale for all columns
    int64_t out_step = 0;                    // words from one tile of h to the next
    int width = 16;                          // tokens of a tile
    int last_tokens = 16;                    // of the last of the tiles
    bool out_nibbles = false;                // whether h will meet nibbles
    const uint8_t *data[32], *scales[32], *zeros[32];
    const uint8_t* next[2] = {};  // rows that will be read soon, or null
    int64_t next_stride[2];
    float global_scale[32];
};

// An instruction set that multiplies tiles: up to 16 tokens stand together, their columns in pairs, as the words
// [block of 32 columns][pair][token]. Columns that meet nibbles are in the order of bfloat16_panels.h.
struct TileOps {
    void (*begin)();  // on each thread, before products and after them
    void (*end)();
    // `rows` are 16 tokens of bfloat16, null for none; from `width` on there are none.
    void (*pack)(const uint16_t* const* rows, int width, int64_t columns, bool nibbles, uint32_t* to);
    // h of the columns that the rows make up, the first of which is `column`. `bias` has 32 values, or is null. All
    // tiles together have at most kTokenBlock tokens.
    // `scratch` has `tile_scratch_bytes(columns)`.
    void (*gate_up)(const TileRows& rows, const float* bias, const Activation& activation, const uint32_t* x,
                    int64_t num_tiles, int64_t column, uint32_t* h, uint8_t* scratch);
    // y[t][i] for token t of the tiles and row i; null where there is no token.
    void (*down)(const TileRows& rows, const float* bias, const uint32_t* h, int64_t num_tiles, float* const* y,
                 uint8_t* scratch);
    bool are_vectors = false;  // made of vectors of 16 tokens, or of 8: no unit of the processor multiplies them
};
constexpr int64_t tile_words(int64_t columns) { return (columns + 31) / 32 * 256; }
// Rows of bfloat16 with what does not fill a tile, or panels of all columns, as AMX keeps them, their scales and zeros.
constexpr int64_t tile_scratch_bytes(int64_t columns) {
    return 32 * ((columns + 127) / 128 * 256 + 64) + 64 * 4 * (columns / 16 + 64);
}

// 32 rows of weights at once, for many tokens; results are those of RowOps, bit by bit.
struct Int8TileOps {
    int64_t (*packed_bytes)(Element weights, int64_t columns, int64_t group_columns, int64_t m);
    // Rows that quantize_row made, 16 tokens together as products with many rows take them.
    void (*pack)(Element weights, int64_t columns, int64_t group_columns, const float* const* x, int64_t m,
                 uint8_t* to);
    // out[t][i] for eight times four rows. `scratch` has `scratch_floats(columns)`.
    void (*rows)(const FourRows* eight, const uint8_t* packed, int64_t m, float* out, float* scratch);
    int64_t (*scratch_floats)(int64_t columns);
};
constexpr int kInt8TileRows = 32;

constexpr int kOuterRows = 16;          // of weights, for outer products
constexpr int64_t kOuterColumns = 512;  // of them, that all tokens pass over before the next ones

// Rows of another kind than floats in their order, and their products: of integers of 8 or 16 bits, each with one scale
// (docs/reference/expert_weights.md), for weights that are integers, i8 with one scale a row, or nibbles; of bfloat16
// for weights of bfloat16, and maybe of e4m3; of floats in another order, for e4m3. Such a row takes the place of a row
// of floats, laid out for the weights.
struct RowOps {
    int64_t (*row_floats)(Element weights, int64_t columns);
    // `group_columns` as of the weights. A row with NaN or infinity gets the scale NaN, or stays floats: false for a
    // row that is to.
    bool (*quantize_row)(Element weights, int64_t columns, int64_t group_columns, const float* from, float* to);
    // As Isa::four_rows; `scratch` has `scratch_floats(columns)`.
    void (*four_rows)(const FourRows& rows, const float* const* x, int64_t m, float* out, float* scratch);
    int64_t (*scratch_floats)(int64_t columns);
    const Int8TileOps* tiles = nullptr;
    int64_t e4m3_columns = 0;  // of a group of e4m3 that rows of bfloat16 meet too; 0: they do not
    // As Isa::outer_products, with that set's scratch. Null where there are none.
    void (*outer_products)(const FourRows* four, const float* const* x, int64_t m, float* out,
                           float* scratch) = nullptr;
};
// How many bytes ahead rows of weights fetch themselves (fetch_ahead_in_row), and up to how many tokens those of an
// element do; with more they fetch the rows that come next.
struct AheadInRow {
    int64_t bytes = 0;
    int64_t f32 = 0, bf16 = 0, i8 = 0, e4m3 = 0;  // tokens

    constexpr int64_t most_tokens(Element element) const {
        switch (element) {
            case Element::f32: return f32;
            case Element::bf16: return bf16;
            case Element::i8: return i8;
            case Element::e4m3: return e4m3;
            default: return 0;
        }
    }
};
// What is written once and compiled for every instruction set. Vectors of floats that meet weights lie in the order in
// which the weights' elements are decoded: as they are, or for nibbles as `position` has it, zeros up to `padded`.
struct Isa {
    const char* name = nullptr;
    Features needs = 0;
    int lanes = 0;
    // out[step][t][i] = sum over columns of x[t] * row i, for m tokens. `scratch` has `scratch_floats(columns, m)`.
    // Null where rows of floats are not multiplied.
    void (*four_rows)(const FourRows& rows, const float* const* x, int64_t m, float* out, float* scratch) = nullptr;
    int64_t direct_tokens = 0;         // tokens up to which it decodes weights in registers
    int64_t direct_16_bit_tokens = 0;  // the same for those of 16 bits: several tiles may decode them
    AheadInRow ahead_in_row;
    // to[i] = factor * from[i] for n elements of a dtype.
    void (*widen)(const void* from, Element dtype, int64_t n, float factor, float* to) = nullptr;
    // gate[i] = what the down projection is given; n is rounded up to `lanes`, so both have room.
    void (*activate)(const Activation& activation, int64_t n, float* gate, const float* up) = nullptr;
    // out[0..n) = sum over k in order of weights[k] * rows[k][0..n), in a dtype; null rows add nothing.
    void (*combine)(const float* const* rows, const float* weights, int64_t num_rows, int64_t n, void* out,
                    Element dtype) = nullptr;
    // row[i] = e^(row[i] - the largest) for n values; n is rounded up to `lanes`. found: the largest, and the sum.
    // Zeros where all values are -infinity.
    void (*exponentials)(int64_t n, float* row, float* found) = nullptr;
    // sums[q][0..columns) += sum over t of weights[q][t] * row t, for m sums and n rows of a dtype, `stride` bytes
    // apart. Sums have room for whole vectors.
    void (*weigh)(const void* rows, Element dtype, int64_t stride, int64_t n, int64_t columns,
                  const float* const* weights, int64_t m, float* const* sums) = nullptr;
    // As four_rows of one step, out[t][0..8) of two times four rows: faster for many tokens. Null where it is not.
    void (*eight_rows)(const FourRows* two, const float* const* x, int64_t m, float* out, float* scratch) = nullptr;
    // As four_rows of one step, with other bits, out[t][0..kOuterRows) of four times four rows whose groups divide
    // kOuterColumns: faster for many tokens. Null where it is not.
    void (*outer_products)(const FourRows* four, const float* const* x, int64_t m, float* out,
                           float* scratch) = nullptr;
    const TileOps* tiles = nullptr;    // null, or what multiplies tiles of bfloat16; then x is bfloat16
    const RowOps* bfloat16 = nullptr;  // for rows of bfloat16
    const RowOps* int8 = nullptr;      // for rows of int8
    const RowOps* int8_residual =
        nullptr;                    // for rows of 16 bits and weights that are integers: two rows of int8 for each
    const RowOps* int16 = nullptr;  // likewise: integers of 16 bits
    const RowOps* e4m3 = nullptr;   // for rows of floats and weights of e4m3, in the order of the codes

    bool runs_here() const { return lacking(needs) == 0; }
};

// `rows` rows as floats, their scales and zeros (a group has at least 16 columns), and a vector of sums for each
// output. With kOuterRows it is more than outer products take: kOuterColumns of the rows twice, their scales and zeros.
constexpr int64_t scratch_floats(int64_t columns, int64_t m, int64_t rows = 4) {
    return rows * (columns + 256 + 2 * (columns / 16 + 64) + 16 * m);
}

// Best first.
extern const Isa* const kIsas[];
extern const int kNumIsas;

// Computes `call` with `isa`. top_k is at most kMostSlots.
// Throws std::invalid_argument, and has written nothing, where an id names an expert that no table lists.
void expert_mlp(const Isa& isa, const Call& call);
// What `call` leaves to do where its rows were written to `call.rows`, maybe by several calls: the sum of each token's
// slots.
void sum_rows(const Isa& isa, const Call& call);
void linear(const Isa& isa, const LinearCall& call);

}  // namespace moestro
