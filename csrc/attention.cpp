// Keys are cut into chunks. Of each chunk come the largest logit, the sum of exponentials and the weighted values; a
// head's chunks are then added up. Chunks do not depend on the number of threads, so no bit does.

#include "attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>

#include "layout.h"
#include "team.h"

namespace moestro {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kChunk = 256;          // keys
constexpr int64_t kSmallCall = 1 << 14;  // numbers of keys and values that are not worth a team of threads

class Attention : public Workspace<Attention> {
public:
    Attention(const Isa& isa, const AttentionCall& call)
        : isa_(isa), call_(call), queries_(call.heads / call.groups), chunks_((call.num_keys + kChunk - 1) / kChunk),
          query_step_(round_up(call.columns, 16)), out_step_(round_up(call.value_columns, 16)) {
        partial_ = arena().reserve(call.batch * call.heads * chunks_ * (out_step_ + kFacts));
    }

    void run() {
        const int64_t pieces = call_.batch * call_.groups * chunks_;
        const int64_t numbers = call_.batch * call_.groups * call_.num_keys * (call_.columns + call_.value_columns);
        const int threads = numbers <= kSmallCall ? 1 : static_cast<int>(std::min<int64_t>(call_.num_threads, pieces));
        std::atomic<int64_t> next{0};
        run_team(threads, [&](int, int) {
            for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < pieces;) take(i);
        });
        for (int64_t row = 0; row < call_.batch * call_.heads; ++row) add_up(row);
    }

private:
    static constexpr int64_t kFacts = 16;  // of which two are used: the largest logit and the sum

    float* partial(int64_t row, int64_t chunk) const {
        return partial_ + (row * chunks_ + chunk) * (out_step_ + kFacts);
    }
    const uint8_t* at(const HeadRows& rows, int64_t b, int64_t g, int64_t row) const {
        const int64_t index = b * rows.batch_stride + g * rows.group_stride + row * rows.row_stride;
        return static_cast<const uint8_t*>(rows.data) + bytes_of(call_.dtype, index);
    }

    // One chunk of the keys of a group.
    void take(int64_t piece) {
        const int64_t chunk = piece % chunks_, b = piece / chunks_ / call_.groups, g = piece / chunks_ % call_.groups;
        const int64_t first = chunk * kChunk, n = std::min(kChunk, call_.num_keys - first);
        const int64_t panel = round_up(scratch_floats(call_.columns, queries_), 16);
        float* logits = scratch().reserve(queries_ * (query_step_ + kChunk) + 4 * queries_ + kChunk + panel + 64);
        float* query = logits + queries_ * kChunk;
        float* room = query + queries_ * query_step_;
        for (int64_t q = 0; q < queries_; ++q) {
            float* row = query + q * query_step_;
            isa_.widen(at(call_.query, b, g * queries_ + q, 0), call_.dtype, call_.columns, call_.scale, row);
            std::fill(row + call_.columns, row + query_step_, 0.0f);  // what meets the zeros beside a key
        }
        multiply(b, g, first, n, query, logits, room);
        add_mask(b, first, n, logits, room);
        for (int64_t q = 0; q < queries_; ++q) {
            float* to = partial(b * call_.heads + g * queries_ + q, chunk);
            isa_.exponentials(n, logits + q * kChunk, to);
            std::fill_n(to + kFacts, out_step_, 0.0f);
        }
        weigh(b, g, first, n, logits);
    }

    void multiply(int64_t b, int64_t g, int64_t first, int64_t n, const float* query, float* logits,
                  float* room) const {
        const float* x[kMostQueries];
        for (int64_t q = 0; q < queries_; ++q) x[q] = query + q * query_step_;
        float* sums = room;
        float* panel = room + round_up(4 * queries_, 16);
        FourRows rows{};
        rows.element = call_.dtype;
        rows.columns = call_.columns;
        rows.decoded = call_.dtype != Element::f32 && queries_ > isa_.direct_tokens;
        for (int r = 0; r < 4; ++r) rows.global_scale[r] = 1.0f;
        for (int64_t t = 0; t < n; t += 4) {
            const int64_t count = std::min<int64_t>(4, n - t);
            for (int64_t r = 0; r < 4; ++r) rows.data[r] = at(call_.key, b, g, first + t + std::min(r, count - 1));
            isa_.four_rows(rows, x, queries_, sums, panel);
            for (int64_t q = 0; q < queries_; ++q)
                for (int64_t r = 0; r < count; ++r) logits[q * kChunk + t + r] = sums[4 * q + r];
        }
    }

    void add_mask(int64_t b, int64_t first, int64_t n, float* logits, float* wide) const {
        if (!call_.mask.data) return;
        const auto* from =
            static_cast<const uint8_t*>(call_.mask.data) + bytes_of(call_.mask.dtype, b * call_.mask.stride + first);
        isa_.widen(from, call_.mask.dtype, n, 1.0f, wide);
        for (int64_t q = 0; q < queries_; ++q)
            for (int64_t t = 0; t < n; ++t) logits[q * kChunk + t] += wide[t];
    }

    // Adds to the partial sums of each query its weights times the values.
    void weigh(int64_t b, int64_t g, int64_t first, int64_t n, const float* logits) const {
        const float* weights[kMostQueries];
        float* sums[kMostQueries];
        for (int64_t q = 0; q < queries_; ++q) {
            weights[q] = logits + q * kChunk;
            sums[q] = partial(b * call_.heads + g * queries_ + q, first / kChunk) + kFacts;
        }
        const int64_t stride = bytes_of(call_.dtype, call_.value.row_stride);
        isa_.weigh(at(call_.value, b, g, first), call_.dtype, stride, n, call_.value_columns, weights, queries_, sums);
    }

    void add_up(int64_t row) const {
        const float* rows[kMostSlots];
        float weights[kMostSlots];
        const int64_t head = row % call_.heads;
        float largest = call_.sinks ? call_.sinks[head] : -kInfinity, sum = 0.0f;
        for (int64_t c = 0; c < chunks_; ++c) largest = std::max(largest, partial(row, c)[0]);
        if (call_.sinks && call_.sinks[head] > -kInfinity) sum = std::exp(call_.sinks[head] - largest);
        for (int64_t c = 0; c < chunks_; ++c) {
            const float* p = partial(row, c);
            if (p[1] != 0.0f) sum += p[1] * std::exp(p[0] - largest);
        }
        float* total = partial(row, 0) + kFacts;
        auto* out = static_cast<uint8_t*>(call_.out) + bytes_of(call_.dtype, row * call_.value_columns);
        for (int64_t c = 0; c < chunks_;) {
            int64_t n = 0;
            if (c > 0) rows[n] = total, weights[n++] = 1.0f;
            for (; c < chunks_ && n < kMostSlots; ++c) {
                const float* p = partial(row, c);
                rows[n] = p + kFacts;
                weights[n++] = p[1] == 0.0f ? 0.0f : std::exp(p[0] - largest) / sum;
            }
            const bool is_last = c == chunks_;
            isa_.combine(rows, weights, n, call_.value_columns, is_last ? static_cast<void*>(out) : total,
                         is_last ? call_.dtype : Element::f32);
        }
    }

    const Isa& isa_;
    const AttentionCall& call_;
    const int64_t queries_, chunks_, query_step_, out_step_;
    float* partial_ = nullptr;
};

}  // namespace

void attention(const Isa& isa, const AttentionCall& call) {
    const struct Release {
        ~Release() { Attention::release(); }
    } release;
    Attention(isa, call).run();
}

}  // namespace moestro
