// The fastest that a processor multiplies and adds, from registers: what a measured time is a share of.
#pragma once

#include <cstdint>

#include "processor.h"

namespace moestro {

struct PeakKernel {
    const char* name;
    double operations;  // of one iteration; a multiply-add counts two
    Features needs;
    void (*run)(int64_t iterations);

    bool runs_here() const { return lacking(needs) == 0; }
};

extern const PeakKernel kPeakKernels[];
extern const int kNumPeakKernels;

// Operations a second of `num_threads` threads at once: the best of several runs that take about `seconds` together.
double peak_rate(const PeakKernel& kernel, int num_threads, double seconds);

}  // namespace moestro
