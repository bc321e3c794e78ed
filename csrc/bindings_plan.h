// The kernels of a call, as Python sees them.
#pragma once

#include <string>
#include <vector>

#include "plan.h"

namespace moestro {

struct PlanRecord {
    std::string projection, kernel;
    int64_t units, rows;
};
inline std::vector<PlanRecord> records(const std::vector<Planned>& found) {
    std::vector<PlanRecord> list;
    for (const Planned& p : found)
        list.push_back({kStages[static_cast<int>(p.stage)], name_of(p.kernel), p.units, p.rows});
    return list;
}

}  // namespace moestro
