// Python's way to experts: addresses and sizes, checked as far as addresses can be. Tensors are kept alive by the
// caller.

#include "bindings_experts.h"

#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>

#include "bindings_check.h"
#include "bindings_plan.h"
#include "plan.h"
#include "stored.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace moestro {
namespace {

constexpr int64_t kMostPieces = 1 << 20;

// Everything of a call that does not change from one to the next, checked once.
class ExpertMlp {
public:
    ExpertMlp(const Isa& isa, const Call& fixed, const Stored& gate_up, const Stored& down)
        : isa_(isa), call_(fixed), kept_{gate_up.kept(), down.kept()} {
        call_.gate_up = gate_up.projection(fixed.num_experts);
        call_.down = down.projection(fixed.num_experts);
        call_.hidden_size = call_.gate_up.columns;
        call_.intermediate_size = call_.down.columns;
        check_sizes();
        check_isa();
        for (int64_t e = 0; call_.all_experts && e < call_.num_experts; ++e)
            need(call_.gate_up.has(e) && call_.down.has(e), "an expert without weights");
    }

    void run(int64_t num_threads, int64_t num_tokens, uint64_t x, int64_t x_stride, uint64_t ids, uint64_t weights,
             uint64_t out) const {
        Call call = with_ids(num_threads, num_tokens, ids);
        if (num_tokens == 0 || call.hidden_size == 0) return;
        call.x.data = at<void>(x);
        call.x.stride = x_stride;
        call.routing_weights = at<float>(weights);
        call.out = at<void>(out);
        need(call.out && call.x.data && (call.top_k == 0 || call.routing_weights), "no address");
        const nb::gil_scoped_release release;
        expert_mlp(isa_, call);
    }
    // The rows of the pairs that ids name, to where `sum` reads those of all pairs: float32 [T, K, H].
    void run_rows(int64_t num_threads, int64_t num_tokens, uint64_t x, int64_t x_stride, uint64_t ids, uint64_t weights,
                  uint64_t rows) const {
        Call call = with_ids(num_threads, num_tokens, ids);
        if (num_tokens == 0 || call.hidden_size == 0 || call.top_k == 0) return;
        need(x && weights && rows, "no address");
        call.x.data = at<void>(x), call.x.stride = x_stride;
        call.routing_weights = at<float>(weights), call.rows = at<float>(rows);
        const nb::gil_scoped_release release;
        expert_mlp(isa_, call);
    }
    // Ids outside 0..num_experts - 1 are empty slots.
    void sum(int64_t num_threads, int64_t num_tokens, uint64_t rows, uint64_t ids, uint64_t weights, uint64_t out,
             int64_t num_experts) const {
        Call call = with_ids(num_threads, num_tokens, ids);
        if (num_tokens == 0 || call.hidden_size == 0) return;
        need(out && (call.top_k == 0 || (weights && rows)), "no address");
        need(num_experts >= 0 && num_experts < kMostExperts, "sizes out of range");
        call.num_experts = num_experts, call.out = at<void>(out);
        call.routing_weights = at<float>(weights), call.rows = at<float>(rows);
        const nb::gil_scoped_release release;
        sum_rows(isa_, call);
    }
    std::vector<PlanRecord> plan(int64_t num_threads, int64_t num_tokens, uint64_t ids) const {
        const Call call = with_ids(num_threads, num_tokens, ids);
        if (num_tokens == 0 || call.hidden_size == 0) return {};
        return records(moestro::plan(isa_, call));
    }
    int64_t workspace_bytes(int64_t num_tokens) const {
        need(num_tokens >= 0 && num_tokens < kMostTokens, "sizes out of range");
        Call call = call_;
        call.num_tokens = num_tokens;
        return moestro::workspace_bytes(isa_, call);
    }

private:
    Call with_ids(int64_t num_threads, int64_t num_tokens, uint64_t ids) const {
        Call call = call_;
        call.num_threads = checked_threads(num_threads);
        need(num_tokens >= 0 && num_tokens < kMostTokens, "sizes out of range");
        call.num_tokens = num_tokens;
        call.expert_ids = at<void>(ids);
        need(num_tokens == 0 || call.hidden_size == 0 || call.top_k == 0 || call.expert_ids, "no address");
        return call;
    }
    void check_sizes() const {
        const Call& c = call_;
        need(c.top_k >= 0 && c.top_k <= kMostSlots, "more slots than fit");
        need(c.num_experts >= 0 && c.num_experts <= kMostExperts, "sizes out of range");
        need(c.pieces >= 0 && c.pieces <= kMostPieces, "a number of pieces out of range");
        need(c.wide_rows >= 0, "a negative number of rows");
        need(c.down.rows == c.hidden_size, "a down projection that does not lead back to the hidden size");
        need(c.gate_up.rows == c.intermediate_size * (c.activation.gated ? 2 : 1),
             "projections that do not belong together");
    }
    void check_isa() const {
        const Call& c = call_;
        need(c.int8_input ? isa_.int8 != nullptr : isa_.four_rows != nullptr,
             "an input format that this instruction set does not multiply");
        for (const Projection* p : {&c.gate_up, &c.down}) {
            const bool is_integer = moestro::is_integer(p->element) && (is_nibble(p->element) || p->group_columns == 0);
            need(!c.int8_input || is_integer, "an int8 input and weights that are no integers");
            need(!c.int8_input || p->columns <= kMostInt8Columns,
                 "an int8 input of so many columns that sums may leave 32 bits");
        }
        if (!isa_.tiles) return;
        need(c.x.dtype == Element::bf16, "an instruction set that multiplies bfloat16 only, and something else");
        need_tiles(c.gate_up, c.activation.gated && !c.activation.interleaved ? 2 : 1);
        need_tiles(c.down, 1);
    }

