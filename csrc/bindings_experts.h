// Experts, as Python holds them: what does not change from one call to the next, checked once.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <vector>

#include "bindings_check.h"
#include "bindings_plan.h"
#include "plan.h"
#include "stored.h"

namespace moestro {

constexpr int64_t kMostPieces = 1 << 20;

class ExpertMlp {
public:
    ExpertMlp(const Isa& isa, const Call& fixed, const Stored& gate_up, const Stored& down)
        : isa_(isa), call_(fixed), kept_{gate_up.kept(), down.kept()} {
        call_.gate_up = gate_up.projection(fixed.num_experts);
        call_.down = down.projection(fixed.num_experts);
        call_.hidden_size = call_.gate_up.columns;
        call_.intermediate_size = call_.down.columns;
        check_sizes();
        check_isa();
        for (int64_t e = 0; call_.all_experts && e < call_.num_experts; ++e)
            need(call_.gate_up.has(e) && call_.down.has(e), "an expert without weights");
    }

    void run(int64_t num_threads, int64_t num_tokens, uint64_t x, int64_t x_stride, uint64_t ids, uint64_t weights,
             uint64_t out) const {
        Call call = with_ids(num_threads, num_tokens, ids);
        if (num_tokens == 0 || call.hidden_size == 0) return;
        call.x.data = at<void>(x);
        call.x.stride = x_stride;
        call.routing_weights = at<float>(weights);
        call.out = at<void>(out);
        need(call.out && call.x.data && (call.top_k == 0 || call.routing_weights), "no address");
        const nanobind::gil_scoped_release release;
        expert_mlp(isa_, call);
    }
    // The rows of the pairs that ids name, to where `sum` reads those of all pairs: float32 [T, K, H].
    void run_rows(int64_t num_threads, int64_t num_tokens, uint64_t x, int64_t x_stride, uint64_t ids, uint64_t weights,
                  uint64_t rows) const {
        Call call = with_ids(num_threads, num_tokens, ids);
        if (num_tokens == 0 || call.hidden_size == 0 || call.top_k == 0) return;
        need(x && weights && rows, "no address");
        call.x.data = at<void>(x), call.x.stride = x_stride;
        call.routing_weights = at<float>(weights), call.rows = at<float>(rows);
        const nanobind::gil_scoped_release release;
        expert_mlp(isa_, call);
    }
    // Ids outside 0..num_experts - 1 are empty slots.
    void sum(int64_t num_threads, int64_t num_tokens, uint64_t rows, uint64_t ids, uint64_t weights, uint64_t out,
             int64_t num_experts) const {
        Call call = with_ids(num_threads, num_tokens, ids);
        if (num_tokens == 0 || call.hidden_size == 0) return;
        need(out && (call.top_k == 0 || (weights && rows)), "no address");
        need(num_experts >= 0 && num_experts < kMostExperts, "sizes out of range");
        call.num_experts = num_experts, call.out = at<void>(out);
        call.routing_weights = at<float>(weights), call.rows = at<float>(rows);
        const nanobind::gil_scoped_release release;
        sum_rows(isa_, call);
    }
    // What `run` computes, without rows, weights and a place for the result.
    Call prepared(int64_t num_threads, int64_t num_tokens) const {
        Call call = call_;
        call.num_threads = checked_threads(num_threads);
        need(num_tokens >= 0 && num_tokens < kMostTokens, "sizes out of range");
        call.num_tokens = num_tokens;
        return call;
    }
    const Isa& isa() const { return isa_; }
    std::vector<PlanRecord> plan(int64_t num_threads, int64_t num_tokens, uint64_t ids) const {
        const Call call = with_ids(num_threads, num_tokens, ids);
        if (num_tokens == 0 || call.hidden_size == 0) return {};
        return records(moestro::plan(isa_, call));
    }
    int64_t workspace_bytes(int64_t num_tokens) const {
        need(num_tokens >= 0 && num_tokens < kMostTokens, "sizes out of range");
        Call call = call_;
        call.num_tokens = num_tokens;
        return moestro::workspace_bytes(isa_, call);
    }

private:
    Call with_ids(int64_t num_threads, int64_t num_tokens, uint64_t ids) const {
        Call call = prepared(num_threads, num_tokens);
        call.expert_ids = at<void>(ids);
        need(num_tokens == 0 || call.hidden_size == 0 || call.top_k == 0 || call.expert_ids, "no address");
        return call;
    }
    void check_sizes() const {
        const Call& c = call_;
        need(c.top_k >= 0 && c.top_k <= kMostSlots, "more slots than fit");
        need(c.num_experts >= 0 && c.num_experts <= kMostExperts, "sizes out of range");
        need(c.pieces >= 0 && c.pieces <= kMostPieces, "a number of pieces out of range");
        need(c.wide_rows >= 0, "a negative number of rows");
        need(c.down.rows == c.hidden_size, "a down projection that does not lead back to the hidden size");
        need(c.gate_up.rows == c.intermediate_size * (c.activation.gated ? 2 : 1),
             "projections that do not belong together");
    }
    void check_isa() const {
        const Call& c = call_;
        need(c.int8_input ? isa_.int8 != nullptr : isa_.four_rows != nullptr,
             "an input format that this instruction set does not multiply");
        for (const Projection* p : {&c.gate_up, &c.down}) {
            const bool is_integer = moestro::is_integer(p->element) && (is_nibble(p->element) || p->group_columns == 0);
            need(!c.int8_input || is_integer, "an int8 input and weights that are no integers");
            need(!c.int8_input || p->columns <= kMostInt8Columns,
                 "an int8 input of so many columns that sums may leave 32 bits");
        }
        if (!isa_.tiles) return;
        need(c.x.dtype == Element::bf16, "an instruction set that multiplies bfloat16 only, and something else");
        need_tiles(c.gate_up, c.activation.gated && !c.activation.interleaved ? 2 : 1);
        need_tiles(c.down, 1);
    }

    const Isa& isa_;
    Call call_;
    std::shared_ptr<const void> kept_[2];  // tables that the projections point into
};

void bind_experts(nanobind::module_& m);

}  // namespace moestro
