// The attention of a model's layer for one new token of each sequence: what comes before keys and values are kept, and
// what comes after it.
#pragma once

#include <optional>

#include "attention.h"
#include "norm.h"
#include "rotary.h"

namespace moestro {

// A matrix, and the instruction set that multiplies it.
struct PreparedLinear {
    const Isa* isa = nullptr;
    LinearCall call;  // without tokens
};
void run(const PreparedLinear& prepared, const FloatArray& x, int64_t num_tokens, void* out, int num_threads);

struct AttentionStep {
    PreparedLinear q, k, v, o;  // of one dtype are what they read and what they write
    int64_t heads = 0, groups = 0, head_size = 0;
    std::optional<RmsNorm> q_norm, k_norm;  // of each head, or of all of a token's heads together
    float scale = 1.0f;
    FloatArray sinks;  // [heads], or null
    // Around it, where they belong to it: of what comes in, and of the sum of that and what comes out.
    std::optional<RmsNorm> norm_before, norm_after;
};

// Memory of a cache for one new row of each group: keys and values [batch, groups, head_size], columns contiguous.
struct CacheRows {
    void* data = nullptr;  // or null: nothing is copied
    int64_t batch_stride = 0, group_stride = 0;
};

// `out` is the queries [batch, heads, head_size], after them the keys and then the values [batch, groups, head_size],
// queries and keys normalised and turned. Keys and values are copied to where a cache has room for them.
void project(const Isa& isa, const AttentionStep& step, const FloatArray& x, int64_t batch, const Rotary& rotary,
             void* out, const CacheRows (&cache)[2], int num_threads);

// Where the results of a step go: [batch, rows of o] each.
struct StepOut {
    void* out = nullptr;
    const void* residual = nullptr;  // or null: nothing is added to `out`
    void* normalised = nullptr;      // where there is a norm after it
};

// out[i] += residual[i] for so many values of a dtype, rounded once.
void add(const Isa& isa, const void* residual, void* out, Element dtype, int64_t values);

// `out` = o of the attention of queries as `project` wrote them. `call` lacks what the step knows.
void attend(const Isa& isa, const AttentionStep& step, AttentionCall call, const StepOut& to);

}  // namespace moestro
