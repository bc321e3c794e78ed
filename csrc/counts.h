// How often each kernel ran, while somebody counts: of each projection the (expert, block of token rows) units.
#pragma once

#include <atomic>
#include <cstdint>

#include "choose.h"

namespace moestro {

enum class Stage : int { gate_up, down, linear };
constexpr const char* kStages[] = {"gate_up", "down", "linear"};
constexpr int kNumStages = 3;

extern std::atomic<bool> counting;
extern std::atomic<int64_t> kernel_counts[kNumStages][kNumKernels];

inline bool is_counting() { return counting.load(std::memory_order_relaxed); }
inline void count(Stage stage, Kernel kernel) {
    kernel_counts[static_cast<int>(stage)][static_cast<int>(kernel)].fetch_add(1, std::memory_order_relaxed);
}

}  // namespace moestro
