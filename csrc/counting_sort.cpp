#include "counting_sort.h"

#include <cstring>

namespace moestro {

ExpertIds::ExpertIds(int64_t count, int64_t num_experts)
    : count_(count), num_experts_(num_experts), ids_(new int32_t[static_cast<size_t>(count)]) {}

ExpertIds::ExpertIds(const void* ids, bool are_64_bit, int64_t count, int64_t num_experts)
    : ExpertIds(count, num_experts) {
    read(ids, are_64_bit, 0, count);
}

template <class Id> bool ExpertIds::read_as(const void* ids, int64_t first, int64_t last) {
    bool good = true;
    for (int64_t s = first; s < last; ++s) {
        Id id;
        std::memcpy(&id, static_cast<const uint8_t*>(ids) + s * static_cast<int64_t>(sizeof(Id)), sizeof(Id));
        __asm__ volatile("" : "+r"(id));  // read once: another thread may write here meanwhile
        const bool is_expert = id >= 0 && static_cast<int64_t>(id) < num_experts_;
        good = good && (is_expert || id == -1);
        ids_[static_cast<size_t>(s)] = is_expert ? static_cast<int32_t>(id) : -1;
    }
    return good;
}

bool ExpertIds::read(const void* ids, bool are_64_bit, int64_t first, int64_t last) {
    return are_64_bit ? read_as<int64_t>(ids, first, last) : read_as<int32_t>(ids, first, last);
}

}  // namespace moestro
