#pragma once

#include <nanobind/nanobind.h>

namespace moestro {

void bind_experts(nanobind::module_& m);

}  // namespace moestro
