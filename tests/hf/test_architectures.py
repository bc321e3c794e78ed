"""The walk over Transformers' own registry: every MoE architecture, built tiny, against its own code."""

from __future__ import annotations

import copy
import re
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers

import architectures
import zoo
from moestro.errors import UnsupportedError
from moestro.hf.serving import accelerate, adapter_of, routes

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "architectures.md"
ARCHITECTURES = zoo.architectures()


@cache
def reason_of(architecture):
    """Why `accelerate` refuses the architecture, or None."""
    try:
        accelerate(zoo.build(architecture).model)
    except UnsupportedError as error:
        return str(error)
    return None


@cache
def seeds_of_the_page():
    """Of an architecture: the first steady model, which the page has found with many draws of noise."""
    return {
        name: int(seed) for name, seed in re.findall(r"^\| (\w+) \|.*\| (\d+) \| [^|]* \|$", PAGE.read_text(), re.M)
    }


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_agrees_with_its_own_code_or_is_refused_by_name(architecture, monkeypatch):
    """A few draws see whether the page's model is still steady; otherwise another is looked for."""
    first = seeds_of_the_page().get(architecture, 0)
    with monkeypatch.context() as few:
        few.setattr(architectures, "NOISE_DRAWS", 4)
        row = architectures.measure(architecture, [first])
    if row.covered and row.seed is None:
        row = architectures.measure(architecture)
    if row.covered:
        assert row.influence > architectures.INFLUENCE, (
            f"zeroed experts move the logits by {row.influence}: proves nothing"
        )
        assert row.float32 <= architectures.FLOAT32
        assert row.bfloat16 <= architectures.BFLOAT16
        assert row.generate is not False
        assert row.agrees
    else:
        assert row.model, f"no tiny model could be built: {row.reason}"
        assert row.model in row.reason


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_tokens(architecture):
    model = zoo.build(architecture).model
    try:
        accelerate(model)
    except UnsupportedError:
        return
    for module in [m for m in model.modules() if adapter_of(m) is not None]:
        arguments = arguments_of(model, module)
        if arguments is None:
            continue
        hidden, *others = arguments
        # [B, S, H] loses its sequence, [T, H] its rows; every other tensor leads with the tokens.
        empty = hidden[:, :0] if hidden.dim() == 3 else hidden[:0]
        result = module(empty, *(t[:0] for t in others))
        output = result[0] if isinstance(result, tuple) else result
        assert output.numel() == 0
        assert output.shape[-1] == hidden.shape[-1]
        assert output.dtype == hidden.dtype


def arguments_of(model, module):
    """What the model passes to `module` for one sequence; None if this input does not reach it."""
    seen = []
    hook = module.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append([*args, *kwargs.values()]), with_kwargs=True
    )
    inputs = zoo.inputs_of(model, batch=1)
    zoo.outputs(model, inputs)
    hook.remove()
    return seen[0] if seen else None


def test_at_least_fifty_are_covered_and_the_others_say_why():
    refused = {name: reason for name in ARCHITECTURES if (reason := reason_of(name)) is not None}
    assert len(ARCHITECTURES) - len(refused) >= 50
    for name, reason in refused.items():
        assert "needs" in reason
        assert name.replace("_", "") in reason.lower()


