#include "routing_step.h"

#include "layout.h"

namespace moestro {
namespace {

class Logits : public Workspace<Logits> {};
class Chosen : public Workspace<Chosen> {};

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

bool route_to_experts(const Isa& isa, const RoutingStep& step, Element weights_dtype, const Isa& experts, Call call,
                      const void* residual) {
    const struct Release {
        ~Release() { Chosen::release(); }
    } release;
    const int64_t scores = round_up(call.num_tokens * call.num_experts, 16);
    const int64_t slots = round_up(call.num_tokens * call.top_k, 16);
    float* weights = Chosen::arena().reserve(slots + 2 * slots + slots + scores);
    auto* ids = reinterpret_cast<int64_t*>(weights + slots);
    float *rounded = weights + 3 * slots, *logits = weights + 4 * slots;
    const Routed to{logits, ids, rounded, weights_dtype};
    if (!route_rows(isa, step, call.x, call.num_tokens, to, call.num_threads)) return false;
    isa.widen(rounded, weights_dtype, call.num_tokens * call.top_k, 1.0f, weights);
    call.expert_ids = ids, call.ids_are_64_bit = true, call.routing_weights = weights;
    expert_mlp(experts, call);
    add(isa, residual, call.out, call.out_dtype, call.num_tokens * call.hidden_size);
    return true;
}

}  // namespace moestro
