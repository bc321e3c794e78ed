// Python's way to what a layer computes for one token beside its experts. Tensors are kept alive by the caller.

#include "bindings_step.h"

#include <nanobind/stl/tuple.h>

#include <tuple>

#include "attention_step.h"
#include "bindings_experts.h"
#include "bindings_linear.h"
#include "routing_step.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace moestro {
namespace {

constexpr int64_t kMostColumns = int64_t{1} << 31;

const Isa& checked_floats(int64_t isa) {
    const Isa& chosen = checked_isa(isa);
    need(chosen.four_rows, "an instruction set that multiplies no floats");
    return chosen;
}

class Norm {
public:
    Norm(const Isa& isa, const RmsNorm& norm) : isa_(isa), norm_(norm) {
        need(norm.columns > 0 && norm.columns < kMostColumns, "sizes out of range");
        need(norm.weight.data, "no address");
    }
    void run(int64_t num_threads, int64_t num_rows, uint64_t x, int64_t x_stride, int dtype, uint64_t out) const {
        const int threads = checked_threads(num_threads);
        need(num_rows >= 0 && num_rows < kMostTokens / norm_.columns, "sizes out of range");
        if (num_rows == 0) return;
        need(x && out, "no address");
        const FloatArray rows{at<void>(x), checked_dtype(dtype), x_stride};
        const nb::gil_scoped_release release;
        rms_norm(isa_, norm_, rows, num_rows, at<void>(out), threads);
    }
    const RmsNorm& described() const { return norm_; }

private:
    const Isa& isa_;
    const RmsNorm norm_;
};

void make_norm(Norm* self, int64_t isa, const FloatArray& weight, int64_t columns, float epsilon, float offset,
               bool rounds_twice) {
    new (self) Norm(checked_floats(isa), {weight, columns, epsilon, offset, rounds_twice});
}

std::optional<RmsNorm> norm_of(const Norm* norm, int64_t head_size, int64_t heads) {
    if (!norm) return std::nullopt;
    const int64_t columns = norm->described().columns;
    need(columns == head_size || columns == head_size * heads, "a norm of other columns");
    return norm->described();
}

using Shape = std::tuple<int64_t, int64_t, int64_t>;                       // heads, groups, size of a head
using Turned = std::tuple<uint64_t, uint64_t, int64_t, int64_t, int64_t>;  // cos, sin, stride, columns, second
using Place = std::tuple<uint64_t, int64_t, int64_t>;                      // address, and strides: sequence, group
using Rows = std::tuple<uint64_t, int64_t, int64_t, int64_t>;              // address, and strides
using Projections = std::tuple<const Linear*, const Linear*, const Linear*, const Linear*>;

class Step {
public:
    Step(const Isa& isa, const AttentionStep& step) : isa_(isa), step_(step), dtype_(step.q.call.x.dtype) {
        const int64_t queries = step.heads * step.head_size, keys = step.groups * step.head_size;
        const int64_t columns = step.q.call.weights.columns;
        for (const PreparedLinear* each : {&step.q, &step.k, &step.v})
            need(each->call.weights.columns == columns, "projections that do not belong together");
        for (const PreparedLinear* each : {&step.q, &step.k, &step.v, &step.o})
            need(each->call.x.dtype == dtype_ && each->call.out_dtype == dtype_, "several dtypes");
        need(step.q.call.weights.rows == queries && step.k.call.weights.rows == keys &&
                 step.v.call.weights.rows == keys && step.o.call.weights.columns == queries,
             "projections that do not belong together");
    }

    void project(int64_t num_threads, int64_t batch, uint64_t x, int64_t x_stride, const Turned& turned, uint64_t out,
                 const Place& keys, const Place& values) const {
        const int threads = checked_threads(num_threads);
        check(batch);
        Rotary rotary;
        uint64_t cos, sin;
        std::tie(cos, sin, rotary.stride, rotary.columns, rotary.second) = turned;
        need(x && out && (rotary.columns == 0 || (cos && sin)), "no address");
        const bool even = rotary.columns >= 0 && rotary.columns <= step_.head_size && rotary.columns % 2 == 0;
        need(even && rotary.second >= 0 && rotary.second <= rotary.columns, "positions that do not fit a head");
        rotary.cos = at<void>(cos), rotary.sin = at<void>(sin);
        const nb::gil_scoped_release release;
        moestro::project(isa_, step_, {at<void>(x), dtype_, x_stride}, batch, rotary, at<void>(out),
                         {rows_of(keys), rows_of(values)}, threads);
    }

