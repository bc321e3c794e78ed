// Packed weights for tiles: 32 rows become panels of bfloat16, 128 columns at a time, exactly (AMX and vdpbf16ps take
// subnormal ones for zero). A scale that does not fit into a bfloat16 beside its element stays outside, for the sums of
// its group.
//
// Of 32 columns of nibbles, four to a word of 16 bits, nibble j of word w stands at 8 * j + w: so x must lie (see
// `pack`).
#pragma once

#include "kernels.h"

namespace MOESTRO_ISA {

using moestro::TileRows;
constexpr int kTile = 16;  // rows of weights, tokens, and pairs of columns of a tile
constexpr int64_t kColumns = 32;
constexpr int64_t kPanel = 128;  // columns of a panel
constexpr int64_t kPanelWords = 2 * kTile * kPanel;
constexpr int kPart = 4;  // rows that are decoded while a tile's products are under way

// Where a scale is multiplied: into a sum of all columns, into a sum of its group's, or into the elements, as a power
// of two or as any number whose product with them a bfloat16 holds.
enum class Scaled { sum, group, exponent, element };

struct Packed {
    const TileRows* rows = nullptr;
    Scaled scaled = Scaled::sum;
    int64_t group = 0, room = 0;      // columns of a group, and scales between rows
    const float* scales = nullptr;    // [row][group]
    const uint32_t* words = nullptr;  // [row][group], twice the zero, or twice what to subtract from an element's bits
    bool has_large_zeros = false;
    int shift = 0;  // nibbles of a group are a power of two
};

// to[i] = each(bytes[i]), twice in a word; up to 15 words behind the last are written. False if one is above `most`.
template <class Each>
MOESTRO_INLINE bool pairs_of_bytes(const uint8_t* bytes, int64_t n, uint32_t most, uint32_t* to, Each each) {
    __mmask16 above = 0;
    for (int64_t i = 0; i < n; i += W) {
        const __mmask16 mask = n - i >= W ? 0xffff : static_cast<__mmask16>((1 << (n - i)) - 1);
        const __m512i wide = each(_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask, bytes + i)));
        above = static_cast<__mmask16>(
            above | _mm512_mask_cmpgt_epu32_mask(mask, wide, _mm512_set1_epi32(static_cast<int>(most))));
        _mm512_storeu_si512(to + i, _mm512_or_si512(wide, _mm512_slli_epi32(wide, 16)));
    }
    return above == 0;
}

// `scratch` takes scales and words, room for 32 rows of each; `factors` the 32 numbers that sums are multiplied by at
// last.
static Packed packed_of(const TileRows& w, float* scratch, float* factors) {
    const int64_t group = w.group_columns ? w.group_columns : w.columns,
                  n = w.columns ? (w.columns + group - 1) / group : 0;
    const float factor = w.element == Element::e4m3 ? kE4m3Factor : 1.0f;
    auto* words = reinterpret_cast<uint32_t*>(scratch);
    Packed p;
    p.rows = &w;
    p.group = group;
    p.room = round_up(n + 1, W) + W;
    p.scales = scratch;
    p.words = words;
    while (p.shift < 40 && (int64_t{1} << p.shift) < group) ++p.shift;
    if (w.group_columns == 0) {
        for (int r = 0; r < 2 * kTile; ++r) {
            read_scales(w.scale, w.scales[r], 1, factor * w.global_scale[r], scratch, 2 * W);
            factors[r] = scratch[0];
        }
        return p;
    }
    for (int r = 0; r < 2 * kTile; ++r) factors[r] = w.global_scale[r];
    if (w.element == Element::e2m1 && w.scale == Scale::e8m0) {
        // Powers of two from 2^-125 to 2^125, with which no element leaves the normal numbers.
        bool moderate = true;
        const auto down = [](__m512i s) { return _mm512_slli_epi32(_mm512_sub_epi32(_mm512_set1_epi32(252), s), 7); };
        for (int r = 0; r < 2 * kTile; ++r)
            moderate = pairs_of_bytes(w.scales[r], n, 250 << 7, words + r * p.room, down) && moderate;
        p.scaled = moderate ? Scaled::exponent : Scaled::element;
        if (moderate) return p;
    } else {
        p.scaled = p.group < kColumns ? Scaled::element : Scaled::group;
    }
    for (int r = 0; r < 2 * kTile; ++r) read_scales(w.scale, w.scales[r], n, factor, scratch + r * p.room, p.room);
    if (!moestro::has_zeros(w.element)) return p;
    p.words = words += 2 * kTile * p.room;
    for (int r = 0; r < 2 * kTile; ++r) {
        const bool small = pairs_of_bytes(w.zeros[r], n, 16, words + r * p.room, [](__m512i z) { return z; });
        p.has_large_zeros = p.has_large_zeros || !small;
    }
    return p;
}

