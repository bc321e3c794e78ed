// The module: what can be computed here, the codes and limits that Python uses, and the parts that compute.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings_attention.h"
#include "bindings_experts.h"
#include "bindings_linear.h"
#include "bindings_peaks.h"
#include "bindings_reads.h"
#include "bindings_routing.h"
#include "bindings_step.h"
#include "choose.h"
#include "engine.h"
#include "reads.h"
#include "routing.h"

namespace nb = nanobind;
using namespace moestro;

namespace {

struct IsaFacts {
    const Isa& isa;
    int index;
};

nb::tuple names(Features features) {
    nb::list found;
    for (const std::string& name : names_of(features)) found.append(name);
    return nb::tuple(found);
}

template <class Get> nb::dict codes(int count, Get get) {
    nb::dict found;
    for (int i = 0; i < count; ++i) found[get(i)] = i;
    return found;
}

nb::dict limits() {
    nb::dict found;
    found["most_slots"] = kMostSlots;
    found["most_int8_columns"] = kMostInt8Columns;
    found["token_block"] = kTokenBlock;
    found["outer_token_block"] = kOuterTokenBlock;
    found["most_experts"] = kMostExperts;
    found["most_scores"] = kMostScores;
    found["most_threads"] = kMostThreads;
    found["most_readers"] = kMostReaders;
    return found;
}

nb::list isas() {
    nb::list found;
    for (int i = 0; i < kNumIsas; ++i) found.append(nb::cast(IsaFacts{*kIsas[i], i}));
    return found;
}

void bind_isas(nb::module_& m) {
    nb::class_<IsaFacts>(m, "Isa")
        .def_prop_ro("name", [](const IsaFacts& i) { return i.isa.name; })
        .def_prop_ro("index", [](const IsaFacts& i) { return i.index; })
        .def_prop_ro("needs", [](const IsaFacts& i) { return names(i.isa.needs); })
        .def_prop_ro("missing", [](const IsaFacts& i) { return names(lacking(i.isa.needs)); })
        .def_prop_ro("runs_here", [](const IsaFacts& i) { return i.isa.runs_here(); })
        .def_prop_ro("lanes", [](const IsaFacts& i) { return i.isa.lanes; })
        .def_prop_ro("direct_tokens", [](const IsaFacts& i) { return i.isa.direct_tokens; })
        .def_prop_ro("direct_16_bit_tokens", [](const IsaFacts& i) { return i.isa.direct_16_bit_tokens; })
        .def_prop_ro("multiplies_bfloat16", [](const IsaFacts& i) { return i.isa.tiles != nullptr; })
        .def_prop_ro("has_tile_unit", [](const IsaFacts& i) { return i.isa.tiles && !i.isa.tiles->are_vectors; })
        .def_prop_ro("multiplies_floats", [](const IsaFacts& i) { return i.isa.four_rows != nullptr; })
        .def_prop_ro("multiplies_int8", [](const IsaFacts& i) { return i.isa.int8 != nullptr; })
        .def_prop_ro("multiplies_int8_residual", [](const IsaFacts& i) { return i.isa.int8_residual != nullptr; })
        .def_prop_ro("multiplies_int16", [](const IsaFacts& i) { return i.isa.int16 != nullptr; })
        .def_prop_ro("has_outer_products", [](const IsaFacts& i) { return i.isa.outer_products != nullptr; })
        .def_prop_ro("shifts_e4m3", [](const IsaFacts& i) { return shifts_e4m3(i.isa); });
    m.def("isas", &isas);
    m.def("mask", &mask);
}

void bind_codes(nb::module_& m) {
    m.attr("ELEMENTS") = codes(kNumElements, [](int i) { return kElements[i].name; });
    m.attr("SCALES") = codes(kNumScales, [](int i) { return kScales[i].name; });
    m.attr("FLOATS") = codes(kNumReals, [](int i) { return kReals[i]; });
    m.attr("ACTIVATIONS") = codes(kNumKinds, [](int i) { return kKinds[i]; });
    m.attr("SCORES") = codes(kNumScores, [](int i) { return kScores[i]; });
    m.attr("LIMITS") = limits();
    nb::list integers, tiled;
    for (const ElementFacts& e : kElements) {
        if (e.is_integer) integers.append(e.name);
        if (e.has_tiles) tiled.append(e.name);
    }
    m.attr("INTEGERS") = nb::tuple(integers);
    m.attr("TILED") = nb::tuple(tiled);
}

// The table of kernels in words: (kernel, when), and (weights, rows beside floats, rows beside an int8 residual).
nb::tuple kernel_table() {
    nb::list kernels, tiles;
    for (const KernelRule& rule : kernel_rules()) kernels.append(nb::make_tuple(rule.kernel, rule.when));
    for (const TileRule& rule : tile_rules())
        tiles.append(nb::make_tuple(rule.weights, rule.with_floats, rule.with_int8_residual));
    return nb::make_tuple(kernels, tiles);
}

}  // namespace

NB_MODULE(_native, m) {
    nb::set_leak_warnings(false);  // descriptions are remembered until the process ends
    bind_isas(m);
    bind_codes(m);
    m.def("kernel_table", &kernel_table);
    bind_attention(m);
    bind_experts(m);
    bind_linear(m);
    bind_peaks(m);
    bind_reads(m);
    bind_routing(m);
    bind_step(m);
}
