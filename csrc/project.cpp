// A projection by itself, with the kernels of the experts: rows of weights are cut into ranges, which threads take in order.

#include <algorithm>
#include <atomic>
#include <cstring>

#include "engine.h"
#include "layout.h"
#include "stored_rows.h"
#include "team.h"

namespace moestro {
namespace {

constexpr int64_t kBlock = 96;      // token rows that meet a range of weights before the next ones
constexpr int64_t kSegment = 64;    // outputs that are written at a time
constexpr int64_t kRangeBytes = 128 << 10;
constexpr int64_t kWorkspaceBytes = 64 << 20;

class Project : public Workspace<Project> {
public:
    Project(const Isa& isa, const ProjectionCall& call, int64_t first, int64_t n)
        : isa_(isa), call_(call), first_(first), n_(n), layout_(call.weights.element, call.weights.columns, isa.lanes) {
        const int64_t bytes = std::max<int64_t>(call.weights.row_bytes(), 1);
        range_ = std::max(kRangeBytes / bytes / kSegment, int64_t{1}) * kSegment;
        x_ = arena().reserve(isa.tiles ? num_tiles() * tile_words(call.weights.columns) : n * layout_.stride());
    }

    void run() {
        const int threads = call_.num_threads;
        const int64_t pieces = isa_.tiles ? num_tiles() : n_;
        const bool small = n_ * call_.weights.columns <= 1 << 15;
        for (int64_t i = 0; small && i < pieces; ++i) prepare(i);
        if (!small)
            run_team(threads, [&](int thread, int all) {
                for (int64_t i = pieces * thread / all; i < pieces * (thread + 1) / all; ++i) prepare(i);
            });
        run_team(threads, [&](int, int) { take_ranges(); });
    }

private:

    int64_t num_tiles() const { return (n_ + 15) / 16; }
    const uint8_t* row(int64_t t) const {
        const int64_t size = call_.x.dtype == Element::f32 ? 4 : 2;
        return static_cast<const uint8_t*>(call_.x.data) + (first_ + t) * call_.x.stride * size;
    }

    void prepare(int64_t i) {
        const int64_t columns = call_.weights.columns;
        if (isa_.tiles) {
            const uint16_t* rows[16];
            for (int64_t t = 0; t < 16; ++t) rows[t] = 16 * i + t < n_ ? reinterpret_cast<const uint16_t*>(row(16 * i + t)) : nullptr;
            isa_.tiles->pack(rows, tile_width(n_), columns, is_nibble(call_.weights.element), tile(i));
            return;
        }
        float* to = x_ + i * layout_.stride();
        if (layout_.nibbles) {
            float* wide = scratch().reserve(columns);
            isa_.widen(row(i), call_.x.dtype, columns, 1.0f, wide);
            layout_.place(wide, 0, columns, to);
        } else {
            isa_.widen(row(i), call_.x.dtype, columns, 1.0f, to);
        }
        layout_.clear_padding(to);
    }
    uint32_t* tile(int64_t i) const { return reinterpret_cast<uint32_t*>(x_) + i * tile_words(call_.weights.columns); }

    void take_ranges() {
        const int64_t sums = 4 * kBlock, segment = kBlock * kSegment;
        const int64_t panel = std::max(scratch_floats(layout_.padded, kBlock), tile_scratch_bytes(call_.weights.columns) / 4);
        float* room = scratch().reserve(panel + sums + segment);
        if (isa_.tiles) isa_.tiles->begin();
        for (Reader reader{*this, take()}; reader.first < call_.weights.rows; reader.go_on()) {
            for (int64_t i = reader.first; i < reader.stop(); i += kSegment)
                for (int64_t t = 0; t < n_; t += kBlock) {
                    reader.last_pass = t + kBlock >= n_;
                    (isa_.tiles ? &Project::tiled : &Project::dotted)(reader, i, std::min(i + kSegment, reader.stop()), t, std::min(kBlock, n_ - t), room, room + panel);
                }
        }
        if (isa_.tiles) isa_.tiles->end();
    }
    int64_t take() { return next_.fetch_add(range_, std::memory_order_relaxed); }

    // A range of rows, and the one that its thread takes after it: as soon as rows are to be fetched from there.
    struct Reader {
        Project& p;
        int64_t first, following = -1;
        bool last_pass = true;

