// A matrix by itself, as Python holds it: what does not change from one call to the next, checked once.
#pragma once

#include <nanobind/nanobind.h>

#include "attention_step.h"
#include "bindings_check.h"
#include "bindings_plan.h"
#include "stored.h"

namespace moestro {

// out = W x + bias.
class Linear {
public:
    Linear(const Isa& isa, const LinearCall& fixed, const Stored& weights) : isa_(isa), call_(fixed) {
        need(!weights.kept(), "weights that are not one matrix");
        need(call_.wide_rows >= 0, "a negative number of rows");
        call_.weights = weights.projection(call_.weights.rows ? 1 : 0);
        need(!isa.tiles || call_.x.dtype == Element::bf16,
             "an instruction set that multiplies bfloat16 only, and something else");
        if (isa.tiles) need_tiles(call_.weights, 1);
        need(isa.four_rows || isa.tiles, "an instruction set that multiplies int8 only");
    }

    void run(int64_t num_threads, int64_t num_tokens, uint64_t x, int64_t x_stride, uint64_t out) const {
        LinearCall call = with_tokens(num_threads, num_tokens);
        if (num_tokens == 0 || call.weights.rows == 0) return;
        call.x.data = at<void>(x);
        call.x.stride = x_stride;
        call.out = at<void>(out);
        need(call.out && (call.x.data || call.weights.columns == 0), "no address");
        const nanobind::gil_scoped_release release;
        linear(isa_, call);
    }
    std::vector<PlanRecord> plan(int64_t num_threads, int64_t num_tokens) const {
        return records(moestro::plan(isa_, with_tokens(num_threads, num_tokens)));
    }
    int64_t workspace_bytes(int64_t num_tokens) const {
        return moestro::workspace_bytes(isa_, with_tokens(1, num_tokens));
    }

    PreparedLinear prepared() const { return {&isa_, call_}; }

private:
    LinearCall with_tokens(int64_t num_threads, int64_t num_tokens) const {
        LinearCall call = call_;
        call.num_threads = checked_threads(num_threads);
        need(num_tokens >= 0 && num_tokens < kMostTokens, "sizes out of range");
        call.num_tokens = num_tokens;
        return call;
    }

    const Isa& isa_;
    LinearCall call_;
};

void bind_linear(nanobind::module_& m);

}  // namespace moestro
