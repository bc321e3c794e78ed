// The numbers that weights, scales and tokens are stored in, and the activations: one list of each, with its names.
#pragma once

#include <cstdint>

#include "kinds.h"

namespace moestro {

// An entry is ELEMENT(name in C++, name in Python, and the rest of ElementFacts). The first three are also dtypes of
// tokens.
#define MOESTRO_ELEMENTS(ELEMENT)                     \
    ELEMENT(f32, "float32", 32, false, false, false)  \
    ELEMENT(f16, "float16", 16, false, false, false)  \
    ELEMENT(bf16, "bfloat16", 16, false, false, true) \
    ELEMENT(e4m3, "e4m3", 8, false, false, true)      \
    ELEMENT(i8, "int8", 8, true, false, true)         \
    ELEMENT(e2m1, "e2m1", 4, true, false, true)       \
    ELEMENT(i4, "int4", 4, true, false, true)         \
    ELEMENT(u4, "uint4", 4, true, true, true)

#define MOESTRO_ELEMENT(name, ...) name,
enum class Element : int { MOESTRO_ELEMENTS(MOESTRO_ELEMENT) };
#undef MOESTRO_ELEMENT

struct ElementFacts {
    Element element;
    const char* name;
    int bits;
    bool is_integer;  // its codes are multiplied as 8-bit integers
    bool has_zeros;   // a zero point for each group
    bool has_tiles;   // tiles of bfloat16 hold it (bfloat16_panels.h)
};
#define MOESTRO_ELEMENT(name, ...) {Element::name, __VA_ARGS__},
constexpr ElementFacts kElements[] = {MOESTRO_ELEMENTS(MOESTRO_ELEMENT)};
#undef MOESTRO_ELEMENT
constexpr int kNumElements = sizeof(kElements) / sizeof(kElements[0]);

constexpr const ElementFacts& facts(Element e) { return kElements[static_cast<int>(e)]; }
constexpr bool is_nibble(Element e) { return facts(e).bits == 4; }
constexpr bool has_scale(Element e) { return facts(e).bits < 16; }
constexpr bool has_zeros(Element e) { return facts(e).has_zeros; }
constexpr bool is_integer(Element e) { return facts(e).is_integer; }
constexpr int64_t bytes_of(Element e, int64_t n) { return facts(e).bits * n / 8; }

// `values[16]`: what the codes of a nibble stand for, for those that kernels have no shorter way to decode (`values_of`
// in kernels.h).
template <Element E> struct Codes;

template <Element E> struct ElementConstant {
    static constexpr Element value = E;
};
// Calls `body` with the element as a constant: body(c) uses decltype(c)::value.
template <class Body> inline auto with_element(Element e, Body body) {
#define MOESTRO_ELEMENT(name, ...) \
    case Element::name: return body(ElementConstant<Element::name>{});
    switch (e) { MOESTRO_ELEMENTS(MOESTRO_ELEMENT) }
#undef MOESTRO_ELEMENT
    __builtin_unreachable();
}

// The same for those whose codes are multiplied as integers; nothing for others.
template <class Body> inline void with_integer(Element e, Body body) {
    with_element(e, [&](auto c) {
        if constexpr (is_integer(decltype(c)::value)) body(c);
    });
}

enum class Scale : int { none, f32, f16, bf16, e8m0, e4m3 };

struct ScaleFacts {
    Scale scale;
    const char* name;
    int bytes;
};
constexpr ScaleFacts kScales[] = {
    {Scale::none, "none", 0},     {Scale::f32, "float32", 4}, {Scale::f16, "float16", 2},
    {Scale::bf16, "bfloat16", 2}, {Scale::e8m0, "e8m0", 1},   {Scale::e4m3, "e4m3", 1},
};
constexpr int kNumScales = sizeof(kScales) / sizeof(kScales[0]);
constexpr int bytes_of(Scale s) { return kScales[static_cast<int>(s)].bytes; }
constexpr const char* name_of(Scale s) { return kScales[static_cast<int>(s)].name; }

// Dtypes of tensors. Those of experts' tokens are the first three, in the order of the elements.
enum class Real : int { f32, f16, bf16, f64 };
constexpr const char* kReals[] = {"float32", "float16", "bfloat16", "float64"};
constexpr int kNumReals = sizeof(kReals) / sizeof(kReals[0]);
constexpr int kNumExpertReals = 3;

#define MOESTRO_KIND(name, text, formula) name,
enum class Kind : int { MOESTRO_KINDS(MOESTRO_KIND) };
#undef MOESTRO_KIND
#define MOESTRO_KIND(name, text, formula) text,
constexpr const char* kKinds[] = {MOESTRO_KINDS(MOESTRO_KIND)};
#undef MOESTRO_KIND
constexpr int kNumKinds = sizeof(kKinds) / sizeof(kKinds[0]);

}  // namespace moestro
