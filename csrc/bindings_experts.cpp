// Python's way to experts: addresses and sizes, checked as far as addresses can be. Tensors are kept alive by the
// caller.

#include "bindings_experts.h"

#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>

namespace nb = nanobind;
using namespace nb::literals;

namespace moestro {
namespace {

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
             "same_bits"_a = false, "token_block"_a = 0, "pieces"_a = 0, "wide_rows"_a = 0)
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
