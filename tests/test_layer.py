"""The modules people build layers from, against the reference."""

from __future__ import annotations

import copy
import re
import shutil

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import moestro
from moestro import FFN, Activation, Experts, MoE, Routing, SharedExperts, TopKRouter, reference
from moestro.errors import InvalidInputError
from moestro.ops import native
from moestro.routing import GroupLimit, GroupLimitedRouter, drop_over_capacity, keep_confident
from moestro.types import GPT_OSS_SWIGLU
from tolerances import assert_close


def layer(**kwargs) -> MoE:
    torch.manual_seed(0)
    return MoE(TopKRouter(16, 6, 2), Experts(6, 16, 12), **kwargs)


def expected(moe: MoE, x: torch.Tensor) -> torch.Tensor:
    flat = x.reshape(-1, x.shape[-1])
    return reference.expert_mlp(flat, moe.route(flat), moe.experts.weights).reshape(x.shape)


@pytest.mark.parametrize("shape", [(16,), (5, 16), (2, 7, 16), (0, 16), (2, 0, 16)])
def test_layer_is_the_reference_for_any_leading_shape(shape):
    moe, x = layer(), torch.randn(shape)
    assert moe(x).shape == shape
    assert_close(moe(x), expected(moe, x))


def test_shared_experts_are_added():
    moe = layer(shared_experts=SharedExperts(16, 12, num_shared_experts=2, gate=True))
    x = torch.randn(5, 16)
    shared = moe.shared_experts
    gate, up = (x @ shared.gate_up.T).chunk(2, dim=-1)
    s = (F.silu(gate) * up) @ shared.down.T * torch.sigmoid(x @ shared.output_gate.T)
    assert_close(moe(x), expected(moe, x) + s)


def test_several_shared_experts_are_the_sum_of_single_ones():
    torch.manual_seed(0)
    three, x = SharedExperts(8, 5, num_shared_experts=3), torch.randn(4, 8)
    total = torch.zeros(4, 8)
    gate, up = three.gate_up.chunk(2)
    for s in range(3):
        rows = slice(5 * s, 5 * s + 5)
        total = total + (F.silu(x @ gate[rows].T) * (x @ up[rows].T)) @ three.down[:, rows].T
    assert_close(three(x), total)


def test_plain_shared_experts_with_biases():
    torch.manual_seed(0)
    shared, x = SharedExperts(8, 5, activation=Activation("relu2", gated=False), bias=True), torch.randn(4, 8)
    nn.init.normal_(shared.gate_up_bias)
    nn.init.normal_(shared.down_bias)
    h = F.relu(F.linear(x, shared.gate_up, shared.gate_up_bias)).square()
    assert_close(shared(x), F.linear(h, shared.down, shared.down_bias))


@pytest.mark.parametrize("activation", [Activation("relu2", gated=False), GPT_OSS_SWIGLU], ids=["plain", "gpt-oss"])
def test_experts_with_biases(activation):
    torch.manual_seed(0)
    experts = Experts(6, 16, 12, activation, bias=True)
    nn.init.normal_(experts.gate_up_bias)
    nn.init.normal_(experts.down_bias)
    moe = MoE(TopKRouter(16, 6, 3), experts)
    x = torch.randn(9, 16)
    assert_close(moe(x), expected(moe, x))


def test_rewrites_apply_to_every_routing():
    torch.manual_seed(0)
    x = torch.randn(40, 16)
    dropping = layer(rewrite=lambda r: drop_over_capacity(r, 6, capacity_factor=0.5)[0])
    assert (dropping.route(x).expert_ids == -1).any()
    assert_close(dropping(x), expected(dropping, x))
    confident = layer(rewrite=lambda r: keep_confident(r, min_share=0.9))
    assert (confident.route(x).expert_ids == -1).any()
    assert_close(confident(x), expected(confident, x))