alignas(64) static const uint16_t kE2m1[32] = {0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                                               0, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0,
                                               0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                                               0, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};
// Integers modulo 32, as bfloat16.
alignas(64) static const uint16_t kIntegers[32] = {0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
                                                   0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170,
                                                   0xc180, 0xc170, 0xc160, 0xc150, 0xc140, 0xc130, 0xc120, 0xc110,
                                                   0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80};
alignas(64) static const uint16_t kI4[32] = {0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
                                             0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
                                             0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
                                             0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80};

// Calls each(r, what is stored of the panel, with zeros behind the last column) for kPart rows from `first` on.
template <class Each>
MOESTRO_INLINE void rows_of_panel(const TileRows& w, int64_t k, int64_t bytes, int first, Each each) {
    const int64_t at = k * bytes / kPanel, left = w.columns - k;
    if (left >= kPanel) {
        const uint8_t* const* data = w.data + first;
        // What comes next is fetched in the order of its addresses, and not into the first cache, which has no room for
        // it.
        const uint8_t* next = w.next[first / kTile];
        if (next) next += (k / kPanel * kTile + first % kTile) * bytes;
        for (int r = 0; r < kPart; ++r) {
            const uint8_t* p = data[r] + at;
            if (next) {
                _mm_prefetch(reinterpret_cast<const char*>(next + r * bytes), _MM_HINT_T1);
                if (bytes > 64) _mm_prefetch(reinterpret_cast<const char*>(next + r * bytes + 64), _MM_HINT_T1);
            }
            each(r, p);
        }
        return;
    }
    const int64_t have = left * bytes / kPanel;
    const auto mask = [&](int64_t from) {
        return have - from >= 64 ? ~__mmask64{0} : have <= from ? 0 : (__mmask64{1} << (have - from)) - 1;
    };
    const __mmask64 low = mask(0), high = mask(64);
    for (int r = 0; r < kPart; ++r) {
        alignas(64) uint8_t padded[kPanel];
        _mm512_store_si512(padded, _mm512_maskz_loadu_epi8(low, w.data[first + r] + at));
        if (bytes > 64) _mm512_store_si512(padded + 64, _mm512_maskz_loadu_epi8(high, w.data[first + r] + at + 64));
        each(r, padded);
    }
}

// 32 words of bfloat16 times 16 floats, one for each pair; the products are bfloat16.
MOESTRO_INLINE __m512i multiplied(__m512i words, __m512 scales) {
    const __m512i odd = _mm512_set1_epi32(static_cast<int>(0xffff0000));
    const __m512 low = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(words, 16)), scales);
    const __m512 high = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_and_si512(words, odd)), scales);
    // 0xea: (a & b) | c
    return _mm512_ternarylogic_epi32(_mm512_castps_si512(high), odd, _mm512_srli_epi32(_mm512_castps_si512(low), 16),
                                     0xea);
}

