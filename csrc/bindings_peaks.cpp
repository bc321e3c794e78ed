// Python's way to what is measured of the machine: the peaks of registers and of memory, and how far threads are apart.

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "bindings_peaks.h"
#include "peaks.h"
#include "plain_reads.h"
#include "round_trip.h"

namespace nb = nanobind;

namespace moestro {
namespace {

void check_threads(int num_threads) {
    if (num_threads < 1 || num_threads > (1 << 16)) throw std::invalid_argument("a number of threads out of range");
}

// Operations a second by name, of what this processor has; the faster one where there are several of a name.
nb::dict peaks(int num_threads, double seconds) {
    check_threads(num_threads);
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

// Reads memory that the caller keeps: addresses and numbers of bytes.
uint64_t read(const std::vector<std::pair<uintptr_t, int64_t>>& pieces, int num_threads) {
    check_threads(num_threads);
    std::vector<Piece> found;
    for (const auto& [address, bytes] : pieces) {
        if (bytes < 0 || (bytes && !address)) throw std::invalid_argument("a piece that is no memory");
        found.push_back({reinterpret_cast<const uint8_t*>(address), bytes});
    }
    nb::gil_scoped_release release;
    return plain_read(found, num_threads);
}

// As `round_trip`, in seconds.
double trip(int num_threads, double seconds) {
    check_threads(num_threads);
    if (!(seconds >= 0 && seconds < 3600)) throw std::invalid_argument("seconds out of range");
    nb::gil_scoped_release release;
    return round_trip(num_threads, seconds);
}

}  // namespace

void bind_peaks(nb::module_& m) {
    m.def("peaks", &peaks);
    m.def("plain_read", &read);
    m.def("round_trip", &trip);
}

}  // namespace moestro
