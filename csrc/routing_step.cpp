#include "routing_step.h"

#include "layout.h"

namespace moestro {
namespace {

class Logits : public Workspace<Logits> {};

}  // namespace

bool route_rows(const Isa& isa, const RoutingStep& step, const FloatArray& x, int64_t num_tokens, const Routed& to,
                int num_threads) {
    const struct Release {
        ~Release() { Logits::release(); }
    } release;
    run(step.logits, x, num_tokens, to.logits, num_threads);
    const int64_t experts = step.logits.call.weights.rows, slots = num_tokens * step.router.top_k;
    float* logits = Logits::arena().reserve(round_up(num_tokens * experts, 16) + slots);
    float* weights = logits + round_up(num_tokens * experts, 16);
    isa.widen(to.logits, step.logits.call.out_dtype, num_tokens * experts, 1.0f, logits);
    if (!route({logits, Real::f32, num_tokens, experts, experts}, step.router, to.ids, weights, num_threads))
        return false;
    const float one = 1.0f;
    isa.combine(&weights, &one, 1, slots, to.weights, to.weights_dtype);
    return true;
}

}  // namespace moestro
