// How one call is walked: rows grouped by expert, work cut by cost, threads taking it in order.
//
// Each expert has two parts, gate_up with the activation, and down. A part is cut into ranges of its weights' rows, and
// threads take ranges from one list: an expert's gate_up stands in it one expert before its down, so that a thread that
// comes to a down part hardly ever waits for the gate_up that another one is finishing.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "engine.h"
#include "layout.h"
#include "pieces.h"
#include "places.h"
#include "ranges.h"
#include "rows.h"
#include "stored_rows.h"
#include "team.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace moestro {
namespace {

constexpr int64_t kRoundedAtOnce = 8;      // rows of h
constexpr int64_t kAheadBytes = 8 << 10;       // of weights are fetched before they are read

class Walk : public Workspace<Walk> {
public:
    // `rounded` is what rows are rounded by before each product; null: they stay floats.
    Walk(const Isa& isa, const Call& call, const RoundedOps* rounded, int64_t first_token, int64_t num_tokens)
        : isa_(isa), rounded_(rounded), call_(call), first_token_(first_token), num_tokens_(num_tokens),
          x_layout_(call.gate_up.element, call.hidden_size, isa.lanes),
          h_layout_(call.down.element, call.intermediate_size, isa.lanes),
          token_block_(std::clamp<int64_t>(call.token_block, 1, kTokenBlock)), rows_(call, first_token, num_tokens, fewest_tiled()), ranges_(cut(call, rows_.active)) {
        progress_ = std::make_unique<Progress[]>(rows_.active.size());
        lay_out();
    }

    void run() {
        const bool small = num_tokens_ * call_.hidden_size <= 1 << 15;
        const int64_t prepared = rows_.num_tiles + num_x_rows();
        if (small) {
            for (int64_t i = 0; i < prepared; ++i) prepare(i);
            run_team(call_.num_threads, [&](int, int) { take_ranges(); });
            for (int64_t t = 0; t < num_tokens_; ++t) combine(t);
            return;
        }
        run_team(call_.num_threads, [&](int thread, int threads) {
            share(thread, threads, prepared, [&](int64_t i) { prepare(i); });
        });
        run_team(call_.num_threads, [&](int, int) { take_ranges(); });
        run_team(call_.num_threads, [&](int thread, int threads) {
            share(thread, threads, num_tokens_, [&](int64_t t) { combine(t); });
        });
    }

private:
    template <class Body> static void share(int thread, int threads, int64_t n, Body body) {
        for (int64_t i = n * thread / threads; i < n * (thread + 1) / threads; ++i) body(i);
    }

    bool x_is_ready() const {
        // Of many rows, a copy whose rows do not share cache sets is faster.
        return !rounded_ && num_tokens_ <= 32 && !call_.weight_on_input && call_.x.dtype == Element::f32 && !x_layout_.nibbles && x_layout_.padded == call_.hidden_size;
    }
    // Rows that one of them takes are multiplied by tiles from this many on.
    int64_t fewest_tiled() const {
        if (!isa_.tiles) return INT64_MAX;
        return call_.same_bits ? 1 : std::max(isa_.tiles->fewest_rows(call_.gate_up, rounded_), isa_.tiles->fewest_rows(call_.down, rounded_));
    }
    int64_t num_plain_rows() const { return rows_.num_rows - rows_.first_plain; }
    int64_t num_x_rows() const {
        if (num_plain_rows() == 0 || x_is_ready()) return 0;
        return call_.weight_on_input ? num_plain_rows() : num_tokens_;
    }

