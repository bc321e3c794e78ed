#include "choose.h"

#include <algorithm>

namespace moestro {
namespace {

// Token rows of a block from which on eight rows of weights at once are faster than four.
constexpr int64_t kFewestForEight = 7;
// Rows of an expert from which on outer products are faster than dots: weights are transposed for all of them.
constexpr int64_t kFewestForOuter = 40;
// Token rows of a block from which on tiles of int8 are faster than dots.
constexpr int64_t kFewestForInt8Tiles = 5;
// Rows of an expert up to which codes of e4m3 become floats in registers.
constexpr int64_t kFewE4m3Rows = 8;

constexpr int64_t kWorkspaceBytes = 256 << 20;  // what a call takes beside its arguments; more tokens go in turns
constexpr int64_t kLinearWorkspaceBytes = 64 << 20;

int64_t given(int64_t measured, int64_t otherwise) { return measured ? measured : otherwise; }

// Token rows of a block from which on weights are decoded once for all of them. Where there are tiles or eight-row
// dots, what was measured is about those; else it holds for this and for outer products.
int64_t fewest_decoded(const Case& c) {
    const bool others = c.isa.eight_rows || c.isa.tiles;
    const bool has_16_bits = facts(c.weights.element).bits == 16;
    const int64_t most = has_16_bits ? c.isa.direct_16_bit_tokens : c.isa.direct_tokens;
    return given(others ? 0 : c.wide_rows, most + 1);
}

bool takes_outer_products(const Case& c) {
    const int64_t columns = c.weights.columns, group = c.weights.group_columns;
    const RowOps* const ops = row_ops(c.isa, c.input);
    const bool has_them = c.isa.outer_products && (!ops || ops->outer_products);
    return c.may_take_more && has_them && !c.same_bits && columns > 0 && (group == 0 || kOuterColumns % group == 0) &&
           c.expert_rows >= std::max(c.wide_rows, kFewestForOuter);
}

std::string when_outer_products() {
    return "avx2 and avx2-vnni, where groups of weights divide " + std::to_string(kOuterColumns) + " columns, from " +
           std::to_string(kFewestForOuter) +
           " rows of the expert (more where that was measured), unless PyTorch is deterministic";
}

bool takes_eight_rows(const Case& c) {
    return c.may_take_more && c.isa.eight_rows && c.rows >= given(c.wide_rows, kFewestForEight) &&
           c.weights.columns > 0;
}

struct Rule {
    Kernel kernel;
    const char* name;
    bool (*applies)(const Case&);
    std::string (*when)();
};

// The first that applies is taken.
const Rule kRules[kNumKernels] = {
    {Kernel::bfloat16_tiles, "bfloat16 tiles", [](const Case& c) { return c.takes_tiles; },
     [] { return std::string("amx and avx512-bf16, from the rows of the expert that the next table gives"); }},
    {Kernel::int8_tiles, "int8 tiles",
     [](const Case& c) {
         const RowOps* ops = row_ops(c.isa, c.input);
         return ops && ops->tiles && c.rows >= given(c.wide_rows, kFewestForInt8Tiles);
     },
     [] { return "amx-int8, from " + std::to_string(kFewestForInt8Tiles) + " rows of a block"; }},
    {Kernel::int8_dots, "int8 dots", [](const Case& c) { return c.input == Input::int8; },
     [] { return std::string("the input format is int8"); }},
    {Kernel::int8_residual_dots, "int8 residual dots", [](const Case& c) { return c.input == Input::int8_residual; },
     [] {
         return std::string(
             "tokens of 16 bits and both projections stored as integers, unless PyTorch is deterministic "
             "(avx512-vnni, avx512-bf16, amx, avx2-vnni, neon-dotprod, neon-i8mm)");
     }},
    {Kernel::int16_dots, "int16 dots", [](const Case& c) { return c.input == Input::int16; },
     [] { return std::string("the same on avx2, which has no products of bytes with sums of 32 bits"); }},
    {Kernel::bfloat16_dots, "bfloat16 dots", [](const Case& c) { return c.input == Input::bfloat16; },
     [] {
         return std::string(
             "tokens in bfloat16, and each projection in bfloat16 (avx512-bf16, neon-i8mm) or, with one scale a row "
             "or for 128 columns, in e4m3 (avx512-bf16)");
     }},
    {Kernel::e4m3_dots, "e4m3 dots", [](const Case& c) { return c.input == Input::e4m3 && c.group_scales; },
     [] {
         return "each projection in e4m3, with one scale a row or for a multiple of 64 columns, and at most " +
                std::to_string(kFewE4m3Rows) +
                " rows of the expert, unless PyTorch is deterministic (avx2, avx2-vnni, where the processor "
                "multiplies subnormal numbers as fast as others)";
     }},
    {Kernel::outer_products, "outer products", takes_outer_products, when_outer_products},
    {Kernel::decoded_e4m3_dots, "decoded e4m3 dots", [](const Case& c) { return c.input == Input::e4m3; },
     [] { return std::string("as e4m3 dots, with more rows"); }},
    {Kernel::eight_row_dots, "eight-row dots", takes_eight_rows,
     [] {
         return "avx512, avx512-vnni and avx512-bf16, from " + std::to_string(kFewestForEight) + " rows of a block";
     }},
    {Kernel::group_scaled_dots, "group-scaled dots",
     [](const Case& c) { return c.group_scales && has_scale(c.weights.element) && c.rows <= c.isa.direct_tokens; },
     [] {
         return std::string(
             "packed weights and at most `direct_tokens` rows of the expert, unless PyTorch is "
             "deterministic");
     }},
    {Kernel::direct_dots, "direct dots",
     [](const Case& c) { return c.weights.element == Element::f32 || c.rows < fewest_decoded(c); },
     [] {
         return std::string(
             "float32 weights, or at most `direct_tokens` rows of a block, of weights of 16 bits "
             "`direct_16_bit_tokens`; on sets without tiles and eight-row dots fewer than was measured");
     }},
    {Kernel::decoded_dots, "decoded dots", [](const Case&) { return true; },
     [] { return std::string("everything else"); }},
};

// Counted by timing both with every number of rows (docs/log.md): rows from which on an expert takes tiles of bfloat16,
// where its other rows would be floats, or int8 with a residual.
struct FewestTiled {
    Element element;
    Scale scale;  // none: any
    int64_t floats, int8_residual;
};
constexpr FewestTiled kFewestTiled[] = {
    {Element::e4m3, Scale::none, 3, 3}, {Element::i8, Scale::none, 5, 6}, {Element::e2m1, Scale::e8m0, 2, 3},
    {Element::e2m1, Scale::none, 5, 8}, {Element::i4, Scale::none, 4, 6}, {Element::u4, Scale::none, 4, 5},
};
// Where tiles are made of vectors: beside floats, and beside rows of bfloat16 or int8 with a residual. For 32 columns
// a tile takes 16 products, of half the size in a last tile of at most 8 tokens; the others take 2, 1 and 1 a token.
constexpr int64_t kFewestOfVectors = 10, kFewestBesideOthers = 16;

int64_t fewest_tiled(const TileOps& tiles, const Projection& p, Input input) {
    if (tiles.are_vectors) return input == Input::floats ? kFewestOfVectors : kFewestBesideOthers;
    for (const FewestTiled& each : kFewestTiled)
        if (each.element == p.element && (each.scale == Scale::none || each.scale == p.scale))
            return input == Input::int8_residual ? each.int8_residual : each.floats;
    return 1;
}

// Whether rows of bfloat16 meet the weights as they are.
bool takes_bfloat16(const Isa& isa, const FloatArray& x, const Projection& p) {
    if (!isa.bfloat16 || x.dtype != Element::bf16) return false;
    const int64_t e4m3 = isa.bfloat16->e4m3_columns;
    return p.element == Element::bf16 ||
           (p.element == Element::e4m3 && e4m3 && (p.group_columns == 0 || p.group_columns == e4m3));
}

bool takes_e4m3(const Isa& isa, const Projection& p) {
    return shifts_e4m3(isa) && p.element == Element::e4m3 && p.group_columns % 64 == 0;
}

bool takes_int8(const Projection& p) {
    const bool one_scale_a_row = is_nibble(p.element) || p.group_columns == 0;
    return is_integer(p.element) && one_scale_a_row && p.columns <= kMostInt8Columns;
}

// What rows of 16 bits become where integers can stand for them.
Input input_of_integers(const Isa& isa, bool can) {
    if (can && isa.int8_residual) return Input::int8_residual;
    return can && isa.int16 ? Input::int16 : Input::floats;
}

}  // namespace

Kernel choose(const Case& asked) {
    for (const Rule& rule : kRules)
        if (rule.applies(asked)) return rule.kernel;
    return Kernel::decoded_dots;
}

Case expert_case(const Isa& isa, const Call& call, const Projection& weights, int64_t expert_rows) {
    Case asked{isa, weights};
    asked.input = input_of(isa, call);
    asked.may_take_more = true;
    asked.same_bits = call.same_bits;
    asked.group_scales = group_scales(isa, asked.input, call.same_bits, expert_rows);
    asked.expert_rows = expert_rows;
    asked.wide_rows = call.wide_rows;
    return asked;
}

Case linear_case(const Isa& isa, const LinearCall& call) {
    Case asked{isa, call.weights};
    asked.input = input_of(isa, call);
    asked.may_take_more = isa.outer_products != nullptr;  // eight-row dots are not what linear modules take
    asked.same_bits = call.same_bits;
    asked.group_scales = asked.input == Input::e4m3 && group_scales(isa, asked.input, call.same_bits, call.num_tokens);
    asked.expert_rows = call.num_tokens;
    asked.wide_rows = call.wide_rows;
    return asked;
}

bool shifts_e4m3(const Isa& isa) { return isa.e4m3 && !lacking(all_of({Feature::subnormals})); }

Input input_of(const Isa& isa, const LinearCall& call) {
    if (takes_bfloat16(isa, call.x, call.weights)) return Input::bfloat16;
    if (takes_e4m3(isa, call.weights) && !call.same_bits) return Input::e4m3;
    return input_of_integers(isa, call.x.dtype != Element::f32 && takes_int8(call.weights) && !call.same_bits);
}

Input input_of(const Isa& isa, const Call& call) {
    if (call.int8_input) return Input::int8;
    if (takes_bfloat16(isa, call.x, call.gate_up) && takes_bfloat16(isa, call.x, call.down)) return Input::bfloat16;
    if (takes_e4m3(isa, call.gate_up) && takes_e4m3(isa, call.down) && !call.same_bits) return Input::e4m3;
    const bool can = call.x.dtype != Element::f32 && takes_int8(call.gate_up) && takes_int8(call.down);
    return input_of_integers(isa, can && !call.same_bits);
}

const RowOps* row_ops(const Isa& isa, Input input) {
    switch (input) {
        case Input::bfloat16: return isa.bfloat16;
        case Input::int8: return isa.int8;
        case Input::int8_residual: return isa.int8_residual;
        case Input::int16: return isa.int16;
        case Input::e4m3: return isa.e4m3;
        default: return nullptr;
    }
}

int64_t fewest_tiled(const Isa& isa, const Call& call, Input input) {
    if (!isa.tiles) return INT64_MAX;
    if (call.same_bits) return isa.tiles->are_vectors ? INT64_MAX : 1;
    if (call.wide_rows) return call.wide_rows;
    return std::max(fewest_tiled(*isa.tiles, call.gate_up, input), fewest_tiled(*isa.tiles, call.down, input));
}

bool group_scales(const Isa& isa, Input input, bool same_bits, int64_t expert_rows) {
    return !same_bits && expert_rows <= (input == Input::e4m3 ? kFewE4m3Rows : isa.direct_tokens);
}

bool takes_tiles(const Isa& isa, const LinearCall& call) {
    if (!isa.tiles) return false;
    const bool packed = has_scale(call.weights.element);
    if (call.same_bits || !packed) return !isa.tiles->are_vectors;
    return call.num_tokens >= given(call.wide_rows, fewest_tiled(*isa.tiles, call.weights, input_of(isa, call)));
}

int64_t token_block(const Call& call) {
    return call.token_block > 0 ? std::min(call.token_block, kTokenBlock) : kTokenBlock;
}

int64_t next_block(const Case& asked, int64_t left, int64_t most) {
    const bool outer = choose(asked) == Kernel::outer_products;
    const int64_t own = outer ? kOuterTokenBlock : kTokenBlock;
    most = most > 0 ? std::min(most, own) : own;
    const int64_t blocks = (left + most - 1) / most;
    return outer ? (left + blocks - 1) / blocks : std::min(left, most);
}

int64_t tokens_at_once(const Isa& isa, const Call& call, Input input) {
    const int64_t rows = call.all_experts ? call.num_experts + call.top_k : call.top_k;
    const int64_t x_rows = isa.tiles || call.weight_on_input ? std::max<int64_t>(rows, 1) : 1;
    // Rows of int8 with a residual are few where tiles take the others.
    const bool few = input == Input::int8_residual && isa.tiles && !isa.tiles->are_vectors;
    const RowOps* ops = few ? nullptr : row_ops(isa, input);
    // Rows of integers are made of rows of floats, of which those of h are all kept meanwhile.
    const auto of_row = [&](const Projection& p) {
        return (ops ? ops->row_floats(p.element, p.columns) : p.columns * (few ? 2 : 1)) + 96;
    };
    const int64_t h_floats = of_row(call.down) + (ops ? call.intermediate_size : 0);
    const int64_t per_token = 4 * (rows * (h_floats + call.hidden_size + 96) + x_rows * (of_row(call.gate_up) + 32));
    return std::max<int64_t>(kWorkspaceBytes / per_token, 16);
}

int64_t tokens_at_once(const LinearCall& call) {
    const int64_t vectors = has_scale(call.weights.element) ? 3 : 1;  // of a row: an int8 residual takes up to three
    return std::max<int64_t>(kLinearWorkspaceBytes / (4 * (vectors * call.weights.columns + 256)) / 16 * 16, 16);
}

const char* name_of(Kernel kernel) { return kRules[static_cast<int>(kernel)].name; }

std::vector<KernelRule> kernel_rules() {
    std::vector<KernelRule> found;
    for (const Rule& rule : kRules) found.push_back({rule.name, rule.when()});
    return found;
}

std::vector<TileRule> tile_rules() {
    std::vector<TileRule> found;
    for (const FewestTiled& each : kFewestTiled) {
        std::string weights = facts(each.element).name;
        if (each.scale != Scale::none) weights += std::string(" with scales in ") + name_of(each.scale);
        found.push_back({weights, each.floats, each.int8_residual});
    }
    found.push_back({"every other", 1, 1});
    found.push_back({"avx512-bf16: bfloat16 and e4m3", kFewestBesideOthers, kFewestBesideOthers});
    found.push_back({"avx512-bf16: others", kFewestOfVectors, kFewestBesideOthers});
    return found;
}

}  // namespace moestro
