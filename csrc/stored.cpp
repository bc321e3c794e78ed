#include "stored.h"

#include <utility>

#include "bindings_check.h"

namespace moestro {
namespace {

constexpr int64_t kMostRows = int64_t{1} << 40, kMostColumns = int64_t{1} << 31, kMostBlocks = 64;

}  // namespace

Stored::Stored(const Projection& projection) : projection_(projection) {
    const Projection& p = projection_;
    need(p.rows >= 0 && p.columns >= 0 && p.rows < kMostRows && p.columns < kMostColumns, "sizes out of range");
    need(!is_nibble(p.element) || p.columns % 8 == 0, "columns that do not fill words of eight nibbles");
    need(p.group_rows >= 0 && p.group_columns >= 0, "negative groups");
    need(!is_nibble(p.element) || p.group_columns % 16 == 0, "groups of fewer than 16 columns");
    need(!is_nibble(p.element) || (p.group_columns & (p.group_columns - 1)) == 0,
         "groups of nibbles that are no power of two");
    need(is_nibble(p.element) || p.group_columns % 16 == 0, "groups that do not fill vectors");
    need(has_scale(p.element) == (p.scale != Scale::none),
         "scales where the element has none, or none where it has them");
}

Matrix Stored::matrix(const Addresses& a) {
    return {at<uint8_t>(a[0]), at<uint8_t>(a[1]), at<uint8_t>(a[2]), at<float>(a[3])};
}

void Stored::check(const Matrix& m) const {
    const Projection& p = projection_;
    if (p.rows == 0) return;
    need(p.columns == 0 || m.data != nullptr, "no data");
    if (p.num_groups() == 0) return;
    need(p.scale == Scale::none || m.scales != nullptr, "no scales");
    need(!has_zeros(p.element) || m.zeros != nullptr, "no zeros");
}

void Stored::use_table(int64_t num_experts, int64_t num_blocks, const std::vector<int64_t>& experts,
                       const std::vector<Addresses>& matrices) {
    need(num_experts >= 0 && num_experts <= kMostExperts && num_blocks > 0 && num_blocks < kMostBlocks,
         "sizes out of range");
    need(projection_.rows % num_blocks == 0, "blocks of unequal heights");
    need(matrices.size() == experts.size() * static_cast<size_t>(num_blocks), "matrices that do not belong to experts");
    auto table = std::make_shared<Table>();
    table->num_experts = num_experts;
    table->matrices.resize(static_cast<size_t>(num_experts * num_blocks));
    table->listed.resize(static_cast<size_t>(num_experts), 0);
    for (size_t i = 0; i < experts.size(); ++i) {
        need(experts[i] >= 0 && experts[i] < num_experts, "an expert out of range");
        for (int64_t b = 0; b < num_blocks; ++b) {
            const Matrix m = matrix(matrices[i * num_blocks + b]);
            check(m);
            table->matrices[experts[i] * num_blocks + b] = m;
        }
        table->listed[experts[i]] = 1;
    }
    projection_.num_blocks = num_blocks;
    table_ = std::move(table);
}

Projection Stored::projection(int64_t num_experts) const {
    Projection p = projection_;
    if (!table_) {
        if (num_experts) check(p.base);
        return p;
    }
    need(table_->num_experts == num_experts, "tables of other numbers of experts");
    p.table = table_->matrices.data();
    p.listed = table_->listed.data();
    return p;
}

}  // namespace moestro
