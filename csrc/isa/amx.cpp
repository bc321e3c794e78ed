// bfloat16 weights and tokens on AMX: 16 rows of weights, as they lie, times 16 tokens whose values were put in pairs.
//
// A product is a matrix [weight row][token] of float32. The sum of an output runs over the columns in order, whatever else
// is in the tile. What stands between the projections is rounded to bfloat16.

#define MOESTRO_ISA moestro_amx
#include "../vec_avx512.h"
#include "../epilogue.h"

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace MOESTRO_ISA {

using moestro::TileRows;
constexpr int kTile = 16;       // rows of weights, tokens, and pairs of columns of a tile
constexpr int64_t kColumns = 32;
constexpr int64_t kTileWords = kTile * kTile;

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static const TileConfig kConfig;  // of all of which gcc 12 does not know that the instruction reads it
static void begin() { _tile_loadconfig(&kConfig); }
static void end() { _tile_release(); }

MOESTRO_INLINE __m512i rounded(__m512 v) {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i sum = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    return _mm512_mask_mov_epi32(sum, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc00000));
}
// Two rows of 16 tokens as the pairs of one row of a tile.
MOESTRO_INLINE __m512i pairs(F even, F odd) {
    return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(rounded(even.v), 16), rounded(odd.v));
}

static void transpose(__m512i* r) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; ++i) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

// 16 tokens' rows of bfloat16, null for none, as tiles one after the other: to[block][pair][token].
static void pack(const uint16_t* const* rows, int64_t columns, uint32_t* to) {
    for (int64_t k = 0; k < columns; k += kColumns, to += kTileWords) {
        const int64_t n = columns - k < kColumns ? columns - k : kColumns;
        const __mmask32 mask = n == kColumns ? ~__mmask32{0} : (__mmask32{1} << n) - 1;
        __m512i r[16];
        for (int t = 0; t < kTile; ++t) r[t] = rows[t] ? _mm512_maskz_loadu_epi16(mask, rows[t] + k) : _mm512_setzero_si512();
        transpose(r);
        for (int t = 0; t < kTile; ++t) _mm512_storeu_si512(to + t * kTile, r[t]);
    }
}

// Rows of weights that a tile can be loaded from: where they lie, or a copy where there are fewer than 16.
struct Source {
    const uint8_t* rows[2];
    int64_t stride[2];
    const uint8_t* last[2];  // the last columns where they do not fill a tile
    int64_t whole;           // blocks of 32 columns
    bool has_last;
    int64_t ahead;
};
static Source source_of(const TileRows& w, uint8_t* scratch) {
    Source s;
    s.whole = w.columns / kColumns;
    s.has_last = w.columns % kColumns != 0;
    s.ahead = w.ahead;
    const int64_t row_bytes = w.columns * 2, padded = (s.whole + s.has_last) * 64;
    for (int i = 0; i < 2; ++i) {
        s.rows[i] = w.first[i];
        s.stride[i] = w.stride[i];
        if (w.count[i] < kTile) {
            std::memset(scratch, 0, static_cast<size_t>(kTile * padded));
            for (int r = 0; r < w.count[i]; ++r)
                std::memcpy(scratch + r * padded, w.first[i] + r * w.stride[i], static_cast<size_t>(row_bytes));
            s.rows[i] = scratch;
            s.stride[i] = padded;
            s.ahead = 0;
        }
        scratch += kTile * padded;
        s.last[i] = scratch;
        if (s.has_last) {
            const int64_t done = s.whole * 64;
            std::memset(scratch, 0, kTile * 64);
            for (int r = 0; r < w.count[i]; ++r)
                std::memcpy(scratch + r * 64, w.first[i] + r * w.stride[i] + done, static_cast<size_t>(row_bytes - done));
        }
        scratch += kTile * 64;
    }
    return s;
}

