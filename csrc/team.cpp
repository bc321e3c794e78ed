#include "team.h"

#include <atomic>
#include <exception>
#include <mutex>
#include <thread>

#if defined(_OPENMP)
#include <omp.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace moestro {
namespace {

std::atomic<bool> forked{false};

struct WatchForks {
    WatchForks() {
#if defined(__unix__) || defined(__APPLE__)
        pthread_atfork(nullptr, nullptr, [] { forked.store(true); });
#endif
    }
} watch_forks;

void run_here(int num_threads, const std::function<void(int, int)>& work) {
#if defined(_OPENMP)
    if (num_threads > 1 && !omp_in_parallel()) {
        // No exception may leave a thread of the team.
        std::exception_ptr failure;
        std::mutex mutex;
#pragma omp parallel num_threads(num_threads)
        {
            try {
                work(omp_get_thread_num(), omp_get_num_threads());
            } catch (...) {
                const std::lock_guard<std::mutex> lock(mutex);
                failure = std::current_exception();
            }
        }
        if (failure) std::rethrow_exception(failure);
        return;
    }
#endif
    (void)num_threads;
    work(0, 1);
}

}  // namespace

void run_team(int num_threads, const std::function<void(int, int)>& work) {
    if (num_threads > 1 && forked.load()) {
        std::exception_ptr failure;
        std::thread([&] {  // whose own team is new
            try {
                run_here(num_threads, work);
            } catch (...) {
                failure = std::current_exception();
            }
        })
            .join();
        if (failure) std::rethrow_exception(failure);
        return;
    }
    run_here(num_threads, work);
}

}  // namespace moestro
