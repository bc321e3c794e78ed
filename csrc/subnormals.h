// Subnormal numbers are kept, whatever the thread was told to do with them (torch.set_flush_denormal): shifted codes of
// e4m3 may be such numbers.
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace moestro {

class KeepSubnormals {
#if defined(__x86_64__)
    static constexpr unsigned kFlushes = 0x8040;  // those of inputs and of results
    const unsigned before_ = _mm_getcsr();
    const bool changed_;

public:
    // Where `keeps` is false nothing changes.
    explicit KeepSubnormals(bool keeps = true) : changed_(keeps && (before_ & kFlushes)) {
        if (changed_) _mm_setcsr(before_ & ~kFlushes);
    }
    ~KeepSubnormals() {
        if (changed_) _mm_setcsr(before_);
    }
#else
public:
    explicit KeepSubnormals(bool = true) {}
#endif
    KeepSubnormals(const KeepSubnormals&) = delete;
    KeepSubnormals& operator=(const KeepSubnormals&) = delete;
};

}  // namespace moestro
