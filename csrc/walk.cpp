#include "walk.h"

#include <algorithm>
#include <cstring>

#include "counts.h"
#include "subnormals.h"
#include "team.h"

namespace moestro {
namespace {

constexpr int64_t kRowsQuantizedAtOnce = 8;  // of h
constexpr int64_t kSmallCall = 1 << 15;      // values of x that are not worth a team of threads
constexpr int64_t kFewTokens = 32;           // that may be read where they lie

template <class Body> void share(int thread, int threads, int64_t n, Body body) {
    for (int64_t i = n * thread / threads; i < n * (thread + 1) / threads; ++i) body(i);
}

}  // namespace

Walk::Walk(const Isa& isa, const Call& call, const ExpertIds& ids, int64_t first_token, int64_t num_tokens)
    : isa_(isa), call_(call), input_(input_of(isa, call)), row_ops_(row_ops(isa, input_)), first_token_(first_token),
      num_tokens_(num_tokens), x_layout_(call.gate_up.element, call.hidden_size, isa.lanes),
      h_layout_(call.down.element, call.intermediate_size, isa.lanes),
      rows_(call, ids, first_token, num_tokens, fewest_tiled(isa, call, input_)), queue_(cut(call, rows_.active)) {
    progress_ = std::make_unique<Progress[]>(rows_.active.size());
    reserve();
    point_to_tokens();
}

void Walk::run() {
    const int64_t prepared = rows_.num_tiles + num_x_rows();
    if (num_tokens_ * call_.hidden_size <= kSmallCall) {
        for (int64_t i = 0; i < prepared; ++i) prepare(i);
        run_team(call_.num_threads, [&](int, int) { take_ranges(); });
        for (int64_t t = 0; t < num_tokens_; ++t) combine(t);
        return;
    }
    run_team(call_.num_threads,
             [&](int thread, int threads) { share(thread, threads, prepared, [&](int64_t i) { prepare(i); }); });
    run_team(call_.num_threads, [&](int, int) { take_ranges(); });
    run_team(call_.num_threads,
             [&](int thread, int threads) { share(thread, threads, num_tokens_, [&](int64_t t) { combine(t); }); });
}

bool Walk::x_is_ready() const {
    // Of many rows, a copy whose rows do not share cache sets is faster.
    const bool as_it_is = !row_ops_ && !call_.weight_on_input && call_.x.dtype == Element::f32;
    return as_it_is && num_tokens_ <= kFewTokens && !x_layout_.nibbles && x_layout_.padded == call_.hidden_size;
}

int64_t Walk::num_x_rows() const {
    if (num_float_rows() == 0 || x_is_ready()) return 0;
    return call_.weight_on_input ? num_float_rows() : num_tokens_;
}

void Walk::reserve() {
    const int64_t hidden = call_.hidden_size, inner = call_.intermediate_size;
    x_stride_ = row_ops_ ? round_up(row_ops_->row_floats(call_.gate_up.element, hidden), 16) : x_layout_.stride();
    h_stride_ = row_ops_ ? round_up(row_ops_->row_floats(call_.down.element, inner), 16) : h_layout_.stride();
    y_stride_ = round_up(hidden, 16) + 16;
    wide_stride_ = round_up(inner, 16);
    const int64_t x_words = rows_.num_tiles * tile_words(hidden), h_words = rows_.num_tiles * tile_words(inner);
    const int64_t x_floats = num_x_rows() * x_stride_, h_floats = num_float_rows() * h_stride_;
    const int64_t y_floats = rows_.num_rows * y_stride_, wide_floats = row_ops_ ? num_float_rows() * wide_stride_ : 0;
    x_tiles_ = arena().reserve(x_words + h_words + x_floats + h_floats + y_floats + wide_floats);
    h_tiles_ = x_tiles_ + x_words;
    x_ = h_tiles_ + h_words;
    h_ = x_ + x_floats;
    y_ = h_ + h_floats;
    wide_h_ = y_ + y_floats;
    for (const Active& a : rows_.active) {
        const int64_t block = 16 * a.tile_width(), last = (inner - 1) / 32 * block;
        for (int64_t t = 0; a.tiled && t < a.num_tiles() && inner % 32; ++t)
            std::memset(h_tile(a.first_tile + t) + last, 0, static_cast<size_t>(block) * sizeof(uint32_t));
    }
    if (!row_ops_ && h_layout_.padded != h_layout_.columns)
        for (int64_t r = rows_.first_plain; r < rows_.num_rows; ++r) h_layout_.clear_padding(h_row(r));
}

// Says of each row that takes no tile where its token lies, and of each of x's rows whether one needs it.
void Walk::point_to_tokens() {
    tokens_.resize(static_cast<size_t>(num_float_rows()));
    if (isa_.tiles || row_ops_) wanted_.assign(static_cast<size_t>(num_x_rows()), call_.weight_on_input);
    if (row_ops_) x_is_float_.assign(static_cast<size_t>(num_x_rows()), 0), h_is_float_.assign(tokens_.size(), 0);
    const auto* x = static_cast<const float*>(call_.x.data);
    const bool ready = x_is_ready();
    for (int64_t r = rows_.first_plain; r < rows_.num_rows; ++r) {
        const int64_t token = rows_.token[r];
        if (!wanted_.empty() && !call_.weight_on_input) wanted_[token] = true;
        tokens_[r - rows_.first_plain] = call_.weight_on_input ? x_ + (r - rows_.first_plain) * x_stride_
                                         : ready               ? x + (first_token_ + token) * call_.x.stride
                                                               : x_ + token * x_stride_;
    }
}

void Walk::prepare_tile(int64_t tile) {
    const auto behind = [](int64_t t, const Active& each) { return t < each.first_tile; };
    const Active& a = *std::prev(std::upper_bound(rows_.active.begin(), rows_.active.end(), tile, behind));
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

// A tile; or the row of a token, or with weights on the input of a (token, slot) pair, in the order of gate_up's
// columns.
void Walk::prepare(int64_t i) {
    if (i < rows_.num_tiles) return prepare_tile(i);
    i -= rows_.num_tiles;
    if (!wanted_.empty() && !wanted_[i]) return;
    const Projection& p = call_.gate_up;
    const int64_t row = rows_.first_plain + i, token = first_token_ + (call_.weight_on_input ? rows_.token[row] : i);
    const float factor = call_.weight_on_input ? rows_.factor[row] : 1.0f;
    const auto* from = static_cast<const uint8_t*>(call_.x.data) + bytes_of(call_.x.dtype, token * call_.x.stride);
    float* to = x_ + i * x_stride_;
    float* wide = row_ops_ || x_layout_.nibbles ? scratch().reserve(call_.hidden_size) : to;
    isa_.widen(from, call_.x.dtype, call_.hidden_size, factor, wide);
    if (row_ops_) {
        if (row_ops_->quantize_row(p.element, call_.hidden_size, p.group_columns, wide, to)) return;
        x_is_float_[i] = true;
    }
    if (wide != to) x_layout_.place(wide, 0, call_.hidden_size, to);
    x_layout_.clear_padding(to);
}

Walk::Room Walk::room_of_thread() const {
    const int64_t widest = std::max(x_layout_.padded, h_layout_.padded);
    const int64_t of_floats = scratch_floats(widest, kTokenBlock,
                                             isa_.outer_products ? kOuterRows
                                             : isa_.eight_rows   ? 8
                                                                 : 4);
    const int64_t of_int8 = row_ops_ ? row_ops_->scratch_floats(widest) : 0;
    const int64_t of_tiles = int8_tiles() ? int8_tiles()->scratch_floats(widest) : 0;
    const auto bytes = [&](const Projection& p) {
        return int8_tiles() ? int8_tiles()->packed_bytes(p.element, p.columns, p.group_columns, kTokenBlock) : 0;
    };
    const int64_t packed = std::max(bytes(call_.gate_up), bytes(call_.down)) / 4;
    const int64_t panel = round_up(std::max({of_floats, of_int8, of_tiles}), 16);
    const int64_t half = kMostTokenRows * kChunk;
    const int64_t all = std::max(panel + kSums + 2 * half + packed, tile_scratch_bytes(widest) / 4);
    Room room;
    room.panel = scratch().reserve(all);
    room.sums = room.panel + panel;
    room.gate = room.sums + kSums;
    room.up = room.gate + half;
    room.packed = room.up + half;
    return room;
}

void Walk::take_ranges() {
    const KeepSubnormals keep(input_ == Input::e4m3);
    if (rows_.num_tiles) isa_.tiles->begin();
    const Room room = room_of_thread();
    Reader reader(queue_);
    const bool counted = is_counting();
    while (const Range* range = reader.take()) {
        reader.counts = counted && range->first == 0;
        if (range->down) wait_for_h(range->expert);
        run_range(reader, room);
        if (!range->down) progress_[range->expert].ranges.fetch_add(1, std::memory_order_release);
    }
    if (rows_.num_tiles) isa_.tiles->end();
}

void Walk::run_range(Reader& reader, const Room& room) {
    const Range* range = reader.range;
    const Active& active = rows_.active[range->expert];
    if (active.tiled) {
        auto* bytes = reinterpret_cast<uint8_t*>(room.panel);
        const int64_t last = active.first_tile + active.num_tiles(), block = (token_block(call_) + 15) / 16;
        for (int64_t t = active.first_tile; t < last; t += block) {
            const int64_t n = std::min(block, last - t);
            reader.last_pass = t + n == last;
            if (range->down) tiled_down(active, reader, t, n, bytes);
            else tiled_gate_up(active, reader, t, n, bytes);
        }
        return;
    }
    const Case asked = expert_case(isa_, call_, projection(*range), active.num_rows);
    for (int64_t r = 0, m = 0; r < active.num_rows; r += m) {
        m = next_block(asked, active.num_rows - r, call_.token_block);
        reader.last_pass = r + m == active.num_rows;
        if (range->down) down(active, reader, r, m, room);
        else gate_up(active, reader, r, m, room);
    }
}

// Rows of h are whole once all ranges of gate_up are done; whoever comes then quantizes those that nobody has taken.
void Walk::wait_for_h(int32_t expert) {
    const Active& active = rows_.active[expert];
    Progress& progress = progress_[expert];
    wait_for(progress.ranges, active.num_ranges);
    if (!row_ops_ || active.tiled) return;
    while (true) {
        const int64_t first = progress.taken.fetch_add(kRowsQuantizedAtOnce, std::memory_order_relaxed);
        const int64_t last = std::min(first + kRowsQuantizedAtOnce, active.num_rows);
        if (first >= last) break;
        quantize_h(active, first, last);
        progress.quantized.fetch_add(last - first, std::memory_order_release);
    }
    wait_for(progress.quantized, active.num_rows);
}

void Walk::quantize_h(const Active& active, int64_t first, int64_t last) {
    const Projection& p = call_.down;
    for (int64_t r = active.first_row + first; r < active.first_row + last; ++r) {
        if (row_ops_->quantize_row(p.element, p.columns, p.group_columns, wide_h(r), h_row(r))) continue;
        h_is_float_[r - rows_.first_plain] = true;
        h_layout_.place(wide_h(r), 0, p.columns, h_row(r));
        h_layout_.clear_padding(h_row(r));
    }
}

void Walk::combine(int64_t t) {
    const float* rows[kMostSlots];
    float weights[kMostSlots];
    auto* out = static_cast<uint8_t*>(call_.out);
    if (call_.rows) return keep_rows(t);
    out += bytes_of(call_.out_dtype, (first_token_ + t) * call_.hidden_size);
    for (int64_t k = 0; k < call_.top_k; ++k) {
        const int64_t row = rows_.of_slot[t * call_.top_k + k];
        rows[k] = row < 0 ? nullptr : y_ + row * y_stride_;
        weights[k] = call_.weight_on_input ? 1.0f : call_.routing_weights[(first_token_ + t) * call_.top_k + k];
    }
    isa_.combine(rows, weights, call_.top_k, call_.hidden_size, out, call_.out_dtype);
}

void Walk::keep_rows(int64_t t) {
    for (int64_t k = 0; k < call_.top_k; ++k) {
        const int64_t row = rows_.of_slot[t * call_.top_k + k];
        if (row < 0) continue;
        float* to = call_.rows + ((first_token_ + t) * call_.top_k + k) * call_.hidden_size;
        std::memcpy(to, y_ + row * y_stride_, static_cast<size_t>(call_.hidden_size) * sizeof(float));
    }
}

void sum_rows(const Isa& isa, const Call& call) {
    const ExpertIds ids(call.expert_ids, call.ids_are_64_bit, call.num_tokens * call.top_k, call.num_experts);
    run_team(call.num_tokens * call.hidden_size <= kSmallCall ? 1 : call.num_threads, [&](int thread, int threads) {
        share(thread, threads, call.num_tokens, [&](int64_t t) {
            const float* rows[kMostSlots];
            float weights[kMostSlots];
            for (int64_t k = 0; k < call.top_k; ++k) {
                const int64_t pair = t * call.top_k + k;
                rows[k] = ids[pair] < 0 ? nullptr : call.rows + pair * call.hidden_size;
                weights[k] = call.weight_on_input ? 1.0f : call.routing_weights[pair];
            }
            auto* out = static_cast<uint8_t*>(call.out) + bytes_of(call.out_dtype, t * call.hidden_size);
            isa.combine(rows, weights, call.top_k, call.hidden_size, out, call.out_dtype);
        });
    });
}

void expert_mlp(const Isa& isa, const Call& call) {
    const int64_t most = tokens_at_once(isa, call, input_of(isa, call));
    const ExpertIds ids = read_ids(call);
    const struct Release {
        ~Release() { Walk::lend(); }
    } release;
    for (int64_t t = 0; t < call.num_tokens; t += most)
        Walk(isa, call, ids, t, std::min(most, call.num_tokens - t)).run();
}

}  // namespace moestro