    void attend(int64_t num_threads, int64_t batch, uint64_t query, const Rows& key, const Rows& value,
                int64_t num_keys, std::tuple<uint64_t, int64_t> mask, uint64_t out, uint64_t residual,
                uint64_t normalised) const {
        check(batch);
        AttentionCall call;
        call.batch = batch, call.num_keys = num_keys, call.value_columns = step_.head_size;
        need(num_keys > 0 && batch * step_.heads < kMostTokens / num_keys, "sizes out of range");
        call.dtype = dtype_;
        need(!normalised == !step_.norm_after, "a norm without a place, or a place without a norm");
        need(query && std::get<0>(key) && std::get<0>(value) && out, "no address");
        call.query.data = at<void>(query);
        call.key = rows_at(key), call.value = rows_at(value);
        call.mask = {at<void>(std::get<0>(mask)), dtype_, std::get<1>(mask)};
        call.num_threads = checked_threads(num_threads);
        const nb::gil_scoped_release release;
        moestro::attend(isa_, step_, call, {at<void>(out), at<void>(residual), at<void>(normalised)});
    }

private:
    static CacheRows rows_of(const Place& place) {
        const auto [address, batch_stride, group_stride] = place;
        return {at<void>(address), batch_stride, group_stride};
    }
    static HeadRows rows_at(const Rows& rows) {
        const auto [address, batch_stride, group_stride, row_stride] = rows;
        return {at<void>(address), batch_stride, group_stride, row_stride};
    }
    void check(int64_t batch) const { need(batch > 0 && batch < kMostTokens / step_.heads, "sizes out of range"); }

    const Isa& isa_;
    const AttentionStep step_;
    const Element dtype_;
};

void check_shape(const AttentionStep& step) {
    for (const int64_t n : {step.heads, step.groups, step.head_size})
        need(n > 0 && n < kMostColumns, "sizes out of range");
    need(step.heads % step.groups == 0 && step.heads / step.groups <= kMostQueries, "heads that groups do not share");
    need(step.heads * step.head_size < kMostColumns, "sizes out of range");
}

void make_step(Step* self, int64_t isa, const Projections& projections, const Shape& shape, const Norm* q_norm,
               const Norm* k_norm, float scale, const FloatArray* sinks, const Norm* norm_before,
               const Norm* norm_after) {
    const auto [q, k, v, o] = projections;
    need(q && k && v && o, "no projection");
    AttentionStep step;
    step.q = q->prepared(), step.k = k->prepared(), step.v = v->prepared(), step.o = o->prepared();
    std::tie(step.heads, step.groups, step.head_size) = shape;
    check_shape(step);
    step.q_norm = norm_of(q_norm, step.head_size, step.heads);
    step.k_norm = norm_of(k_norm, step.head_size, step.groups);
    step.scale = scale;
    step.sinks = array_or_none(sinks);
    step.norm_before = norm_of(norm_before, step.q.call.weights.columns, 1);
    step.norm_after = norm_of(norm_after, step.o.call.weights.rows, 1);
    new (self) Step(checked_floats(isa), step);
}

class Routing {
public:
    Routing(const Isa& isa, const RoutingStep& step) : isa_(isa), step_(step) {
        const int64_t experts = step.logits.call.weights.rows, k = step.router.top_k;
        need(experts > 0 && experts <= kMostScores && k > 0 && k <= experts, "k out of range");
    }
    bool run(int64_t num_threads, int64_t num_tokens, uint64_t x, int64_t x_stride, uint64_t logits, uint64_t ids,
             uint64_t weights, int weights_dtype) const {
        const int threads = checked_threads(num_threads);
        need(num_tokens > 0 && num_tokens < kMostTokens / kMostScores, "sizes out of range");
        need(x && logits && ids && weights, "no address");
        const FloatArray rows{at<void>(x), step_.logits.call.x.dtype, x_stride};
        const Routed to{at<void>(logits), at<int64_t>(ids), at<void>(weights), checked_dtype(weights_dtype)};
        const nb::gil_scoped_release release;
        return route_rows(isa_, step_, rows, num_tokens, to, threads);
    }
    // `out` [tokens, hidden], which must not be `residual`.
    bool run_experts(int64_t num_threads, int64_t num_tokens, uint64_t x, int64_t x_stride, const ExpertMlp& experts,
                     int weights_dtype, uint64_t residual, uint64_t out) const {
        Call call = experts.prepared(num_threads, num_tokens);
        const LinearCall& logits = step_.logits.call;
        need(num_tokens > 0 && num_tokens < kMostTokens / kMostScores, "sizes out of range");
        need(call.num_experts == logits.weights.rows && call.top_k == step_.router.top_k &&
                 call.hidden_size == logits.weights.columns,
             "experts that are not those of the router");
        need(call.x.dtype == logits.x.dtype && call.out_dtype == call.x.dtype, "several dtypes");
        need(x && residual && out && residual != out, "no address");
        call.x.data = at<void>(x), call.x.stride = x_stride, call.out = at<void>(out);
        const Element rounded = checked_dtype(weights_dtype);
        const nb::gil_scoped_release release;
        return route_to_experts(isa_, step_, rounded, experts.isa(), call, at<void>(residual));
    }

private:
    const Isa& isa_;
    const RoutingStep step_;
};

void make_routing(Routing* self, int64_t isa, const Linear& logits, const Router& router, int64_t top_k) {
    RoutingStep step{logits.prepared(), router};
    step.router.top_k = top_k;
    new (self) Routing(checked_floats(isa), step);
}

// Whether dicts hold these items and no others, key and value in turn, each the same object; `...` stands for any.
// Neither is touched: a list of them would count its references, and what is counted is fetched from memory first.
bool items_are(const nb::list& dicts, const nb::list& items) {
    const Py_ssize_t all = PyList_GET_SIZE(items.ptr());
    Py_ssize_t at = 0;
    const auto is_next = [&](PyObject* found) {
        if (at == all) return false;
        PyObject* const wanted = PyList_GET_ITEM(items.ptr(), at++);
        return found == wanted || wanted == Py_Ellipsis;
    };
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(dicts.ptr()); ++i) {
        PyObject *dict = PyList_GET_ITEM(dicts.ptr(), i), *key = nullptr, *value = nullptr;
        if (!PyDict_Check(dict)) throw std::invalid_argument("dicts that are none");
        for (Py_ssize_t place = 0; PyDict_Next(dict, &place, &key, &value);)
            if (!is_next(key) || !is_next(value)) return false;
    }
    return at == all;
}

}  // namespace

