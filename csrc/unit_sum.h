// In each lane the exact sum of a unit's products of codes below 32 with bytes, after what it begins with. Included by
// the byte part of the vector vocabulary.
#pragma once

namespace MOESTRO_ISA {

struct UnitSum {
    I sum;
    static inline UnitSum none() { return {zero_bytes()}; }
    static inline UnitSum from(const int32_t* start) { return {load_bytes(start)}; }
    inline void add(I codes, I bytes) { sum = dot4(sum, codes, bytes); }
    inline I value() const { return sum; }
    inline void store_negated(int32_t* start) const { store_bytes(start, zero_bytes() - sum); }
};

}  // namespace MOESTRO_ISA
