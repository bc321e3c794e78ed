// Int8 inputs on AMX: 32 rows of weights meet tokens 16 at a time, in exact sums of 32 bits. Few tokens are left to
// VNNI, whose sums these equal bit by bit: floats are added in the order in which its lanes and then `sums` add them.
//
// One side of a product is 16 rows of weights: of int8 as they lie, of nibbles decoded to signed bytes, one unit of
// columns that share a scale at a time. The other is 16 tokens, four columns of each in a word: [unit][word][token].

#define MOESTRO_ISA moestro_amx_int8
#include "../bytes_avx512.h"
#include "../epilogue.h"
#include "../int8.h"
#include "../transpose.h"
#include "shared.h"

namespace MOESTRO_ISA {

using moestro::kInt8TileRows;
constexpr int kTile = 16;  // rows of weights, and tokens
constexpr int64_t kTileWords = kTile * kTile;
constexpr int kPair = 2;  // tiles of tokens that are multiplied together

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 0, 0, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 0, 0};
    // 0 to 3 are sums; 4 and 5 rows of weights with so many columns, 6 and 7 tokens.
    constexpr explicit TileConfig(int columns) {
        row_bytes[4] = row_bytes[5] = static_cast<uint16_t>(columns);
        rows[6] = rows[7] = static_cast<uint8_t>(columns / 4);
    }
};
static const TileConfig kWhole(64), kUnit(32),
    kHalf(16);  // of all of which gcc 12 does not know that the instruction reads it

// The place of a lane's units: `sums` adds lanes in pairs, pairs of pairs and so on, in this order.
constexpr int kRank[16] = {0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15};

// Sizes of what stands for `columns`: units are ordered by the rank of their lane, and then by block and part.
struct Shape {
    bool nibbles, zeros;
    int parts;
    int64_t blocks, unit_bytes;  // unit_bytes: of a row
    int64_t units() const { return nibbles ? blocks * W * parts : blocks; }
    int64_t place(int lane, int64_t block, int part) const { return (kRank[lane] * blocks + block) * parts + part; }
    // Of 16 tokens: their scales, their bytes, and for zero points the sums of their units.
    int64_t tile_bytes() const { return 64 + units() * (unit_bytes * kTile + (zeros ? 64 : 0)); }
};
static Shape shape_of(Element e, int64_t columns, int64_t group_columns) {
    if (!moestro::is_nibble(e)) return {false, false, 1, (columns + 63) / 64, 64};
    const int parts = parts_of(group_columns);
    return {true, e == Element::u4, parts, (columns + kUnits - 1) / kUnits, 32 / parts};
}

static int64_t packed_bytes(Element e, int64_t columns, int64_t group_columns, int64_t m) {
    return (m + kTile - 1) / kTile * shape_of(e, columns, group_columns).tile_bytes();
}

static void pack(Element e, int64_t columns, int64_t group_columns, const float* const* x, int64_t m, uint8_t* to) {
    const Shape shape = shape_of(e, columns, group_columns);
    const int64_t padded = padded_columns(e, columns), unit_tile = shape.unit_bytes * kTile;
    for (int64_t first = 0; first < m; first += kTile, to += shape.tile_bytes()) {
        const auto row = [&](int t) { return first + t < m ? bytes_of_row(x[first + t]) : nullptr; };
        alignas(64) float scales[kTile];
        for (int t = 0; t < kTile; ++t) scales[t] = first + t < m ? scale_of_row(x[first + t]) : 0.0f;
        std::memcpy(to, scales, sizeof scales);
        uint8_t* const bytes = to + 64;
        const auto words = [&](int64_t at, __m512i* r) {
            for (int t = 0; t < kTile; ++t) r[t] = row(t) ? _mm512_loadu_si512(row(t) + at) : _mm512_setzero_si512();
            transpose(r);
        };
        __m512i r[16];
        for (int64_t block = 0; block < shape.blocks; ++block) {
            if (!shape.nibbles) {
                words(block * 64, r);
                for (int i = 0; i < 16; ++i) _mm512_storeu_si512(bytes + block * unit_tile + i * 64, r[i]);
                continue;
            }
            for (int v = 0; v < 8; ++v) {  // a vector of a block holds four columns of every lane's unit
                words(block * kUnits + v * kVectorBytes, r);
                // Of whole units rows of weights hold the even columns, and then the odd ones; of halves they alternate
                // by word.
                const int part = v * shape.parts / 8, word = shape.parts == 1 ? v % 2 * 4 + v / 2 : v % 4;
                for (int lane = 0; lane < W; ++lane)
                    _mm512_storeu_si512(bytes + shape.place(lane, block, part) * unit_tile + word * 64, r[lane]);
            }
            for (int p = 0; shape.zeros && p < shape.parts; ++p) {
                words(padded + (block * shape.parts + p) * 4 * W, r);
                for (int lane = 0; lane < W; ++lane)
                    _mm512_storeu_si512(bytes + shape.units() * unit_tile + shape.place(lane, block, p) * 64, r[lane]);
            }
        }
    }
}

