// A matrix by itself, with the kernels of the experts: its rows are cut into ranges, which threads take in turn.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "choose.h"
#include "counts.h"
#include "engine.h"
#include "layout.h"
#include "schedule.h"
#include "stored_rows.h"
#include "subnormals.h"
#include "team.h"

namespace moestro {
namespace {

constexpr int64_t kMostTokenRows = std::max(kTokenBlock, kOuterTokenBlock);  // that meet a range of weights at once
constexpr int64_t kSmallCall = 1 << 15;  // values of x that are not worth a team of threads

class Linear : public Workspace<Linear> {
public:
    Linear(const Isa& isa, const LinearCall& call, int64_t first, int64_t n)
        : isa_(isa), call_(call), first_(first), n_(n), tiled_(takes_tiles(isa, call)),
          row_ops_(row_ops(isa, input_of(isa, call))), layout_(call.weights.element, call.weights.columns, isa.lanes),
          x_stride_(linear_stride(row_ops_, call.weights, layout_)), queue_(cut(call)),
          is_float_(static_cast<size_t>(n), row_ops_ == nullptr) {
        x_ = arena().reserve(tiled_ ? num_tiles() * tile_words(call.weights.columns) : n * x_stride_);
    }

    void run() {
        const int64_t pieces = tiled_ ? num_tiles() : n_;
        const bool small = n_ * call_.weights.columns <= kSmallCall;
        for (int64_t i = 0; small && i < pieces; ++i) prepare(i);
        if (!small)
            run_team(call_.num_threads, [&](int thread, int all) {
                for (int64_t i = pieces * thread / all; i < pieces * (thread + 1) / all; ++i) prepare(i);
            });
        run_team(call_.num_threads, [&](int, int) { take_ranges(); });
    }

private:
    // Some outputs of some tokens, and the memory of a thread.
    struct Part {
        int64_t first_row, last_row, first_token, num_tokens;
        float *panel, *sums, *out;
    };

    int64_t num_tiles() const { return (n_ + 15) / 16; }
    const uint8_t* row(int64_t t) const {
        return static_cast<const uint8_t*>(call_.x.data) + bytes_of(call_.x.dtype, (first_ + t) * call_.x.stride);
    }
    uint32_t* tile(int64_t i) const { return reinterpret_cast<uint32_t*>(x_) + i * tile_words(call_.weights.columns); }

    void prepare(int64_t i) {
        const int64_t columns = call_.weights.columns;
        if (tiled_) {
            const uint16_t* rows[16];
            for (int64_t t = 0; t < 16; ++t)
                rows[t] = 16 * i + t < n_ ? reinterpret_cast<const uint16_t*>(row(16 * i + t)) : nullptr;
            isa_.tiles->pack(rows, tile_width(n_), columns, is_nibble(call_.weights.element), tile(i));
            return;
        }
        float* to = x_ + i * x_stride_;
        float* wide = row_ops_ || layout_.nibbles ? scratch().reserve(columns) : to;
        isa_.widen(row(i), call_.x.dtype, columns, 1.0f, wide);
        const Projection& p = call_.weights;
        if (row_ops_ && row_ops_->quantize_row(p.element, columns, p.group_columns, wide, to)) return;
        is_float_[i] = true;
        if (wide != to) layout_.place(wide, 0, columns, to);
        layout_.clear_padding(to);
    }

    void take_ranges() {
        const KeepSubnormals keep(input_of(isa_, call_) == Input::e4m3);
        const int64_t sums = kChunk * kMostTokenRows, segment = kMostTokenRows * kChunk;
        const int64_t of_tiles = tile_scratch_bytes(call_.weights.columns) / 4;
        const int64_t of_rows = row_ops_ ? row_ops_->scratch_floats(call_.weights.columns) : 0;
        const int64_t of_floats = scratch_floats(layout_.padded, kTokenBlock, isa_.outer_products ? kOuterRows : 4);
        const int64_t panel = round_up(std::max({of_floats, of_tiles, of_rows}), 16);
        float* room = scratch().reserve(panel + sums + segment);
        Part part{};
        part.panel = room, part.sums = room + panel, part.out = room + panel + sums;
        const bool counted = is_counting();
        if (tiled_) isa_.tiles->begin();
        Case asked = linear_case(isa_, call_);
        asked.takes_tiles = tiled_;
        Reader reader(queue_);
        while (const Range* range = reader.take())
            for (int64_t i = range->first; i < range->last; i += kChunk)
                for (int64_t t = 0; t < n_; t += part.num_tokens) {
                    part.first_row = i, part.last_row = std::min(i + kChunk, range->last);
                    part.first_token = t, part.num_tokens = next_block(asked, n_ - t, 0);
                    reader.last_pass = t + part.num_tokens == n_;
                    reader.counts = counted && i == 0;
                    if (tiled_) tiled(reader, part);
                    else dotted(reader, part);
                    write(part);
                }
        if (tiled_) isa_.tiles->end();
    }

