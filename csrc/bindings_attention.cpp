// Python's way to attention: addresses, sizes and strides. Tensors are kept alive by the caller.

#include "bindings_attention.h"

#include <nanobind/stl/tuple.h>

#include <tuple>

#include "attention.h"
#include "bindings_check.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace moestro {
namespace {

using Rows = std::tuple<uint64_t, int64_t, int64_t, int64_t>;  // address, and strides: sequence, group, row

HeadRows rows_at(const Rows& rows) {
    const auto [address, batch_stride, group_stride, row_stride] = rows;
    need(address, "no address");
    return {at<void>(address), batch_stride, group_stride, row_stride};
}

// Heads and keys of a call: batch, heads, groups, keys, columns of a key, columns of a value.
using Sizes = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>;

AttentionCall sized(const Sizes& sizes) {
    AttentionCall call;
    std::tie(call.batch, call.heads, call.groups, call.num_keys, call.columns, call.value_columns) = sizes;
    for (const int64_t n : {call.batch, call.heads, call.groups, call.num_keys, call.columns, call.value_columns})
        need(n > 0 && n < (int64_t{1} << 31), "sizes out of range");
    need(call.heads % call.groups == 0 && call.heads / call.groups <= kMostQueries, "heads that groups do not share");
    need(call.batch * call.heads < kMostTokens / call.num_keys, "sizes out of range");
    return call;
}

void attention_at(int64_t isa, const Sizes& sizes, int dtype, const Rows& query, const Rows& key, const Rows& value,
                  std::tuple<uint64_t, int64_t> mask, uint64_t sinks, float scale, uint64_t out, int64_t num_threads) {
    AttentionCall call = sized(sizes);
    const Isa& chosen = checked_isa(isa);
    need(chosen.four_rows, "an instruction set that multiplies no floats");
    call.dtype = checked_dtype(dtype);
    call.query = rows_at(query), call.key = rows_at(key), call.value = rows_at(value);
    call.mask = {at<void>(std::get<0>(mask)), call.dtype, std::get<1>(mask)};
    call.sinks = at<float>(sinks);
    call.scale = scale;
    need(out, "no address");
    call.out = at<void>(out);
    call.num_threads = checked_threads(num_threads);
    const nb::gil_scoped_release release;
    attention(chosen, call);
}

}  // namespace

void bind_attention(nb::module_& m) {
    m.def("attention", &attention_at, "isa"_a, "sizes"_a, "dtype"_a, "query"_a, "key"_a, "value"_a, "mask"_a, "sinks"_a,
          "scale"_a, "out"_a, "num_threads"_a);
}

}  // namespace moestro