// 32 rows of weights: of nibbles signed bytes [unit][row][column]; scales and zero points [group][row], and where in
// these a unit's stand.
struct TilePanel {
    uint8_t* codes;
    float* scales;
    int32_t* zeros;
    int32_t* group;
};

template <Element E> MOESTRO_INLINE I signed_nibbles(I nibbles) {
    constexpr int8_t kE2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // twice the values
    constexpr int8_t kI4[16] = {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};
    if constexpr (E == Element::u4) return nibbles & every_byte(15);
    return look_up(bytes_table(reinterpret_cast<const uint8_t*>(E == Element::i4 ? kI4 : kE2m1)), nibbles);
}

// Row `at` of a panel. Lane 4 * q + j of VNNI's order is unit 4 * j + q of a block, which is 128-bit lane q of load j.
template <Element E>
static void decode_row(const uint8_t* row, int64_t columns, const Shape& shape, int at, uint8_t* codes) {
    const __m512i low_half = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11),
                  high_half = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    const int64_t part_step = kInt8TileRows * shape.unit_bytes;
    for (int64_t k = 0, block = 0; k < columns; k += kUnits, ++block) {
        const uint8_t* from = row + k / 2;
        alignas(64) uint8_t padded[kUnits / 2];
        if (k + kUnits > columns) from = copied(from, (columns - k) / 2, padded, kUnits / 2);
        uint8_t* const to = codes + at * shape.unit_bytes + block * shape.parts * part_step;
        const int64_t lane = shape.blocks * shape.parts * part_step;  // from one rank to the next
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
            const I words = load_bytes(from + j * 64), low = signed_nibbles<E>(words),
                    high = signed_nibbles<E>(upper_nibbles(words));
            uint8_t* const place[4] = {to + kRank[j] * lane, to + kRank[4 + j] * lane, to + kRank[8 + j] * lane,
                                       to + kRank[12 + j] * lane};
            if (shape.parts == 1) {
                const __m512i a = _mm512_permutex2var_epi64(low.v, low_half, high.v),
                              b = _mm512_permutex2var_epi64(low.v, high_half, high.v);
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(place[0]), _mm512_castsi512_si256(a));
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(place[1]), _mm512_extracti64x4_epi64(a, 1));
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(place[2]), _mm512_castsi512_si256(b));
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(place[3]), _mm512_extracti64x4_epi64(b, 1));
                continue;
            }
            const __m512i halves[2] = {_mm512_unpacklo_epi32(low.v, high.v), _mm512_unpackhi_epi32(low.v, high.v)};
            for (int p = 0; p < 2; ++p) {
                _mm_storeu_si128(reinterpret_cast<__m128i*>(place[0] + p * part_step),
                                 _mm512_castsi512_si128(halves[p]));
                _mm_storeu_si128(reinterpret_cast<__m128i*>(place[1] + p * part_step),
                                 _mm512_extracti32x4_epi32(halves[p], 1));
                _mm_storeu_si128(reinterpret_cast<__m128i*>(place[2] + p * part_step),
                                 _mm512_extracti32x4_epi32(halves[p], 2));
                _mm_storeu_si128(reinterpret_cast<__m128i*>(place[3] + p * part_step),
                                 _mm512_extracti32x4_epi32(halves[p], 3));
            }
        }
    }
}

