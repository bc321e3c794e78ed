#pragma once

#include <nanobind/nanobind.h>

namespace moestro {
void bind_peaks(nanobind::module_& m);
}