        int64_t stop() const { return std::min(first + p.range_, p.call_.weights.rows); }
        void go_on() {
            first = following < 0 ? p.take() : following;
            following = -1;
        }
        // The row that is read when `n` from `at` on have been, or -1.
        int64_t ahead(int64_t at, int64_t n) {
            if (at + n < stop()) return at + n;
            if (!last_pass) return -1;
            if (following < 0) following = p.take();
            return following < p.call_.weights.rows ? following : -1;
        }
    };

    // Outputs i to stop of m tokens from t on.
    static void dotted(Reader& reader, int64_t i, int64_t stop, int64_t t, int64_t m, float* panel, float* sums) {
        const Project& p = reader.p;
        float* out = sums + 4 * kBlock;
        const float* x[kBlock];
        for (int64_t r = 0; r < m; ++r) x[r] = p.x_ + (t + r) * p.layout_.stride();
        for (int64_t at = i; at < stop; at += 4) {
            Place four[4] = {};
            for (int64_t j = 0; j < 4; ++j) four[j].row = std::min(at + j, stop - 1);
            FourRows rows;
            take_rows(rows, p.call_.weights, 0, four);
            if (const int64_t then = reader.ahead(at, 4); then >= 0) {
                for (int64_t j = 0; j < 4; ++j) four[j].row = std::min(then + j, p.call_.weights.rows - 1);
                follow(rows, p.call_.weights, 0, four);
            }
            p.isa_.four_rows(rows, x, m, sums, panel);
            for (int64_t r = 0; r < m; ++r)
                for (int64_t j = 0; j < std::min<int64_t>(4, stop - at); ++j) out[r * kSegment + at - i + j] = sums[4 * r + j];
        }
        p.write(i, stop, t, m, out);
    }

    static void tiled(Reader& reader, int64_t i, int64_t stop, int64_t t, int64_t m, float* panel, float* sums) {
        const Project& p = reader.p;
        float *out = sums + 4 * kBlock, *y[kBlock];
        for (int64_t at = i; at < stop; at += 32) {
            const auto left = static_cast<int>(stop - at);
            const int count[2] = {std::min(left, 16), std::clamp(left - 16, 0, 16)};
            for (int64_t r = 0; r < (m + 15) / 16 * 16; ++r) y[r] = r < m ? out + r * kSegment + at - i : nullptr;
            TileRows rows = tile_rows(p.call_.weights, 0, at, count[1] ? 16 : 0, 1, count);
            rows.width = tile_width(p.n_);
            if (const int64_t then = reader.ahead(at, 32); then >= 0) follow(rows, p.call_.weights, 0, then, 16, 1);
            p.isa_.tiles->down(rows, nullptr, p.tile(t / 16), (m + 15) / 16, y, reinterpret_cast<uint8_t*>(panel));
        }
        p.write(i, stop, t, m, out);
    }

    void write(int64_t i, int64_t stop, int64_t t, int64_t m, float* sums) const {
        float bias[kSegment];
        const float one[2] = {1.0f, 1.0f};
        const int64_t size = call_.out_dtype == Element::f32 ? 4 : 2;
        if (call_.bias.data) {
            const int64_t bytes = call_.bias.dtype == Element::f32 ? 4 : 2;
            isa_.widen(static_cast<const uint8_t*>(call_.bias.data) + i * bytes, call_.bias.dtype, stop - i, 1.0f, bias);
        }
        for (int64_t r = 0; r < m; ++r) {
            const float* rows[2] = {sums + r * kSegment, bias};
            auto* out = static_cast<uint8_t*>(call_.out) + ((first_ + t + r) * call_.weights.rows + i) * size;
            isa_.combine(rows, one, call_.bias.data ? 2 : 1, stop - i, out, call_.out_dtype);
        }
    }

    const Isa& isa_;
    const ProjectionCall& call_;
    const int64_t first_, n_;
    const Layout layout_;
    int64_t range_ = 0;
    std::atomic<int64_t> next_{0};
    float* x_ = nullptr;
};

}  // namespace

void project(const Isa& isa, const ProjectionCall& call) {
    const int64_t most = std::max<int64_t>(kWorkspaceBytes / (4 * (call.weights.columns + 256)) / 16 * 16, 16);
    const struct Release {
        ~Release() { Project::release(); }
    } release;
    for (int64_t t = 0; t < call.num_tokens; t += most) Project(isa, call, t, std::min(most, call.num_tokens - t)).run();
}

}  // namespace moestro