// Values of 32 rows, each with its `n` and zeros up to `room`, as [group][row].
static void turn(const float* from, int64_t n, int64_t room, float* to) {
    for (int half = 0; half < 2; ++half)
        for (int64_t g = 0; g < n; g += 16) {
            __m512i r[16];
            for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(from + (half * 16 + i) * room + g);
            transpose(r);
            for (int i = 0; i < 16; ++i) _mm512_storeu_si512(to + (g + i) * kInt8TileRows + half * 16, r[i]);
        }
}

static const uint8_t* row_of(const FourRows* eight, int r) { return eight[r / kRows].data[r % kRows]; }

static void read_panel(const FourRows* eight, const Shape& shape, float* room_for_rows, const TilePanel& panel) {
    const FourRows& first = eight[0];
    const int64_t n = first.group_columns ? (first.columns + first.group_columns - 1) / first.group_columns : 1,
                  room = round_up(n, W) + 2 * W;
    const int64_t last = room - W;  // a multiple of W behind all groups that units may name
    for (int r = 0; r < kInt8TileRows; ++r) {
        const FourRows& rows = eight[r / kRows];
        const float factor = rows.global_scale[r % kRows] * (rows.element == Element::e2m1 ? 0.5f : 1.0f);
        read_scales(rows.scale, rows.scales[r % kRows], n, factor, room_for_rows + r * room, room);
    }
    turn(room_for_rows, last, room, panel.scales);
    if (shape.zeros) {
        for (int r = 0; r < kInt8TileRows; ++r)
            read_zeros(eight[r / kRows].zeros[r % kRows], n, room_for_rows + r * room, room);
        turn(room_for_rows, last, room, reinterpret_cast<float*>(panel.zeros));
        for (int64_t i = 0; i < last * kInt8TileRows; i += W)
            store_bytes(panel.zeros + i, to_integers(load(reinterpret_cast<float*>(panel.zeros) + i)));
    }
    if (!shape.nibbles) return;
    const int64_t group = first.group_columns ? first.group_columns : round_up(first.columns, kUnits);
    int shift = 0;
    while ((int64_t{1} << shift) < group) ++shift;
    for (int lane = 0; lane < W; ++lane)
        for (int64_t block = 0; block < shape.blocks; ++block)
            for (int p = 0; p < shape.parts; ++p)
                panel.group[shape.place(lane, block, p)] =
                    static_cast<int32_t>((block * kUnits + 32 * (lane % 4 * 4 + lane / 4) + 16 * p) >> shift);
    for (int r = 0; r < kInt8TileRows; ++r) {
        const uint8_t* row = row_of(eight, r);
        moestro::with_integer(first.element, [&](auto e) {
            constexpr Element kElement = decltype(e)::value;
            if constexpr (moestro::is_nibble(kElement)) decode_row<kElement>(row, first.columns, shape, r, panel.codes);
        });
    }
}

// The rows that come next, to the second cache, a share at a time.
struct Next {
    const FourRows* eight;
    int64_t line = 0, lines;

    Next(const FourRows* asked, int64_t row_bytes)
        : eight(asked), lines(asked->next[0] ? row_bytes / 64 * kInt8TileRows : 0) {}
    MOESTRO_INLINE void some(int64_t n) {
        for (; n > 0 && line < lines; --n, ++line) {
            const FourRows& rows = eight[line % kInt8TileRows / kRows];
            _mm_prefetch(reinterpret_cast<const char*>(rows.next[line % kRows] + line / kInt8TileRows * 64),
                         _MM_HINT_T1);
        }
    }
};