// Small integers as bfloat16.
MOESTRO_INLINE __m512i converted(__m512i words) {
    const __m512 low = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(words, 16), 16));
    const __m512 high = _mm512_cvtepi32_ps(_mm512_srai_epi32(words, 16));
    return _mm512_or_si512(_mm512_castps_si512(high), _mm512_srli_epi32(_mm512_castps_si512(low), 16));
}

// Decodes columns k to k + 128 of kPart rows into tiles: to[block of 32 columns][half][row][column].
template <Element E, Scaled S> struct Decoder {
    const Packed p;
    __m512i table, shifts, offsets, pairs;

    explicit Decoder(const Packed& packed) : p(packed) {
        table = _mm512_load_si512(E == Element::e2m1 ? kE2m1 : E == Element::i4 ? kI4 : kIntegers);
        // 2^125 times the values, from which a scale takes powers of two down to what it is; both zeros stay zero.
        if (S == Scaled::exponent)
            table =
                _mm512_mask_add_epi16(table, _mm512_test_epi16_mask(table, table), table, _mm512_set1_epi16(125 << 7));
        shifts = _mm512_set_epi64(INT64_C(0x000c000c000c000c), INT64_C(0x000c000c000c000c), INT64_C(0x0008000800080008),
                                  INT64_C(0x0008000800080008), INT64_C(0x0004000400040004), INT64_C(0x0004000400040004),
                                  0, 0);
        offsets = _mm512_add_epi8(_mm512_set1_epi64(INT64_C(0x3030202010100000)),
                                  _mm512_or_si512(shifts, _mm512_slli_epi16(shifts, 8)));
        pairs = _mm512_broadcast_i32x4(p.group == 16 ? _mm_setr_epi32(0, 0, 1, 1) : _mm_setzero_si128());
    }

    // 32 columns; `at` is where their scale is.
    MOESTRO_INLINE __m512i block(const uint8_t* bytes, int j, int64_t at) const {
        __m512i index = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes + 16 * j)));
        // The same shifts, on one port or another: where there is no subtraction, which has that of `srlv`, in turns.
        index = S == Scaled::exponent || j % 2 ? _mm512_multishift_epi64_epi8(offsets, index)
                                               : _mm512_srlv_epi16(index, shifts);
        if constexpr (E == Element::u4)
            index = _mm512_sub_epi16(_mm512_and_si512(index, _mm512_set1_epi16(15)),
                                     _mm512_set1_epi32(static_cast<int>(p.words[at])));
        if constexpr (E == Element::u4 && S == Scaled::element) return converted(index);
        const __m512i value = _mm512_permutexvar_epi16(index, table);
        if constexpr (S == Scaled::exponent)
            return _mm512_subs_epu16(value, _mm512_set1_epi32(static_cast<int>(p.words[at])));
        if constexpr (S == Scaled::element)
            return multiplied(value, _mm512_permutexvar_ps(pairs, _mm512_loadu_ps(p.scales + at)));
        return value;
    }

    MOESTRO_INLINE void part(int64_t k, int first_row, uint16_t* to) const {
        const Decoder own = *this;  // of which the compiler knows that nothing here writes to it
        const int64_t room = own.p.room;
        const int shift = S == Scaled::exponent ? 5 : own.p.shift;
        int64_t at = first_row * room + (k >> shift);
        to += first_row * kColumns;
        rows_of_panel(*own.p.rows, k, kPanel / 2, first_row,
                      [&](int r, const uint8_t* bytes) __attribute__((always_inline)) {
#pragma GCC unroll 4
                          for (int j = 0; j < 4; ++j)
                              _mm512_storeu_si512(to + (2 * kTile * j + r) * kColumns,
                                                  own.block(bytes, j, at + (j * kColumns >> shift)));
                          at += room;
                      });
    }
};

