// Runs the engine by itself over many shapes, formats, instruction sets and numbers of threads, for builds with
// sanitizers and for processors that are emulated: every array is an allocation of its own of exactly the bytes that a
// call may touch, and the team is made of ordinary threads, which ThreadSanitizer can follow. Fails if bits depend on
// the threads or the strategy, if a set is far from the portable one, or if a routing is not what its definition says.
// Prints a digest of the portable set's bits, which are those of every processor. Links the engine without team.cpp and
// the bindings: CONTRIBUTING.md, tools/arm64.py and, for sanitizers, docs/log.md have the commands.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "attention_step.h"
#include "engine.h"
#include "routing.h"
#include "team.h"

namespace moestro {
void run_team(int num_threads, const std::function<void(int, int)>& work) {
    std::vector<std::thread> others;
    for (int i = 1; i < num_threads; ++i) others.emplace_back([&, i] { work(i, num_threads); });
    work(0, num_threads);
    for (auto& other : others) other.join();
}
}  // namespace moestro

using namespace moestro;

namespace {

std::mt19937 generator(1);
int64_t among(std::initializer_list<int64_t> values) { return values.begin()[generator() % values.size()]; }

int64_t g_most_multiplications = INT64_MAX;  // of a layer's down projection with more than two tokens

// Exactly so many bytes; random ones that no format reads as NaN or as very large, or scales of this byte or the next.
struct Bytes {
    std::unique_ptr<uint8_t[]> data;
    explicit Bytes(int64_t size, uint8_t scale = 0) : data(new uint8_t[static_cast<size_t>(size)]) {
        for (int64_t i = 0; i < size; ++i)
            data[i] = static_cast<uint8_t>(scale ? scale + generator() % 2 : generator() & 0xbf & ~0x40);
    }
};

struct Experts {
    Projection projection;
    std::vector<Bytes> kept;
    std::vector<Matrix> table;

