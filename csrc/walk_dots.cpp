// The part of a walk whose rows of tokens are floats or int8.

#include <algorithm>
#include <cstring>

#include "counts.h"
#include "walk.h"

namespace moestro {
namespace {

int rows_at_once(Kernel kernel) {
    switch (kernel) {
        case Kernel::int8_tiles: return kInt8TileRows;
        case Kernel::outer_products: return kOuterRows;
        case Kernel::eight_row_dots: return 8;
        default: return 4;
    }
}

void take_kernel(FourRows& rows, Kernel kernel) {
    rows.group_scaled = kernel == Kernel::group_scaled_dots;
    rows.decoded = kernel == Kernel::decoded_dots || kernel == Kernel::decoded_e4m3_dots;
}

}  // namespace

Walk::Block Walk::block_of(const Active& active, int64_t first, int64_t m, bool down) const {
    Block block;
    int64_t n = 0;
    for (int is_float = row_ops_ ? 0 : 1; is_float < 2; ++is_float) {
        for (int64_t r = active.first_row + first; r < active.first_row + first + m; ++r) {
            const int64_t plain = r - rows_.first_plain, of_x = call_.weight_on_input ? plain : rows_.token[r];
            if (row_ops_ && (down ? h_is_float_[plain] : x_is_float_[of_x]) != is_float) continue;
            block.row[n] = r;
            block.x[n++] = down ? h_row(r) : tokens_[plain];
        }
        if (!is_float) block.integers = n;
    }
    return block;
}

Walk::Products Walk::products(const Projection& p, const Active& active, const Block& block, int64_t m,
                              const Room& room) const {
    Case asked = expert_case(isa_, call_, p, active.num_rows);
    asked.rows = m;
    const Kernel kernel = choose(asked);
    asked.input = Input::floats;
    asked.may_take_more = false;
    asked.rows = m - block.integers;
    if (row_ops_) asked.wide_rows = 0;  // what was measured is about rows that became integers
    const Kernel float_kernel = row_ops_ && kernel != Kernel::outer_products ? choose(asked) : kernel;
    const int rows = rows_at_once(kernel);
    const bool gated = &p == &call_.gate_up && call_.activation.gated;
    const int64_t ahead = steps_ahead(p.row_bytes(), rows) * (gated ? rows / 2 : rows);
    Products found{p};
    found.expert = active.expert, found.rows_of_expert = active.num_rows;
    found.kernel = kernel, found.float_kernel = float_kernel;
    found.rows = rows;
    found.x = block.x;
    found.integers = block.integers;
    found.ahead = ahead;
    if (kernel != Kernel::int8_tiles) return found;
    auto* packed = reinterpret_cast<uint8_t*>(room.packed);
    int8_tiles()->pack(p.element, p.columns, p.group_columns, block.x, m, packed);
    found.integers = m;
    found.packed = packed;
    return found;
}

Chunk Walk::chunk_of(const Range& range, int64_t i) const {
    const Activation& act = call_.activation;
    const int64_t first = first_of_chunk(range.first, i), columns = std::min(kChunk, range.last - first);
    const bool both = !range.down && act.gated;
    return {first, columns, both && act.interleaved, both && !act.interleaved ? call_.intermediate_size : 0};
}

// Which rows of weights are read in the step that computes column `i` of a range.
template <int N> void Walk::rows_of_step(const Range& range, int64_t i, ReadRow* at) const {
    const Chunk chunk = chunk_of(range, i);
    interleave<N>(chunk, i - chunk.first, at);
}
void Walk::rows_of(const Products& products, const Range& range, int64_t i, ReadRow* at) const {
    if (products.rows == kInt8TileRows) rows_of_step<kInt8TileRows>(range, i, at);
    else if (products.rows == kOuterRows) rows_of_step<kOuterRows>(range, i, at);
    else if (products.rows == 8) rows_of_step<8>(range, i, at);
    else rows_of_step<4>(range, i, at);
}

// The rows of the step that begins at a column and, where these are four, of up to `most` steps: they and what is
// fetched meanwhile have to be where a stride leads.
template <int N>
void Walk::describe(const Products& products, Reader& reader, int64_t column, int64_t most, FourRows* rows) const {
    const Projection& p = products.projection;
    ReadRow at[N];
    rows_of_step<N>(*reader.range, column, at);
    for (int64_t i = 0; i < N; i += 4) take_rows(rows[i / 4], p, products.expert, at + i);
    const auto in_line = [&](const Range& range, const Projection& of, const ReadRow* four) {
        const Chunk chunk = chunk_of(range, column);
        return steps_by_stride(of, four, std::min(most, steps_in_line(chunk, column - chunk.first)));
    };
    if (N == 4) rows->steps = most = in_line(*reader.range, p, at);
    const Range* then = reader.ahead(column, products.ahead);
    if (!then) return;
    ReadRow next[N];
    rows_of_step<N>(*then, column, next);
    if (N == 4) rows->steps = in_line(*then, projection(*then), next);
    for (int64_t i = 0; i < N; i += 4) moestro::follow(rows[i / 4], projection(*then), expert(*then), next + i);
}

void Walk::count(const Products& products, const Reader& reader, int64_t m) const {
    const Stage stage = reader.range->down ? Stage::down : Stage::gate_up;
    const bool all = !row_ops_ || products.integers == m || products.float_kernel == products.kernel;
    if (all || products.integers > 0) moestro::count(stage, products.kernel);
    if (!all) moestro::count(stage, products.float_kernel);
}

// sums[step][t][i] of m tokens and the rows of some steps, the first of which begins at a column; returns how many.
int64_t Walk::multiply(const Products& products, Reader& reader, int64_t column, int64_t m, const Room& room) const {
    float* const sums = room.sums;
    if (reader.counts && column == reader.range->first) count(products, reader, m);
    if (products.kernel == Kernel::eight_row_dots) {
        FourRows rows[2];
        describe<8>(products, reader, column, 1, rows);
        isa_.eight_rows(rows, products.x, m, sums, room.panel);
    } else if (products.kernel == Kernel::outer_products) {
        FourRows rows[kOuterRows / 4];
        describe<kOuterRows>(products, reader, column, 1, rows);
        const int64_t n = products.integers;
        if (n > 0) row_ops_->outer_products(rows, products.x, n, sums, room.panel);
        if (n < m) isa_.outer_products(rows, products.x + n, m - n, sums + kOuterRows * n, room.panel);
    } else if (products.kernel == Kernel::int8_tiles) {
        FourRows rows[kInt8TileRows / 4];
        describe<kInt8TileRows>(products, reader, column, 1, rows);
        int8_tiles()->rows(rows, products.packed, m, sums, room.panel);
    } else {
        FourRows rows;
        const int64_t n = products.integers;
        describe<4>(products, reader, column, n > 0 && n < m ? 1 : kSums / (4 * m), &rows);
        fetch_ahead_in_row(rows, isa_, products.rows_of_expert);
        take_kernel(rows, products.kernel);
        if (n > 0) row_ops_->four_rows(rows, products.x, n, sums, room.panel);
        take_kernel(rows, products.float_kernel);
        if (n < m) isa_.four_rows(rows, products.x + n, m - n, sums + 4 * n, room.panel);
        return rows.steps;
    }
    return 1;
}

// Calls put(row of weights, the first token's sum with it) for each row of the steps from column i on. The next
// token's is as many floats behind as a step has rows.
template <class Put> void Walk::each_sum(const Products& products, const Range& range, int64_t i, int64_t steps,
                                         int64_t m, const Room& room, Put put) const {
    ReadRow at[kInt8TileRows];
    rows_of(products, range, i, at);
    const Chunk chunk = chunk_of(range, i);
    for (int64_t j = 0; j < products.rows; ++j)
        for (int64_t s = 0; s < steps && at[j].counts; ++s)
            put(in_line_behind(chunk, at[j], s), room.sums + products.rows * m * s + j);
}

// Adds the bias of n outputs of an expert, the first of them given, to each of m rows of sums.
void Walk::add_bias(const FloatArray& bias, int64_t expert, int64_t first, int64_t n, int64_t m, float* const* sums) {
    float values[kChunk];
    const auto* from = static_cast<const uint8_t*>(bias.data) + bytes_of(bias.dtype, expert * bias.stride + first);
    isa_.widen(from, bias.dtype, n, 1.0f, values);
    for (int64_t t = 0; t < m; ++t)
        for (int64_t i = 0; i < n; ++i) sums[t][i] += values[i];
}

// The same for n columns of h, where gate and up may alternate.
void Walk::add_gate_up_bias(int64_t expert, int64_t column, int64_t n, int64_t m, const Room& room) {
    const FloatArray& bias = call_.gate_up_bias;
    const Activation& act = call_.activation;
    if (!bias.data) return;
    float *gate[kMostTokenRows], *up[kMostTokenRows];
    for (int64_t t = 0; t < m; ++t) gate[t] = room.gate + t * kChunk, up[t] = room.up + t * kChunk;
    if (!act.gated || !act.interleaved) {
        add_bias(bias, expert, column, n, m, gate);
        if (act.gated) add_bias(bias, expert, call_.intermediate_size + column, n, m, up);
        return;
    }
    float values[2 * kChunk];
    const auto* from = static_cast<const uint8_t*>(bias.data) + bytes_of(bias.dtype, expert * bias.stride + 2 * column);
    isa_.widen(from, bias.dtype, 2 * n, 1.0f, values);
    for (int64_t t = 0; t < m; ++t)
        for (int64_t i = 0; i < n; ++i) gate[t][i] += values[2 * i], up[t][i] += values[2 * i + 1];
}

void Walk::gate_up(const Active& active, Reader& reader, int64_t first, int64_t m, const Room& room) {
    const Range& range = *reader.range;
    const Block block = block_of(active, first, m, false);
    const Products all = products(call_.gate_up, active, block, m, room);
    const int64_t step = call_.activation.gated ? all.rows / 2 : all.rows;
    for (int64_t c = range.first; c < range.last; c += kChunk) {
        const int64_t stop = std::min(c + kChunk, range.last);
        for (int64_t i = c; i < stop;) {
            const int64_t steps = multiply(all, reader, i, m, room);
            each_sum(all, range, i, steps, m, room, [&](const ReadRow& row, const float* sums) {
                float* const to = (row.up ? room.up : room.gate) + row.column;
                for (int64_t t = 0; t < m; ++t) to[t * kChunk] = sums[all.rows * t];
            });
            i += steps * step;
        }
        add_gate_up_bias(active.expert, c, stop - c, m, room);
        activate(range, c, block, m, room);
    }
}

// Turns the gate and up parts of a chunk, which begins at a column, into h.
void Walk::activate(const Range& range, int64_t column, const Block& block, int64_t m, const Room& room) {
    const int64_t n = std::min(kChunk, range.last - column);
    for (int64_t t = 0; t < m; ++t) {
        float* gate = room.gate + t * kChunk;
        isa_.activate(call_.activation, n, gate, room.up + t * kChunk);
        const int64_t row = block.row[t];
        if (row_ops_) std::memcpy(wide_h(row) + column, gate, static_cast<size_t>(n) * sizeof(float));
        else h_layout_.place(gate, column, n, h_row(row));
    }
}

void Walk::down(const Active& active, Reader& reader, int64_t first, int64_t m, const Room& room) {
    const Range& range = *reader.range;
    const Block block = block_of(active, first, m, true);
    const Products all = products(call_.down, active, block, m, room);
    for (int64_t i = range.first; i < range.last;) {
        const int64_t steps = multiply(all, reader, i, m, room);
        each_sum(all, range, i, steps, m, room, [&](const ReadRow& row, const float* sums) {
            for (int64_t t = 0; t < m; ++t) y_[block.row[t] * y_stride_ + row.row] = sums[all.rows * t];
        });
        i += steps * all.rows;
    }
    if (!call_.down_bias.data) return;
    for (int64_t i = range.first; i < range.last; i += kChunk) {
        float* y[kMostTokenRows];
        for (int64_t t = 0; t < m; ++t) y[t] = y_ + block.row[t] * y_stride_ + i;
        add_bias(call_.down_bias, active.expert, i, std::min(kChunk, range.last - i), m, y);
    }
}

}  // namespace moestro
