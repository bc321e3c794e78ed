#pragma once

#include <nanobind/nanobind.h>

namespace moestro {

// Adds attention of one query to the module.
void bind_attention(nanobind::module_& m);

}  // namespace moestro
