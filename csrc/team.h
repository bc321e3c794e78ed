// A team of threads: PyTorch's own where OpenMP is shared with it, and never more than were asked for.
#pragma once

#include <functional>

namespace moestro {

// Runs `work(thread, num_threads)` once on each of at most `num_threads` threads, this one among them, and waits.
// In a child of `fork` the parent's team is gone and may not be woken; another one is started there.
void run_team(int num_threads, const std::function<void(int, int)>& work);

}  // namespace moestro
