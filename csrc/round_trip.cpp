#include "round_trip.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <limits>
#include <thread>

#include "team.h"

namespace moestro {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int64_t kTrips = 50;  // of a run
constexpr int64_t kEnd = std::numeric_limits<int64_t>::max();
constexpr int kSpins = 10000;    // before a thread lets others have its core
constexpr double kApart = 1e-6;  // seconds; a longer trip is taken for that of two threads on one core
constexpr int kPatience = 20;    // times as long is waited for such two to get a core each

double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// What the threads pass to one another, alone in its line and the one beside it.
struct alignas(128) Line {
    std::atomic<int64_t> count{0};

    void put(int64_t n) { count.store(n, std::memory_order_release); }
    int64_t wait_for(int64_t least) const {
        for (int spins = 0;;) {
            if (const int64_t found = count.load(std::memory_order_acquire); found >= least) return found;
            if (spins < kSpins) ++spins;
            else std::this_thread::yield();
        }
    }
};

class Trips {
public:
    explicit Trips(double seconds) : seconds_(seconds) {}

    void run(int thread, int all) {
        if (all < 2) return;
        if (thread == 0)
            for (int other = 1; other < all; ++other) longest_ = std::max(longest_, least_to(other, all));
        else answer(thread);
    }
    double longest() const { return longest_; }

private:
    // The first thread's counts are odd, the answers even.
    double least_to(int other, int all) {
        line_.put(0);
        turn_.put(other);
        double least = std::numeric_limits<double>::max();
        int64_t count = 0;
        const Clock::time_point begun = Clock::now();
        do {
            const Clock::time_point start = Clock::now();
            for (int64_t i = 0; i < kTrips; ++i, count += 2) {
                line_.put(count + 1);
                line_.wait_for(count + 2);
            }
            if (count > 2 * kTrips) least = std::min(least, since(start) / kTrips);  // the other one is awake
        } while (count <= 2 * kTrips || since(begun) < seconds_ / (all - 1) * (least < kApart ? 1 : kPatience));
        line_.put(kEnd);
        answered_.wait_for(other);
        return least;
    }

    void answer(int thread) {
        turn_.wait_for(thread);
        for (int64_t count = 1; line_.wait_for(count) != kEnd; count += 2) line_.put(count + 1);
        answered_.put(thread);
    }

    const double seconds_;
    double longest_ = 0;
    Line line_, turn_, answered_;
};

}  // namespace

double round_trip(int num_threads, double seconds) {
    Trips trips(seconds);
    run_team(num_threads, [&](int thread, int all) { trips.run(thread, all); });
    return trips.longest();
}

}  // namespace moestro
