// One call for some tokens: rows grouped by expert, work cut by cost, threads taking it in order.
//
// Each expert has two parts, gate_up with the activation, and down. A part is cut into ranges of its weights' rows, and
// threads take ranges from one list: an expert's gate_up stands in it one expert before its down, so that a thread that
// comes to a down part hardly ever waits for the gate_up that another one is finishing.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "choose.h"
#include "layout.h"
#include "row_interleave.h"
#include "rows.h"
#include "schedule.h"
#include "stored_rows.h"

namespace moestro {

constexpr int64_t kMostTokenRows = std::max(kTokenBlock, kOuterTokenBlock);  // of tokens in a block
// Sums that a thread has room for.
constexpr int64_t kSums = std::max(kInt8TileRows * kTokenBlock, kOuterRows* kOuterTokenBlock);

class Walk : public Workspace<Walk> {
public:
    Walk(const Isa& isa, const Call& call, const ExpertIds& ids, int64_t first_token, int64_t num_tokens);
    void run();

private:
    // Some rows of a projection for a block of tokens: the kernels that multiply them, and the tokens as these want
    // them.
    struct Products {
        const Projection& projection;
        int64_t expert = 0, rows_of_expert = 0;
        Kernel kernel = Kernel::decoded_dots;  // of rows of int8, or of all where none is
        Kernel float_kernel = kernel;          // of those that stay floats
        int rows = 4;                          // of weights at once
        const float* const* x = nullptr;
        int64_t integers = 0;  // so many of x are; the others are floats
        int64_t ahead = 0;     // from columns of h, or rows of down, to those that are fetched meanwhile
        const uint8_t* packed = nullptr;
    };
    // Rows first to first + m of an expert, those of int8 before those that stay floats.
    struct Block {
        int64_t row[kMostTokenRows];
        const float* x[kMostTokenRows];
        int64_t integers = 0;
    };
    // Of an expert: ranges of gate_up that are done, and rows of h taken to be quantized, and quantized.
    struct Progress {
        std::atomic<int64_t> ranges{0}, taken{0}, quantized{0};
    };
    // Memory of a thread: what kernels need, the sums of a block of tokens, and both halves before the activation.
    struct Room {
        float *panel, *sums, *gate, *up, *packed;
    };

    // walk.cpp: memory, and the rows of x.
    bool x_is_ready() const;
    int64_t num_float_rows() const { return rows_.num_rows - rows_.first_plain; }
    int64_t num_x_rows() const;
    void reserve();
    void point_to_tokens();
    void prepare(int64_t i);
    void prepare_tile(int64_t tile);
    void take_ranges();
    Room room_of_thread() const;
    void run_range(Reader& reader, const Room& room);
    void wait_for_h(int32_t expert);
    void quantize_h(const Active& active, int64_t first, int64_t last);
    void combine(int64_t t);
    void keep_rows(int64_t t);

    // walk_dots.cpp: rows of floats or int8.
    void gate_up(const Active& active, Reader& reader, int64_t first, int64_t m, const Room& room);
    void activate(const Range& range, int64_t column, const Block& block, int64_t m, const Room& room);
    void down(const Active& active, Reader& reader, int64_t first, int64_t m, const Room& room);
    Block block_of(const Active& active, int64_t first, int64_t m, bool down) const;
    Products products(const Projection& p, const Active& active, const Block& block, int64_t m, const Room& room) const;
    int64_t multiply(const Products& products, Reader& reader, int64_t column, int64_t m, const Room& room) const;
    template <class Put> void each_sum(const Products& products, const Range& range, int64_t i, int64_t steps,
                                       int64_t m, const Room& room, Put put) const;
    void count(const Products& products, const Reader& reader, int64_t m) const;
    template <int N>
    void describe(const Products& products, Reader& reader, int64_t column, int64_t most, FourRows* rows) const;
    template <int N> void rows_of_step(const Range& range, int64_t i, ReadRow* at) const;
    void rows_of(const Products& products, const Range& range, int64_t i, ReadRow* at) const;
    Chunk chunk_of(const Range& range, int64_t i) const;
    void add_bias(const FloatArray& bias, int64_t expert, int64_t first, int64_t n, int64_t m, float* const* sums);
    void add_gate_up_bias(int64_t expert, int64_t column, int64_t n, int64_t m, const Room& room);

    // walk_tiles.cpp: tiles of bfloat16. `first` and `n` number tiles of tokens, among all and from there.
    void tiled_gate_up(const Active& active, Reader& reader, int64_t first, int64_t n, uint8_t* room);
    void tiled_down(const Active& active, Reader& reader, int64_t first, int64_t n, uint8_t* room);
    void follow(TileRows& rows, Reader& reader, int64_t i) const;

    const Projection& projection(const Range& range) const { return range.down ? call_.down : call_.gate_up; }
    int64_t expert(const Range& range) const { return rows_.active[range.expert].expert; }
    const Int8TileOps* int8_tiles() const { return row_ops_ ? row_ops_->tiles : nullptr; }
    float* wide_h(int64_t row) const { return wide_h_ + (row - rows_.first_plain) * wide_stride_; }
    float* h_row(int64_t row) const { return h_ + (row - rows_.first_plain) * h_stride_; }
    // Tiles of bfloat16 take the place of rows of floats: a word is two values.
    uint32_t* x_tile(int64_t t) const {
        return reinterpret_cast<uint32_t*>(x_tiles_) + t * tile_words(call_.hidden_size);
    }
    uint32_t* h_tile(int64_t t) const {
        return reinterpret_cast<uint32_t*>(h_tiles_) + t * tile_words(call_.intermediate_size);
    }

    const Isa& isa_;
    const Call& call_;
    const Input input_;
    const RowOps* const row_ops_;  // null where rows stay floats
    const int64_t first_token_, num_tokens_;
    const Layout x_layout_, h_layout_;
    Rows rows_;
    Queue queue_;
    int64_t x_stride_ = 0, h_stride_ = 0, y_stride_ = 0, wide_stride_ = 0;
    std::vector<const float*> tokens_;
    std::unique_ptr<Progress[]> progress_;
    float *x_ = nullptr, *h_ = nullptr, *y_ = nullptr;
    float *x_tiles_ = nullptr, *h_tiles_ = nullptr;  // words
    std::vector<bool> wanted_;                       // of x's rows where some experts take tiles
    float* wide_h_ = nullptr;                        // of rows that are to be quantized
    std::vector<uint8_t> x_is_float_, h_is_float_;   // of those, which stayed what they were
};

}  // namespace moestro
