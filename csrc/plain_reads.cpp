#include "plain_reads.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "team.h"

namespace moestro {
namespace {

constexpr int64_t kPartBytes = 256 << 10;  // what a thread takes at once
constexpr int64_t kStreams = 4;
constexpr int kLineWords = 8;  // of 64 bytes

std::vector<Piece> cut(const std::vector<Piece>& pieces) {
    std::vector<Piece> parts;
    for (const Piece& piece : pieces)
        for (int64_t at = 0; at < piece.bytes; at += kPartBytes)
            parts.push_back({piece.data + at, std::min(kPartBytes, piece.bytes - at)});
    return parts;
}

// All words by exclusive or, the words of a line each with one of eight.
void read(const Piece& part, uint64_t (&found)[kLineWords]) {
    const int64_t line = kLineWords * sizeof(uint64_t), stride = part.bytes / kStreams / line * line;
    uint64_t sum[kLineWords] = {};
    for (int64_t at = 0; at < stride; at += line)
        for (int64_t s = 0; s < kStreams; ++s) {
            uint64_t words[kLineWords];
            std::memcpy(words, part.data + s * stride + at, sizeof words);
            for (int w = 0; w < kLineWords; ++w) sum[w] ^= words[w];
        }
    for (int64_t i = kStreams * stride; i < part.bytes; ++i) sum[0] ^= part.data[i];
    for (int w = 0; w < kLineWords; ++w) found[w] ^= sum[w];
}

}  // namespace

uint64_t plain_read(const std::vector<Piece>& pieces, int num_threads) {
    const std::vector<Piece> parts = cut(pieces);
    std::atomic<size_t> next{0};
    std::atomic<uint64_t> all{0};
    run_team(num_threads, [&](int, int) {
        uint64_t found[kLineWords] = {}, one = 0;
        for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < parts.size();) read(parts[i], found);
        for (uint64_t word : found) one ^= word;
        all.fetch_xor(one);
    });
    return all.load();
}

}  // namespace moestro