    // Of the tokens of a part, those that became what row_ops_ multiplies, and after them those that stayed floats.
    struct Tokens {
        int64_t of[kMostTokenRows];  // counted from the part's first
        const float* x[kMostTokenRows];
        int64_t integers = 0;
    };
    Tokens tokens_of(const Part& part) const {
        Tokens found;
        int64_t n = 0;
        for (int is_float = 0; is_float < 2; ++is_float) {
            for (int64_t r = 0; r < part.num_tokens; ++r) {
                const int64_t t = part.first_token + r;
                if (is_float_[t] == is_float) found.of[n] = r, found.x[n++] = x_ + t * x_stride_;
            }
            if (!is_float) found.integers = n;
        }
        return found;
    }

    void dotted(Reader& reader, const Part& part) const {
        const int64_t m = part.num_tokens;
        const Tokens tokens = tokens_of(part);
        Case asked = linear_case(isa_, call_);
        asked.rows = m;
        const Kernel kernel = choose(asked);
        asked.input = Input::floats, asked.group_scales = asked.may_take_more = false;
        asked.rows = m - tokens.integers;
        const Kernel float_kernel = row_ops_ && kernel != Kernel::outer_products ? choose(asked) : kernel;
        const bool all = tokens.integers == m || float_kernel == kernel;
        if (reader.counts && (all || tokens.integers > 0)) count(Stage::linear, kernel);
        if (reader.counts && !all) count(Stage::linear, float_kernel);
        if (kernel == Kernel::outer_products) multiply<kOuterRows>(reader, part, tokens, kernel, float_kernel);
        else multiply<4>(reader, part, tokens, kernel, float_kernel);
    }

    // The products of a part's tokens with its rows, N of them at once.
    template <int N>
    void multiply(Reader& reader, const Part& part, const Tokens& tokens, Kernel kernel, Kernel float_kernel) const {
        const int64_t m = part.num_tokens, n = tokens.integers, most = N > 4 || (n > 0 && n < m) ? 1 : kChunk;
        for (int64_t at = part.first_row; at < part.last_row;) {
            FourRows rows[N / 4];
            describe<N>(reader, at, most, rows);
            float* const floats = part.sums + N * n;
            if constexpr (N == kOuterRows) {
                if (n > 0) row_ops_->outer_products(rows, tokens.x, n, part.sums, part.panel);
                if (n < m) isa_.outer_products(rows, tokens.x + n, m - n, floats, part.panel);
            } else {
                fetch_ahead_in_row(*rows, isa_, n_);
                rows->decoded = kernel == Kernel::decoded_e4m3_dots;
                if (n > 0) row_ops_->four_rows(*rows, tokens.x, n, part.sums, part.panel);
                rows->decoded = float_kernel == Kernel::decoded_dots;
                if (n < m) isa_.four_rows(*rows, tokens.x + n, m - n, floats, part.panel);
            }
            ReadRow read[N];
            rows_of_step<N>(*reader.range, at, read);
            for (int64_t j = 0; j < N; ++j)
                for (int64_t s = 0; s < rows->steps && read[j].counts; ++s)
                    for (int64_t r = 0; r < m; ++r)
                        part.out[tokens.of[r] * kChunk + read[j].column + s] = part.sums[N * (m * s + r) + j];
            at += N * rows->steps;
        }
    }

