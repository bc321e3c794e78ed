// Python's way to top-k, routers and grouping: addresses and sizes, checked as far as addresses can be. Tensors are kept
// alive by the caller. What a value is wrong with is for Python to say: these functions answer false.

#include "bindings_routing.h"

#include <optional>

#include "bindings_check.h"
#include "routing.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace moestro {
namespace {

constexpr int64_t kMostBlocks = int64_t{1} << 31;
constexpr int64_t kLong = 1 << 14;  // values that are worth letting other Python threads on

// Lets go of the interpreter while there is much to do.
struct Release {
    explicit Release(int64_t values) {
        if (values >= kLong) released.emplace();
    }
    std::optional<nb::gil_scoped_release> released;
};

Scores scores_of(uint64_t address, int dtype, int64_t num_tokens, int64_t num_experts, int64_t stride, int64_t k) {
    need(dtype >= 0 && dtype < kNumReals, "a dtype other than float32, float16, bfloat16, float64");
    need(num_tokens >= 0 && num_tokens < kMostTokens && num_experts > 0 && num_experts <= kMostScores,
         "sizes out of range");
    need(k > 0 && k <= num_experts, "k out of range");
    need(num_tokens == 0 || address, "no address");
    Scores s;
    s.data = at<void>(address);
    s.dtype = static_cast<Real>(dtype);
    s.num_tokens = num_tokens, s.num_experts = num_experts, s.stride = stride;
    return s;
}

bool topk_at(uint64_t scores, int dtype, int64_t num_tokens, int64_t num_experts, int64_t stride, int64_t k,
             uint64_t indices, int64_t num_threads) {
    const Scores s = scores_of(scores, dtype, num_tokens, num_experts, stride, k);
    const int threads = checked_threads(num_threads);
    if (s.num_tokens == 0) return true;
    need(indices, "no address");
    const Release release(s.num_tokens * s.num_experts);
    return topk(s, k, at<int64_t>(indices), threads);
}

void make_router(Router* self, int score, bool select_on_logits, bool renormalize, float epsilon, float floor,
                 float scale, float logit_scale) {
    Router r;
    r.score = checked<Score>(score, kNumScores, "score");
    r.select_on_logits = select_on_logits, r.renormalize = renormalize;
    r.epsilon = epsilon, r.floor = floor, r.scale = scale, r.logit_scale = logit_scale;
    new (self) Router(r);
}

void make_groups(GroupLimit* self, int64_t num_groups, int64_t top_groups, int64_t best, float excluded) {
    need(num_groups > 0 && top_groups > 0 && top_groups <= num_groups && best > 0, "kept groups out of range");
    new (self) GroupLimit{num_groups, top_groups, best, excluded};
}

bool route_at(const Router& router, const GroupLimit* groups, uint64_t logits, int64_t num_tokens, int64_t num_experts,
              int64_t stride, int64_t k, uint64_t correction, uint64_t ids, uint64_t weights, int64_t num_threads) {
    const Scores s = scores_of(logits, static_cast<int>(Real::f32), num_tokens, num_experts, stride, k);
    const int threads = checked_threads(num_threads);
    Router r = router;
    r.correction = at<void>(correction);
    if (groups) r.groups = *groups;
    need(r.groups.num_groups <= s.num_experts && s.num_experts % r.groups.num_groups == 0, "groups of unequal sizes");
    r.top_k = k;
    if (s.num_tokens == 0) return true;
    need(ids && weights, "no address");
    const Release release(s.num_tokens * s.num_experts);
    return route(s, r, at<int64_t>(ids), at<float>(weights), threads);
}

Slots slots_of(uint64_t ids, bool are_64_bit, int64_t num_tokens, int64_t top_k, int64_t num_experts) {
    need(num_tokens >= 0 && num_tokens < kMostTokens && top_k >= 0 && top_k <= kMostTokens / (num_tokens + 1),
         "sizes out of range");
    need(num_experts >= 0 && num_experts <= kMostExperts, "experts out of range");
    Slots s;
    s.ids = at<void>(ids);
    s.are_64_bit = are_64_bit;
    s.num_tokens = num_tokens, s.top_k = top_k, s.num_experts = num_experts;
    need(s.count() == 0 || ids, "no address");
    return s;
}

bool group_at(uint64_t ids, bool are_64_bit, int64_t num_tokens, int64_t top_k, int64_t num_experts, uint64_t token_ids,
              uint64_t slot_numbers, uint64_t offsets, uint64_t inverse, int64_t num_threads) {
    const Slots s = slots_of(ids, are_64_bit, num_tokens, top_k, num_experts);
    const int threads = checked_threads(num_threads);
    const Grouped g{at<int64_t>(token_ids), at<int64_t>(slot_numbers), at<int64_t>(offsets), at<int64_t>(inverse)};
    need(g.offsets && (s.count() == 0 || (g.token_ids && g.slots && g.inverse)), "no address");
    const Release release(s.count() + s.num_experts);
    return group(s, g, threads);
}

bool schedule_at(uint64_t ids, bool are_64_bit, int64_t num_tokens, int64_t top_k, int64_t num_experts,
                 int64_t num_blocks, int64_t block_size, uint64_t block_experts, uint64_t pair_ids,
                 uint64_t scatter_index, uint64_t counts) {
    const Slots s = slots_of(ids, are_64_bit, num_tokens, top_k, num_experts);
    need(num_blocks >= 0 && block_size > 0 && num_blocks < kMostBlocks && block_size < kMostBlocks &&
             num_blocks * block_size < kMostTokens,
         "blocks out of range");
    Schedule out{};
    out.num_blocks = num_blocks, out.block_size = block_size;
    out.block_experts = at<int64_t>(block_experts), out.pair_ids = at<int64_t>(pair_ids);
    out.scatter_index = at<int64_t>(scatter_index), out.counts = at<int64_t>(counts);
    need((num_blocks == 0 || (out.block_experts && out.pair_ids)) && (s.count() == 0 || out.scatter_index) &&
             (s.num_experts == 0 || out.counts),
         "no address");
    const Release release(s.count() + s.num_experts + num_blocks * block_size);
    return schedule(s, out);
}

bool fits_at(uint64_t ids, bool are_64_bit, int64_t num_tokens, int64_t top_k, int64_t num_experts, uint64_t weights) {
    const Slots s = slots_of(ids, are_64_bit, num_tokens, top_k, num_experts);
    const Release release(s.count());
    return fits(s, at<void>(weights));
}

}  // namespace