def test_a_dispatcher_comes_in_as_a_value():
    """Two ranks in one process: each computes its experts, and the rows are added where they came from."""

    class TwoRanks:
        def dispatch(self, x, routing):
            halves = [torch.where(routing.expert_ids // 3 == rank, routing.expert_ids, -1) for rank in (0, 1)]
            both = Routing(torch.cat(halves), routing.routing_weights.repeat(2, 1))
            return x.repeat(2, 1), both, x.shape[0]

        def combine(self, y, handle):
            return y[:handle] + y[handle:]

    moe, x = layer(), torch.randn(9, 16)
    split = MoE(moe.router, moe.experts, dispatcher=TwoRanks())
    assert_close(split(x), moe(x))


def test_any_module_that_routes_is_a_router():
    class RoundRobin(nn.Module):
        def forward(self, x):
            ids = torch.arange(x.shape[0])[:, None] % 6
            return Routing(ids, torch.ones(x.shape[0], 1))

    moe, x = layer(), torch.randn(9, 16)
    foreign = MoE(RoundRobin(), moe.experts)
    assert_close(foreign(x), expected(foreign, x))
    wrong = MoE(RoundRobin(), Experts(3, 16, 12))
    with pytest.raises(InvalidInputError, match="expert_ids"):
        wrong(x)


def test_group_limited_layer():
    torch.manual_seed(0)
    router = GroupLimitedRouter(16, 8, 2, GroupLimit(num_groups=4, top_groups=2))
    nn.init.normal_(router.correction_bias)
    moe, x = MoE(router, Experts(8, 16, 12)), torch.randn(9, 16)
    assert_close(moe(x), expected(moe, x))


def test_ffn_upcycled_from_a_dense_one_computes_what_it_did():
    class Dense(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj = nn.Linear(16, 24, bias=False)
            self.up_proj = nn.Linear(16, 24, bias=False)
            self.down_proj = nn.Linear(24, 16, bias=False)

        def forward(self, x):
            return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

    torch.manual_seed(0)
    dense, x = Dense(), torch.randn(3, 5, 16)
    for top_k in (1, 2, 4):
        assert_close(FFN.from_dense(dense, num_experts=4, top_k=top_k)(x), dense(x))
    half = FFN.from_dense(dense.bfloat16(), num_experts=4, top_k=2)
    assert half.experts.gate_up.dtype == torch.bfloat16
    assert_close(half(x.bfloat16()), dense(x.bfloat16()))


def test_ffn_refuses_to_upcycle_what_it_would_not_compute():
    class GeluMLP(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj, self.up_proj = nn.Linear(16, 24, bias=False), nn.Linear(16, 24, bias=False)
            self.down_proj = nn.Linear(24, 16, bias=False)

        def forward(self, x):
            return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))

    torch.manual_seed(0)
    dense, x = GeluMLP(), torch.randn(5, 16)
    with pytest.raises(InvalidInputError, match="does not compute Activation"):
        FFN.from_dense(dense, 4, 2)
    assert_close(FFN.from_dense(dense, 4, 2, Activation("gelu-tanh"))(x), dense(x))
    for wrong in (Activation(interleaved=True), Activation("gelu", gated=False)):
        with pytest.raises(InvalidInputError, match="of the same kind"):
            FFN.from_dense(dense, 4, 2, wrong)


def test_a_dispatchers_routing_is_not_trusted():
    class Identity:
        def dispatch(self, x, routing):
            return x, routing, None

        def combine(self, y, handle):
            return y

    moe = MoE(TopKRouter(16, 8, 2), Experts(4, 16, 12), dispatcher=Identity())
    with pytest.raises(InvalidInputError, match="expert_ids"):
        moe(torch.randn(100, 16))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiles_with_the_default_backend():
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("torch.compile's default backend needs a C++ compiler")
    moe, x = layer(), torch.randn(9, 16)
    assert_close(torch.compile(moe, fullgraph=True)(x), moe(x))


def test_ffn_upcycled_from_a_plain_one():
    torch.manual_seed(0)
    dense = nn.Module()
    dense.fc1, dense.fc2 = nn.Linear(8, 12, bias=False), nn.Linear(12, 8, bias=False)
    ffn = FFN.from_dense(dense, 4, 2, Activation("gelu", gated=False))
    x = torch.randn(5, 8)
    assert_close(ffn(x), dense.fc2(F.gelu(dense.fc1(x))))


def test_training_moves_every_parameter():
    moe = layer(shared_experts=SharedExperts(16, 12, gate=True))
    before = copy.deepcopy(moe.state_dict())
    optimizer = torch.optim.SGD(moe.parameters(), lr=1.0)
    (moe(torch.randn(64, 16)) - torch.randn(64, 16)).square().mean().backward()
    optimizer.step()
    assert all(not torch.equal(v, before[k]) for k, v in moe.state_dict().items())


def test_state_dict_round_trip_and_dtype_change():
    moe = layer()
    other = MoE(TopKRouter(16, 6, 2), Experts(6, 16, 12))
    other.load_state_dict(moe.state_dict())
    x = torch.randn(5, 16)
    assert torch.equal(other(x), moe(x))
    assert_close(moe.bfloat16()(x.bfloat16()), other(x), torch.bfloat16)


def test_experts_from_weights_share_storage():
    weights = layer().experts.weights
    experts = Experts.from_weights(weights, strategy="grouped")
    assert experts.gate_up.data_ptr() == weights.gate_up.data.data_ptr()
    assert experts.gate_up.requires_grad
    assert experts.strategy == "grouped"


def test_compiles_whole_and_exports_with_any_number_of_tokens():
    moe = layer(shared_experts=SharedExperts(16, 12))
    tokens = {0: torch.export.Dim("num_tokens")}
    exported = torch.export.export(moe, (torch.randn(5, 16),), dynamic_shapes=(tokens,)).module()
    compiled = torch.compile(moe, fullgraph=True, dynamic=True, backend="aot_eager")
    for num_tokens in (2, 33):
        x = torch.randn(num_tokens, 16)
        assert_close(exported(x), moe(x))
        assert_close(compiled(x), moe(x))


def test_gradients_through_a_compiled_layer():
    moe, x = layer(), torch.randn(9, 16)
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
    moe(x).square().sum().backward()
    eager = {name: p.grad.clone() for name, p in moe.named_parameters()}
    moe.zero_grad()
    compiled(x).square().sum().backward()
    for name, p in moe.named_parameters():
        assert_close(p.grad, eager[name])


@pytest.mark.parametrize(
    ("call", "arguments", "says"),
    [
        (None, (None,), "[MoE] got no value; needs a torch.Tensor for x"),
        (moestro.expert_mlp, (1, 2, 3), "[expert_mlp] got a value of type builtins.int; needs a torch.Tensor for x"),
        (moestro.expert_mlp, (torch.ones(3, 4), (1, 2), 3), "got a tuple as routing; needs a moestro.Routing"),
        (moestro.topk, ([1.0], 2), "[topk] got a value of type builtins.list; needs a torch.Tensor for scores"),
        (moestro.group_by_expert, (None, 2), "[grouping] got no value; needs a torch.Tensor for expert_ids"),
        (torch.nn.Sequential(torch.nn.Linear(2, 2)), (torch.ones(2),), "of a model, one of its expert layers"),
    ],
)
def test_explain_of_something_else_says_what_to_pass(call, arguments, says):
    call = call or moestro.FFN(hidden_size=16, intermediate_size=8, num_experts=4, top_k=2)
    with pytest.raises(moestro.errors.InvalidInputError, match=re.escape(says)):
        moestro.explain(call, *arguments)


def test_explain_names_every_candidate_with_its_reason():
    moe, x = layer(), torch.randn(2, 3, 16)
    explanation = moestro.explain(moe, x)
    assert explanation.chosen == "torch"
    running = {f"cpu-{isa.name}" for isa in native.ISAS if isa.runs_here}
    assert all("requires one" in c.reason for c in explanation.candidates if c.name in running)
    assert explanation.strategy == "selective"
    assert "T*K = 12 <= 24" in explanation.strategy_reason
    assert moestro.explain(moe, torch.randn(13, 16)).strategy == "grouped"
    text = str(explanation)
    assert "> torch" in text
    assert "reference" in text
    assert explanation.as_dict()["candidates"][-1]["name"] == "reference"
    with torch.no_grad():
        runs = [c.name for c in moestro.explain(moe, x).candidates if c.reason is None]
        assert moestro.explain(moe, x).chosen == runs[0]
    with moestro.use(implementation="reference"):
        assert moestro.explain(moe, x).chosen == "reference"
    first = "torch" if native.module is None else "cpu-native"
    assert moestro.explain(moestro.topk, torch.zeros(1, 4), 2).chosen == first
    big = torch.zeros(2000, 256)
    branchless = next(c for c in moestro.explain(moestro.topk, big, 2).candidates if c.name == "branchless")
    assert "exceed" in branchless.reason
    with moestro.use(implementation="branchless"):
        assert moestro.explain(moestro.topk, big, 2).chosen is None
        assert "forced: branchless" in str(moestro.explain(moestro.topk, big, 2))


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: Experts(0, 4, 4), "num_experts=0"),
        (lambda: Experts(2, 4, 4, strategy="fast"), "strategy='fast'"),
        (lambda: SharedExperts(4, 4, 0), "num_shared_experts=0"),
        (lambda: SharedExperts(4, 4, activation=GPT_OSS_SWIGLU), "not interleaved"),
        (lambda: MoE(TopKRouter(4, 5, 2), Experts(6, 4, 4)), "a router over 5 experts and 6 experts"),
        (lambda: FFN(4, 4, num_experts=2, top_k=3), "top_k=3"),
        (lambda: FFN.from_dense(nn.Linear(2, 2), 2, 1), "gate_proj"),
        (lambda: layer()(torch.randn(3, 15)), r"x \[3, 15\]"),
        (lambda: layer()(torch.full((1, 16), torch.nan)), "NaN"),
        (lambda: layer().experts(torch.randn(3, 16), Routing(torch.tensor([[6]]), torch.ones(1, 1))), "one row of ids"),
        (lambda: SharedExperts(4, 4)(torch.randn(2, 5)), r"x \[2, 5\]"),
        (lambda: moestro.explain(print), "print"),
        (lambda: moestro.explain(moestro.topk), "0 arguments for topk"),
        (lambda: moestro.explain(layer()), "0 arguments for MoE"),
        (lambda: Activation("gelu", alpha=2.0), "alpha"),
        (lambda: Activation(gated=False, up_offset=1.0), "up_offset"),
        (lambda: SharedExperts(4, 4)(torch.randn(2, 4).bfloat16()), "bfloat16"),
        (lambda: TopKRouter(4, 4, 2)(torch.zeros(5, 4, device="meta")), "meta"),
    ],
)
def test_bad_input(build, text):
    with pytest.raises(InvalidInputError, match=text):
        build()