    const Isa& isa_;
    Call call_;
    std::shared_ptr<const void> kept_[2];  // tables that the projections point into
};

void make_stored(Stored* self, int element, int scale, int64_t rows, int64_t columns, int64_t group_rows,
                 int64_t group_columns, int64_t row_stride, int64_t scale_row_stride, int64_t zero_row_stride,
                 const Addresses& base, const Strides& step) {
    Projection p;
    p.element = checked<Element>(element, kNumElements, "element");
    p.scale = checked<Scale>(scale, kNumScales, "scale");
    p.rows = rows, p.columns = columns;
    p.group_rows = group_rows, p.group_columns = group_columns;
    p.row_stride = row_stride, p.scale_row_stride = scale_row_stride, p.zero_row_stride = zero_row_stride;
    p.base = Stored::matrix(base);
    for (int i = 0; i < 4; ++i) p.step[i] = step[i];
    new (self) Stored(p);
}

void make_activation(Activation* self, int kind, bool gated, bool interleaved, float alpha, std::optional<float> limit,
                     float up_offset) {
    Activation a;
    a.kind = checked<Kind>(kind, kNumKinds, "activation");
    a.gated = gated;
    a.interleaved = interleaved && gated;  // there is nothing to alternate with
    a.limited = limit.has_value();
    a.alpha = alpha, a.limit = limit.value_or(0.0f), a.up_offset = up_offset;
    new (self) Activation(a);
}

void make_experts(ExpertMlp* self, int64_t isa, const Stored& gate_up, const Stored& down,
                  const FloatArray* gate_up_bias, const FloatArray* down_bias, const Activation& activation,
                  int64_t num_experts, int64_t top_k, int x_dtype, int out_dtype, bool ids_are_64_bit,
                  bool weight_on_input, bool int8_input, bool all_experts, bool same_bits, int64_t token_block,
                  int64_t pieces, int64_t wide_rows) {
    Call call;
    call.num_experts = num_experts, call.top_k = top_k;
    call.gate_up_bias = array_or_none(gate_up_bias), call.down_bias = array_or_none(down_bias);
    call.activation = activation;
    call.x.dtype = checked_dtype(x_dtype), call.out_dtype = checked_dtype(out_dtype);
    call.ids_are_64_bit = ids_are_64_bit, call.weight_on_input = weight_on_input;
    call.int8_input = int8_input, call.all_experts = all_experts, call.same_bits = same_bits;
    call.token_block = token_block, call.pieces = pieces, call.wide_rows = wide_rows;
    new (self) ExpertMlp(checked_isa(isa), call, gate_up, down);
}

nb::dict counts() {
    nb::dict found;
    for (int s = 0; s < kNumStages; ++s)
        for (int k = 0; k < kNumKernels; ++k)
            if (const int64_t n = kernel_counts[s][k].load())
                found[nb::make_tuple(kStages[s], name_of(static_cast<Kernel>(k)))] = n;
    return found;
}

void count_kernels(bool on) {
    for (auto& stage : kernel_counts)
        for (auto& kernel : stage) kernel.store(0);
    counting.store(on);
}

void bind_stored(nb::module_& m) {
    nb::class_<Stored>(m, "Stored")
        .def("__init__", &make_stored, nb::kw_only(), "element"_a, "scale"_a, "rows"_a, "columns"_a, "group_rows"_a = 1,
             "group_columns"_a = 0, "row_stride"_a, "scale_row_stride"_a = 0, "zero_row_stride"_a = 0, "base"_a,
             "step"_a = Strides{})
        .def("use_table", &Stored::use_table, nb::kw_only(), "num_experts"_a, "num_blocks"_a, "experts"_a,
             "matrices"_a);
    nb::class_<Activation>(m, "Activation")
        .def("__init__", &make_activation, "kind"_a, "gated"_a, "interleaved"_a, "alpha"_a, "limit"_a.none(),
             "up_offset"_a);
    nb::class_<FloatArray>(m, "Array")
        .def(
            "__init__",
            [](FloatArray* self, uint64_t address, int dtype, int64_t stride) {
                new (self) FloatArray{at<void>(address), checked_dtype(dtype), stride};
            },
            "address"_a, "dtype"_a, "stride"_a);
    nb::class_<PlanRecord>(m, "PlanRecord")
        .def_ro("projection", &PlanRecord::projection)
        .def_ro("kernel", &PlanRecord::kernel)
        .def_ro("units", &PlanRecord::units)
        .def_ro("rows", &PlanRecord::rows);
}

}  // namespace