void bind_step(nb::module_& m) {
    m.def("items_are", &items_are, "dicts"_a, "items"_a);
    nb::class_<Norm>(m, "Norm")
        .def("__init__", &make_norm, nb::kw_only(), "isa"_a, "weight"_a, "columns"_a, "epsilon"_a, "offset"_a,
             "rounds_twice"_a)
        .def("run", &Norm::run, "num_threads"_a, "num_rows"_a, "x_address"_a, "x_stride"_a, "dtype"_a, "out_address"_a);
    nb::class_<Step>(m, "AttentionStep")
        .def("__init__", &make_step, nb::kw_only(), "isa"_a, "projections"_a, "shape"_a, "q_norm"_a.none(),
             "k_norm"_a.none(), "scale"_a, "sinks"_a.none(), "norm_before"_a.none() = nb::none(),
             "norm_after"_a.none() = nb::none())
        .def("project", &Step::project, "num_threads"_a, "batch"_a, "x_address"_a, "x_stride"_a, "rotary"_a,
             "out_address"_a, "keys"_a, "values"_a)
        .def("attend", &Step::attend, "num_threads"_a, "batch"_a, "query_address"_a, "key"_a, "value"_a, "num_keys"_a,
             "mask"_a, "out_address"_a, "residual_address"_a = 0, "normalised_address"_a = 0);
    nb::class_<Routing>(m, "RoutingStep")
        .def("__init__", &make_routing, nb::kw_only(), "isa"_a, "logits"_a, "router"_a, "top_k"_a)
        .def("run", &Routing::run, "num_threads"_a, "num_tokens"_a, "x_address"_a, "x_stride"_a, "logits_address"_a,
             "ids_address"_a, "weights_address"_a, "weights_dtype"_a)
        .def("run_experts", &Routing::run_experts, "num_threads"_a, "num_tokens"_a, "x_address"_a, "x_stride"_a,
             "experts"_a, "weights_dtype"_a, "residual_address"_a, "out_address"_a);
}

}  // namespace moestro
