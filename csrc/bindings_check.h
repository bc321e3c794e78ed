// What every binding does with the numbers that Python gives it: an address becomes a pointer, a code an enum, and what
// is wrong with one an error in words.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "elements.h"
#include "engine.h"

namespace moestro {

[[noreturn]] inline void refuse(const std::string& why) { throw std::invalid_argument(why); }
inline void need(bool condition, const char* why) {
    if (!condition) refuse(why);
}

template <class T> T* at(uint64_t address) { return reinterpret_cast<T*>(address); }

template <class Enum> Enum checked(int64_t value, int count, const char* name) {
    if (value < 0 || value >= count) refuse(std::string(name) + " has no code " + std::to_string(value));
    return static_cast<Enum>(value);
}
// float32, float16 or bfloat16.
inline Element checked_dtype(int64_t value) {
    if (value < 0 || value >= kNumExpertReals) refuse("a dtype other than float32, float16, bfloat16");
    return static_cast<Element>(value);
}
inline const Isa& checked_isa(int64_t index) {
    need(index >= 0 && index < kNumIsas && kIsas[index]->runs_here(), "an instruction set that this processor lacks");
    return *kIsas[index];
}
inline FloatArray array_or_none(const FloatArray* array) { return array ? *array : FloatArray(); }
// Refuses a projection that cannot be multiplied by tiles of bfloat16.
inline void need_tiles(const Projection& p, int64_t most_blocks) {
    const bool is_bf16 = p.element == Element::bf16;
    need(is_bf16 || has_scale(p.element), "an instruction set that multiplies bfloat16 only, and something else");
    const bool bytes = p.element == Element::i8 || p.element == Element::e4m3;
    const bool by_group = bytes || p.element == Element::i4 || p.element == Element::u4;
    need(!by_group || p.group_columns % 32 == 0, "groups that do not fill tiles");
    need(!bytes || (p.group_columns & (p.group_columns - 1)) == 0, "groups that are no power of two");
    const bool powers = p.element == Element::e2m1 && p.scale == Scale::e8m0;
    need(!powers || p.group_columns == 0 || p.group_columns == 32, "powers of two as scales of other groups than 32");
    need(!is_bf16 || p.num_blocks <= most_blocks, "matrices that end inside a tile");
}
inline int checked_threads(int64_t num_threads) {
    need(num_threads > 0 && num_threads <= kMostThreads, "a number of threads out of range");
    return static_cast<int>(num_threads);
}

constexpr int64_t kMostTokens = int64_t{1} << 40;

}  // namespace moestro
