// What tiles of integer dots fetch of the rows that come next: in bursts before each tile, or beside its dots.
#pragma once

#include "kernels.h"

namespace MOESTRO_ISA {

// The rows that come next, a share of them before each tile of tokens: all at once they would hold up what is loaded
// now.
struct Prefetched {
    const FourRows& rows;
    int64_t at = 0, bytes, share;

    Prefetched(const FourRows& asked, int64_t row_bytes, int64_t m, int64_t most)
        : rows(asked), bytes(asked.next[0] ? row_bytes : 0),
          share(round_up(row_bytes / ((m + most - 1) / most) + 1, 64)) {}
    MOESTRO_INLINE void some() {
        const int64_t stop = at + share < bytes ? at + share : bytes;
        for (; at < stop; at += 64)
            for (int r = 0; r < kRows; ++r) prefetch(rows.next[r] + at);
    }
};

// Whether fetch_ahead_in_row (stored_rows.h) has rows of int8 fetch themselves: the first next then lies in its row.
MOESTRO_INLINE bool fetch_themselves(const FourRows& rows) {
    return rows.next[0] > rows.data[0] && rows.next[0] - rows.data[0] < rows.columns;
}

// The rows for one of so many tiles of tokens. Each row that comes next is fetched whole, with one of the tiles; in
// place of the others stand rows that the tile reads anyway. Rows that fetch themselves do it with the first tile,
// which is the one that waits for them.
MOESTRO_INLINE FourRows fetching_share(const FourRows& rows, int64_t tile, int64_t tiles) {
    FourRows given = rows;
    const int64_t shares = fetch_themselves(rows) ? 1 : tiles;
    bool fetches = false;
    for (int r = 0; r < kRows && rows.next[0]; ++r) {
        const bool now = r * shares / kRows == tile;
        if (!now) given.next[r] = rows.data[r];
        fetches |= now;
    }
    if (!fetches) given.next[0] = nullptr;
    return given;
}

}  // namespace MOESTRO_ISA