    void lay_out() {
        x_stride_ = rounded_ ? round_up(rounded_->row_floats(call_.gate_up.element, call_.hidden_size), 16) : x_layout_.stride();
        h_stride_ = rounded_ ? round_up(rounded_->row_floats(call_.down.element, call_.intermediate_size), 16) : h_layout_.stride();
        const int64_t x_words = rows_.num_tiles * tile_words(call_.hidden_size), h_words = rows_.num_tiles * tile_words(call_.intermediate_size);
        const int64_t x_floats = num_x_rows() * x_stride_, h_floats = num_plain_rows() * h_stride_;
        y_stride_ = round_up(call_.hidden_size, 16) + 16;
        wide_stride_ = round_up(call_.intermediate_size, 16);
        x_tiles_ = arena().reserve(x_words + h_words + x_floats + h_floats + rows_.num_rows * y_stride_ + (rounded_ ? num_plain_rows() * wide_stride_ : 0));
        h_tiles_ = x_tiles_ + x_words;
        x_ = h_tiles_ + h_words;
        h_ = x_ + x_floats;
        y_ = h_ + h_floats;
        wide_h_ = y_ + rows_.num_rows * y_stride_;
        for (const Active& a : rows_.active) {
            const int64_t block = 16 * a.tile_width(), last = (call_.intermediate_size - 1) / 32 * block;
            for (int64_t t = 0; a.tiled && t < a.num_tiles() && call_.intermediate_size % 32; ++t)
                std::memset(h_tile(a.first_tile + t) + last, 0, static_cast<size_t>(block) * sizeof(uint32_t));
        }
        if (!rounded_ && h_layout_.padded != h_layout_.columns)
            for (int64_t r = rows_.first_plain; r < rows_.num_rows; ++r) h_layout_.clear_padding(h_row(r));
        tokens_.resize(static_cast<size_t>(num_plain_rows()));
        if (isa_.tiles || rounded_) wanted_.assign(static_cast<size_t>(num_x_rows()), call_.weight_on_input);
        if (rounded_) x_is_float_.assign(static_cast<size_t>(num_x_rows()), 0), h_is_float_.assign(tokens_.size(), 0);
        for (int64_t r = rows_.first_plain; r < rows_.num_rows; ++r) {
            const int64_t token = rows_.token[r];
            if (!wanted_.empty() && !call_.weight_on_input) wanted_[token] = true;
            tokens_[r - rows_.first_plain] = call_.weight_on_input ? x_ + (r - rows_.first_plain) * x_stride_
                                             : x_is_ready()        ? static_cast<const float*>(call_.x.data) + (first_token_ + token) * call_.x.stride
                                                                   : x_ + token * x_stride_;
        }
    }
    float* wide_h(int64_t row) const { return wide_h_ + (row - rows_.first_plain) * wide_stride_; }
    float* h_row(int64_t row) const { return h_ + (row - rows_.first_plain) * h_stride_; }

    // Tiles of bfloat16 take the places of rows of floats: a word is a pair.
    uint32_t* x_tile(int64_t t) const { return reinterpret_cast<uint32_t*>(x_tiles_) + t * tile_words(call_.hidden_size); }
    uint32_t* h_tile(int64_t t) const { return reinterpret_cast<uint32_t*>(h_tiles_) + t * tile_words(call_.intermediate_size); }

    void prepare_tile(int64_t tile) {
        const Active& a = *std::prev(std::upper_bound(rows_.active.begin(), rows_.active.end(), tile, [](int64_t t, const Active& each) { return t < each.first_tile; }));
        const int64_t first = (tile - a.first_tile) * 16, hidden = call_.hidden_size;
        const uint16_t* rows[16];
        float* wide = call_.weight_on_input ? scratch().reserve(hidden + 8 * hidden) : nullptr;
        auto* weighted = reinterpret_cast<uint16_t*>(wide + hidden);
        for (int64_t i = 0; i < 16; ++i) {
            const int64_t row = a.first_row + first + i;
            rows[i] = nullptr;
            if (first + i >= a.num_rows) continue;
            rows[i] = static_cast<const uint16_t*>(call_.x.data) + (first_token_ + rows_.token[row]) * call_.x.stride;
            if (!call_.weight_on_input) continue;
            isa_.widen(rows[i], Element::bf16, hidden, rows_.factor[row], wide);
            const float* one = wide;
            const float factor = 1.0f;
            isa_.combine(&one, &factor, 1, hidden, weighted + i * hidden, Element::bf16);
            rows[i] = weighted + i * hidden;
        }
        isa_.tiles->pack(rows, a.tile_width(), hidden, is_nibble(call_.gate_up.element), x_tile(tile));
    }

    // A tile; or a token's row, or with weights on the input a (token, slot) pair's, as floats in the order of gate_up's columns.
    void prepare(int64_t i) {
        if (i < rows_.num_tiles) return prepare_tile(i);
        i -= rows_.num_tiles;
        if (!wanted_.empty() && !wanted_[i]) return;
        const int64_t row = rows_.first_plain + i, token = first_token_ + (call_.weight_on_input ? rows_.token[row] : i);
        const float factor = call_.weight_on_input ? rows_.factor[row] : 1.0f;
        const int64_t size = call_.x.dtype == Element::f32 ? 4 : 2;
        const auto* from = static_cast<const uint8_t*>(call_.x.data) + token * call_.x.stride * size;
        float* to = x_ + i * x_stride_;
        float* wide = rounded_ || x_layout_.nibbles ? scratch().reserve(call_.hidden_size) : to;
        isa_.widen(from, call_.x.dtype, call_.hidden_size, factor, wide);
        if (rounded_) {
            if (rounded_->round_row(call_.gate_up.element, call_.hidden_size, call_.gate_up.group_columns, wide, to)) return;
            x_is_float_[i] = true;
        }
        if (wide != to) x_layout_.place(wide, 0, call_.hidden_size, to);
        x_layout_.clear_padding(to);
    }

