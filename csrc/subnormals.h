// Subnormal numbers are kept, whatever the thread was told to do with them (torch.set_flush_denormal): stored weights
// may become such numbers.
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace moestro {

class KeepSubnormals {
#if defined(__x86_64__)
    static constexpr unsigned kFlushes = 0x8040;  // those of inputs and of results
    const unsigned before_ = _mm_getcsr();

public:
    KeepSubnormals() {
        if (before_ & kFlushes) _mm_setcsr(before_ & ~kFlushes);
    }
    ~KeepSubnormals() {
        if (before_ & kFlushes) _mm_setcsr(before_);
    }
#else
public:
    KeepSubnormals() = default;
#endif
    KeepSubnormals(const KeepSubnormals&) = delete;
    KeepSubnormals& operator=(const KeepSubnormals&) = delete;
};

}  // namespace moestro
