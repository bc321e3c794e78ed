#pragma once

#include <nanobind/nanobind.h>

namespace moestro {

void bind_step(nanobind::module_& m);

}  // namespace moestro