void bind_routing(nb::module_& m) {
    nb::class_<Router>(m, "Router")
        .def("__init__", &make_router, nb::kw_only(), "score"_a, "select_on_logits"_a, "renormalize"_a, "epsilon"_a,
             "floor"_a, "scale"_a, "logit_scale"_a);
    nb::class_<GroupLimit>(m, "Groups")
        .def("__init__", &make_groups, nb::kw_only(), "num_groups"_a, "top_groups"_a, "best"_a, "excluded"_a);
    m.def("topk", &topk_at, "scores"_a, "dtype"_a, "num_tokens"_a, "num_experts"_a, "stride"_a, "k"_a, "indices"_a,
          "num_threads"_a);
    m.def("route", &route_at, "router"_a, "groups"_a.none(), "logits"_a, "num_tokens"_a, "num_experts"_a, "stride"_a,
          "k"_a, "correction"_a, "ids"_a, "weights"_a, "num_threads"_a);
    m.def("group", &group_at, "ids"_a, "are_64_bit"_a, "num_tokens"_a, "top_k"_a, "num_experts"_a, "token_ids"_a,
          "slots"_a, "offsets"_a, "inverse"_a, "num_threads"_a);
    m.def("schedule", &schedule_at, "ids"_a, "are_64_bit"_a, "num_tokens"_a, "top_k"_a, "num_experts"_a, "num_blocks"_a,
          "block_size"_a, "block_experts"_a, "pair_ids"_a, "scatter_index"_a, "counts"_a);
    m.def("fits", &fits_at, "ids"_a, "are_64_bit"_a, "num_tokens"_a, "top_k"_a, "num_experts"_a, "weights"_a);
}

}  // namespace moestro
