// Experts in tiles of bfloat16: 16 rows of weights, bfloat16 as they lie or panels that were decoded, times 16 tokens
// whose values were put in pairs. Who includes this says how a product is made, `set_width`, `product`,
// `multiply_packed`, and before it up to how many tokens a tile is narrow and takes less time: `kNarrow`, or 0; and how
// many blocks of columns all tiles meet before the next ones: `kPieceBlocks`, or 0 where a tile meets all at once.
//
// A product is a matrix [weight row][token] of float32. The sum of an output runs over the columns in order, whatever
// else is in the tile. What stands between the projections is rounded to bfloat16.
#pragma once

#include "bfloat16_panels.h"
#include "epilogue.h"
#include "transpose.h"

namespace MOESTRO_ISA {

constexpr int64_t kTileWords = kTile * kTile;
constexpr int64_t kMostTiles = (moestro::kTokenBlock + kTile - 1) / kTile;

MOESTRO_INLINE __m512i to_bfloat16(__m512 v) {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i sum = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    return _mm512_mask_mov_epi32(sum, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc00000));
}
// Two rows of 16 tokens as the pairs of one row of a tile.
MOESTRO_INLINE __m512i bfloat16_pairs(F even, F odd) {
    return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(to_bfloat16(even.v), 16), to_bfloat16(odd.v));
}

// 16 tokens' rows of bfloat16, null for none, as tiles one after the other: to[block][pair][token].
static void pack(const uint16_t* const* rows, int width, int64_t columns, bool nibbles, uint32_t* to) {
    const auto tokens = static_cast<__mmask16>((1 << width) - 1);
    alignas(64) uint16_t order[32];
    for (int i = 0; i < 32; ++i) order[i] = static_cast<uint16_t>(nibbles ? 4 * (i % 8) + i / 8 : i);
    const __m512i index = _mm512_load_si512(order);
    for (int64_t k = 0; k < columns; k += kColumns, to += kTile * width) {
        const int64_t n = columns - k < kColumns ? columns - k : kColumns;
        const __mmask32 mask = n == kColumns ? ~__mmask32{0} : (__mmask32{1} << n) - 1;
        __m512i r[16];
        for (int t = 0; t < kTile; ++t) {
            r[t] = rows[t] ? _mm512_maskz_loadu_epi16(mask, rows[t] + k) : _mm512_setzero_si512();
            if (nibbles) r[t] = _mm512_permutexvar_epi16(index, r[t]);
        }
        transpose(r);
        for (int t = 0; t < kTile; ++t) _mm512_mask_storeu_epi32(to + t * width, tokens, r[t]);
    }
}

// Rows of weights that a tile can be loaded from: where they lie, or a copy where there are fewer than 16.
struct Source {
    const uint8_t* rows[2];
    int64_t stride[2];
    const uint8_t* last[2];  // the last columns where they do not fill a tile
    int64_t whole;           // blocks of 32 columns
    bool has_last;
    const uint8_t* next[2];
    int64_t next_stride[2];
};
static Source source_of(const TileRows& w, uint8_t* scratch) {
    Source s;
    s.whole = w.columns / kColumns;
    s.has_last = w.columns % kColumns != 0;
    const int64_t row_bytes = w.columns * 2, padded = (s.whole + s.has_last) * 64;
    for (int i = 0; i < 2; ++i) {
        s.rows[i] = w.first[i];
        s.stride[i] = w.stride[i];
        s.next[i] = w.next[i];
        s.next_stride[i] = w.next_stride[i];
        if (w.count[i] < kTile) {
            std::memset(scratch, 0, static_cast<size_t>(kTile * padded));
            for (int r = 0; r < w.count[i]; ++r)
                std::memcpy(scratch + r * padded, w.first[i] + r * w.stride[i], static_cast<size_t>(row_bytes));
            s.rows[i] = scratch;
            s.stride[i] = padded;
        }
        scratch += kTile * padded;
        s.last[i] = scratch;
        if (s.has_last) {
            const int64_t done = s.whole * 64;
            std::memset(scratch, 0, kTile * 64);
            for (int r = 0; r < w.count[i]; ++r)
                std::memcpy(scratch + r * 64, w.first[i] + r * w.stride[i] + done,
                            static_cast<size_t>(row_bytes - done));
        }
        scratch += kTile * 64;
    }
    return s;
}

struct Piece {
    int64_t first, blocks;  // of 32 columns
    bool fetches;           // the rows that follow; with all columns at once each call does
};

// From now on a tile has so many tokens.
static void set_width(int width);
// Adds a piece to c[tile][half][row][token], or writes there what all columns give, for one or two tiles of tokens,
// `step` words apart, the last of which is narrow, or not.
template <int Tiles, bool Narrow>
static void product(const Source& s, Piece piece, const uint32_t* x, int width, int64_t step, float* c);
// Tiles of tokens, `step` words apart, the last of which has so many.
struct Tokens {
    const uint32_t* x;
    int64_t tiles, step;
    int last_tokens;
};
// Adds the products of all tiles to c[tile][half][row][token], which is zero; there is room for the panels of all
// columns.
template <class Decoder>
static void multiply_packed(const Decoder& decoder, uint16_t* panels, const Tokens& tokens, float* c);

