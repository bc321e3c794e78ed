// Tiles of bfloat16 on AMX.

#define MOESTRO_ISA moestro_amx
namespace MOESTRO_ISA {
constexpr int kNarrow = 0;
constexpr int kPieceBlocks = 0;
}  // namespace MOESTRO_ISA
#include "../vec_avx512.h"
#include "../bfloat16_tiles.h"
#include "shared.h"

namespace MOESTRO_ISA {

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};
static thread_local int configured = 0;  // tokens of a tile

// Tiles 4 and 5 are of weights, 6 and 7 of tokens, the others of sums.
static void configure(int width) {
    TileConfig config;
    for (int i = 0; i < 8; ++i) {
        config.rows[i] = kTile;
        config.row_bytes[i] = static_cast<uint16_t>(i == 4 || i == 5 ? 64 : 4 * width);
    }
    __asm__ volatile("" : : "m"(config));  // gcc 12 does not know that the instruction reads all of it
    _tile_loadconfig(&config);
    configured = width;
}
static void set_width(int width) {
    if (width != configured) configure(width);
}
static void begin() { configure(kTile); }
static void end() { _tile_release(); }

template <int Tiles, bool>
static void product(const Source& s, Piece, const uint32_t* x, int width, int64_t step, float* c) {
    __asm__ volatile("" ::: "memory");  // gcc 12 does not know that tiles are loaded from memory that was just written
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (Tiles == 2) {
        _tile_zero(2);
        _tile_zero(3);
    }
    const uint8_t *a = s.rows[0], *b = s.rows[1], *next_a = s.next[0] ? s.next[0] : s.rows[0],
                  *next_b = s.next[0] ? s.next[1] : s.rows[1];
    const int64_t blocks = s.whole + s.has_last;
    for (int64_t k = 0; k < blocks; ++k, a += 64, b += 64, next_a += 64, next_b += 64, x += kTile * width) {
        const bool last = k == s.whole;
        if (s.next[0] && !last) {
#pragma GCC unroll 16
            for (int r = 0; r < kTile; ++r) {
                _mm_prefetch(reinterpret_cast<const char*>(next_a + r * s.next_stride[0]), _MM_HINT_T1);
                _mm_prefetch(reinterpret_cast<const char*>(next_b + r * s.next_stride[1]), _MM_HINT_T1);
            }
        }
        _tile_loadd(6, x, 4 * width);
        _tile_loadd(4, last ? s.last[0] : a, last ? 64 : s.stride[0]);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, last ? s.last[1] : b, last ? 64 : s.stride[1]);
        _tile_dpbf16ps(1, 5, 6);
        if constexpr (Tiles == 2) {
            _tile_loadd(7, x + step, 4 * width);
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, c, 64);
    _tile_stored(1, c + kTileWords, 64);
    if constexpr (Tiles == 2) {
        _tile_stored(2, c + 2 * kTileWords, 64);
        _tile_stored(3, c + 3 * kTileWords, 64);
    }
}

