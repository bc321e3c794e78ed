// What a router gives for few tokens: logits, and from them experts and their weights.
#pragma once

#include "attention_step.h"
#include "routing.h"

namespace moestro {

struct RoutingStep {
    PreparedLinear logits;
    Router router;
};

// Where a router's results go: logits [T, E] in the dtype that the matrix writes, ids and weights [T, K].
struct Routed {
    void* logits = nullptr;
    int64_t* ids = nullptr;
    void* weights = nullptr;
    Element weights_dtype = Element::f32;
};

// False, and what was written but the logits of no use, as of `route`. Logits are rounded before experts are chosen.
bool route_rows(const Isa& isa, const RoutingStep& step, const FloatArray& x, int64_t num_tokens, const Routed& to,
                int num_threads);

// call.out = residual + the experts of call.x that the router chooses, whose weights are rounded to a dtype between the
// two. `call` has no routing. False as of `route_rows`, and nothing is written.
bool route_to_experts(const Isa& isa, const RoutingStep& step, Element weights_dtype, const Isa& experts, Call call,
                      const void* residual);

}  // namespace moestro
