// Python's way to the measured peaks.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <string>

#include "bindings_peaks.h"
#include "peaks.h"

namespace nb = nanobind;

namespace moestro {
namespace {

// Operations a second by name, of what this processor has; the faster one where there are several of a name.
nb::dict peaks(int num_threads, double seconds) {
    if (num_threads < 1 || num_threads > (1 << 16)) throw std::invalid_argument("a number of threads out of range");
    if (!(seconds >= 0 && seconds < 3600)) throw std::invalid_argument("seconds out of range");
    nb::dict found;
    for (int i = 0; i < kNumPeakKernels; ++i) {
        const PeakKernel& kernel = kPeakKernels[i];
        if (!kernel.runs_here()) continue;
        double rate = 0;
        {
            nb::gil_scoped_release release;
            rate = peak_rate(kernel, num_threads, seconds);
        }
        if (found.contains(kernel.name)) rate = std::max(rate, nb::cast<double>(found[kernel.name]));
        found[kernel.name] = rate;
    }
    return found;
}

}  // namespace

void bind_peaks(nb::module_& m) { m.def("peaks", &peaks); }

}  // namespace moestro