    void take_ranges() {
        if (rows_.num_tiles) isa_.tiles->begin();
        take_all();
        if (rows_.num_tiles) isa_.tiles->end();
    }

    void take_all() {
        const int64_t widest = std::max(x_layout_.padded, h_layout_.padded);
        // What four_rows needs, the sums of a block of tokens, and both halves before the activation.
        const int64_t panel = round_up(std::max({scratch_floats(widest, kTokenBlock, isa_.eight_rows ? 8 : 4), rounded_ ? rounded_->scratch_floats(widest) : 0,
                                                 many() ? many()->scratch_floats(widest) : 0}), 16);
        const int64_t sums = kManyRows * kTokenBlock, half = kTokenBlock * kChunk;
        float* room = scratch().reserve(std::max(panel + sums + 2 * half + packed_floats(), tile_scratch_bytes(widest) / 4));
        for (Reader reader{*this}; const Range* range = reader.take();) {
            const Active& active = rows_.active[range->expert];
            if (range->down) wait_for_h(range->expert);
            if (active.tiled) {
                const int64_t last = active.first_tile + active.num_tiles(), block = (token_block_ + 15) / 16;
                for (int64_t t = active.first_tile; t < last; t += block) {
                    const int64_t n = std::min(block, last - t);
                    reader.last_pass = t + n == last;
                    if (range->down) tiled_down(active, reader, t, n, reinterpret_cast<uint8_t*>(room));
                    else tiled_gate_up(active, reader, t, n, reinterpret_cast<uint8_t*>(room));
                }
            } else {
                for (int64_t r = 0; r < active.num_rows; r += token_block_) {
                    const int64_t m = std::min(token_block_, active.num_rows - r);
                    reader.last_pass = r + m == active.num_rows;
                    if (range->down) down(active, reader, r, m, room, room + panel);
                    else gate_up(active, reader, r, m, room, room + panel);
                }
            }
            if (!range->down) progress_[range->expert].ranges.fetch_add(1, std::memory_order_release);
        }
    }

    // What a thread reads. It takes the range that follows when the end of its own comes near, so that it can be fetched.
    struct Reader {
        Walk& walk;
        const Range *range = nullptr, *following = nullptr;
        bool last_pass = true, at_end = false;

        const Range* take() {
            range = following ? following : at_end ? nullptr : walk.next_range();
            following = nullptr;
            return range;
        }
        // The place `distance` rows behind i: in this range, or in the one that follows; null where there is none.
        const Range* ahead(int64_t& i, int64_t distance) {
            i += distance;
            if (i < range->last) return range;
            if (!last_pass) return nullptr;
            if (!following && !at_end) following = walk.next_range();
            at_end = !following;
            if (at_end) return nullptr;
            i += following->first - range->last;
            return i < following->last ? following : nullptr;
        }
    };
    const Range* next_range() {
        const int64_t i = next_.fetch_add(1, std::memory_order_relaxed);
        return i < static_cast<int64_t>(ranges_.size()) ? &ranges_[i] : nullptr;
    }
    const Projection& projection(const Range& range) const { return range.down ? call_.down : call_.gate_up; }
    int64_t expert(const Range& range) const { return rows_.active[range.expert].expert; }

    // The chunk of a range that column `i` is in.
    Chunk chunk_of(const Range& range, int64_t i) const {
        const Activation& act = call_.activation;
        const int64_t first = range.first + ((i - range.first) & -kChunk), columns = std::min(kChunk, range.last - first);
        const bool both = !range.down && act.gated;
        return {first, columns, both && act.interleaved, both && !act.interleaved ? call_.intermediate_size : 0};
    }
    // The rows of weights of the step that begins at column `i`.
    template <int N> void places(const Range& range, int64_t i, Place* at) const {
        const Chunk chunk = chunk_of(range, i);
        moestro::places<N>(chunk, i - chunk.first, at);
    }