// The sums of one or two tiles of tokens, each half of whose rows is in a tile.
template <int Tiles> MOESTRO_INLINE void clear() {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (Tiles == 2) {
        _tile_zero(2);
        _tile_zero(3);
    }
}
// Adds the products of a block of 32 columns; `meanwhile(i)` is what the processor may do beside those of half i.
template <int Tiles, class Meanwhile>
MOESTRO_INLINE void multiply(const uint16_t* tiles, const uint32_t* x, int width, int64_t step, Meanwhile meanwhile) {
    _tile_loadd(6, x, 4 * width);
    _tile_loadd(4, tiles, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (Tiles == 2) {
        _tile_loadd(7, x + step, 4 * width);
        _tile_dpbf16ps(2, 4, 7);
    }
    meanwhile(0);
    _tile_loadd(5, tiles + kTile * kColumns, 64);
    _tile_dpbf16ps(1, 5, 6);
    if constexpr (Tiles == 2) _tile_dpbf16ps(3, 5, 7);
    meanwhile(1);
}
template <int Tiles> MOESTRO_INLINE void store_tiles(float* c) {
    _tile_stored(0, c, 64);
    _tile_stored(1, c + kTileWords, 64);
    if constexpr (Tiles == 2) {
        _tile_stored(2, c + 2 * kTileWords, 64);
        _tile_stored(3, c + 3 * kTileWords, 64);
    }
}

// Adds the sums of n groups, `first` the first of them, times the scale of each row, to c.
template <int Tiles> static void add_scaled(const Packed& p, int64_t first, int64_t n, const float* sums, float* c) {
    for (int t = 0; t < 2 * Tiles; ++t) {
        const int half = t % 2;
        float* to = c + t * kTileWords;
        F sum[kTile];
#pragma GCC unroll 16
        for (int row = 0; row < kTile; ++row) sum[row] = load(to + row * kTile);
        for (int64_t g = 0; g < n; ++g) {
            const float *from = sums + (g * 2 * Tiles + t) * kTileWords,
                        *scales = p.scales + half * kTile * p.room + first + g;
#pragma GCC unroll 16
            for (int row = 0; row < kTile; ++row)
                sum[row] = fma(load(from + row * kTile), set1(scales[row * p.room]), sum[row]);
        }
#pragma GCC unroll 16
        for (int row = 0; row < kTile; ++row) store(to + row * kTile, sum[row]);
    }
}

// From panels: those of all columns stand one after the other in `panels`, or two take turns.
template <int Tiles, class Decoder> static void packed_product(const Decoder& decoder, uint16_t* panels, bool decode,
                                                               bool keep, const uint32_t* x, int64_t step, float* c) {
    const Packed& p = decoder.p;
    const int width = p.rows->width;
    const bool by_group = p.scaled == Scaled::group;
    const int64_t blocks = moestro::tile_words(p.rows->columns) / kTileWords,
                  per_group = by_group ? p.group / kColumns : blocks;
    alignas(64) float sums[4 * 2 * Tiles * kTileWords];
    if (by_group && width < kTile) std::memset(sums, 0, sizeof sums);
    const auto panel = [&](int64_t i) { return panels + (keep ? i : i % 2) * kPanelWords; };
    for (int r = 0; r < 2 * kTile && decode && blocks; r += kPart) decoder.part(0, r, panel(0));
    clear<Tiles>();
    for (int64_t b = 0, in_group = 0, groups = 0; b < blocks; ++b) {
        // The next panel is decoded part by part while products of this one are under way.
        const int64_t next = b / 4 + 1;
        const bool more = decode && next * 4 < blocks;
        uint16_t* const to = panel(next);
        __asm__ volatile(
            "" ::
                : "memory");  // gcc 12 does not know that tiles are loaded from memory that was just written
        multiply<Tiles>(panel(b / 4) + b % 4 * 2 * kTile * kColumns, x + b * kTile * width, width, step,
                        [&](int half) __attribute__((always_inline)) {
                            if (more) decoder.part(next * kPanel, static_cast<int>(b % 4 * 2 + half) * kPart, to);
                        });
        const bool last = b + 1 == blocks;
        if (!by_group || (++in_group < per_group && !last)) continue;
        store_tiles<Tiles>(sums + groups++ * 2 * Tiles * kTileWords);
        in_group = 0;
        if (!last) clear<Tiles>();
        if (b % 4 != 3 && !last) continue;
        __asm__ volatile("" ::: "memory");
        add_scaled<Tiles>(p, (b - b % 4) / per_group, groups, sums, c);
        groups = 0;
    }
    if (!by_group) store_tiles<Tiles>(c);
}

template <class Decoder>
static void multiply_packed(const Decoder& decoder, uint16_t* panels, const Tokens& tokens, float* c) {
    two_by_two(tokens, [&](int64_t t, auto taken) {
        packed_product<decltype(taken)::kTiles>(decoder, panels, t == 0, tokens.tiles > 2, tokens.x + t * tokens.step,
                                                tokens.step, c + 2 * t * kTileWords);
    });
}

static const moestro::TileOps kTileOps = {begin, end, pack, gate_up, down};

constexpr moestro::Isa make_isa() {
    using moestro::Feature;
    moestro::Isa isa =
        basic_isa("amx", moestro::all_of({Feature::amx_tile, Feature::amx_bf16, Feature::avx512f, Feature::avx512bw,
                                          Feature::avx512dq, Feature::avx512vl, Feature::avx512_bf16,
                                          Feature::avx512vbmi, Feature::avx512_vnni, Feature::tiles_allowed}));
    isa.four_rows = moestro::avx512::four_rows;
    isa.tiles = &kTileOps;
    isa.int8_residual = &moestro::avx512_vbmi::kInt8Residual;
    return isa;
}

}  // namespace MOESTRO_ISA

namespace moestro {
extern const Isa kAmx = MOESTRO_ISA::make_isa();
}  // namespace moestro
