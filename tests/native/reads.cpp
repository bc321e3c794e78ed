// Reads under ThreadSanitizer: threads of demand and of guesses, with delays, calls that are interrupted, short reads
// and failures put in the place of pread; some requests are broken off. Fails if memory holds other bytes than the
// file, if a request that failed says it did not, or one ends twice. tools/reads.py compiles and runs it.

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <random>
#include <string>
#include <thread>

namespace {
std::atomic<uint32_t> calls{0};
std::atomic<int> failures{0};
}  // namespace

// Of every 64 calls one waits, one is interrupted, two are short; of every 512 one fails.
static ssize_t faulty_pread(int file, void* to, size_t bytes, off_t at) {
    const uint32_t call = calls.fetch_add(1) * 2654435761u >> 7;
    if (call % 64 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
    if (call % 64 == 1) return errno = EINTR, -1;
    if (call % 512 == 2) return failures.fetch_add(1), errno = EIO, -1;
    if (call % 64 > 61 && bytes > 8192) bytes = 4096;
    return ::pread(file, to, bytes, at);
}

#define MOESTRO_PREAD faulty_pread
#include "../../csrc/reads.cpp"

using namespace moestro;

namespace {

constexpr int64_t kFileBytes = 9 << 20;
constexpr int kThreads = 8;

uint8_t byte_at(int64_t offset) { return static_cast<uint8_t>((offset * 2654435761u) >> 11); }

struct Tally {
    int64_t done = 0, failed = 0, dropped = 0, wrong = 0;
};

// One after the other: requests of a few runs, half of them guesses that are dropped, hurried, or just waited for.
Tally ask(Reads& reads, int file, unsigned seed, int rounds) {
    std::mt19937 generator(seed);
    std::vector<uint8_t> memory(3 << 20);
    Tally tally;
    for (int i = 0; i < rounds; ++i) {
        std::vector<Run> runs(1 + generator() % 3);
        int64_t room = 0;
        for (Run& run : runs) {
            run.file = file, run.length = generator() % (i % 50 ? 20000 : 900000);
            run.offset = static_cast<int64_t>(generator()) % (kFileBytes - run.length);
            const int64_t step = generator() % 2 ? run.offset % kReadBlock : generator() % 64;
            room = (room + kReadBlock - 1) / kReadBlock * kReadBlock + step;
            run.to = memory.data() + room;
            room += run.length;
        }
        const bool urgent = generator() % 2;
        while (!reads.clear(runs, 1000)) continue;
        const uint64_t ticket = reads.submit(runs, urgent);
        if (generator() % 16 == 0) continue;  // broken off: the next that asks for this memory comes after it
        if (!urgent && generator() % 4 == 0) reads.hurry(ticket);
        if (!urgent && generator() % 4 == 0 && reads.drop(ticket)) {
            tally.dropped += 1;
            continue;
        }
        ReadReport report;
        while (!reads.wait(ticket, 1000, report)) continue;
        if (reads.knows(ticket)) tally.wrong += 1;
        if (report.outcome == ReadOutcome::done) {
            tally.done += 1;
            for (const Run& run : runs)
                for (int64_t b = 0; b < run.length; b += std::max<int64_t>(run.length / 64, 1))
                    tally.wrong += run.to[b] != byte_at(run.offset + b);
        } else {
            tally.failed += report.outcome == ReadOutcome::system_error && report.error == EIO;
            tally.wrong += report.outcome != ReadOutcome::system_error;
        }
    }
    Run whole;
    whole.to = memory.data(), whole.length = static_cast<int64_t>(memory.size());
    while (!reads.clear({whole}, 1000)) continue;
    return tally;
}

FileIdentity identity_now(const char* path) {
    struct stat status;
    if (::stat(path, &status)) std::abort();
    return identity_of(status);
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 3) return 2;
    const char* path = argv[1];
    const int rounds = std::atoi(argv[2]) / kThreads;
    std::vector<uint8_t> bytes(kFileBytes);
    for (int64_t i = 0; i < kFileBytes; ++i) bytes[i] = byte_at(i);
    FILE* file = std::fopen(path, "wb");
    if (!file || std::fwrite(bytes.data(), 1, bytes.size(), file) != bytes.size() || std::fclose(file)) return 2;
    Tally all;
    int64_t dropped = 0;
    bool direct = false;
    for (const bool wants_direct : {true, false}) {
        Reads reads(kThreads / 2);
        const int number = reads.open(path, identity_now(path), wants_direct);
        if (number < 0) return 2;
        direct |= reads.is_direct(number);
        std::vector<std::thread> threads;
        std::vector<Tally> tallies(kThreads);
        for (int t = 0; t < kThreads; ++t)
            threads.emplace_back([&, t] { tallies[t] = ask(reads, number, t + 10 * wants_direct, rounds / 2); });
        for (std::thread& thread : threads) thread.join();
        for (const Tally& one : tallies) {
            all.done += one.done, all.failed += one.failed, all.dropped += one.dropped, all.wrong += one.wrong;
        }
        dropped += reads.counts().dropped;
    }
    std::printf("%lld read, %lld failed, %lld dropped, %lld wrong, direct: %s\n", static_cast<long long>(all.done),
                static_cast<long long>(all.failed), static_cast<long long>(all.dropped),
                static_cast<long long>(all.wrong), direct ? "yes" : "no");
    const bool told = all.failed > 0 && all.failed <= failures.load() && all.dropped <= dropped;
    return all.wrong == 0 && all.done > 0 && told ? 0 : 1;
}