    Experts(Element element, int64_t experts, int64_t rows, int64_t columns, int64_t num_blocks, bool int8) {
        Projection& p = projection;
        p.element = element;
        p.scale = has_scale(element) ? static_cast<Scale>(1 + generator() % 5) : Scale::none;
        p.rows = rows, p.columns = columns, p.num_blocks = num_blocks;
        p.group_columns = is_nibble(element) ? among({16, 32, 64, 128, 256}) : int8 ? 0 : among({0, 128});
        p.group_rows = is_nibble(element) ? 1 : among({0, 1, 128});
        p.row_stride = p.row_bytes();
        p.scale_row_stride = p.num_groups() * bytes_of(p.scale);
        p.zero_row_stride = p.num_groups();
        const int64_t height = rows / num_blocks, down = p.group_rows ? (height + p.group_rows - 1) / p.group_rows : 1;
        for (int64_t m = 0; m < experts * num_blocks; ++m) {
            Matrix made;
            made.data = keep(height * p.row_stride);
            if (p.scale != Scale::none)
                made.scales = keep(down * p.scale_row_stride, p.scale == Scale::e8m0 ? 0x7c : 0x3c);
            if (has_zeros(element)) made.zeros = keep(down * p.zero_row_stride);
            table.push_back(made);
        }
        p.table = table.data();
    }
    const uint8_t* keep(int64_t size, uint8_t scale = 0) {
        kept.emplace_back(size, scale);
        return kept.back().data.get();
    }
};

// FNV-1a of what the portable set gave, but for functions of the C library.
uint64_t g_digest = 0xcbf29ce484222325u;
void digest(const uint8_t* bytes, int64_t size) {
    for (int64_t i = 0; i < size; ++i) g_digest = (g_digest ^ bytes[i]) * 0x100000001b3u;
}

double value(const uint8_t* bytes, Element dtype, int64_t i) {
    if (dtype == Element::f32) return reinterpret_cast<const float*>(bytes)[i];
    const uint32_t half = reinterpret_cast<const uint16_t*>(bytes)[i];
    const uint32_t exponent = half >> 10 & 31, sign = half >> 15 << 31;
    uint32_t bits = half << 16;
    if (dtype == Element::f16 && !exponent) return (sign ? -1.0 : 1.0) * (half & 1023) * 0x1p-24;
    if (dtype == Element::f16)
        bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | (half & 1023) << 13;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}

// Whether the difference is small against the larger of both, as a whole.
bool are_close(const uint8_t* a, const uint8_t* b, Element dtype, int64_t count, double bound) {
    double difference = 0, size = 0;
    for (int64_t i = 0; i < count; ++i) {
        const double x = value(a, dtype, i), y = value(b, dtype, i);
        if (!std::isfinite(x) || !std::isfinite(y)) continue;           // float16 overflows in either
        if (std::max(std::fabs(x), std::fabs(y)) < 0x1p-126) continue;  // vdpbf16ps takes such numbers as 0
        difference += (x - y) * (x - y), size += std::max(x * x, y * y);
    }
    return std::sqrt(difference) <= bound * std::sqrt(size);
}

// Whether the portable set gives nearly what a call has written; of that set itself, the digest.
bool like_portable(const Isa& isa, Call call) {
    const Isa& portable = *kIsas[kNumIsas - 1];
    const int64_t count = call.num_tokens * call.hidden_size, size = call.out_dtype == Element::f32 ? 4 : 2;
    const auto* found = static_cast<const uint8_t*>(call.out);
    const bool from_library = call.activation.kind == Kind::gelu || call.activation.kind == Kind::tanh;
    if (&isa == &portable && !from_library) digest(found, count * size);
    if (&isa == &portable) return true;
    if (isa.tiles && std::min(call.hidden_size, call.intermediate_size) < 16) return true;  // bfloat16 that may cancel
    const Bytes out(count * size);
    call.out = out.data.get();
    expert_mlp(portable, call);
    const double exact = call.intermediate_size < 16 ? 1e-4 : 1e-5;  // each of so few may be a sum that nearly cancels
    const double bound = call.int8_input ? 0.05 : call.out_dtype == Element::f32 ? exact : 0.02;
    return are_close(out.data.get(), found, call.out_dtype, count, bound);
}

// On, off and around the vectors' widths.
int64_t width(Element e, int64_t lanes) {
    if (is_nibble(e)) return among({64, 192, 8 * lanes, 8 * lanes + 64, 32 * lanes, 32 * lanes + 64, 1088, 2112});
    return among({1, 3, 7, lanes - 1, lanes, lanes + 1, 8 * lanes + 2, 150, 31, 32, 33, 1025, 2051});
}

// Groups that the bindings refuse for tiles.
bool parts_a_tile(const Projection& p) {
    if (p.element == Element::e2m1) return p.scale == Scale::e8m0 && p.group_columns != 32;
    return p.group_columns == 16;
}

// One layer, computed with one thread and then in other ways; whether all gave the same bits. Twice as many rounds as
// there are elements meet each with tokens as they are and, where the set has them, each integer with int8 tokens.
bool same_bits(const Isa& isa, unsigned round) {
    const bool tiled = isa.tiles != nullptr, int8 = isa.int8 && (!isa.four_rows || round / kNumElements % 2);
    const bool bfloat16 = !tiled && !int8 && isa.bfloat16 && kElements[round % kNumElements].element == Element::bf16 &&
                          round / kNumElements % 4 == 0;  // all of it, or by chance almost never
    const auto element = [&](unsigned from) {
        if (bfloat16) return Element::bf16;
        for (;; ++from) {
            const ElementFacts& found = kElements[from % kNumElements];
            if (tiled ? found.has_tiles : !int8 || found.is_integer) return found.element;
        }
    };
    const Element first = element(round), last = element(3 * round + 1 + round / kNumElements / 2);
    Call call;
    call.int8_input = int8;
    call.hidden_size = width(first, isa.lanes), call.intermediate_size = width(last, isa.lanes);
    call.num_experts = among({1, 3, 9}), call.top_k = among({1, 2, 8});
    do call.num_tokens = among({1, 2, 5, 7, 16, 97, 200});
    while (call.num_tokens > 2 &&
           call.num_tokens * call.top_k * call.hidden_size * call.intermediate_size > g_most_multiplications);
    call.activation.kind = static_cast<Kind>(generator() % kNumKinds);
    call.activation.gated = generator() % 2, call.activation.interleaved = call.activation.gated && generator() % 2;
    call.activation.limited = true, call.activation.limit = 7.0f;
    call.weight_on_input = generator() % 2, call.same_bits = generator() % 2;
    const int64_t halves = call.activation.gated ? 2 : 1;
    Experts gate_up(first, call.num_experts, halves * call.intermediate_size, call.hidden_size,
                    call.activation.interleaved ? 1 : among({1, halves}), int8);
    Experts down(last, call.num_experts, call.hidden_size, call.intermediate_size, 1, int8);
    call.gate_up = gate_up.projection, call.down = down.projection;
    if (tiled && (parts_a_tile(call.gate_up) || parts_a_tile(call.down))) return true;

    const auto dtype = tiled || bfloat16 ? Element::bf16 : static_cast<Element>(generator() % 3);
    const int64_t size = dtype == Element::f32 ? 4 : 2, slots = call.num_tokens * call.top_k;
    Bytes x(call.num_tokens * call.hidden_size * size), bias(call.num_experts * call.hidden_size * 4);
    call.x = {x.data.get(), dtype, call.hidden_size};
    if (generator() % 2) call.down_bias = {bias.data.get(), Element::f32, call.hidden_size};
    std::unique_ptr<int32_t[]> ids(new int32_t[slots]);
    std::unique_ptr<float[]> weights(new float[slots]);
    for (int64_t s = 0; s < slots; ++s) {
        ids[s] = static_cast<int32_t>(generator() % (call.num_experts + 1)) - 1;
        weights[s] = ids[s] < 0 ? NAN : static_cast<float>(generator() % 100) / 100;
    }
    call.expert_ids = ids.get(), call.ids_are_64_bit = false, call.routing_weights = weights.get();
    call.out_dtype = dtype;
    const int64_t out_bytes = call.num_tokens * call.hidden_size * size;
    std::unique_ptr<uint8_t[]> expected(new uint8_t[out_bytes]);
    call.out = expected.get();
    expert_mlp(isa, call);
    if (!like_portable(isa, call)) return false;
    for (const int threads : {2, 5})
        for (const int64_t block : {1, 96})
            for (const bool all_experts : {false, true}) {
                std::unique_ptr<uint8_t[]> out(new uint8_t[out_bytes]);
                call.num_threads = threads, call.token_block = block, call.all_experts = all_experts,
                call.out = out.get();
                expert_mlp(isa, call);
                const bool other_kernels = !call.same_bits && (all_experts || block == 1);  // by the number of rows
                if (!other_kernels && std::memcmp(out.get(), expected.get(), out_bytes) != 0) return false;
            }
    return true;
}

// One projection with one thread, and then its last tokens with several: with the same bits, where they may not depend
// on how many tokens there are, and nearly those of the portable set.
bool same_linear(const Isa& isa) {
    if (!isa.tiles && !isa.four_rows) return true;
    const auto dtype = isa.tiles ? Element::bf16 : static_cast<Element>(generator() % 3);
    const int64_t W = isa.lanes, size = dtype == Element::f32 ? 4 : 2;
    const int64_t rows = among({1, 2, 15, 16, 17, 31, 33, 65, 200, 417}),
                  columns = among({1, 3, 7, W - 1, W, W + 1, 33, 8 * W + 2, 150, 1000});
    const int64_t tokens = among({1, 2, 5, 17, 97, 200});
    Bytes x(tokens * columns * size), weights(rows * columns * size), bias(rows * size), expected(tokens * rows * size);
    LinearCall call;
    call.num_tokens = tokens;
    call.x = {x.data.get(), dtype, columns};
    call.weights.element = dtype, call.weights.rows = rows, call.weights.columns = columns;
    call.weights.group_columns = 0, call.weights.row_stride = columns * size,
    call.weights.base.data = weights.data.get();
    if (generator() % 2) call.bias = {bias.data.get(), dtype, 0};
    call.out = expected.data.get(), call.out_dtype = dtype;
    call.same_bits = generator() % 2;
    linear(isa, call);
    for (const int threads : {1, 2, 5})
        for (const int64_t last : {int64_t{1}, std::min<int64_t>(tokens, 3), tokens}) {
            if (!call.same_bits && isa.outer_products && tokens >= 40 && last < 40) continue;
            Bytes out(last * rows * size);
            call.num_threads = threads, call.num_tokens = last, call.out = out.data.get();
            call.x.data = x.data.get() + (tokens - last) * columns * size;
            linear(isa, call);
            if (std::memcmp(out.data.get(), expected.data.get() + (tokens - last) * rows * size, last * rows * size) !=
                0)
                return false;
        }
    Bytes out(tokens * rows * size);
    call.num_tokens = tokens, call.x.data = x.data.get(), call.out = out.data.get();
    linear(*kIsas[kNumIsas - 1], call);
    return are_close(out.data.get(), expected.data.get(), dtype, tokens * rows, dtype == Element::f32 ? 1e-5 : 0.02);
}

// One packed projection: nearly that of the portable set, with the same bits on any number of threads.
bool same_packed(const Isa& isa, unsigned round) {
    if (!isa.tiles && !isa.four_rows) return true;
    const auto dtype = isa.tiles ? Element::bf16 : static_cast<Element>(round % 3);
    Element element = kElements[round % kNumElements].element;
    while (!has_scale(element)) element = kElements[++round % kNumElements].element;
    const int64_t W = isa.lanes, size = dtype == Element::f32 ? 4 : 2, tokens = among({1, 2, 5, 17, 49, 97, 200});
    const int64_t rows = among({1, 2, 3, 15, 16, 17, 33, 65, 200, 417}),
                  columns = is_nibble(element) ? among({64, 192, 8 * W + 64, 1088})
                                               : among({1, 3, 7, W - 1, W + 1, 33, 8 * W + 2, 150, 1025});
    Experts stored(element, 1, rows, columns, 1, generator() % 2);
    if (isa.tiles && parts_a_tile(stored.projection)) return true;
    Bytes x(tokens * columns * size), bias(rows * size), expected(tokens * rows * size);
    if (generator() % 2) std::memset(x.data.get(), 0, static_cast<size_t>(columns * size));  // a row of zeros
    if (size == 2)  // and one whose largest value leaves nothing of the others as integers
        reinterpret_cast<uint16_t*>(x.data.get())[(tokens - 1) * columns] = dtype == Element::bf16 ? 0x4e80 : 0x7800;
    LinearCall call;
    call.num_tokens = tokens, call.x = {x.data.get(), dtype, columns}, call.weights = stored.projection;
    call.weights.table = nullptr, call.weights.base = stored.table[0];
    if (generator() % 2) call.bias = {bias.data.get(), dtype, 0};
    call.out = expected.data.get(), call.out_dtype = dtype, call.same_bits = generator() % 2;
    linear(isa, call);
    for (const int threads : {2, 5}) {
        Bytes out(tokens * rows * size);
        call.num_threads = threads, call.out = out.data.get();
        linear(isa, call);
        if (std::memcmp(out.data.get(), expected.data.get(), tokens * rows * size) != 0) return false;
    }
    Bytes out(tokens * rows * size);
    call.out = out.data.get();
    linear(*kIsas[kNumIsas - 1], call);
    return are_close(out.data.get(), expected.data.get(), dtype, tokens * rows, dtype == Element::f32 ? 1e-5 : 0.02);
}

// A step of attention of random sizes, with norms around it.
struct RandomStep {
    Element dtype;
    int64_t size, hidden, keys, batch;
    AttentionStep step;
    Rotary rotary;
    std::vector<Bytes> kept;
    uint8_t *x, *key, *value;

