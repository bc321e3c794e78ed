// Experts of one projection as Python describes them, with the table of those that are unstacked.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "engine.h"

namespace moestro {

using Addresses = std::array<uint64_t, 4>;  // data, scales, zeros, global scale
using Strides = std::array<int64_t, 4>;     // the same, in bytes

class Stored {
public:
    // Throws std::invalid_argument where sizes, groups and scales do not go together.
    explicit Stored(const Projection& projection);

    // `experts[i]` is the number of the expert that `matrices[i * num_blocks ..]` make up; a routing may name no others.
    void use_table(int64_t num_experts, int64_t num_blocks, const std::vector<int64_t>& experts,
                   const std::vector<Addresses>& matrices);

    // The experts, of which there are to be so many, and what they point into. Throws where something is missing.
    Projection projection(int64_t num_experts) const;
    const Projection& described() const { return projection_; }
    std::shared_ptr<const void> kept() const { return table_; }
    static Matrix matrix(const Addresses& addresses);

private:
    struct Table {
        int64_t num_experts = 0;
        std::vector<Matrix> matrices;
        std::vector<uint8_t> listed;
    };
    void check(const Matrix& matrix) const;

    Projection projection_;
    std::shared_ptr<const Table> table_;
};

}  // namespace moestro
