// Python's way in: addresses and sizes, checked as far as addresses can be. Tensors are kept alive by the caller.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "bindings_peaks.h"
#include "bindings_routing.h"
#include "engine.h"

namespace nb = nanobind;
using namespace moestro;

namespace {

constexpr int64_t kMostExperts = 1 << 20;
constexpr int kMostThreads = 1 << 16;
constexpr int64_t kMostPieces = 1 << 20;

[[noreturn]] void refuse(const std::string& why) { throw std::invalid_argument(why); }
void need(bool condition, const char* why) {
    if (!condition) refuse(why);
}

template <class Enum> Enum checked(int value, int count, const char* name) {
    if (value < 0 || value >= count) refuse(std::string(name) + " has no code " + std::to_string(value));
    return static_cast<Enum>(value);
}
Element float_type(int value) {
    const auto element = checked<Element>(value, 8, "element");
    need(element == Element::f32 || element == Element::f16 || element == Element::bf16, "a dtype other than float32, float16, bfloat16");
    return element;
}
template <class T> const T* at(uint64_t address) { return reinterpret_cast<const T*>(address); }

using Addresses = std::tuple<uint64_t, uint64_t, uint64_t, uint64_t>;  // data, scales, zeros, global scale
using Strides = std::tuple<int64_t, int64_t, int64_t, int64_t>;

Matrix matrix_of(const Addresses& a) {
    return {at<uint8_t>(std::get<0>(a)), at<uint8_t>(std::get<1>(a)), at<uint8_t>(std::get<2>(a)), at<float>(std::get<3>(a))};
}

// Owns the table that its projection points into.
struct Stored {
    Projection projection;
    std::vector<Matrix> table;
    std::vector<bool> listed;  // experts that the table has

    void check() const {
        const Projection& p = projection;
        need(p.rows >= 0 && p.columns >= 0 && p.rows < (int64_t{1} << 40) && p.columns < (int64_t{1} << 31), "sizes out of range");
        need(!is_nibble(p.element) || p.columns % 8 == 0, "columns that do not fill words of eight nibbles");
        need(p.group_rows >= 0 && p.group_columns >= 0, "negative groups");
        need(!is_nibble(p.element) || p.group_columns == 0 || p.group_columns % 16 == 0, "groups of fewer than 16 columns");
        need(!is_nibble(p.element) || (p.group_columns & (p.group_columns - 1)) == 0, "groups of nibbles that are no power of two");
        need(is_nibble(p.element) || p.group_columns % 16 == 0, "groups that do not fill vectors");
        const bool scaled = p.element > Element::bf16;
        need(scaled == (p.scale != Scale::none), "scales where the element has none, or none where it has them");
    }
    bool has(int64_t expert) const { return !projection.table || listed[expert]; }
    bool fits(int64_t num_experts) const { return !projection.table || table.size() == static_cast<size_t>(num_experts * projection.num_blocks); }