template <int Tiles> MOESTRO_INLINE void clear_tiles() {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (Tiles == kPair) {
        _tile_zero(2);
        _tile_zero(3);
    }
}
template <int Tiles> MOESTRO_INLINE void store_tiles(int32_t* c) {
    _tile_stored(0, c, 64);
    _tile_stored(1, c + kTileWords, 64);
    if constexpr (Tiles == kPair) {
        _tile_stored(2, c + 2 * kTileWords, 64);
        _tile_stored(3, c + 3 * kTileWords, 64);
    }
}
// Adds the products of both halves of rows and one or two tiles of tokens.
template <int Tiles> MOESTRO_INLINE void multiply(const uint8_t* a, const uint8_t* b, const int64_t* stride,
                                                  const uint8_t* x, int64_t step) {
    _tile_loadd(6, x, 64);
    _tile_loadd(4, a, stride[0]);
    _tile_dpbssd(0, 4, 6);
    _tile_loadd(5, b, stride[1]);
    _tile_dpbssd(1, 5, 6);
    if constexpr (Tiles == kPair) {
        _tile_loadd(7, x + step, 64);
        _tile_dpbssd(2, 4, 7);
        _tile_dpbssd(3, 5, 7);
    }
}

// 16 rows of 16 tokens, times the tokens' scales: out[token][half of 32 rows].
static void give(__m512* sum, const float* scales, int64_t tokens, float* out) {
    const __m512 s = _mm512_loadu_ps(scales);
    __m512i r[16];
    for (int i = 0; i < kTile; ++i) r[i] = _mm512_castps_si512(_mm512_mul_ps(sum[i], s));
    transpose(r);
    for (int64_t t = 0; t < tokens && t < kTile; ++t) _mm512_storeu_si512(out + t * kInt8TileRows, r[t]);
}

constexpr int kAtOnce = 4;  // units whose sums stand in the first cache

// Adds up what the leaves of a tree hold: leaf by leaf, each pair as soon as both are there.
template <int Tiles> struct Tree {
    alignas(64) float level[5][2 * Tiles][kTileWords];
    alignas(64) float leaf[2 * Tiles][kTileWords];
};

// Units first to first + n of a leaf, whose exact sums stand in `c`, for one tile of them.
template <int Tiles, bool Zeros> static void add_units(const TilePanel& panel, const Shape& shape, const uint8_t* x,
                                                       int64_t step, const int32_t* c, int64_t first, int64_t n,
                                                       int tile, Tree<Tiles>& tree) {
    const int64_t chain = shape.blocks * shape.parts, leaf = first / chain;
    const int half = tile % 2;
    __m512 sum[16];
    const bool begins = first % chain == 0;
#pragma GCC unroll 16
    for (int i = 0; i < kTile; ++i) sum[i] = begins ? _mm512_setzero_ps() : _mm512_load_ps(tree.leaf[tile] + i * kTile);
    for (int64_t u = 0; u < n; ++u) {
        const int32_t* from = c + (u * 2 * Tiles + tile) * kTileWords;
        const int64_t at = int64_t{panel.group[first + u]} * kInt8TileRows + half * kTile;
        const float* scales = panel.scales + at;
        __m512i own = _mm512_setzero_si512();
        if constexpr (Zeros)
            own = _mm512_loadu_si512(x + tile / 2 * step + 64 + shape.units() * shape.unit_bytes * kTile +
                                     (first + u) * 64);
#pragma GCC unroll 16
        for (int i = 0; i < kTile; ++i) {
            __m512i exact = _mm512_load_si512(from + i * kTile);
            if constexpr (Zeros)
                exact = _mm512_add_epi32(exact, _mm512_madd_epi16(own, _mm512_set1_epi32(panel.zeros[at + i])));
            sum[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(exact), _mm512_set1_ps(scales[i]), sum[i]);
        }
    }
    float* to = tree.leaf[tile];
    if ((first + n) % chain == 0) {
        int level = 0;
        for (; leaf >> level & 1; ++level)
#pragma GCC unroll 16
            for (int i = 0; i < kTile; ++i)
                sum[i] = _mm512_add_ps(_mm512_load_ps(tree.level[level][tile] + i * kTile), sum[i]);
        to = tree.level[level][tile];
    }
#pragma GCC unroll 16
    for (int i = 0; i < kTile; ++i) _mm512_store_ps(to + i * kTile, sum[i]);
}

