// The sum of a row's squares has an order of its own, so that no bit depends on rows beside it or on threads.

#include "norm.h"

#include <cmath>

#include "layout.h"
#include "team.h"

namespace moestro {
namespace {

constexpr int64_t kLanes = 16;           // partial sums
constexpr int64_t kSmallCall = 1 << 15;  // values that are not worth a team of threads

float sum_of_squares(const float* x, int64_t n) {
    float lanes[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes)
        for (int64_t l = 0; l < kLanes; ++l) lanes[l] += x[i + l] * x[i + l];
    for (int64_t l = 0; i < n; ++i, ++l) lanes[l] += x[i] * x[i];
    for (int64_t half = kLanes / 2; half; half /= 2)
        for (int64_t l = 0; l < half; ++l) lanes[l] += lanes[l + half];
    return lanes[0];
}

class Norm : public Workspace<Norm> {
public:
    Norm(const Isa& isa, const RmsNorm& norm) : isa_(isa), norm_(norm), step_(round_up(norm.columns, 16)) {
        weight_ = arena().reserve(step_);
        isa.widen(norm.weight.data, norm.weight.dtype, norm.columns, 1.0f, weight_);
        for (int64_t i = 0; norm.offset != 0.0f && i < norm.columns; ++i) weight_[i] += norm.offset;
    }

    void row(const void* x, Element dtype, void* out) const {
        float* wide = scratch().reserve(2 * step_);
        isa_.widen(x, dtype, norm_.columns, 1.0f, wide);
        const float mean = sum_of_squares(wide, norm_.columns) / static_cast<float>(norm_.columns);
        const float factor = 1.0f / std::sqrt(mean + norm_.epsilon);
        if (norm_.rounds_twice && dtype != Element::f32) {
            float* rounded = wide + step_;
            write(wide, factor, dtype, rounded);
            isa_.widen(rounded, dtype, norm_.columns, 1.0f, wide);
            for (int64_t i = 0; i < norm_.columns; ++i) wide[i] *= weight_[i];
        } else {
            for (int64_t i = 0; i < norm_.columns; ++i) wide[i] = wide[i] * factor * weight_[i];
        }
        write(wide, 1.0f, dtype, out);
    }

private:
    void write(const float* from, float factor, Element dtype, void* to) const {
        isa_.combine(&from, &factor, 1, norm_.columns, to, dtype);
    }

    const Isa& isa_;
    const RmsNorm& norm_;
    const int64_t step_;
    float* weight_;
};

}  // namespace

void rms_norm(const Isa& isa, const RmsNorm& norm, const FloatArray& x, int64_t num_rows, void* out, int num_threads) {
    const struct Release {
        ~Release() { Norm::release(); }
    } release;
    const Norm made(isa, norm);
    const auto* from = static_cast<const uint8_t*>(x.data);
    auto* to = static_cast<uint8_t*>(out);
    const int threads =
        num_rows * norm.columns <= kSmallCall ? 1 : static_cast<int>(std::min<int64_t>(num_threads, num_rows));
    run_team(threads, [&](int thread, int all) {
        for (int64_t t = num_rows * thread / all; t < num_rows * (thread + 1) / all; ++t)
            made.row(from + bytes_of(x.dtype, t * x.stride), x.dtype, to + bytes_of(x.dtype, t * norm.columns));
    });
}

}  // namespace moestro