// 32 of e4m3, none of which is subnormal or NaN: their exponents move from a bias of 7 to one of 127. As
// `load_two_e4m3` has it, 2^-8 of their values.
MOESTRO_INLINE __m512i normal_e4m3(const uint8_t* bytes) {
    const __m512i wide =
        _mm512_slli_epi16(_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes))), 4);
    return _mm512_add_epi16(_mm512_and_si512(wide, _mm512_set1_epi16(static_cast<short>(0x87f0))),
                            _mm512_set1_epi16((120 - 8) << 7));
}

// Stores 64 columns as two blocks.
template <Element E> MOESTRO_INLINE void decode_bytes(const uint8_t* from, uint16_t* first, uint16_t* second) {
    if constexpr (E == Element::e4m3) {
        const __m512i raw = _mm512_loadu_si512(from), sign = _mm512_set1_epi8(INT8_MIN);
        const __mmask64 nan = _mm512_cmpeq_epi8_mask(_mm512_or_si512(raw, sign), _mm512_set1_epi8(-1));
        if (__builtin_expect((_mm512_testn_epi8_mask(raw, _mm512_set1_epi8(0x78)) | nan) == 0, 1)) {
            _mm512_storeu_si512(first, normal_e4m3(from));
            _mm512_storeu_si512(second, normal_e4m3(from + kColumns));
            return;
        }
        const Two a = load_two_e4m3(from), b = load_two_e4m3(from + kColumns);
        _mm512_storeu_si512(first, (__m512i)_mm512_cvtne2ps_pbh(a.second.v, a.first.v));
        _mm512_storeu_si512(second, (__m512i)_mm512_cvtne2ps_pbh(b.second.v, b.first.v));
    } else {
        _mm512_storeu_si512(first, (__m512i)_mm512_cvtne2ps_pbh(load_i8(from + W).v, load_i8(from).v));
        _mm512_storeu_si512(second, (__m512i)_mm512_cvtne2ps_pbh(load_i8(from + 3 * W).v, load_i8(from + 2 * W).v));
    }
}
template <Element E> struct ByteDecoder {
    const Packed p;
    explicit ByteDecoder(const Packed& packed) : p(packed) {}
    MOESTRO_INLINE void part(int64_t k, int first_row, uint16_t* to) const {
        to += first_row * kColumns;
        rows_of_panel(*p.rows, k, kPanel, first_row, [&](int r, const uint8_t* bytes) __attribute__((always_inline)) {
            for (int j = 0; j < 4; j += 2)
                decode_bytes<E>(bytes + j * kColumns, to + (2 * kTile * j + r) * kColumns,
                                to + (2 * kTile * (j + 1) + r) * kColumns);
        });
    }
};
template <Scaled S> struct Decoder<Element::e4m3, S> : ByteDecoder<Element::e4m3> {
    using ByteDecoder<Element::e4m3>::ByteDecoder;
};
template <Scaled S> struct Decoder<Element::i8, S> : ByteDecoder<Element::i8> {
    using ByteDecoder<Element::i8>::ByteDecoder;
};

// Calls `then` with the decoder that the rows need.
template <class Then> MOESTRO_INLINE void with_decoder(const Packed& p, Then then) {
    switch (p.rows->element) {
        case Element::e4m3: return then(Decoder<Element::e4m3, Scaled::sum>(p));
        case Element::i8: return then(Decoder<Element::i8, Scaled::sum>(p));
        case Element::i4: return then(Decoder<Element::i4, Scaled::group>(p));
        case Element::u4:
            if (p.has_large_zeros) return then(Decoder<Element::u4, Scaled::element>(p));
            return then(Decoder<Element::u4, Scaled::group>(p));
        default: break;
    }
    if (p.scaled == Scaled::exponent) return then(Decoder<Element::e2m1, Scaled::exponent>(p));
    if (p.scaled == Scaled::element) return then(Decoder<Element::e2m1, Scaled::element>(p));
    then(Decoder<Element::e2m1, Scaled::group>(p));
}

}  // namespace MOESTRO_ISA