void bind_experts(nb::module_& m) {
    bind_stored(m);
    nb::class_<ExpertMlp>(m, "ExpertMlp")
        .def("__init__", &make_experts, nb::kw_only(), "isa"_a, "gate_up"_a, "down"_a, "gate_up_bias"_a.none(),
             "down_bias"_a.none(), "activation"_a, "num_experts"_a, "top_k"_a, "x_dtype"_a, "out_dtype"_a,
             "ids_are_64_bit"_a, "weight_on_input"_a = false, "int8_input"_a = false, "all_experts"_a = false,
             "same_bits"_a = false, "token_block"_a = kTokenBlock, "pieces"_a = 0, "wide_rows"_a = 0)
        .def("run", &ExpertMlp::run, "num_threads"_a, "num_tokens"_a, "x_address"_a, "x_stride"_a, "ids_address"_a,
             "weights_address"_a, "out_address"_a)
        .def("run_rows", &ExpertMlp::run_rows, "num_threads"_a, "num_tokens"_a, "x_address"_a, "x_stride"_a,
             "ids_address"_a, "weights_address"_a, "rows_address"_a)
        .def("sum", &ExpertMlp::sum, "num_threads"_a, "num_tokens"_a, "rows_address"_a, "ids_address"_a,
             "weights_address"_a, "out_address"_a, "num_experts"_a)
        .def("plan", &ExpertMlp::plan, "num_threads"_a, "num_tokens"_a, "ids_address"_a)
        .def("workspace_bytes", &ExpertMlp::workspace_bytes, "num_tokens"_a);
    m.def("count_kernels", &count_kernels, "on"_a);
    m.def("kernel_counts", &counts);
}

}  // namespace moestro