    // Rows of h are whole once all ranges of gate_up are done; whoever comes then rounds those that nobody has taken.
    void wait_for_h(int32_t expert) {
        const Active& active = rows_.active[expert];
        Progress& progress = progress_[expert];
        wait_for(progress.ranges, active.num_ranges);
        if (!rounded_ || active.tiled) return;
        while (true) {
            const int64_t first = progress.taken.fetch_add(kRoundedAtOnce, std::memory_order_relaxed);
            const int64_t last = std::min(first + kRoundedAtOnce, active.num_rows);
            if (first >= last) break;
            for (int64_t r = active.first_row + first; r < active.first_row + last; ++r) {
                if (rounded_->round_row(call_.down.element, call_.intermediate_size, call_.down.group_columns, wide_h(r), h_row(r))) continue;
                h_is_float_[r - rows_.first_plain] = true;
                h_layout_.place(wide_h(r), 0, call_.intermediate_size, h_row(r));
                h_layout_.clear_padding(h_row(r));
            }
            progress.rounded.fetch_add(last - first, std::memory_order_release);
        }
        wait_for(progress.rounded, active.num_rows);
    }

    static void wait_for(const std::atomic<int64_t>& count, int64_t wanted) {
        for (int spins = 0; count.load(std::memory_order_acquire) < wanted; ++spins) {
#if defined(__x86_64__)
            _mm_pause();
#endif
            if (spins > 1000) std::this_thread::yield();
        }
    }

    const ManyOps* many() const { return rounded_ ? rounded_->many : nullptr; }
    int64_t packed_floats() const {
        if (!many()) return 0;
        const auto bytes = [&](const Projection& p) { return many()->packed_bytes(p.element, p.columns, p.group_columns, kTokenBlock); };
        return std::max(bytes(call_.gate_up), bytes(call_.down)) / 4;
    }

    // Some rows of a projection for some tokens: how many rows at once, and the tokens as these want them.
    struct Products {
        const Projection& projection;
        int64_t expert, rows;
        const float* const* x;
        int64_t integers;  // so many of x are; the others are floats
        bool few;       // the expert has so few rows that scales multiply sums
        int64_t ahead;  // from columns of h, or rows of down, to those that are fetched meanwhile
        const uint8_t* packed;
    };
    // Rows first to first + m of an expert, those that were rounded before those that stay floats.
    struct Block {
        int64_t row[kTokenBlock];
        const float* x[kTokenBlock];
        int64_t integers = 0;
    };
    Block block_of(const Active& active, int64_t first, int64_t m, bool down) const {
        Block block;
        int64_t n = 0;
        for (int is_float = rounded_ ? 0 : 1; is_float < 2; ++is_float) {
            for (int64_t r = active.first_row + first; r < active.first_row + first + m; ++r) {
                const int64_t plain = r - rows_.first_plain, of_x = call_.weight_on_input ? plain : rows_.token[r];
                if (rounded_ && (down ? h_is_float_[plain] : x_is_float_[of_x]) != is_float) continue;
                block.row[n] = r;
                block.x[n++] = down ? h_row(r) : tokens_[plain];
            }
            if (!is_float) block.integers = n;
        }
        return block;
    }
    Products products(const Projection& p, const Active& active, const Block& block, int64_t m, float* sums) const {
        const float* const* x = block.x;
        const int64_t expert = active.expert;
        const bool few = !call_.same_bits && active.num_rows <= isa_.few;
        const bool gated = &p == &call_.gate_up && call_.activation.gated;
        const auto ahead = [&](int64_t rows) { return (kAheadBytes / (rows * p.row_bytes() + 1) + 1) * (gated ? rows / 2 : rows); };
        if (!rounded_ && isa_.eight_rows && m >= kManyTokens && p.columns > 0) return {p, expert, 8, x, 0, few, ahead(8), nullptr};
        if (!many() || m <= kFewTokens) return {p, expert, 4, x, block.integers, few, ahead(4), nullptr};
        auto* packed = reinterpret_cast<uint8_t*>(sums + kManyRows * kTokenBlock + 2 * kTokenBlock * kChunk);
        many()->pack(p.element, p.columns, p.group_columns, x, m, packed);
        return {p, expert, kManyRows, x, m, false, ahead(kManyRows), packed};
    }
    // sums[t][i] of the rows of the step that begins at a column, and m tokens; says which rows these are.
    void multiply(const Products& products, Reader& reader, int64_t column, const FloatArray& bias, int64_t m, float* sums, float* panel, Place* at) const {
        if (products.rows == 8) {
            FourRows rows[2];
            describe<8>(products, reader, column, at, rows);
            isa_.eight_rows(rows, products.x, m, sums, panel);
        } else if (!products.packed) {
            FourRows rows;
            describe<4>(products, reader, column, at, &rows);
            const int64_t n = products.integers;
            if (n > 0) rounded_->four_rows(rows, products.x, n, sums, panel);
            if (n < m) isa_.four_rows(rows, products.x + n, m - n, sums + 4 * n, panel);
        } else {
            FourRows rows[kManyRows / 4];
            describe<kManyRows>(products, reader, column, at, rows);
            many()->rows(rows, products.packed, m, sums, panel);
        }
        if (bias.data) add_bias(bias, products, at, m, sums);
    }
    template <int N> void describe(const Products& products, Reader& reader, int64_t column, Place* at, FourRows* rows) const {
        places<N>(*reader.range, column, at);
        for (int64_t i = 0; i < N; i += 4) {
            take_rows(rows[i / 4], products.projection, products.expert, at + i);
            rows[i / 4].scale_sums = products.few;
        }
        const Range* then = reader.ahead(column, products.ahead);
        if (!then) return;
        Place next[N];
        places<N>(*then, column, next);
        for (int64_t i = 0; i < N; i += 4) moestro::follow(rows[i / 4], projection(*then), expert(*then), next + i);
    }

