#pragma once

#include <nanobind/nanobind.h>

namespace moestro {

// Adds top-k, routers and grouping to the module.
void bind_routing(nanobind::module_& m);

}  // namespace moestro