// While tiles multiply a few units, the sums of the few before become floats.
template <int Tiles, bool Zeros> static void unit_products(const TilePanel& panel, const Shape& shape, const uint8_t* x,
                                                           int64_t m, Next& next, int64_t lines, float* out) {
    alignas(64) int32_t c[2][kAtOnce * 2 * Tiles * kTileWords];
    Tree<Tiles> tree;
    const int64_t step = shape.tile_bytes(), units = shape.units(), chain = shape.blocks * shape.parts;
    const int64_t unit_tile = shape.unit_bytes * kTile, stride[2] = {shape.unit_bytes, shape.unit_bytes};
    int64_t before = 0, n_before = 0;
    for (int64_t u = 0, turn = 0; u < units || n_before; turn ^= 1) {
        int64_t n = chain - u % chain < kAtOnce ? chain - u % chain : kAtOnce;
        if (u == units) n = 0;
        for (int64_t i = 0; i < kAtOnce; ++i) {
            if (i < n) {
                const uint8_t* a = panel.codes + (u + i) * kInt8TileRows * shape.unit_bytes;
                __asm__ volatile(
                    "" ::
                        : "memory");  // gcc 12 does not know that tiles are loaded from memory that was just written
                clear_tiles<Tiles>();
                multiply<Tiles>(a, a + unit_tile, stride, x + 64 + (u + i) * unit_tile, step);
                store_tiles<Tiles>(c[turn] + i * 2 * Tiles * kTileWords);
                next.some(lines);
            }
            if (n_before && i < 2 * Tiles)
                add_units<Tiles, Zeros>(panel, shape, x, step, c[turn ^ 1], before, n_before, static_cast<int>(i),
                                        tree);
        }
        before = u, n_before = n;
        u += n;
    }
    for (int tile = 0; tile < 2 * Tiles; ++tile) {
        __m512 sum[16];
        for (int i = 0; i < kTile; ++i) sum[i] = _mm512_load_ps(tree.level[4][tile] + i * kTile);
        const int64_t t = tile / 2 * kTile;
        give(sum, reinterpret_cast<const float*>(x + tile / 2 * step), m - t,
             out + t * kInt8TileRows + tile % 2 * kTile);
    }
}

// Sums all along the row. `a` are 32 rows of int8 as they lie, and of `last` what does not fill 64 columns.
template <int Tiles> static void row_products(const FourRows* eight, const TilePanel& panel, const Shape& shape,
                                              const uint8_t* x, int64_t m, Next& next, int64_t lines, float* out) {
    const int64_t step = shape.tile_bytes(), whole = eight->columns / 64;
    const int64_t stride[2] = {row_of(eight, 1) - row_of(eight, 0), row_of(eight, 17) - row_of(eight, 16)},
                  packed[2] = {64, 64};
    const uint8_t *a = row_of(eight, 0), *b = row_of(eight, 16);
    alignas(64) int32_t c[2 * Tiles * kTileWords];
    __asm__ volatile("" ::: "memory");
    clear_tiles<Tiles>();
    for (int64_t k = 0; k < shape.blocks; ++k, x += kTile * 64) {
        next.some(lines);
        if (k < whole && panel.group[0]) multiply<Tiles>(a + k * 64, b + k * 64, stride, x + 64, step);
        else
            multiply<Tiles>(panel.codes + k * kInt8TileRows * 64, panel.codes + k * kInt8TileRows * 64 + kTile * 64,
                            packed, x + 64, step);
    }
    store_tiles<Tiles>(c);
    __asm__ volatile("" ::: "memory");
    x -= shape.blocks * kTile * 64;
    for (int tile = 0; tile < 2 * Tiles; ++tile) {
        __m512 sum[16];
        for (int i = 0; i < kTile; ++i)
            sum[i] = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_load_si512(c + tile * kTileWords + i * kTile)),
                                   _mm512_set1_ps(panel.scales[tile % 2 * kTile + i]));
        const int64_t t = tile / 2 * kTile;
        give(sum, reinterpret_cast<const float*>(x + tile / 2 * step), m - t,
             out + t * kInt8TileRows + tile % 2 * kTile);
    }
}