template <int Tiles, bool Narrow> struct Taken {
    static constexpr int kTiles = Tiles;
    static constexpr bool kNarrow = Narrow;
};
// Calls multiply(first tile, Taken) for tiles two by two. Of an odd number one is by itself: the last, or the first
// where the last is narrow. A narrow tile takes least time beside another one.
template <class Multiply> MOESTRO_INLINE void two_by_two(const Tokens& tokens, Multiply multiply) {
    const int64_t tiles = tokens.tiles;
    const bool narrow = tokens.last_tokens <= kNarrow;
    int taken = narrow && tiles % 2 ? 1 : 2;
    for (int64_t t = 0; t < tiles; t += taken, taken = 2) {
        if (tiles - t < taken) taken = 1;
        const bool ends_narrow = narrow && t + taken == tiles;
        if constexpr (kNarrow > 0) {
            if (ends_narrow && taken == 2) multiply(t, Taken<2, true>());
            else if (ends_narrow) multiply(t, Taken<1, true>());
        }
        if (!ends_narrow && taken == 2) multiply(t, Taken<2, false>());
        else if (!ends_narrow) multiply(t, Taken<1, false>());
    }
}

static void multiply_stored(const Source& s, int width, const Tokens& tokens, float* c) {
    const int64_t blocks = s.whole + s.has_last, at_once = kPieceBlocks ? kPieceBlocks : blocks;
    for (int64_t first = 0; first < blocks; first += at_once)
        two_by_two(tokens, [&](int64_t t, auto taken) __attribute__((always_inline)) {
            const Piece piece{first, blocks - first < at_once ? blocks - first : at_once, t == 0};
            product<decltype(taken)::kTiles, decltype(taken)::kNarrow>(s, piece, tokens.x + t * tokens.step, width,
                                                                       tokens.step, c + 2 * t * kTileWords);
        });
}

// Calls each(tile, its sums [half][row][token]) for every tile of tokens.
template <class Each>
MOESTRO_INLINE void products(const TileRows& w, const uint32_t* x, int64_t tiles, uint8_t* scratch, Each each) {
    const Tokens tokens{x, tiles, moestro::tile_words(w.columns), w.last_tokens};
    constexpr int64_t kTileSums = 2 * kTileWords;
    alignas(64) float c[kMostTiles * kTileSums];
    std::memset(c, 0, static_cast<size_t>(tiles * kTileSums) * sizeof(float));  // lanes without a token stay zero
    set_width(w.width);
    if (w.element == Element::bf16) {
        multiply_stored(source_of(w, scratch), w.width, tokens, c);
    } else {
        float factors[2 * kTile];
        const Packed p = packed_of(w, reinterpret_cast<float*>(scratch), factors);
        auto* panels = reinterpret_cast<uint16_t*>(scratch + round_up(4 * kTile * p.room * 4, 64));
        with_decoder(p, [&](const auto& decoder) { multiply_packed(decoder, panels, tokens, c); });
        for (int64_t row = 0; row < tiles * 2 * kTile; ++row)
            store(c + row * kTile, load(c + row * kTile) * set1(factors[row % (2 * kTile)]));
    }
    for (int64_t t = 0; t < tiles; ++t) each(t, c + t * kTileSums);
}

// The first rows of each half are gate's and up's (gated), or the lower and the upper half of 32 columns of h.
static void gate_up(const TileRows& w, const float* bias, const Activation& act, const uint32_t* x, int64_t tiles,
                    int64_t column, uint32_t* h, uint8_t* scratch) {
    products(w, x, tiles, scratch, [&](int64_t t, float* c) __attribute__((always_inline)) {
        const auto value = [&](int half, int row) {
            const F v = load(c + (half * kTile + row) * kTile);
            return bias ? v + set1(bias[half * kTile + row]) : v;
        };
        const auto result = [&](int half, int row) {
            if (row >= w.count[half]) return zero();
            return activated(act, value(half, row), act.gated ? value(1, row) : zero());
        };
        uint32_t* to = h + t * w.out_step;
        const auto tokens = static_cast<__mmask16>((1 << w.width) - 1);
        for (int half = 0; half < (act.gated ? 1 : 2) && w.count[half]; ++half) {
            const int64_t first = column + half * kTile;
            for (int row = 0; row < kTile; row += 2) {
                // Columns a and b of h make up a pair: neighbours, or four apart where nibbles follow.
                const int a = w.out_nibbles ? row / 8 * 8 + row % 8 / 2 : row, b = w.out_nibbles ? a + 4 : a + 1;
                const int64_t at = first + a,
                              pair = w.out_nibbles ? at / kColumns * kTile + at % 4 * 4 + at % kColumns / 8 : at / 2;
                _mm512_mask_storeu_epi32(to + pair * w.width, tokens, bfloat16_pairs(result(half, a), result(half, b)));
            }
        }
    });
}

// y[t][first + i] for the tokens of the tiles that have a row.
static void down(const TileRows& w, const float* bias, const uint32_t* h, int64_t tiles, float* const* y,
                 uint8_t* scratch) {
    products(w, h, tiles, scratch, [&](int64_t t, float* c) __attribute__((always_inline)) {
        for (int half = 0; half < 2; ++half) {
            const int n = w.count[half];
            __m512i r[16];
            for (int row = 0; row < kTile; ++row) {
                F v = load(c + (half * kTile + row) * kTile);
                if (bias) v = v + set1(bias[half * kTile + row]);
                r[row] = _mm512_castps_si512(v.v);
            }
            transpose(r);
            const __mmask16 mask = n == kTile ? 0xffff : static_cast<__mmask16>((1 << n) - 1);
            for (int token = 0; token < kTile; ++token)
                if (float* to = y[t * kTile + token]) _mm512_mask_storeu_epi32(to + half * kTile, mask, r[token]);
        }
    });
}

}  // namespace MOESTRO_ISA
