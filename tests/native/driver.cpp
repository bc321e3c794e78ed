// Runs the engine by itself over many shapes, formats, instruction sets and numbers of threads, for builds with
// sanitizers: every array is an allocation of its own of exactly the bytes that a call may touch, and the team is made of
// ordinary threads, which ThreadSanitizer can follow. Fails if bits depend on the threads or the strategy. Links the
// engine without team.cpp and bindings.cpp; docs/log.md has the command.

#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "engine.h"
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

// Exactly so many bytes; random ones that no format reads as NaN or as very large.
struct Bytes {
    std::unique_ptr<uint8_t[]> data;
    explicit Bytes(int64_t size, bool scales = false) : data(new uint8_t[static_cast<size_t>(size)]) {
        for (int64_t i = 0; i < size; ++i) data[i] = static_cast<uint8_t>(scales ? 0x3c + generator() % 2 : generator() & 0xbf & ~0x40);
    }
};

int64_t scale_size(Scale s) { return s == Scale::none ? 0 : s == Scale::f32 ? 4 : s == Scale::f16 || s == Scale::bf16 ? 2 : 1; }

struct Experts {
    Projection projection;
    std::vector<Bytes> kept;
    std::vector<Matrix> table;

    Experts(Element element, int64_t experts, int64_t rows, int64_t columns, int64_t num_blocks, bool rounded) {
        Projection& p = projection;
        p.element = element;
        p.scale = element <= Element::bf16 ? Scale::none : static_cast<Scale>(1 + generator() % 5);
        p.rows = rows, p.columns = columns, p.num_blocks = num_blocks;
        p.group_columns = is_nibble(element) ? among({16, 32, 64}) : rounded ? 0 : among({0, 128});
        p.group_rows = is_nibble(element) ? 1 : among({0, 1, 128});
        p.row_stride = p.row_bytes();
        p.scale_row_stride = p.num_groups() * scale_size(p.scale);
        p.zero_row_stride = p.num_groups();
        const int64_t height = rows / num_blocks, down = p.group_rows ? (height + p.group_rows - 1) / p.group_rows : 1;
        for (int64_t m = 0; m < experts * num_blocks; ++m) {
            Matrix made;
            made.data = keep(height * p.row_stride, false);
            if (p.scale != Scale::none) made.scales = keep(down * p.scale_row_stride, true);
            if (element == Element::u4) made.zeros = keep(down * p.zero_row_stride, false);
            table.push_back(made);
        }
        p.table = table.data();
    }
    const uint8_t* keep(int64_t size, bool scales) {
        kept.emplace_back(size, scales);
        return kept.back().data.get();
    }
};

// One layer, computed with one thread and then in other ways; whether all gave the same bits.
bool same_bits(const Isa& isa) {
    const bool tiled = isa.tiles != nullptr, rounded = isa.rounded && (!isa.four_rows || generator() % 2);
    const auto element = [&] { return static_cast<Element>(tiled ? 2 + generator() % 6 : rounded ? 4 + generator() % 4 : generator() % 8); };
    const Element first = element(), last = element();
    const int64_t W = isa.lanes;
    const auto width = [&](Element e) {
        return is_nibble(e) ? among({64, 192, 8 * W, 8 * W + 64, 32 * W, 32 * W + 64}) : among({1, 3, 7, W - 1, W, W + 1, 8 * W + 2, 150, 31, 32, 33});
    };
    Call call;
    call.rounded = rounded;
    call.hidden_size = width(first), call.intermediate_size = width(last);
    call.num_experts = among({1, 3, 9}), call.top_k = among({1, 2, 8}), call.num_tokens = among({1, 2, 5, 7, 16, 97, 200});
    call.activation.kind = static_cast<Kind>(generator() % 8);
    call.activation.gated = generator() % 2, call.activation.interleaved = call.activation.gated && generator() % 2;
    call.activation.limited = true, call.activation.limit = 7.0f;
    call.weight_on_input = generator() % 2;
    const int64_t halves = call.activation.gated ? 2 : 1;
    Experts gate_up(first, call.num_experts, halves * call.intermediate_size, call.hidden_size,
                    call.activation.interleaved ? 1 : among({1, halves}), rounded);
    Experts down(last, call.num_experts, call.hidden_size, call.intermediate_size, 1, rounded);
    call.gate_up = gate_up.projection, call.down = down.projection;

    const auto dtype = tiled ? Element::bf16 : static_cast<Element>(generator() % 3);
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
    for (const int threads : {2, 5})
        for (const int64_t block : {1, 96})
            for (const bool all_experts : {false, true}) {
                std::unique_ptr<uint8_t[]> out(new uint8_t[out_bytes]);
                call.num_threads = threads, call.token_block = block, call.all_experts = all_experts, call.out = out.get();
                expert_mlp(isa, call);
                if (std::memcmp(out.get(), expected.get(), out_bytes) != 0) return false;
            }
    return true;
}

}  // namespace

int main(int argc, char** argv) {
    const int rounds = argc > 1 ? std::atoi(argv[1]) : 100;
    for (int i = 0; i < kNumIsas; ++i) {
        if (!kIsas[i]->runs_here()) continue;
        for (int r = 0; r < rounds; ++r)
            if (!same_bits(*kIsas[i])) {
                std::printf("%s: bits differ in round %d\n", kIsas[i]->name, r);
                return 1;
            }
        std::printf("%s: %d layers\n", kIsas[i]->name, rounds);
    }
    return 0;
}
