// The k largest of each row, and routers made of it. A score becomes an integer whose order is that of the scores, and
// of equal ones the last is taken.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "routing.h"
#include "team.h"

namespace moestro {
namespace {

constexpr int64_t kBlock = 16;       // scores whose largest is kept
constexpr int64_t kMostPicked = 32;  // larger k are sorted
constexpr int64_t kWorthThreads = 1 << 16;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLowest = -1e30f;  // below any real score; the sum of a few is finite

template <Real R> struct Bits;
template <> struct Bits<Real::f32> {
    using Key = int32_t;
    static constexpr Key infinity = 0x7f800000;
};
template <> struct Bits<Real::f16> {
    using Key = int16_t;
    static constexpr Key infinity = 0x7c00;
};
template <> struct Bits<Real::bf16> {
    using Key = int16_t;
    static constexpr Key infinity = 0x7f80;
};
template <> struct Bits<Real::f64> {
    using Key = int64_t;
    static constexpr Key infinity = 0x7ff0000000000000;
};

template <Real R> using KeyOf = typename Bits<R>::Key;

// A number whose signed order is that of the scores, -0.0 as 0.0.
template <class Key> inline Key key_of(const void* scores, int64_t i, Key& size) {
    const Key bits = value_at<Key>(scores, i);
    size = bits & std::numeric_limits<Key>::max();
    return bits < 0 ? static_cast<Key>(-size) : bits;
}

constexpr int64_t blocks_of(int64_t n) { return (n + kBlock - 1) / kBlock; }

// The keys of n scores, up to a whole block with the least number there is, which is no score's, and the largest key of
// each block. False if a score is NaN.
template <Real R> bool make_keys(const void* scores, int64_t n, KeyOf<R>* keys, KeyOf<R>* largest) {
    using Key = KeyOf<R>;
    constexpr Key none = std::numeric_limits<Key>::min();
    Key greatest = 0;
    for (int64_t start = 0; start < n; start += kBlock) {
        Key found = none, far = 0, size = 0;
        if (start + kBlock <= n) {
            for (int64_t i = 0; i < kBlock; ++i) {
                const Key key = key_of(scores, start + i, size);
                keys[start + i] = key;
                found = found > key ? found : key;
                far = far > size ? far : size;
            }
        } else {
            for (int64_t i = start; i < start + kBlock; ++i) {
                keys[i] = i < n ? key_of(scores, i, size) : none;
                found = std::max(found, keys[i]);
                if (i < n) far = std::max(far, size);
            }
        }
        *largest++ = found;
        greatest = std::max(greatest, far);
    }
    return greatest <= Bits<R>::infinity;
}

// One after the other: the largest of the blocks' largest, and its place in the block. No branch depends on a score.
template <class Key> void pick(Key* keys, Key* largest, int64_t n, int64_t k, int64_t* indices) {
    constexpr Key taken = std::numeric_limits<Key>::min();
    const int64_t blocks = blocks_of(n);
    for (int64_t j = 0; j < k; ++j) {
        Key best = taken;
        int64_t block = 0, place = 0;
        for (int64_t b = 0; b < blocks; ++b) {
            block = largest[b] >= best ? b : block;
            best = std::max(best, largest[b]);
        }
        for (int64_t i = 0; i < kBlock; ++i) place = keys[block * kBlock + i] == best ? i : place;
        indices[j] = block * kBlock + place;
        keys[indices[j]] = taken;
        Key left = taken;
        for (int64_t i = 0; i < kBlock; ++i) left = std::max(left, keys[block * kBlock + i]);
        largest[block] = left;
    }
}

template <class Key> void sort(const Key* keys, int64_t n, int64_t k, int64_t* indices, int64_t* order) {
    for (int64_t i = 0; i < n; ++i) order[i] = i;
    const auto before = [keys](int64_t a, int64_t b) { return keys[a] != keys[b] ? keys[a] > keys[b] : a > b; };
    if (k < n) std::nth_element(order, order + k, order + n, before);
    std::sort(order, order + k, before);
    std::copy(order, order + k, indices);
}

// Memory of one thread for rows of n scores.
template <Real R> struct Space {
    Space(int64_t n, int64_t k)
        : keys(static_cast<size_t>(blocks_of(n) * kBlock)), blocks(static_cast<size_t>(blocks_of(n))),
          order(static_cast<size_t>(k > kMostPicked ? n : 0)) {}
    // The indices of the k largest; false if a score is NaN.
    bool largest(const void* scores, int64_t n, int64_t k, int64_t* indices) {
        if (!make_keys<R>(scores, n, keys.data(), blocks.data())) return false;
        if (k > kMostPicked) sort(keys.data(), n, k, indices, order.data());
        else pick(keys.data(), blocks.data(), n, k, indices);
        return true;
    }
    std::vector<KeyOf<R>> keys, blocks;
    std::vector<int64_t> order;
};

// Calls `work(space, t)` for every row t until one of them returns false; each thread has what `make()` returns.
template <class Make, class Work> bool each_row(const Scores& s, int num_threads, const Make& make, const Work& work) {
    const int64_t num_rows = s.num_tokens,
                  most = num_rows * s.num_experts < kWorthThreads ? 1 : std::min<int64_t>(num_threads, num_rows);
    std::vector<decltype(make())> spaces;
    spaces.reserve(static_cast<size_t>(most));
    for (int64_t i = 0; i < most; ++i) spaces.push_back(make());
    std::atomic<bool> good{true};
    run_team(static_cast<int>(most), [&](int thread, int threads) {
        const int64_t stop = num_rows * (thread + 1) / threads;
        for (int64_t t = num_rows * thread / threads; t < stop && good.load(std::memory_order_relaxed); ++t)
            if (!work(spaces[static_cast<size_t>(thread)], t)) good.store(false, std::memory_order_relaxed);
    });
    return good.load();
}

template <Real R> bool topk_of(const Scores& s, int64_t k, int64_t* indices, int num_threads) {
    const auto* data = static_cast<const uint8_t*>(s.data);
    const int64_t row_bytes = s.stride * static_cast<int64_t>(sizeof(KeyOf<R>));
    const auto make = [&] { return Space<R>(s.num_experts, k); };
    return each_row(s, num_threads, make, [&](Space<R>& space, int64_t t) {
        return space.largest(data + t * row_bytes, s.num_experts, k, indices + t * k);
    });
}

// 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2] (Cephes' expf; relative error about 1e-7) for x <= 0; 0 below -104.
inline float exp_of_negative(float x) {
    x = x > -105.0f ? x : -105.0f;
    const float shifted = x * 1.44269504088896341f + 12582912.0f;  // whose last bits are the nearest integer
    const float n = shifted - 12582912.0f;
    const float r = x - n * 0.693359375f - n * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    const int32_t power = static_cast<int32_t>(n), half = power / 2;  // in two steps, as the result may be subnormal
    const int32_t one = (half + 127) << 23, other = (power - half + 127) << 23;
    float a, b;
    std::memcpy(&a, &one, 4);
    std::memcpy(&b, &other, 4);
    return p * a * b;
}

constexpr int64_t kLanes = 8;  // partial sums, so that the order of a sum is written down and vectors can follow it

float largest_of(const float* z, int64_t n) {
    float lanes[kLanes];
    for (int64_t l = 0; l < kLanes; ++l) lanes[l] = -kInfinity;
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes)
        for (int64_t l = 0; l < kLanes; ++l) lanes[l] = lanes[l] > z[i + l] ? lanes[l] : z[i + l];
    for (; i < n; ++i) lanes[0] = std::max(lanes[0], z[i]);
    return *std::max_element(lanes, lanes + kLanes);
}

float sum_of(const float* z, int64_t n) {
    float lanes[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes)
        for (int64_t l = 0; l < kLanes; ++l) lanes[l] += z[i + l];
    for (int64_t l = 0; i < n; ++i, ++l) lanes[l] += z[i];
    for (int64_t half = kLanes / 2; half; half /= 2)
        for (int64_t l = 0; l < half; ++l) lanes[l] += lanes[l + half];
    return lanes[0];
}

void score(Score kind, float* z, int64_t n) {
    if (kind == Score::softmax) {
        const float most = largest_of(z, n);
        for (int64_t i = 0; i < n; ++i) z[i] = exp_of_negative(z[i] - most);
        const float sum = sum_of(z, n);
        for (int64_t i = 0; i < n; ++i) z[i] = z[i] / sum;
        return;
    }
    for (int64_t i = 0; i < n; ++i) {
        const float e = exp_of_negative(-std::fabs(z[i]));
        // Where 1 + exp(-z) overflows the score is 0, as it is for PyTorch; such scores tie.
        z[i] = z[i] < -88.72283f ? 0.0f : (z[i] < 0.0f ? e : 1.0f) / (1.0f + e);
    }
}

// Memory of one thread for a router's rows of n logits.
struct RouterSpace {
    RouterSpace(int64_t n, const Router& r)
        : z(static_cast<size_t>(n)), choice(z.size()), own(z.size()),
          of_group(static_cast<size_t>(r.groups.num_groups)),
          order(static_cast<size_t>(std::max(n, r.groups.num_groups))), experts(n, r.top_k),
          groups(r.groups.num_groups, r.groups.top_groups), best(n, r.groups.best) {}
    std::vector<float> z, choice, own, of_group;
    std::vector<int64_t> order;
    Space<Real::f32> experts, groups, best;
};

// Experts of all but the best groups get the excluded score; one that is masked stays so.
bool limit(const GroupLimit& g, RouterSpace& space, int64_t n) {
    const int64_t size = n / g.num_groups, best = std::min(g.best, size);
    float *choice = space.choice.data(), *own = space.own.data();
    for (int64_t i = 0; i < g.num_groups; ++i) {
        for (int64_t e = 0; e < size; ++e) own[e] = std::max(choice[i * size + e], kLowest);
        if (!space.best.largest(own, size, best, space.order.data())) return false;
        float sum = 0.0f;
        for (int64_t e = 0; e < best; ++e) sum += own[space.order[e]];
        space.of_group[i] = sum;
    }
    if (!space.groups.largest(space.of_group.data(), g.num_groups, g.top_groups, space.order.data())) return false;
    std::sort(space.order.begin(), space.order.begin() + g.top_groups);
    for (int64_t i = 0, kept = 0; i < g.num_groups; ++i) {
        if (kept < g.top_groups && space.order[kept] == i) {
            ++kept;
            continue;
        }
        for (int64_t e = i * size; e < (i + 1) * size; ++e)
            if (choice[e] > -kInfinity) choice[e] = g.excluded;
    }
    return true;
}

// z of a row's logits, and whether some are masked; false for values that no router takes.
bool prepare(const void* logits, const Router& r, float* z, int64_t n, bool& masked) {
    bool good = true, some = false;
    const float most = r.score == Score::softmax ? std::numeric_limits<float>::max() : kInfinity;
    for (int64_t i = 0; i < n; ++i) {
        const float logit = value_at<float>(logits, i);
        const bool out = logit == -kInfinity;
        const float scaled = out ? -std::numeric_limits<float>::max() : logit * r.logit_scale;
        some |= out;
        good &= std::fabs(scaled) <= most;  // false for NaN
        z[i] = scaled;
    }
    masked = some;
    return good;
}

bool route_row(const void* logits, const Router& r, RouterSpace& space, int64_t n, int64_t* ids, float* weights) {
    float *z = space.z.data(), *choice = space.choice.data();
    bool masked;
    if (!prepare(logits, r, z, n, masked)) return false;
    if (!r.select_on_logits) score(r.score, z, n);
    for (int64_t i = 0; i < n; ++i) choice[i] = r.correction ? z[i] + value_at<float>(r.correction, i) : z[i];
    for (int64_t i = 0; masked && i < n; ++i)
        if (value_at<float>(logits, i) == -kInfinity) choice[i] = -kInfinity;
    if (r.groups.num_groups > 1 && !limit(r.groups, space, n)) return false;
    if (!space.experts.largest(choice, n, r.top_k, ids)) return false;
    for (int64_t k = 0; k < r.top_k; ++k) weights[k] = z[ids[k]];
    if (r.select_on_logits) score(r.score, weights, r.top_k);
    for (int64_t k = 0; masked && k < r.top_k; ++k)
        if (choice[ids[k]] == -kInfinity) ids[k] = -1, weights[k] = 0.0f;
    const float divisor = r.renormalize ? std::max(sum_of(weights, r.top_k) + r.epsilon, r.floor) : 1.0f;
    for (int64_t k = 0; k < r.top_k; ++k) weights[k] = weights[k] / divisor * r.scale;
    return true;
}

}  // namespace

bool topk(const Scores& scores, int64_t k, int64_t* indices, int num_threads) {
    switch (scores.dtype) {
        case Real::f32: return topk_of<Real::f32>(scores, k, indices, num_threads);
        case Real::f16: return topk_of<Real::f16>(scores, k, indices, num_threads);
        case Real::bf16: return topk_of<Real::bf16>(scores, k, indices, num_threads);
        default: return topk_of<Real::f64>(scores, k, indices, num_threads);
    }
}

bool route(const Scores& logits, const Router& router, int64_t* ids, float* weights, int num_threads) {
    const int64_t n = logits.num_experts, k = router.top_k;
    for (int64_t i = 0; router.correction && i < n; ++i)
        if (!(std::fabs(value_at<float>(router.correction, i)) < kInfinity)) return false;
    const auto* data = static_cast<const uint8_t*>(logits.data);
    const int64_t row_bytes = logits.stride * static_cast<int64_t>(sizeof(float));
    const auto make = [&] { return RouterSpace(n, router); };
    return each_row(logits, num_threads, make, [&](RouterSpace& space, int64_t t) {
        return route_row(data + t * row_bytes, router, space, n, ids + t * k, weights + t * k);
    });
}

}  // namespace moestro