    explicit RandomStep(const Isa& isa)
        : dtype(isa.tiles ? Element::bf16 : static_cast<Element>(generator() % 3)), size(dtype == Element::f32 ? 4 : 2),
          hidden(among({16, 33, 100})), keys(among({1, 3, 257})), batch(among({1, 2, 5})) {
        step.groups = among({1, 2}), step.heads = step.groups * among({1, 2, 5}), step.head_size = among({8, 20, 64});
        const int64_t n = step.head_size, queries = step.heads * n, columns = step.groups * n;
        step.q = matrix(isa, queries, hidden), step.k = matrix(isa, columns, hidden);
        step.v = matrix(isa, columns, hidden), step.o = matrix(isa, hidden, queries);
        step.q_norm = RmsNorm{{keep(n * size), dtype}, n, 1e-5f};
        step.k_norm = RmsNorm{{keep(n * 4), Element::f32}, n, 1e-5f, 1.0f};
        step.norm_before = RmsNorm{{keep(hidden * size), dtype}, hidden, 1e-5f, 0.0f, true};
        step.norm_after = step.norm_before;
        step.scale = 0.3f;
        if (generator() % 2) step.sinks = {keep(step.heads * size), dtype};
        rotary = {keep(batch * n * size), keep(batch * n * size), n, n, n / 2};
        x = keep(batch * hidden * size);
        key = keep(batch * keys * columns * size), value = keep(batch * keys * columns * size);
    }
    uint8_t* keep(int64_t bytes) {
        kept.emplace_back(bytes);
        return kept.back().data.get();
    }
    PreparedLinear matrix(const Isa& isa, int64_t rows, int64_t columns) {
        LinearCall call;
        call.weights.element = dtype, call.weights.rows = rows, call.weights.columns = columns;
        call.weights.group_columns = 0, call.weights.row_stride = columns * size;
        call.weights.base.data = keep(rows * columns * size);
        call.x.dtype = call.out_dtype = dtype;
        if (generator() % 2) call.bias = {keep(rows * size), dtype, 0};
        return {&isa, call};
    }

