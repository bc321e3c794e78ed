#include "bindings_linear.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

namespace nb = nanobind;
using namespace nb::literals;

namespace moestro {
namespace {

void make_linear(Linear* self, int64_t isa, const Stored& weights, const FloatArray* bias, int x_dtype, int out_dtype,
                 bool same_bits, int64_t wide_rows) {
    LinearCall call;
    call.same_bits = same_bits, call.wide_rows = wide_rows;
    call.weights.rows = weights.described().rows;
    call.bias = array_or_none(bias);
    call.x.dtype = checked_dtype(x_dtype), call.out_dtype = checked_dtype(out_dtype);
    new (self) Linear(checked_isa(isa), call, weights);
}

}  // namespace

void bind_linear(nb::module_& m) {
    nb::class_<Linear>(m, "Linear")
        .def("__init__", &make_linear, nb::kw_only(), "isa"_a, "weights"_a, "bias"_a.none(), "x_dtype"_a, "out_dtype"_a,
             "same_bits"_a, "wide_rows"_a = 0)
        .def("run", &Linear::run, "num_threads"_a, "num_tokens"_a, "x_address"_a, "x_stride"_a, "out_address"_a)
        .def("plan", &Linear::plan, "num_threads"_a, "num_tokens"_a)
        .def("workspace_bytes", &Linear::workspace_bytes, "num_tokens"_a);
}

}  // namespace moestro