    void add_bias(const FloatArray& bias, const Products& products, const Place* at, int64_t m, float* sums) const {
        float values[kManyRows];
        const int64_t n = products.rows;
        for (int64_t i = 0; i < n; ++i) {
            const int64_t size = bias.dtype == Element::f32 ? 4 : 2;
            const auto* from = static_cast<const uint8_t*>(bias.data) + (products.expert * bias.stride + at[i].row) * size;
            isa_.widen(from, bias.dtype, 1, 1.0f, values + i);
        }
        for (int64_t t = 0; t < m; ++t)
            for (int64_t i = 0; i < n; ++i) sums[n * t + i] += values[i];
    }

    void gate_up(const Active& active, Reader& reader, int64_t first, int64_t m, float* panel, float* sums) {
        const Activation& act = call_.activation;
        const Range& range = *reader.range;
        float *gate = sums + kManyRows * kTokenBlock, *up = gate + kTokenBlock * kChunk;
        const Block block = block_of(active, first, m, false);
        const Products all = products(call_.gate_up, active, block, m, sums);
        const int64_t step = act.gated ? all.rows / 2 : all.rows;
        for (int64_t c = range.first; c < range.last; c += kChunk) {
            const int64_t stop = std::min(c + kChunk, range.last);
            for (int64_t i = c; i < stop; i += step) {
                Place at[kManyRows];
                multiply(all, reader, i, call_.gate_up_bias, m, sums, panel, at);
                for (int64_t j = 0; j < all.rows; ++j)
                    for (int64_t t = 0; t < m && at[j].counts; ++t) (at[j].up ? up : gate)[t * kChunk + at[j].column] = sums[all.rows * t + j];
            }
            for (int64_t t = 0; t < m; ++t) {
                isa_.activate(act, stop - c, gate + t * kChunk, up + t * kChunk);
                const int64_t row = block.row[t];
                if (rounded_) std::memcpy(wide_h(row) + c, gate + t * kChunk, static_cast<size_t>(stop - c) * sizeof(float));
                else h_layout_.place(gate + t * kChunk, c, stop - c, h_row(row));
            }
        }
    }

    void down(const Active& active, Reader& reader, int64_t first, int64_t m, float* panel, float* sums) {
        const Range& range = *reader.range;
        const Block block = block_of(active, first, m, true);
        const Products all = products(call_.down, active, block, m, sums);
        for (int64_t i = range.first; i < range.last; i += all.rows) {
            Place at[kManyRows];
            multiply(all, reader, i, call_.down_bias, m, sums, panel, at);
            for (int64_t j = 0; j < all.rows; ++j)
                for (int64_t t = 0; t < m && at[j].counts; ++t) y_[block.row[t] * y_stride_ + at[j].row] = sums[all.rows * t + j];
        }
    }