    // The last n sequences with so many threads: what is added up, and after it what is normalised.
    Bytes run(const Isa& isa, int64_t n, int threads) const {
        AttentionStep here = step;
        for (PreparedLinear* each : {&here.q, &here.k, &here.v, &here.o}) each->isa = &isa;
        const int64_t heads = step.heads, groups = step.groups, columns = step.head_size, first = batch - n;
        const int64_t row = columns, group = keys * row, sequence = groups * group;
        Bytes made(n * (heads + 2 * groups) * columns * size), out(2 * n * hidden * size);
        Rotary turned = rotary;
        const auto angles = [&](const void* of) { return static_cast<const uint8_t*>(of) + first * columns * size; };
        turned.cos = angles(rotary.cos), turned.sin = angles(rotary.sin);
        uint8_t *const k = key + first * sequence * size, *const v = value + first * sequence * size;
        const int64_t last = (keys - 1) * row * size;
        const uint8_t* const from = x + first * hidden * size;
        project(isa, here, {from, dtype, hidden}, n, turned, made.data.get(),
                {{k + last, sequence, group}, {v + last, sequence, group}}, threads);
        AttentionCall call;
        call.batch = n, call.num_keys = keys, call.value_columns = columns, call.dtype = dtype;
        call.query.data = made.data.get();
        call.key = {k, sequence, group, row}, call.value = {v, sequence, group, row};
        call.num_threads = threads;
        attend(isa, here, call, {out.data.get(), from, out.data.get() + n * hidden * size});
        return out;
    }
};

// One step with one thread, and then its last sequences with several: the same bits, and nearly the portable set's.
bool same_step(const Isa& isa) {
    if (!isa.four_rows) return true;
    const RandomStep step(isa);
    const int64_t half = step.batch * step.hidden * step.size;
    const Bytes expected = step.run(isa, step.batch, 1);
    for (const int threads : {2, 5})
        for (const int64_t n : {int64_t{1}, step.batch}) {
            const Bytes out = step.run(isa, n, threads);
            const int64_t bytes = n * step.hidden * step.size, before = half - bytes;
            for (int i = 0; i < 2; ++i)
                if (std::memcmp(out.data.get() + i * bytes, expected.data.get() + i * half + before, bytes))
                    return false;
        }
    const Bytes portable = step.run(*kIsas[kNumIsas - 1], step.batch, 1);
    return are_close(portable.data.get(), expected.data.get(), step.dtype, step.batch * step.hidden,
                     step.dtype == Element::f32 ? 1e-5 : 0.02);
}

// The largest scores, the larger index first among equal ones; in every dtype, by a sort of all of them.
bool right_topk() {
    const auto dtype = static_cast<Real>(generator() % 4);
    const int64_t size = dtype == Real::f64 ? 8 : dtype == Real::f32 ? 4 : 2;
    const int64_t tokens = among({1, 2, 7, 300}), experts = among({1, 2, 3, 15, 16, 17, 64, 100, 256, 513}),
                  stride = experts + among({0, 5});
    const int64_t k = 1 + static_cast<int64_t>(generator() % std::min<int64_t>(experts, 12)),
                  last = (tokens - 1) * stride + experts;
    Bytes scores(last * size);
    std::vector<double> values(static_cast<size_t>(last));
    for (int64_t i = 0; i < last; ++i) {  // whole numbers up to 31 have the same value in every dtype
        const double value = values[i] = static_cast<double>(generator() % 63) - 31;
        const auto narrow = static_cast<float>(value);
        uint32_t bits;
        std::memcpy(&bits, &narrow, 4);
        const auto bf16 = static_cast<uint16_t>(bits >> 16);
        const auto f16 = static_cast<uint16_t>(
            value == 0 ? 0 : (bits >> 16 & 0x8000) | (((bits >> 23 & 255) - 112) << 10) | (bits >> 13 & 1023));
        uint8_t* to = scores.data.get() + i * size;
        std::memcpy(to,
                    dtype == Real::f64   ? static_cast<const void*>(&value)
                    : dtype == Real::f32 ? static_cast<const void*>(&narrow)
                    : dtype == Real::f16 ? static_cast<const void*>(&f16)
                                         : &bf16,
                    size);
    }
    for (const int threads : {1, 2, 5}) {
        std::unique_ptr<int64_t[]> found(new int64_t[tokens * k]);
        if (!topk({scores.data.get(), dtype, tokens, experts, stride}, k, found.get(), threads)) return false;
        for (int64_t t = 0; t < tokens; ++t) {
            std::vector<int64_t> order(static_cast<size_t>(experts));
            for (int64_t e = 0; e < experts; ++e) order[e] = e;
            const double* row = values.data() + t * stride;
            std::sort(order.begin(), order.end(),
                      [&](int64_t a, int64_t b) { return row[a] != row[b] ? row[a] > row[b] : a > b; });
            if (!std::equal(order.begin(), order.begin() + k, found.get() + t * k)) return false;
        }
    }
    return true;
}

// A router's choice on any number of threads, and what grouping and blocks make of it.
bool right_routing() {
    const int64_t tokens = among({1, 2, 7, 300}), experts = among({4, 16, 64, 256}), groups = among({1, 2, 4});
    Router router;
    router.score = static_cast<Score>(generator() % 2), router.select_on_logits = generator() % 2,
    router.renormalize = generator() % 2;
    router.groups = {groups, std::max<int64_t>(groups / 2, 1), 2, 0.0f};
    router.top_k = 1 + static_cast<int64_t>(generator() % 2);
    std::unique_ptr<float[]> logits(new float[tokens * experts]), correction(new float[experts]);
    for (int64_t i = 0; i < tokens * experts; ++i) logits[i] = static_cast<float>(generator() % 1000) / 100 - 5;
    for (int64_t e = 0; e < experts; ++e) correction[e] = static_cast<float>(generator() % 10) / 100;
    if (generator() % 2) router.correction = correction.get();
    const int64_t count = tokens * router.top_k;
    std::unique_ptr<int64_t[]> ids(new int64_t[count]), again(new int64_t[count]);
    std::unique_ptr<float[]> weights(new float[count]), others(new float[count]);
    const Scores scores{logits.get(), Real::f32, tokens, experts, experts};
    if (!route(scores, router, ids.get(), weights.get(), 1) || !route(scores, router, again.get(), others.get(), 5))
        return false;
    if (!std::equal(ids.get(), ids.get() + count, again.get()) ||
        std::memcmp(weights.get(), others.get(), count * 4) != 0)
        return false;
    for (int64_t i = 0; i < count; i += 3) ids[i] = -1;
    const Slots slots{ids.get(), true, tokens, router.top_k, experts};
    if (!fits(slots, weights.get())) return false;
    for (const int threads : {1, 5}) {
        std::unique_ptr<int64_t[]> token_ids(new int64_t[count]), places(new int64_t[count]),
            offsets(new int64_t[experts + 1]), inverse(new int64_t[count]);
        if (!group(slots, {token_ids.get(), places.get(), offsets.get(), inverse.get()}, threads)) return false;
        for (int64_t i = 0; i < count; ++i) {
            const int64_t at = inverse[i], id = ids[i];
            if (token_ids[at] != i / router.top_k || places[at] != i % router.top_k) return false;
            if (id < 0 ? at < offsets[experts] : at < offsets[id] || at >= offsets[id + 1]) return false;
        }
    }
    const int64_t size = among({1, 16}), blocks = count / size + experts;
    std::unique_ptr<int64_t[]> owners(new int64_t[blocks]), pairs(new int64_t[blocks * size]),
        cells(new int64_t[count]), counts(new int64_t[experts]);
    if (!schedule(slots, {blocks, size, owners.get(), pairs.get(), cells.get(), counts.get()})) return false;
    for (int64_t i = 0; i < count; ++i)
        if (ids[i] < 0 ? cells[i] != -1 : pairs[cells[i]] != i || owners[cells[i] / size] != ids[i]) return false;
    return true;
}

}  // namespace

