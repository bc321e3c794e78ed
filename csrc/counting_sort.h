// Expert ids of slots, read once, and how many slots each expert has: what a stable sort by expert begins with.
#pragma once

#include <cstdint>
#include <memory>

namespace moestro {

// Ids as they were when they were read. Whatever is written to the memory they came from does not change them.
class ExpertIds {
public:
    // `ids` is an array of `count` integers at any address. One outside [0, num_experts) becomes -1, an empty slot.
    ExpertIds(const void* ids, bool are_64_bit, int64_t count, int64_t num_experts);
    // As many, none of which is read yet: `read` reads some of them, on any thread. False if one is neither an expert nor -1.
    ExpertIds(int64_t count, int64_t num_experts);
    bool read(const void* ids, bool are_64_bit, int64_t first, int64_t last);

    const int32_t* data() const { return ids_.get(); }
    int64_t count() const { return count_; }
    int32_t operator[](int64_t slot) const { return ids_[static_cast<size_t>(slot)]; }
    // Where a slot is counted: at its expert, or behind the last one.
    int64_t bin(int64_t slot) const { return ids_[static_cast<size_t>(slot)] < 0 ? num_experts_ : (*this)[slot]; }
    // counts[bin] += 1 for slots first to last.
    void add_to(int64_t* counts, int64_t first, int64_t last) const {
        for (int64_t s = first; s < last; ++s) ++counts[bin(s)];
    }

private:
    template <class Id> bool read_as(const void* ids, int64_t first, int64_t last);

    const int64_t count_, num_experts_;
    std::unique_ptr<int32_t[]> ids_;
};

}  // namespace moestro
