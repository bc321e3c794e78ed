// Tiles of bfloat16 by dot products of pairs: a vector holds a pair of each of 16 tokens, or of 8, and a weight's pair
// is broadcast from where it lies.
#define MOESTRO_ISA moestro_avx512_bf16
namespace MOESTRO_ISA {
constexpr int kNarrow = 8;       // of vectors of half the size
constexpr int kPieceBlocks = 8;  // of which x stays in the first cache while all rows pass, these in the second
}  // namespace MOESTRO_ISA
#include "../bytes_avx512.h"
#include "../bfloat16_tiles.h"
#include "../e4m3_dots.h"
#include "../int8_residual.h"
#include "shared.h"

namespace MOESTRO_ISA {

static void begin() {}
static void end() {}
static void set_width(int) {}

constexpr int kOnce = 8;  // rows of weights whose sums stay in registers

// Rows of weights from a block of 32 columns on: `stride` bytes from one row to the next, `block_stride` from one block
// of a row to the next. With scales, `room` apart, sums of these blocks are multiplied by the scale of their row.
struct BlockRows {
    const uint8_t* first;
    int64_t stride, block_stride;
    const float* scales = nullptr;
    int64_t room = 0;
    const uint8_t* next = nullptr;  // rows that will be read soon, or null
    int64_t next_stride = 0;
};

// A pair of each token, times the weight's pair in each lane.
MOESTRO_INLINE __m512 add_pairs(__m512 sum, __m512i w, __m512bh v) { return _mm512_dpbf16_ps(sum, (__m512bh)w, v); }
MOESTRO_INLINE __m256 add_pairs(__m256 sum, __m512i w, __m256bh v) {
    return _mm256_dpbf16_ps(sum, (__m256bh)_mm512_castsi512_si256(w), v);
}

// Adds `blocks` blocks of kOnce rows to c[tile][row][token], whose tiles are `apart` floats apart; the last is narrow,
// or not.
// A block of each row that is read later is fetched with every block, one after a few products: fetched at once they
// would fill what waits for memory, and x would wait with them.
template <int Tiles, bool Narrow> MOESTRO_INLINE void add_block_products(const BlockRows& rows, int64_t blocks,
                                                                         const uint32_t* x, int width, int64_t step,
                                                                         float* c, int64_t apart) {
    constexpr int kWide = Tiles - Narrow;
    const auto tokens = static_cast<__mmask16>((1 << width) - 1);
    const float* const scales = rows.scales;
    __m512 sum[kOnce][kWide + 1];
    __m256 rest[kOnce];
#pragma GCC unroll 8
    for (int r = 0; r < kOnce; ++r) {
#pragma GCC unroll 2
        for (int t = 0; t < kWide; ++t)
            sum[r][t] = scales ? _mm512_setzero_ps() : _mm512_loadu_ps(c + t * apart + r * kTile);
        if (Narrow) rest[r] = scales ? _mm256_setzero_ps() : _mm256_loadu_ps(c + kWide * apart + r * kTile);
    }
    const uint8_t* row[kOnce];
#pragma GCC unroll 8
    for (int r = 0; r < kOnce; ++r) row[r] = rows.first + r * rows.stride;
    for (int64_t b = 0; b < blocks; ++b) {
        for (int p = 0; p < kTile; ++p, x += width) {
            if (rows.next && p % 2 == 0)
                _mm_prefetch(reinterpret_cast<const char*>(rows.next + p / 2 * rows.next_stride + b * 64), _MM_HINT_T1);
            __m512bh v[kWide + 1];
            __m256bh last;
#pragma GCC unroll 2
            for (int t = 0; t < kWide; ++t) v[t] = (__m512bh)_mm512_maskz_loadu_epi32(tokens, x + t * step);
            if (Narrow) last = (__m256bh)_mm256_maskz_loadu_epi32(static_cast<__mmask8>(tokens), x + kWide * step);
#pragma GCC unroll 8
            for (int r = 0; r < kOnce; ++r) {
                int32_t pair;
                std::memcpy(&pair, row[r] + 4 * p, sizeof pair);
                const __m512i w = _mm512_set1_epi32(pair);
#pragma GCC unroll 2
                for (int t = 0; t < kWide; ++t) sum[r][t] = add_pairs(sum[r][t], w, v[t]);
                if (Narrow) rest[r] = add_pairs(rest[r], w, last);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < kOnce; ++r) row[r] += rows.block_stride;
    }
#pragma GCC unroll 8
    for (int r = 0; r < kOnce; ++r) {
        const float scale = scales ? scales[r * rows.room] : 1.0f;
#pragma GCC unroll 2
        for (int t = 0; t < kWide; ++t) {
            float* const to = c + t * apart + r * kTile;
            if (scales) sum[r][t] = _mm512_fmadd_ps(sum[r][t], _mm512_set1_ps(scale), _mm512_loadu_ps(to));
            _mm512_storeu_ps(to, sum[r][t]);
        }
        if (!Narrow) continue;
        float* const to = c + kWide * apart + r * kTile;
        if (scales) rest[r] = _mm256_fmadd_ps(rest[r], _mm256_set1_ps(scale), _mm256_loadu_ps(to));
        _mm256_storeu_ps(to, rest[r]);
    }
}

template <int Tiles, bool Narrow>
static void product(const Source& s, Piece piece, const uint32_t* x, int width, int64_t step, float* c) {
    const int64_t k = piece.first, whole = k + piece.blocks < s.whole ? piece.blocks : s.whole - k;
    for (int r = 0; r < 2 * kTile && whole > 0; r += kOnce) {
        const int half = r / kTile, row = r % kTile;
        BlockRows rows{s.rows[half] + row * s.stride[half] + k * 64, s.stride[half], 64};
        if (piece.fetches && s.next[0]) rows.next = s.next[half] + row * s.next_stride[half] + k * 64;
        rows.next_stride = s.next_stride[half];
        add_block_products<Tiles, Narrow>(rows, whole, x + k * kTile * width, width, step, c + r * kTile,
                                          2 * kTileWords);
    }
    if (k + piece.blocks <= s.whole) return;
    for (int r = 0; r < 2 * kTile; r += kOnce)
        add_block_products<Tiles, Narrow>({s.last[r / kTile] + r % kTile * 64, 64, 64}, 1, x + s.whole * kTile * width,
                                          width, step, c + r * kTile, 2 * kTileWords);
}

// Blocks of a panel whose columns share their scales.
MOESTRO_INLINE int64_t blocks_of_group(const Packed& p) {
    const bool fits = p.group % kColumns == 0 && (p.group % kPanel == 0 || kPanel % p.group == 0);
    return fits ? (p.group < kPanel ? p.group : kPanel) / kColumns : 1;
}

// Adds the products of the blocks of a panel, the first of which is given.
template <int Tiles, bool Narrow> static void panel_product(const Packed& p, const uint16_t* panel, int64_t first,
                                                            const uint32_t* x, int64_t step, float* c) {
    constexpr int64_t kBlockWords = 2 * kTile * kColumns, kRowBytes = kColumns * 2, kInPanel = kPanel / kColumns;
    const int width = p.rows->width;
    const bool by_group = p.scaled == Scaled::group;
    const int64_t blocks = moestro::tile_words(p.rows->columns) / kTileWords,
                  at_once = by_group ? blocks_of_group(p) : kInPanel,
                  end = first + kInPanel < blocks ? first + kInPanel : blocks;
    for (int64_t b = first; b < end; b += at_once) {
        const auto* tile = reinterpret_cast<const uint8_t*>(panel + (b - first) * kBlockWords);
        for (int r = 0; r < 2 * kTile; r += kOnce) {
            BlockRows rows{tile + r * kRowBytes, kRowBytes, kBlockWords * 2};
            if (by_group) rows.scales = p.scales + r * p.room + b * kColumns / p.group;
            rows.room = p.room;
            add_block_products<Tiles, Narrow>(rows, end - b < at_once ? end - b : at_once, x + b * kTile * width, width,
                                              step, c + r * kTile, 2 * kTileWords);
        }
    }
}

// All tiles meet a panel before the next one is decoded in its place.
template <class Decoder>
static void multiply_packed(const Decoder& decoder, uint16_t* panel, const Tokens& tokens, float* c) {
    for (int64_t k = 0; k < decoder.p.rows->columns; k += kPanel) {
        for (int r = 0; r < 2 * kTile; r += kPart) decoder.part(k, r, panel);
        two_by_two(tokens, [&](int64_t t, auto taken) __attribute__((always_inline)) {
            panel_product<decltype(taken)::kTiles, decltype(taken)::kNarrow>(
                decoder.p, panel, k / kColumns, tokens.x + t * tokens.step, tokens.step, c + 2 * t * kTileWords);
        });
    }
}

static const moestro::TileOps kTileOps = {begin, end, pack, gate_up, down, true};

constexpr int kAheadInRow = 1024;

constexpr moestro::Isa make_isa() {
    using moestro::Feature;
    moestro::Isa isa = basic_isa(
        "avx512-bf16", moestro::all_of({Feature::avx512f, Feature::avx512bw, Feature::avx512dq, Feature::avx512vl,
                                        Feature::avx512_bf16, Feature::avx512vbmi, Feature::avx512_vnni}));
    isa.four_rows = moestro::avx512::four_rows;
    isa.eight_rows = moestro::avx512::eight_rows;
    isa.ahead_in_row.bytes = kAheadInRow;
    isa.ahead_in_row.bf16 = isa.ahead_in_row.i8 = isa.ahead_in_row.e4m3 = 1;
    isa.tiles = &kTileOps;
    isa.bfloat16 = &kPairs;
    isa.int8_residual = &moestro::avx512_vbmi::kInt8Residual;
    return isa;
}

}  // namespace MOESTRO_ISA

namespace moestro {
namespace avx512_vbmi {
void int8_rows(const FourRows& rows, const float* const* x, int64_t m, float* out, float* scratch) {
    MOESTRO_ISA::int8_rows(rows, x, m, out, scratch);
}
extern const RowOps kInt8Residual = MOESTRO_ISA::kInt8Residual;
}  // namespace avx512_vbmi

extern const Isa kAvx512Bf16 = MOESTRO_ISA::make_isa();
}  // namespace moestro
