// Whether the system lets this process use AMX's tiles.
#pragma once

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

// Of each file's own, since files are compiled for different instruction sets.
static bool tiles_allowed() {
#if defined(__linux__) && defined(SYS_arch_prctl)
    constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool granted = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
    return granted;
#else
    return false;
#endif
}