// c[tile][half][row][token] for one or two tiles of tokens, `step` words apart.
template <int Tiles> static void product(const Source& s, const uint32_t* x, int64_t step, float* c) {
    __asm__ volatile("" ::: "memory");  // gcc 12 does not know that tiles are loaded from memory that was just written
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (Tiles == 2) {
        _tile_zero(2);
        _tile_zero(3);
    }
    const uint8_t *a = s.rows[0], *b = s.rows[1];
    const int64_t blocks = s.whole + s.has_last;
    for (int64_t k = 0; k < blocks; ++k, a += 64, b += 64, x += kTileWords) {
        const bool last = k == s.whole;
        if (s.ahead && !last) {
#pragma GCC unroll 16
            for (int r = 0; r < kTile; ++r) {
                _mm_prefetch(reinterpret_cast<const char*>(a + r * s.stride[0] + s.ahead), _MM_HINT_T1);
                _mm_prefetch(reinterpret_cast<const char*>(b + r * s.stride[1] + s.ahead), _MM_HINT_T1);
            }
        }
        _tile_loadd(6, x, 64);
        _tile_loadd(4, last ? s.last[0] : a, last ? 64 : s.stride[0]);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, last ? s.last[1] : b, last ? 64 : s.stride[1]);
        _tile_dpbf16ps(1, 5, 6);
        if constexpr (Tiles == 2) {
            _tile_loadd(7, x + step, 64);
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

template <class Each> MOESTRO_INLINE void products(const Source& s, const uint32_t* x, int64_t step, int64_t tiles, Each each) {
    alignas(64) float c[4 * kTileWords];
    for (int64_t t = 0; t < tiles; t += 2) {
        const bool two = t + 1 < tiles;
        if (two) product<2>(s, x + t * step, step, c);
        else product<1>(s, x + t * step, step, c);
        each(t, c);
        if (two) each(t + 1, c + 2 * kTileWords);
    }
}

// The first rows of each half are gate's and up's (gated), or the lower and the upper half of 32 columns of h.
static void gate_up(const TileRows& w, const float* bias, const Activation& act, const uint32_t* x, int64_t tiles, uint32_t* h, uint8_t* scratch) {
    const Source s = source_of(w, scratch);
    const int64_t step = (w.columns + kColumns - 1) / kColumns * kTileWords;
    products(s, x, step, tiles, [&](int64_t t, float* c) __attribute__((always_inline)) {
        const auto value = [&](int half, int row) {
            F v = load(c + (half * kTile + row) * kTile);
            if (bias) v = v + set1(bias[half * kTile + row]);
            return act.limited ? at_most(v, act.limit) : v;
        };
        const auto result = [&](int half, int row) {
            const F gate = apply(act.kind, act.alpha, value(half, row));
            if (!act.gated) return gate;
            const F up = value(1, row);
            return gate * ((act.limited ? at_least(up, -act.limit) : up) + set1(act.up_offset));
        };
        uint32_t* to = h + t * w.out_step;
        for (int half = 0; half < (act.gated ? 1 : 2) && w.count[half]; ++half)
            for (int row = 0; row < kTile; row += 2, to += kTile)
                _mm512_storeu_si512(to, pairs(result(half, row), result(half, row + 1)));
    });
}

// y[t][first + i] for the tokens of the tiles that have a row.
static void down(const TileRows& w, const float* bias, const uint32_t* h, int64_t tiles, float* const* y, uint8_t* scratch) {
    const Source s = source_of(w, scratch);
    const int64_t step = (w.columns + kColumns - 1) / kColumns * kTileWords;
    products(s, h, step, tiles, [&](int64_t t, float* c) __attribute__((always_inline)) {
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

static bool allowed() {
#if defined(__linux__) && defined(SYS_arch_prctl)
    constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool granted = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
    return granted;
#else
    return false;
#endif
}

static bool runs_here() {
    __builtin_cpu_init();
    const bool vectors = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    unsigned a = 7, b = 0, c = 0, d = 0;
    __asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    const bool amx = (d >> 22 & 1) && (d >> 24 & 1);  // AMX-BF16, AMX-TILE
    static const bool runs = vectors && amx && allowed();
    return runs;
}

}  // namespace MOESTRO_ISA

namespace moestro {
static const TileOps kTileOps = {MOESTRO_ISA::begin, MOESTRO_ISA::end, MOESTRO_ISA::pack, MOESTRO_ISA::gate_up, MOESTRO_ISA::down};
extern const Isa kAmx = {"amx", "AMX-BF16, and a system that lets it be used", MOESTRO_ISA::runs_here, MOESTRO_ISA::W,
                         MOESTRO_ISA::four_rows, MOESTRO_ISA::widen, MOESTRO_ISA::activate, MOESTRO_ISA::combine, &kTileOps, nullptr};
}  // namespace moestro