    void check(const Matrix& m) const {
        const Projection& p = projection;
        if (p.rows == 0) return;
        need(p.columns == 0 || m.data != nullptr, "no data");
        if (p.num_groups() == 0) return;
        need(p.scale == Scale::none || m.scales != nullptr, "no scales");
        need(p.element != Element::u4 || m.zeros != nullptr, "no zeros");
    }
};

Stored* stacked(std::tuple<int, int> kinds, std::tuple<int64_t, int64_t> shape, std::tuple<int64_t, int64_t> group,
                std::tuple<int64_t, int64_t, int64_t> row_strides, const Addresses& base, const Strides& step) {
    auto made = std::make_unique<Stored>();
    Projection& p = made->projection;
    p.element = checked<Element>(std::get<0>(kinds), 8, "element");
    p.scale = checked<Scale>(std::get<1>(kinds), 6, "scale");
    std::tie(p.rows, p.columns) = shape;
    std::tie(p.group_rows, p.group_columns) = group;
    std::tie(p.row_stride, p.scale_row_stride, p.zero_row_stride) = row_strides;
    p.base = matrix_of(base);
    std::tie(p.step[0], p.step[1], p.step[2], p.step[3]) = step;
    made->check();
    return made.release();
}

// `experts[i]` is the number of the expert that `matrices[i * num_blocks ..]` make up; others may not be named by a routing.
void use_table(Stored& stored, int64_t num_experts, int64_t num_blocks, const std::vector<int64_t>& experts, const std::vector<Addresses>& matrices) {
    need(num_experts >= 0 && num_experts < kMostExperts && num_blocks > 0 && num_blocks < 64, "sizes out of range");
    need(stored.projection.rows % num_blocks == 0, "blocks of unequal heights");
    need(matrices.size() == experts.size() * static_cast<size_t>(num_blocks), "matrices that do not belong to experts");
    std::vector<Matrix> table(static_cast<size_t>(num_experts * num_blocks));
    std::vector<bool> listed(static_cast<size_t>(num_experts), false);
    for (size_t i = 0; i < experts.size(); ++i) {
        need(experts[i] >= 0 && experts[i] < num_experts, "an expert out of range");
        for (int64_t b = 0; b < num_blocks; ++b) {
            const Matrix m = matrix_of(matrices[i * num_blocks + b]);
            stored.check(m);
            table[experts[i] * num_blocks + b] = m;
        }
        listed[experts[i]] = true;
    }
    stored.table = std::move(table);
    stored.listed = std::move(listed);
    stored.projection.num_blocks = num_blocks;
    stored.projection.table = stored.table.data();
}

FloatArray float_array(const std::tuple<uint64_t, int, int64_t>& a) {
    FloatArray found;
    found.data = at<void>(std::get<0>(a));
    found.dtype = float_type(std::get<1>(a));
    found.stride = std::get<2>(a);
    return found;
}

using Array = std::tuple<uint64_t, int, int64_t>;               // address, dtype, stride in elements
using RoutingArgs = std::tuple<uint64_t, bool, uint64_t, bool>;  // ids, whether 64 bit, weights, whether on the input
// Whether all experts, token block, whether a token's bits are always the same, pieces.
using StrategyArgs = std::tuple<bool, int64_t, bool, int64_t>;
using ActivationArgs = std::tuple<int, bool, bool, bool, float, float, float>;

template <class Id> void check_ids(const Call& call, const Stored& gate_up, const Stored& down) {
    const auto* ids = static_cast<const Id*>(call.expert_ids);
    for (int64_t i = 0; i < call.num_tokens * call.top_k; ++i) {
        need(ids[i] >= -1 && ids[i] < call.num_experts, "an expert id out of range");
        if (ids[i] >= 0 && !call.all_experts) need(gate_up.has(ids[i]) && down.has(ids[i]), "an expert without weights");
    }
}

void run(int isa, int num_threads, const StrategyArgs& strategy, std::tuple<int64_t, int64_t, int64_t> sizes, const Array& x, const RoutingArgs& routing,
         const Stored& gate_up, const Stored& down, const std::tuple<Array, Array>& biases, const ActivationArgs& activation,
         std::tuple<uint64_t, int> out, bool rounded) {
    need(isa >= 0 && isa < kNumIsas && kIsas[isa]->runs_here(), "an instruction set that this processor lacks");
    need(num_threads > 0 && num_threads <= kMostThreads, "a number of threads out of range");
    Call call;
    std::tie(call.num_tokens, call.top_k, call.num_experts) = sizes;
    need(call.num_tokens >= 0 && call.top_k >= 0 && call.num_experts >= 0 && call.num_experts < kMostExperts, "sizes out of range");
    need(call.num_tokens < (int64_t{1} << 40) && call.top_k <= kMostSlots, "more slots than fit");
    call.hidden_size = gate_up.projection.columns;
    call.intermediate_size = down.projection.columns;
    call.x = float_array(x);
    call.expert_ids = at<void>(std::get<0>(routing));
    call.ids_are_64_bit = std::get<1>(routing);
    call.routing_weights = at<float>(std::get<2>(routing));
    call.weight_on_input = std::get<3>(routing);
    call.gate_up = gate_up.projection;
    call.down = down.projection;
    call.gate_up_bias = float_array(std::get<0>(biases));
    call.down_bias = float_array(std::get<1>(biases));
    Activation& a = call.activation;
    a.kind = checked<Kind>(std::get<0>(activation), 8, "activation");
    std::tie(std::ignore, a.gated, a.interleaved, a.limited, a.alpha, a.limit, a.up_offset) = activation;
    a.interleaved = a.interleaved && a.gated;  // there is nothing to alternate with
    call.out = reinterpret_cast<void*>(std::get<0>(out));
    call.out_dtype = float_type(std::get<1>(out));
    std::tie(call.all_experts, call.token_block, call.same_bits, call.pieces) = strategy;
    need(call.pieces >= 0 && call.pieces <= kMostPieces, "a number of pieces out of range");
    call.num_threads = num_threads;
    call.rounded = rounded;
    need(rounded ? kIsas[isa]->rounded != nullptr : kIsas[isa]->four_rows != nullptr, "rows that this instruction set does not multiply");
    for (const Projection* p : {&call.gate_up, &call.down}) {
        need(!rounded || is_nibble(p->element) || (p->element == Element::i8 && p->group_columns == 0), "rounded rows and weights that are no integers");
        need(!rounded || p->columns <= kMostRoundedColumns, "rounded rows of so many columns that sums may leave 32 bits");
    }
    need(down.projection.rows == call.hidden_size, "a down projection that does not lead back to the hidden size");
    need(gate_up.projection.rows == call.intermediate_size * (a.gated ? 2 : 1), "projections that do not belong together");
    const auto is_bf16 = [](const Projection& p) { return p.element == Element::bf16; };
    const auto fits = [&](const Projection& p) { return is_bf16(p) || p.element > Element::bf16; };
    need((call.x.dtype == Element::bf16 && fits(call.gate_up) && fits(call.down)) || !kIsas[isa]->tiles,
         "an instruction set that multiplies bfloat16 only, and something else");
    const auto fills_tiles = [](const Projection& p) {
        const bool scaled_apart = p.element == Element::i4 || p.element == Element::u4 || p.element == Element::e4m3;
        return !scaled_apart || p.group_columns % 32 == 0;
    };
    need((fills_tiles(call.gate_up) && fills_tiles(call.down)) || !kIsas[isa]->tiles, "groups that do not fill tiles");
    const int64_t most_blocks = a.gated && !a.interleaved ? 2 : 1;
    const bool whole_tiles = (call.gate_up.num_blocks <= most_blocks || !is_bf16(call.gate_up)) && (call.down.num_blocks == 1 || !is_bf16(call.down));
    need(whole_tiles || !kIsas[isa]->tiles, "matrices that end inside a tile");
    if (call.num_tokens == 0 || call.hidden_size == 0) return;
    need(call.out && call.x.data && (call.top_k == 0 || (call.expert_ids && call.routing_weights)), "no address");
    need(gate_up.fits(call.num_experts) && down.fits(call.num_experts), "tables of other numbers of experts");
    for (int64_t e = 0; call.all_experts && e < call.num_experts; ++e) need(gate_up.has(e) && down.has(e), "an expert without weights");
    if (!gate_up.projection.table && call.num_experts) gate_up.check(gate_up.projection.base);
    if (!down.projection.table && call.num_experts) down.check(down.projection.base);
    nb::gil_scoped_release release;
    if (call.ids_are_64_bit) check_ids<int64_t>(call, gate_up, down);
    else check_ids<int32_t>(call, gate_up, down);
    expert_mlp(*kIsas[isa], call);
}

void run_project(int isa, int num_threads, int64_t num_tokens, const Array& x, const Stored& weights, const Array& bias, std::tuple<uint64_t, int> out) {
    need(isa >= 0 && isa < kNumIsas && kIsas[isa]->runs_here(), "an instruction set that this processor lacks");
    need(num_threads > 0 && num_threads <= kMostThreads, "a number of threads out of range");
    need(num_tokens >= 0 && num_tokens < (int64_t{1} << 40), "sizes out of range");
    ProjectionCall call;
    call.num_tokens = num_tokens;
    call.x = float_array(x);
    call.bias = float_array(bias);
    call.weights = weights.projection;
    call.out = reinterpret_cast<void*>(std::get<0>(out));
    call.out_dtype = float_type(std::get<1>(out));
    call.num_threads = num_threads;
    const Element element = call.weights.element;
    need((call.x.dtype == Element::bf16 && element >= Element::bf16) || !kIsas[isa]->tiles, "an instruction set that multiplies bfloat16 only, and something else");
    need(kIsas[isa]->four_rows || kIsas[isa]->tiles, "an instruction set that multiplies rows as int8 only");
    need(call.weights.num_blocks == 1, "a projection in several matrices");
    if (num_tokens == 0 || call.weights.rows == 0) return;
    need(call.out && (call.x.data || call.weights.columns == 0), "no address");
    need(!call.weights.table, "a projection that is not one matrix");
    weights.check(call.weights.base);
    nb::gil_scoped_release release;
    project(*kIsas[isa], call);
}

nb::list isas() {
    nb::list found;
    for (int i = 0; i < kNumIsas; ++i) found.append(nb::make_tuple(kIsas[i]->name, kIsas[i]->needs, kIsas[i]->runs_here(), kIsas[i]->lanes, kIsas[i]->tiles != nullptr,
                                                                      kIsas[i]->four_rows != nullptr, kIsas[i]->rounded != nullptr, kIsas[i]->pairs != nullptr));
    return found;
}

}  // namespace

NB_MODULE(_native, m) {
    nb::set_leak_warnings(false);  // descriptions are remembered until the process ends
    nb::class_<Stored>(m, "Stored");
    m.def("stacked", &stacked, nb::rv_policy::take_ownership);
    m.def("use_table", &use_table);
    m.def("expert_mlp", &run);
    m.def("project", &run_project);
    m.def("isas", &isas);
    bind_peaks(m);
    register_routing(m);
}
