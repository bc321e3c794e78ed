#include "attention_step.h"

#include "layout.h"

namespace moestro {
namespace {

class Between : public Workspace<Between> {};
struct Release {
    ~Release() { Between::release(); }
};

void normalise(const Isa& isa, const std::optional<RmsNorm>& norm, void* heads, Element dtype, int64_t values) {
    if (norm) rms_norm(isa, *norm, {heads, dtype, norm->columns}, values / norm->columns, heads, 1);
}

void keep(const AttentionStep& step, const uint8_t* rows, int64_t batch, const CacheRows& cache) {
    const Element dtype = step.q.call.out_dtype;
    const int64_t bytes = bytes_of(dtype, step.head_size);
    for (int64_t b = 0; cache.data && b < batch; ++b)
        for (int64_t g = 0; g < step.groups; ++g, rows += bytes)
            std::memcpy(
                static_cast<uint8_t*>(cache.data) + bytes_of(dtype, b * cache.batch_stride + g * cache.group_stride),
                rows, static_cast<size_t>(bytes));
}

}  // namespace

void add(const Isa& isa, const void* residual, void* out, Element dtype, int64_t values) {
    const Release release;
    float* both = Between::arena().reserve(2 * round_up(values, 16));
    const float* rows[2] = {both + round_up(values, 16), both};
    isa.widen(out, dtype, values, 1.0f, both);
    isa.widen(residual, dtype, values, 1.0f, both + round_up(values, 16));
    const float ones[2] = {1.0f, 1.0f};
    isa.combine(rows, ones, 2, values, out, dtype);
}

void run(const PreparedLinear& prepared, const FloatArray& x, int64_t num_tokens, void* out, int num_threads) {
    LinearCall call = prepared.call;
    call.num_tokens = num_tokens, call.num_threads = num_threads;
    call.x.data = x.data, call.x.stride = x.stride;
    call.out = out;
    linear(*prepared.isa, call);
}

void project(const Isa& isa, const AttentionStep& step, const FloatArray& given, int64_t batch, const Rotary& rotary,
             void* out, const CacheRows (&cache)[2], int num_threads) {
    const Release release;
    FloatArray x = given;
    if (step.norm_before) {
        x.stride = step.norm_before->columns;
        x.data = Between::arena().reserve(batch * x.stride);
        rms_norm(isa, *step.norm_before, given, batch, const_cast<void*>(x.data), 1);
    }
    const int64_t q_size = step.heads * step.head_size, k_size = step.groups * step.head_size;
    auto* q = static_cast<uint8_t*>(out);
    auto* k = q + bytes_of(x.dtype, batch * q_size);
    auto* v = k + bytes_of(x.dtype, batch * k_size);
    run(step.q, x, batch, q, num_threads);
    run(step.k, x, batch, k, num_threads);
    run(step.v, x, batch, v, num_threads);
    normalise(isa, step.q_norm, q, x.dtype, batch * q_size);
    normalise(isa, step.k_norm, k, x.dtype, batch * k_size);
    for (int64_t b = 0; b < batch; ++b) {
        rotate(isa, rotary, b, q + bytes_of(x.dtype, b * q_size), step.heads, step.head_size, x.dtype);
        rotate(isa, rotary, b, k + bytes_of(x.dtype, b * k_size), step.groups, step.head_size, x.dtype);
    }
    keep(step, k, batch, cache[0]);
    keep(step, v, batch, cache[1]);
}

void attend(const Isa& isa, const AttentionStep& step, AttentionCall call, const StepOut& to) {
    const Release release;
    call.heads = step.heads, call.groups = step.groups, call.columns = step.head_size;
    call.scale = step.scale;
    const int64_t size = step.heads * call.value_columns;
    call.query.batch_stride = step.heads * step.head_size, call.query.group_stride = step.head_size;
    float* sinks = Between::arena().reserve(round_up(step.heads, 16) + call.batch * size);
    if (step.sinks.data) isa.widen(step.sinks.data, step.sinks.dtype, step.heads, 1.0f, sinks), call.sinks = sinks;
    call.out = sinks + round_up(step.heads, 16);
    attention(isa, call);
    run(step.o, {call.out, call.dtype, size}, call.batch, to.out, call.num_threads);
    const int64_t wide = step.o.call.weights.rows;
    if (to.residual) add(isa, to.residual, to.out, call.dtype, call.batch * wide);
    if (to.normalised) rms_norm(isa, *step.norm_after, {to.out, call.dtype, wide}, call.batch, to.normalised, 1);
}

}  // namespace moestro
