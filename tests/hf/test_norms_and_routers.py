"""Norms and routers in one call of the engine: what the modules' own code computes, and that code for all else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm, GptOssTopKRouter
from transformers.models.granitemoe.modeling_granitemoe import GraniteMoeTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm, Qwen3MoeTopKRouter
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

import moestro
import zoo
from hf.models import built
from moestro.hf.dense import Projection
from moestro.hf.norms import is_norm, native_norm, serve_norms
from moestro.hf.router_steps import is_router, serve_router_steps
from moestro.hf.stand_in import KEPT
from moestro.ops import native
from moestro.ops.projection import measured
from tolerances import assert_close

pytestmark = pytest.mark.skipif(native.missing() is not None, reason="there is no engine")

CLASSES = (Qwen3MoeRMSNorm, GptOssRMSNorm, Qwen3NextRMSNorm)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def norm_of(cls, columns, dtype, weight_dtype, epsilon=1e-6):
    module = cls(columns, eps=epsilon)
    with torch.no_grad():
        module.weight.copy_(torch.rand(columns) + 0.5)
    return module.to(weight_dtype), dtype


def served_and_own(module, x):
    """What the engine computes, asserted that it did, and what the class does."""
    own = type(module)
    with torch.no_grad():
        wanted = module(x)
        serve_norms(module)
        assert type(module) is not own
        found = module(x)
    return found, wanted


@given(data=st.data())
def test_a_norm_is_what_its_class_computes(data):
    cls, dtype = data.draw(st.sampled_from(CLASSES)), data.draw(st.sampled_from(DTYPES))
    weight_dtype = dtype if cls is Qwen3MoeRMSNorm else data.draw(st.sampled_from((dtype, torch.float32)))
    columns = data.draw(st.sampled_from((1, 3, 15, 16, 17, 64, 100, 513)))
    shape = data.draw(st.sampled_from(((columns,), (1, columns), (2, 1, columns), (2, 3, 5, columns))))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    module, dtype = norm_of(cls, columns, dtype, weight_dtype, data.draw(st.sampled_from((1e-6, 1e-5, 0.3))))
    found, wanted = served_and_own(module, torch.randn(shape).to(dtype))
    assert module.__dict__[KEPT].native is not None
    assert found.shape == wanted.shape
    assert_close(found, wanted, dtype)


def test_weights_and_epsilons_that_change_are_followed():
    module, _ = norm_of(Qwen3MoeRMSNorm, 40, torch.float32, torch.float32)
    own, x = type(module), torch.randn(3, 40)
    serve_norms(module)

    def check():
        with torch.no_grad():
            assert_close(module(x), own.forward(module, x), torch.float32)

    check()
    with torch.no_grad():
        module.weight.mul_(2.0)
    check()
    module.weight = nn.Parameter(torch.rand(40))
    check()
    module.variance_epsilon = 0.5
    check()
    with torch.no_grad():
        assert module.bfloat16()(x.bfloat16()).dtype == torch.bfloat16


def test_what_only_looks_like_a_norm_computes_its_own():
    class ShiftedRMSNorm(Qwen3MoeRMSNorm):
        def forward(self, x):
            return super().forward(x) + 1.0

    module, _ = norm_of(ShiftedRMSNorm, 24, torch.float32, torch.float32)
    found, wanted = served_and_own(module, torch.randn(2, 24))
    assert torch.equal(found, wanted)
    assert native_norm(module, torch.float32) is None
    assert not is_norm(nn.LayerNorm(8))
    assert not is_norm(nn.RMSNorm(8))  # its epsilon is None, which depends on the dtype
    mixed, _ = norm_of(Qwen3MoeRMSNorm, 24, torch.bfloat16, torch.float32)  # whose result is float32
    found, wanted = served_and_own(mixed, torch.randn(2, 24).bfloat16())
    assert torch.equal(found, wanted)
    assert found.dtype == torch.float32


@pytest.mark.parametrize("x", ["columns", "strided", "double", "empty", "gradient", "transform"])
def test_other_inputs_of_a_norm_are_its_own(x):
    module, _ = norm_of(Qwen3MoeRMSNorm, 16, torch.float32, torch.float32)
    own = type(module)
    serve_norms(module)
    given_rows = {
        "columns": torch.randn(2, 1),
        "strided": torch.randn(16, 6).t(),
        "double": torch.randn(2, 16, dtype=torch.float64),
        "empty": torch.randn(0, 16),
        "gradient": torch.randn(2, 16, requires_grad=True),
        "transform": torch.randn(3, 2, 16),
    }[x]
    if x == "gradient":
        module(given_rows).square().sum().backward()
        assert given_rows.grad is not None
        assert module.weight.grad is not None
        return
    with torch.no_grad():
        run = torch.func.vmap(module) if x == "transform" else module
        assert torch.equal(run(given_rows), own.forward(module, given_rows))


def test_a_norm_with_nan_is_its_own():
    module, _ = norm_of(Qwen3MoeRMSNorm, 16, torch.float32, torch.float32)
    x = torch.randn(3, 16)
    x[1, 5] = torch.nan
    found, wanted = served_and_own(module, x)
    assert torch.equal(found.isnan(), wanted.isnan())
    with torch.no_grad():
        module.weight[3] = torch.inf
    serve_norms(module)
    with torch.no_grad():
        assert torch.equal(module(x).isnan(), type(module)._moestro_own_class.forward(module, x).isnan())


class Sizes:
    """What routers read of a configuration."""

    num_experts = num_local_experts = 12
    num_experts_per_tok, hidden_size, norm_topk_prob, router_jitter_noise = 3, 40, False, 0.0


@pytest.fixture
def engine_for_few_rows(monkeypatch):
    """Whatever this machine measures."""
    monkeypatch.setattr(measured, "most_rows", lambda *_: 256)


def router_of(cls, dtype, bias=False, **values):
    torch.manual_seed(0)
    module = cls(type("Config", (Sizes,), values)).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    return module.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize(
    ("cls", "values"),
    [
        (GptOssTopKRouter, {}),
        (MixtralTopKRouter, {}),
        (Qwen3MoeTopKRouter, {}),
        (Qwen3MoeTopKRouter, {"norm_topk_prob": True}),
    ],
    ids=["gpt-oss", "mixtral", "qwen3", "qwen3-normalised"],
)
def test_a_router_is_what_its_class_computes(cls, values, rows, dtype, engine_for_few_rows):
    module = router_of(cls, dtype, **values)
    own, x = type(module), torch.randn(rows, 40).to(dtype)
    with torch.no_grad():
        wanted = module(x)
        serve_router_steps(module)
        assert is_router(module)
        assert type(module) is not own
        found = module(x)
    assert any(each is not None for each in module.__dict__[KEPT].by_call.values())
    assert [each.dtype for each in found] == [each.dtype for each in wanted]
    for mine, theirs in zip(found[:2], wanted[:2], strict=True):
        assert_close(mine, theirs, dtype)
    assert torch.equal(found[2], wanted[2])


def test_routers_that_are_not_known_compute_their_own(engine_for_few_rows):
    class DoublingRouter(Qwen3MoeTopKRouter):
        def forward(self, hidden_states):
            logits, weights, ids = super().forward(hidden_states)
            return logits, 2 * weights, ids

    class SwappedRouter(Qwen3MoeTopKRouter):
        def forward(self, hidden_states):
            logits, weights, ids = super().forward(hidden_states)
            return weights, logits, ids

    for cls in (DoublingRouter, SwappedRouter):
        module = router_of(cls, torch.bfloat16)
        x = torch.randn(2, 40).bfloat16()
        with torch.no_grad():
            wanted = module(x)
            serve_router_steps(module)
            found = module(x)
        assert set(module.__dict__[KEPT].by_call.values()) == {None}
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_nan_and_changed_weights_of_a_router(engine_for_few_rows):
    module = router_of(GptOssTopKRouter, torch.bfloat16)
    own = type(module)
    serve_router_steps(module)
    x = torch.randn(2, 40).bfloat16()
    with torch.no_grad():
        module(x)
        module.weight = nn.Parameter(torch.randn(12, 40).bfloat16())
        assert torch.equal(module(x)[2], own.forward(module, x)[2])
        x[0, 0] = torch.nan
        found, wanted = module(x), own.forward(module, x)
    assert torch.equal(found[0].isnan(), wanted[0].isnan())
    assert torch.equal(found[2], wanted[2])


def test_norms_whose_weight_says_nothing_yet():
    """Ones and zeros, as before a checkpoint is read into them: more than one kind gives the same."""

    class ScaledFirstRMSNorm(Qwen3MoeRMSNorm):
        def forward(self, hidden_states):
            return super().forward(hidden_states * self.weight) / self.weight

    module, x = ScaledFirstRMSNorm(24), torch.randn(3, 24)
    serve_norms(module)
    with torch.no_grad():
        assert_close(module(x), type(module)._moestro_own_class.forward(module, x), torch.float32)
        module.weight.copy_(torch.rand(24) + 0.5)
        assert torch.equal(module(x), type(module)._moestro_own_class.forward(module, x))
    plain, _ = norm_of(Qwen3MoeRMSNorm, 24, torch.float32, torch.float32)
    serve_norms(plain)
    with torch.no_grad():
        plain(x)
    assert plain.__dict__[KEPT].native is not None


def test_a_number_is_a_row_of_one_column_to_its_class():
    module, _ = norm_of(Qwen3MoeRMSNorm, 1, torch.float32, torch.float32)
    own = type(module)
    serve_norms(module)
    with torch.no_grad():
        assert torch.equal(module(torch.tensor(2.0)), own.forward(module, torch.tensor(2.0)))


@pytest.mark.parametrize(("name", "value"), [("top_k", 2), ("norm_topk_prob", True)])
def test_values_of_a_router_that_change_are_followed(name, value, engine_for_few_rows):
    module = router_of(Qwen3MoeTopKRouter, torch.bfloat16)
    own = type(module)
    serve_router_steps(module)
    x = 0.1 * torch.randn(2, 40).bfloat16()
    with torch.no_grad():
        module(x)
        setattr(module, name, value)
        for mine, theirs in zip(module(x), own.forward(module, x), strict=True):
            assert_close(mine.float(), theirs.float(), torch.bfloat16)
        assert module(x)[1].shape[1] == module.top_k


@pytest.mark.parametrize("shape", [(2, 40), (2, 1, 40)])
@pytest.mark.parametrize("cls", [GraniteMoeTopKRouter, Qwen3MoeTopKRouter])
def test_a_router_gives_the_shapes_and_dtypes_of_its_class(cls, shape, engine_for_few_rows):
    module = router_of(cls, torch.bfloat16)
    own, x = type(module), torch.randn(shape).bfloat16()
    serve_router_steps(module)
    with torch.no_grad():
        found, wanted = module(x), own.forward(module, x)
    assert [(each.shape, each.dtype) for each in found] == [(each.shape, each.dtype) for each in wanted]
    assert len(shape) == 3 or None not in module.__dict__[KEPT].by_call.values()


@pytest.mark.parametrize("architecture", ["nllb_moe", "switch_transformers"])
def test_linear_modules_inside_experts_stay(architecture):
    model = moestro.accelerate(zoo.to_bfloat16(built(architecture)), projections="auto")
    inside = {type(m) for name, m in model.named_modules() if ".experts." in name and isinstance(m, nn.Linear)}
    assert inside == {nn.Linear}
    assert any(isinstance(module, Projection) for module in model.modules())
    zoo.outputs(model, zoo.inputs_of(model))