// Copies the columns that do not fill a tile, or of rows of unequal distances all columns; panel.group[0]
// says which.
static void copy_rows(const FourRows* eight, const TilePanel& panel) {
    bool even = true;
    for (int r = 0; r < kInt8TileRows; ++r) {
        const int first = r / kTile * kTile;
        even = even && row_of(eight, r) - row_of(eight, first) ==
                           (r - first) * (row_of(eight, first + 1) - row_of(eight, first));
    }
    panel.group[0] = even;
    const int64_t columns = eight->columns;
    for (int64_t k = even ? columns / 64 * 64 : 0; k < columns; k += 64)
        for (int r = 0; r < kInt8TileRows; ++r) {
            uint8_t* to = panel.codes + (k / 64 * kInt8TileRows + r) * 64;
            const int64_t n = columns - k < 64 ? columns - k : 64;
            std::memset(to + n, 0, static_cast<size_t>(64 - n));
            std::memcpy(to, row_of(eight, r) + k, static_cast<size_t>(n));
        }
}

static void int8_tile_rows(const FourRows* eight, const uint8_t* x, int64_t m, float* out, float* scratch) {
    const Shape shape = shape_of(eight->element, eight->columns, eight->group_columns);
    const int64_t n = eight->group_columns ? (eight->columns + eight->group_columns - 1) / eight->group_columns : 1,
                  room = round_up(n, W) + 2 * W;
    TilePanel panel;
    panel.scales = scratch;
    panel.zeros = reinterpret_cast<int32_t*>(panel.scales + kInt8TileRows * room);
    panel.group = panel.zeros + kInt8TileRows * room;
    float* const rows = reinterpret_cast<float*>(panel.group + round_up(shape.units(), 16));
    panel.codes = reinterpret_cast<uint8_t*>(rows + kInt8TileRows * room);
    read_panel(eight, shape, rows, panel);
    if (!shape.nibbles) copy_rows(eight, panel);
    _tile_loadconfig(!shape.nibbles ? &kWhole : shape.parts == 1 ? &kUnit : &kHalf);
    const int64_t pairs = (m + 2 * kTile - 1) / (2 * kTile),
                  row_bytes = shape.nibbles ? eight->columns / 2 : eight->columns;
    Next next(eight, row_bytes);
    const int64_t lines = next.lines / (pairs * shape.units()) + 1;
    for (int64_t t = 0; t < m;
         t += kPair * kTile, x += kPair * shape.tile_bytes(), out += kPair * kTile * kInt8TileRows) {
        const bool two = m - t > kTile;
        if (!shape.nibbles)
            two ? row_products<2>(eight, panel, shape, x, m - t, next, lines, out)
                : row_products<1>(eight, panel, shape, x, m - t, next, lines, out);
        else if (shape.zeros)
            two ? unit_products<2, true>(panel, shape, x, m - t, next, lines, out)
                : unit_products<1, true>(panel, shape, x, m - t, next, lines, out);
        else
            two ? unit_products<2, false>(panel, shape, x, m - t, next, lines, out)
                : unit_products<1, false>(panel, shape, x, m - t, next, lines, out);
    }
    _tile_release();
}

static int64_t int8_tile_scratch(int64_t columns) {
    const int64_t padded = round_up(columns, kUnits), room = kInt8TileRows * (columns / 16 + 3 * W + 1);
    return 3 * room + padded / 16 + 64 + kInt8TileRows * padded / 4;
}

static const moestro::Int8TileOps kInt8Tiles = {packed_bytes, pack, int8_tile_rows, int8_tile_scratch};
static const moestro::RowOps kInt8WithTiles = {integer_row_floats<RowsOfBytes>, quantize_row<RowsOfBytes>,
                                               moestro::avx512_vbmi::int8_rows, integer_scratch<RowsOfBytes>,
                                               &kInt8Tiles};

constexpr moestro::Isa make_isa() {
    using moestro::Feature;
    moestro::Isa isa = basic_isa(
        "amx-int8",
        moestro::all_of({Feature::amx_tile, Feature::amx_int8, Feature::avx512f, Feature::avx512bw, Feature::avx512dq,
                         Feature::avx512vl, Feature::avx512_vnni, Feature::avx512vbmi, Feature::tiles_allowed}));
    isa.int8 = &kInt8WithTiles;
    return isa;
}

}  // namespace MOESTRO_ISA

namespace moestro {
extern const Isa kAmxInt8 = MOESTRO_ISA::make_isa();
}  // namespace moestro
