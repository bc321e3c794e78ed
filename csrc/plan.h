// What a call will run, kernel by kernel, without running it.
#pragma once

#include <vector>

#include "choose.h"
#include "counts.h"

namespace moestro {

struct Planned {
    Stage stage;
    Kernel kernel;
    int64_t units = 0, rows = 0;  // (expert, block of token rows), and the token rows of all of these
};
// In the order of stages and kernels; only what runs. Rows that stay floats for what they hold are not foreseen.
std::vector<Planned> plan(const Isa& isa, const Call& call);
std::vector<Planned> plan(const Isa& isa, const LinearCall& call);

// Bytes that a call takes beside its arguments and the scratch memory of its threads, at most.
int64_t workspace_bytes(const Isa& isa, const Call& call);
int64_t workspace_bytes(const Isa& isa, const LinearCall& call);

}  // namespace moestro
