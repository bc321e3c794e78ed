// Which experts a token's scores choose, and rows brought into the order of experts. No torch, no Python.
#pragma once

#include <cstdint>
#include <cstring>

#include "elements.h"

namespace moestro {

// The i-th value of an array that may lie at any address.
template <class T> inline T value_at(const void* array, int64_t i) {
    T value;
    std::memcpy(&value, static_cast<const uint8_t*>(array) + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
    return value;
}

constexpr int64_t kMostScores = 1 << 16;  // of a row

// Scores [T, E]; columns are contiguous, rows `stride` elements apart.
struct Scores {
    const void* data = nullptr;
    Real dtype = Real::f32;
    int64_t num_tokens = 0, num_experts = 0, stride = 0;
};

// indices[t * k + i] = the index of the i-th largest score of token t. The order is total: of equal scores the larger
// index comes first, -0.0 equals 0.0, infinities are ordinary. False, and indices of no use, if there is a NaN.
bool topk(const Scores& scores, int64_t k, int64_t* indices, int num_threads);

// Experts compete in groups of equal size; a group's score is the sum of its `best` best.
struct GroupLimit {
    int64_t num_groups = 1, top_groups = 1, best = 1;
    float excluded = 0.0f;  // the score of experts of groups that are not kept
};

enum class Score : int { softmax, sigmoid };
constexpr const char* kScores[] = {"softmax", "sigmoid"};
constexpr int kNumScores = 2;

// From logits to a choice of experts and their weights.
struct Router {
    Score score = Score::softmax;
    bool select_on_logits = false, renormalize = false;
    float epsilon = 0.0f, floor = 0.0f, scale = 1.0f, logit_scale = 1.0f;
    const void* correction = nullptr;  // float32 [E], added to what is ranked
    GroupLimit groups;
    int64_t top_k = 1;
};

// ids and weights [T, K] of float32 logits. An expert whose logit is -infinity is never chosen; where no other is left,
// the slot is empty: id -1, weight 0. False, and what was written of no use, if a logit is NaN, or +infinity unless the
// score is the sigmoid, or what is ranked is NaN, or the correction is not finite.
bool route(const Scores& logits, const Router& router, int64_t* ids, float* weights, int num_threads);

// Expert ids of N = T * K slots, contiguous; -1 is an empty slot.
struct Slots {
    const void* ids = nullptr;
    bool are_64_bit = true;
    int64_t num_tokens = 0, top_k = 0, num_experts = 0;

    int64_t count() const { return num_tokens * top_k; }
};

// Whether every id is in -1 .. num_experts - 1, and (if there are any) the float32 weight of every other slot than -1
// is finite.
bool fits(const Slots& slots, const void* weights);

// Rows in the order of experts, stable; those of empty slots last. All but `offsets` [E + 1] have a value for each
// slot.
struct Grouped {
    int64_t *token_ids, *slots, *offsets, *inverse;
};
// False if an id is out of range, which then is an empty slot.
bool group(const Slots& slots, const Grouped& to, int num_threads);

// Rows laid into `num_blocks` blocks of `block_size` cells, one expert a block; -1 where there is nothing.
struct Schedule {
    int64_t num_blocks, block_size;
    int64_t *block_experts, *pair_ids, *scatter_index, *counts;
};
bool schedule(const Slots& slots, const Schedule& to);  // false as `group`, or if the blocks are too few

}  // namespace moestro