    // Has tiles of rows fetch those that follow.
    void follow(TileRows& rows, Reader& reader, int64_t i) const {
        const Activation& act = call_.activation;
        int64_t then = i;
        const Range* range = reader.ahead(then, !reader.range->down && act.gated ? 16 : 32);
        if (!range) return;
        const bool gated = !range->down && act.gated, alternate = gated && act.interleaved;
        moestro::follow(rows, projection(*range), expert(*range), alternate ? 2 * then : then, alternate ? 1 : gated ? call_.intermediate_size : 16, alternate ? 2 : 1);
    }

    // `first` and `n` number tiles of tokens, among all and from there.
    void tiled_gate_up(const Active& active, Reader& reader, int64_t first, int64_t n, uint8_t* room) {
        const Activation& act = call_.activation;
        const Range& range = *reader.range;
        const int64_t step = act.gated ? 16 : 32, every = act.interleaved ? 2 : 1;
        const int64_t apart = !act.gated ? 16 : act.interleaved ? 1 : call_.intermediate_size;
        for (int64_t c = range.first; c < range.last; c += step) {
            const auto left = static_cast<int>(range.last - c);
            const int count[2] = {std::min(left, 16), act.gated ? std::min(left, 16) : std::clamp(left - 16, 0, 16)};
            float values[32];
            const float* bias = tile_bias(isa_, call_.gate_up_bias, active.expert, c * every, apart, every, count, values);
            TileRows rows = tile_rows(call_.gate_up, active.expert, c * every, count[1] ? apart : 0, every, count);
            rows.width = active.tile_width();
            rows.out_step = tile_words(call_.intermediate_size);
            rows.out_nibbles = is_nibble(call_.down.element);
            follow(rows, reader, c);
            isa_.tiles->gate_up(rows, bias, act, x_tile(first), n, c, h_tile(first), room);
        }
    }

    void tiled_down(const Active& active, Reader& reader, int64_t first, int64_t n, uint8_t* room) {
        const Range& range = *reader.range;
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
            follow(rows, reader, i);
            isa_.tiles->down(rows, bias, h_tile(first), n, y, room);
        }
    }

    void combine(int64_t t) {
        const float* rows[kMostSlots];
        float weights[kMostSlots];
        const int64_t size = call_.out_dtype == Element::f32 ? 4 : 2;
        auto* out = static_cast<uint8_t*>(call_.out) + (first_token_ + t) * call_.hidden_size * size;
        for (int64_t k = 0; k < call_.top_k; ++k) {
            const int64_t row = rows_.of_slot[t * call_.top_k + k];
            rows[k] = row < 0 ? nullptr : y_ + row * y_stride_;
            weights[k] = call_.weight_on_input ? 1.0f : call_.routing_weights[(first_token_ + t) * call_.top_k + k];
        }
        isa_.combine(rows, weights, call_.top_k, call_.hidden_size, out, call_.out_dtype);
    }

    // Of an expert: ranges of gate_up that are done, and rows of h taken for rounding, and rounded.
    struct Progress {
        std::atomic<int64_t> ranges{0}, taken{0}, rounded{0};
    };

    const Isa& isa_;
    const RoundedOps* const rounded_;
    const Call& call_;
    const int64_t first_token_, num_tokens_;
    const Layout x_layout_, h_layout_;
    const int64_t token_block_;
    Rows rows_;
    const std::vector<Range> ranges_;
    int64_t x_stride_ = 0, h_stride_ = 0, y_stride_ = 0, wide_stride_ = 0;
    std::vector<const float*> tokens_;
    std::unique_ptr<Progress[]> progress_;
    std::atomic<int64_t> next_{0};
    float *x_ = nullptr, *h_ = nullptr, *y_ = nullptr;
    float *x_tiles_ = nullptr, *h_tiles_ = nullptr;  // words
    std::vector<bool> wanted_;  // of x's rows where some experts take tiles
    float* wide_h_ = nullptr;  // of rows that are to be rounded
    std::vector<uint8_t> x_is_float_, h_is_float_;  // of those, which stayed what they were
};

}  // namespace

void expert_mlp(const Isa& isa, const Call& call) {
    const RoundedOps* rounded = rounding(isa, call);
    const int64_t most = tokens_at_once(isa, call, rounded);
    const struct Release {
        ~Release() { Walk::release(); }
    } release;
    for (int64_t t = 0; t < call.num_tokens; t += most) {
        const int64_t n = std::min(most, call.num_tokens - t);
        Walk(isa, call, rounded, t, n).run();
    }
}

}  // namespace moestro
