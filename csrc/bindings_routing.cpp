// Python's way to top-k, routers and grouping: addresses and sizes, checked as far as addresses can be. Tensors are kept
// alive by the caller. What a value is wrong with is for Python to say: these functions answer false.

#include "bindings_routing.h"

#include <nanobind/stl/tuple.h>

#include <cmath>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>

#include "routing.h"

namespace nb = nanobind;

namespace moestro {
namespace {

constexpr int64_t kMostScores = 1 << 16;   // of a row
constexpr int64_t kMostTokens = int64_t{1} << 40;
constexpr int64_t kMostExperts = 1 << 20;  // that rows are ordered by
constexpr int64_t kMostBlocks = int64_t{1} << 31;
constexpr int kMostTeam = 1 << 16;
constexpr int64_t kLong = 1 << 14;         // values that are worth letting other Python threads on

void need(bool condition, const char* why) {
    if (!condition) throw std::invalid_argument(why);
}

template <class T> T* at(uint64_t address) { return reinterpret_cast<T*>(address); }

// Lets go of the interpreter while there is much to do.
struct Release {
    explicit Release(int64_t values) {
        if (values >= kLong) released.emplace();
    }
    std::optional<nb::gil_scoped_release> released;
};

using ScoresArgs = std::tuple<uint64_t, int, int64_t, int64_t, int64_t>;  // address, dtype, T, E, elements between rows

Scores scores_of(const ScoresArgs& a, int64_t k, int num_threads) {
    Scores s;
    int dtype;
    uint64_t address;
    std::tie(address, dtype, s.num_tokens, s.num_experts, s.stride) = a;
    need(dtype >= 0 && dtype < 4, "a dtype other than float32, float16, bfloat16, float64");
    need(s.num_tokens >= 0 && s.num_tokens < kMostTokens && s.num_experts > 0 && s.num_experts <= kMostScores, "sizes out of range");
    need(k > 0 && k <= s.num_experts, "k out of range");
    need(num_threads > 0 && num_threads <= kMostTeam, "a number of threads out of range");
    need(s.num_tokens == 0 || address, "no address");
    s.data = at<void>(address);
    s.dtype = static_cast<Real>(dtype);
    return s;
}

bool topk_at(const ScoresArgs& scores, int64_t k, uint64_t indices, int num_threads) {
    const Scores s = scores_of(scores, k, num_threads);
    if (s.num_tokens == 0) return true;
    need(indices, "no address");
    const Release release(s.num_tokens * s.num_experts);
    return topk(s, k, at<int64_t>(indices), num_threads);
}

using RouterArgs = std::tuple<int, bool, bool, float, float, float, float>;  // score, on logits, renormalize, epsilon, floor, scale, logit scale
using GroupArgs = std::tuple<int64_t, int64_t, int64_t, float>;              // groups, kept, best, excluded

bool route_at(const ScoresArgs& logits, int64_t k, const RouterArgs& router, uint64_t correction, const GroupArgs& groups,
              std::tuple<uint64_t, uint64_t> out, int num_threads) {
    const Scores s = scores_of(logits, k, num_threads);
    need(s.dtype == Real::f32, "logits of another dtype than float32");
    Router r;
    int score;
    std::tie(score, r.select_on_logits, r.renormalize, r.epsilon, r.floor, r.scale, r.logit_scale) = router;
    need(score >= 0 && score < 2, "a score without a code");
    r.score = static_cast<Score>(score);
    r.correction = at<void>(correction);
    std::tie(r.groups.num_groups, r.groups.top_groups, r.groups.best, r.groups.excluded) = groups;
    need(r.groups.num_groups > 0 && r.groups.num_groups <= s.num_experts && s.num_experts % r.groups.num_groups == 0, "groups of unequal sizes");
    need(r.groups.top_groups > 0 && r.groups.top_groups <= r.groups.num_groups && r.groups.best > 0, "kept groups out of range");
    r.top_k = k;
    if (s.num_tokens == 0) return true;
    need(std::get<0>(out) && std::get<1>(out), "no address");
    const Release release(s.num_tokens * s.num_experts);
    return route(s, r, at<int64_t>(std::get<0>(out)), at<float>(std::get<1>(out)), num_threads);
}

using SlotsArgs = std::tuple<uint64_t, bool, int64_t, int64_t, int64_t>;  // address, whether 64 bit, T, K, E

Slots slots_of(const SlotsArgs& a) {
    Slots s;
    uint64_t address;
    std::tie(address, s.are_64_bit, s.num_tokens, s.top_k, s.num_experts) = a;
    need(s.num_tokens >= 0 && s.num_tokens < kMostTokens && s.top_k >= 0 && s.top_k <= kMostTokens / (s.num_tokens + 1), "sizes out of range");
    need(s.num_experts >= 0 && s.num_experts <= kMostExperts, "experts out of range");
    need(s.count() == 0 || address, "no address");
    s.ids = at<void>(address);
    return s;
}

bool group_at(const SlotsArgs& slots, std::tuple<uint64_t, uint64_t, uint64_t, uint64_t> to, int num_threads) {
    const Slots s = slots_of(slots);
    need(num_threads > 0 && num_threads <= kMostTeam, "a number of threads out of range");
    const Grouped g{at<int64_t>(std::get<0>(to)), at<int64_t>(std::get<1>(to)), at<int64_t>(std::get<2>(to)), at<int64_t>(std::get<3>(to))};
    need(g.offsets && (s.count() == 0 || (g.token_ids && g.slots && g.inverse)), "no address");
    const Release release(s.count() + s.num_experts);
    return group(s, g, num_threads);
}

bool schedule_at(const SlotsArgs& slots, std::tuple<int64_t, int64_t> blocks, std::tuple<uint64_t, uint64_t, uint64_t, uint64_t> to) {
    const Slots s = slots_of(slots);
    const auto [num_blocks, block_size] = blocks;
    need(num_blocks >= 0 && block_size > 0 && num_blocks < kMostBlocks && block_size < kMostBlocks && num_blocks * block_size < kMostTokens,
         "blocks out of range");
    const Schedule out{num_blocks, block_size, at<int64_t>(std::get<0>(to)), at<int64_t>(std::get<1>(to)), at<int64_t>(std::get<2>(to)),
                       at<int64_t>(std::get<3>(to))};
    need((num_blocks == 0 || (out.block_experts && out.pair_ids)) && (s.count() == 0 || out.scatter_index) && (s.num_experts == 0 || out.counts),
         "no address");
    const Release release(s.count() + s.num_experts + num_blocks * block_size);
    return schedule(s, out);
}

bool fits_at(const SlotsArgs& slots, uint64_t weights) {
    const Slots s = slots_of(slots);
    const Release release(s.count());
    return fits(s, at<void>(weights));
}

}  // namespace

void register_routing(nb::module_& m) {
    m.def("topk", &topk_at);
    m.def("route", &route_at);
    m.def("group", &group_at);
    m.def("schedule", &schedule_at);
    m.def("fits", &fits_at);
}

}  // namespace moestro