int main(int argc, char** argv) {
    const int rounds = argc > 1 ? std::atoi(argv[1]) : 100;
    if (argc > 2) g_most_multiplications = std::atoll(argv[2]);
    for (int i = 0; i < kNumIsas; ++i) {
        if (!kIsas[i]->runs_here()) continue;
        generator.seed(1);
        for (int r = 0; r < rounds; ++r)
            for (const bool alone : {false, true})
                if (!(alone ? same_linear(*kIsas[i]) : same_bits(*kIsas[i], r))) {
                    std::printf("%s: bits of a %s differ in round %d\n", kIsas[i]->name, alone ? "projection" : "layer",
                                r);
                    return 1;
                }
        std::printf("%s: %d layers and projections\n", kIsas[i]->name, rounds);
    }
    generator.seed(1);
    for (int i = 0; i < kNumIsas; ++i)
        for (int r = 0; kIsas[i]->runs_here() && r < rounds; ++r)
            if (!same_packed(*kIsas[i], r)) {
                std::printf("%s: a packed projection differs in round %d\n", kIsas[i]->name, r);
                return 1;
            }
    generator.seed(1);
    for (int i = 0; i < kNumIsas; ++i)
        for (int r = 0; kIsas[i]->runs_here() && r < rounds; ++r)
            if (!same_step(*kIsas[i])) {
                std::printf("%s: a step of attention differs in round %d\n", kIsas[i]->name, r);
                return 1;
            }
    generator.seed(1);
    for (int r = 0; r < rounds; ++r)
        if (!right_topk() || !right_routing()) {
            std::printf("routing: wrong in round %d\n", r);
            return 1;
        }
    std::printf("%d routings\ndigest %016llx\n", rounds, static_cast<unsigned long long>(g_digest));
    return 0;
}
