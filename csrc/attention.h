// One query of each head over the keys and values that a cache holds: attention as decoding asks for it.
#pragma once

#include "engine.h"

namespace moestro {

// A float32, float16 or bfloat16 tensor [batch, groups, rows, columns], columns contiguous; strides in elements.
struct HeadRows {
    const void* data = nullptr;
    int64_t batch_stride = 0, group_stride = 0, row_stride = 0;
};

// out[b, h] = sum over keys t of p[b, h, t] * value[b, group of h, t], p the softmax over t of
// scale * query[b, h] . key[b, group of h, t] + mask[b, t]; a sink is one more logit of its head, without a value.
struct AttentionCall {
    int64_t batch = 0, heads = 0, groups = 0, num_keys = 0, columns = 0, value_columns = 0;
    Element dtype = Element::f32;  // of all but sinks and `out`, which has it too
    HeadRows query, key, value;    // a query's group_stride is from one head to the next
    FloatArray mask;               // or null; stride: from one sequence to the next
    const float* sinks = nullptr;  // [heads], or null
    float scale = 1.0f;
    void* out = nullptr;  // contiguous [batch, heads, value_columns]
    int num_threads = 1;
};

constexpr int64_t kMostQueries = kTokenBlock;  // heads of a group

void attention(const Isa& isa, const AttentionCall& call);

}  // namespace moestro