def test_every_module_that_transformers_prepared_for_its_interface_is_walked():
    sources = (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")
    prepared = {p.parent.name for p in sources if re.search(r"^@use_experts_implementation", p.read_text(), re.M)}
    assert len(prepared) > 40
    assert prepared <= set(ARCHITECTURES)


def test_shared_experts_are_no_routed_ones_and_a_family_may_be_called_shared():
    assert not any(map(routes, ("AriaSharedExpertsMLP", "InklingSharedExperts", "SomeSharedExpert")))
    assert routes("GraniteMoeSharedMoE")


def test_the_page_lists_what_the_registry_holds():
    text = PAGE.read_text()
    if f"Transformers {transformers.__version__}," not in text:
        pytest.skip(f"the page was written with another version than {transformers.__version__}")
    served, refused = (set(re.findall(r"^\| (\w+) \|", half, re.M)) for half in text.split("## Not served"))
    again = "run python tools/architectures.py --markdown docs/reference/architectures.md"
    assert (served | refused) - {"architecture"} == set(ARCHITECTURES), again
    assert served - {"architecture"} == {name for name in ARCHITECTURES if reason_of(name) is None}, again
    assert f"{len(served) - 1} architectures served" in text, again


def test_the_page_says_of_every_architecture_which_model_was_steady():
    if f"Transformers {transformers.__version__}," not in PAGE.read_text():
        pytest.skip(f"the page was written with another version than {transformers.__version__}")
    assert set(seeds_of_the_page()) == {name for name in ARCHITECTURES if reason_of(name) is None}


def test_the_walk_sees_a_wrong_result(monkeypatch):
    """The comparison must fail when the experts are a thousandth off, or it proves nothing."""
    from moestro.hf import experts

    right = experts.run
    monkeypatch.setattr(experts, "run", lambda *args: right(*args) * 1.001)
    row = architectures.measure("qwen3_moe")
    assert row.float32 > architectures.FLOAT32
    assert not row.agrees


def test_the_walk_sees_idle_experts(monkeypatch):
    right = zoo.fill

    def idle(model, seed):
        right(model, seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "down_proj" in name:
                    parameter.mul_(1e-6)

    monkeypatch.setattr(zoo, "fill", idle)
    row = architectures.measure("qwen3_moe")
    assert row.influence < architectures.INFLUENCE
    assert not row.agrees


def test_steady_is_judged_without_our_code(monkeypatch):
    from moestro.hf import experts

    def fail(*args):
        raise AssertionError("moestro ran")

    monkeypatch.setattr(experts, "run", fail)
    model = zoo.to_bfloat16(zoo.build("qwen3_moe").model)
    inputs = zoo.inputs_of(model)
    wanted = zoo.outputs(model, inputs)
    assert architectures.steady(model, inputs, wanted)
    torch.testing.assert_close(zoo.outputs(model, inputs), wanted, rtol=0, atol=0)  # the hooks are gone


def test_a_model_that_is_never_steady_says_so(monkeypatch):
    monkeypatch.setattr(architectures, "MOST_SEEDS", 2)
    monkeypatch.setattr(architectures, "steady", lambda *_: False)
    row = architectures.measure("mixtral")
    assert row.covered
    assert row.seed is None
    assert row.bfloat16 is not None
    assert not row.agrees
    assert re.search(r"\| mixtral .*\| never steady \| same tokens \|", architectures.markdown([row]))


def test_a_tiny_model_is_the_same_every_time():
    first, second = zoo.build("mixtral", seed=3).model, zoo.build("mixtral", seed=3).model
    other = zoo.build("mixtral", seed=4).model
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert any(not torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


def test_unknown_architecture_says_what_was_tried():
    with pytest.raises(UnsupportedError, match=r"\[zoo.build\] got llama .*no experts in it"):
        zoo.build("llama")


def test_relative_error_counts_nan_as_infinite():
    nan = torch.tensor([float("nan"), 1.0])
    assert architectures.relative_error(nan, torch.ones(2)) == float("inf")
    assert architectures.relative_error(torch.ones(2), torch.ones(2)) == 0.0


def test_bfloat16_keeps_what_the_family_keeps():
    model = zoo.to_bfloat16(copy.deepcopy(zoo.build("inkling2").model))
    kept = {str(p.dtype) for name, p in model.named_parameters() if ".mlp.gate." in name}
    assert kept == {"torch.float32"}
    assert {str(p.dtype) for name, p in model.named_parameters() if "experts" in name} == {"torch.bfloat16"}
