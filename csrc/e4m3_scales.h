// Of four rows of e4m3 the scales of their groups, floats at any address, and what sums of all columns are multiplied
// by.
#pragma once

#include "kernels.h"

namespace MOESTRO_ISA {

struct E4m3Scales {
    const uint8_t* groups[kRows];
    float factor[kRows];

    // `scratch` takes those that are not floats where they lie.
    E4m3Scales(const FourRows& rows, float* scratch) {
        const int64_t group = rows.group_columns, n = group ? (rows.columns + group - 1) / group : 1;
        const int64_t room = round_up(n + 1, W) + W;
        for (int r = 0; r < kRows; ++r, scratch += room) {
            factor[r] = rows.global_scale[r];
            groups[r] = rows.scales[r];
            if (group == 0) {
                factor[r] *= one_scale(rows.scale, rows.scales[r]);
            } else if (rows.scale != Scale::f32) {
                read_scales(rows.scale, rows.scales[r], n, 1.0f, scratch, room);
                groups[r] = reinterpret_cast<const uint8_t*>(scratch);
            }
        }
    }
    MOESTRO_INLINE float of_group(int r, int64_t group) const {
        float found;
        std::memcpy(&found, groups[r] + group * 4, sizeof found);
        return found;
    }
};

}  // namespace MOESTRO_ISA