    // The rows of the step that begins at row `at` and, where these are four, of up to `most` steps: they and what is
    // fetched meanwhile are where a stride leads.
    template <int N> void describe(Reader& reader, int64_t at, int64_t most, FourRows* rows) const {
        const Projection& p = call_.weights;
        ReadRow own[N], next[N];
        rows_of_step<N>(*reader.range, at, own);
        for (int64_t i = 0; i < N; i += 4) take_rows(rows[i / 4], p, 0, own + i);
        const auto in_line = [&](const Range& range, const ReadRow* of) {
            const Chunk chunk = chunk_of(range, at);
            return steps_by_stride(p, of, std::min(most, steps_in_line(chunk, at - chunk.first)));
        };
        if (N == 4) rows->steps = most = in_line(*reader.range, own);
        const Range* range = reader.ahead(at, N * steps_ahead(p.row_bytes(), N));
        if (!range) return;
        rows_of_step<N>(*range, at, next);
        if (N == 4) rows->steps = in_line(*range, next);
        for (int64_t i = 0; i < N; i += 4) follow(rows[i / 4], p, 0, next + i);
    }

    static Chunk chunk_of(const Range& range, int64_t i) {
        const int64_t first = first_of_chunk(range.first, i);
        return {first, std::min(kChunk, range.last - first), false, 0};
    }
    template <int N> static void rows_of_step(const Range& range, int64_t i, ReadRow* at) {
        const Chunk chunk = chunk_of(range, i);
        interleave<N>(chunk, i - chunk.first, at);
    }

    void tiled(Reader& reader, const Part& part) const {
        const Projection& p = call_.weights;
        const int64_t m = part.num_tokens, tiles = (m + 15) / 16;
        if (reader.counts) count(Stage::linear, Kernel::bfloat16_tiles);
        float* y[kMostTokenRows];
        for (int64_t at = part.first_row; at < part.last_row; at += 32) {
            const auto left = static_cast<int>(part.last_row - at);
            const int count[2] = {std::min(left, 16), std::clamp(left - 16, 0, 16)};
            float* out = part.out + at - part.first_row;
            for (int64_t r = 0; r < tiles * 16; ++r) y[r] = r < m ? out + r * kChunk : nullptr;
            TileRows rows = tile_rows(p, 0, at, count[1] ? 16 : 0, 1, count);
            rows.width = tile_width(n_);
            rows.last_tokens = static_cast<int>(m - (tiles - 1) * 16);
            if (int64_t then = at; reader.ahead(then, 32)) follow(rows, p, 0, then, 16, 1);
            auto* panel = reinterpret_cast<uint8_t*>(part.panel);
            isa_.tiles->down(rows, nullptr, tile(part.first_token / 16), tiles, y, panel);
        }
    }

    void write(const Part& part) const {
        float bias[kChunk];
        const float one[2] = {1.0f, 1.0f};
        const int64_t n = part.last_row - part.first_row;
        if (call_.bias.data) {
            const auto* from = static_cast<const uint8_t*>(call_.bias.data);
            isa_.widen(from + bytes_of(call_.bias.dtype, part.first_row), call_.bias.dtype, n, 1.0f, bias);
        }
        for (int64_t r = 0; r < part.num_tokens; ++r) {
            const float* rows[2] = {part.out + r * kChunk, bias};
            const int64_t index = (first_ + part.first_token + r) * call_.weights.rows + part.first_row;
            auto* out = static_cast<uint8_t*>(call_.out) + bytes_of(call_.out_dtype, index);
            isa_.combine(rows, one, call_.bias.data ? 2 : 1, n, out, call_.out_dtype);
        }
    }

    const Isa& isa_;
    const LinearCall& call_;
    const int64_t first_, n_;
    const bool tiled_;
    const RowOps* const row_ops_;  // null where rows stay floats
    const Layout layout_;
    const int64_t x_stride_;
    Queue queue_;
    std::vector<uint8_t> is_float_;  // of the rows of x; where row_ops_ is null all are
    float* x_ = nullptr;
};

}  // namespace

void linear(const Isa& isa, const LinearCall& call) {
    const int64_t most = tokens_at_once(call);
    const struct Release {
        ~Release() { Linear::release(); }
    } release;
    for (int64_t t = 0; t < call.num_tokens; t += most) Linear(isa, call, t, std::min(most, call.num_tokens - t)).run();
}

}  // namespace moestro
