#pragma once

#include <nanobind/nanobind.h>

namespace moestro {

void bind_reads(nanobind::module_& m);

}  // namespace moestro
