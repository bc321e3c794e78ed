// The numbers that weights, scales and tokens are stored in, and the activations: one list of each, with its names.
#pragma once

#include <cstdint>

#include "kinds.h"

namespace moestro {

enum class Element : int { f32, f16, bf16, e4m3, i8, e2m1, i4, u4 };

struct ElementFacts {
    Element element;
    const char* name;
    int bits;
    bool is_integer;  // its codes are multiplied as 8-bit integers
    bool has_zeros;   // a zero point for each group
};
constexpr ElementFacts kElements[] = {
    {Element::f32, "float32", 32, false, false},   {Element::f16, "float16", 16, false, false},
    {Element::bf16, "bfloat16", 16, false, false}, {Element::e4m3, "e4m3", 8, false, false},
    {Element::i8, "int8", 8, true, false},         {Element::e2m1, "e2m1", 4, true, false},
    {Element::i4, "int4", 4, true, false},         {Element::u4, "uint4", 4, true, true},
};
constexpr int kNumElements = sizeof(kElements) / sizeof(kElements[0]);

constexpr const ElementFacts& facts(Element e) { return kElements[static_cast<int>(e)]; }
constexpr bool is_nibble(Element e) { return facts(e).bits == 4; }
constexpr bool has_scale(Element e) { return facts(e).bits < 16; }
constexpr bool has_zeros(Element e) { return facts(e).has_zeros; }
constexpr bool is_integer(Element e) { return facts(e).is_integer; }
constexpr int64_t bytes_of(Element e, int64_t n) { return facts(e).bits * n / 8; }

template <Element E> struct ElementConstant {
    static constexpr Element value = E;
};
// Calls `body` with the element as a constant: body(c) uses decltype(c)::value.
template <class Body> inline auto with_element(Element e, Body body) {
    switch (e) {
        case Element::f32: return body(ElementConstant<Element::f32>{});
        case Element::f16: return body(ElementConstant<Element::f16>{});
        case Element::bf16: return body(ElementConstant<Element::bf16>{});
        case Element::e4m3: return body(ElementConstant<Element::e4m3>{});
        case Element::i8: return body(ElementConstant<Element::i8>{});
        case Element::e2m1: return body(ElementConstant<Element::e2m1>{});
        case Element::i4: return body(ElementConstant<Element::i4>{});
        default: return body(ElementConstant<Element::u4>{});
    }
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
