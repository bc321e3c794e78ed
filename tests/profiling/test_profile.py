"""`moestro.profile` around models, layers and training: exact loads, the same results, and nothing left behind."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import moestro
import zoo
from hf.models import built
from moestro.errors import InvalidInputError, UnsupportedError
from moestro.hf import accelerate, served
from moestro.ops import dispatch
from moestro.profiling import STAGES, Profile, ProfileReport, calls
from moestro.routing import DropReport, drop_over_capacity, expert_counts
from moestro.types import Routing
from profiling.test_marks import Steps


def is_clean(model: nn.Module) -> bool:
    return not calls._OBSERVERS and not dispatch._OBSERVERS.get() and not any(map(is_seen, model.modules()))


def is_seen(module: nn.Module) -> bool:
    return bool(module._forward_pre_hooks or module._forward_hooks or "_own_class" in vars(type(module)))


def given_to(model: nn.Module) -> tuple[dict[str, list[int]], list[object]]:
    """The ids that come to each layer of Transformers' interface, counted by hooks of this test."""
    counts: dict[str, list[int]] = {}

    def count(name: str, ids: Tensor, experts: int) -> None:
        mine = counts.setdefault(name, [0] * experts)
        for e in ids.reshape(-1).tolist():
            mine[e] += 1

    hooks = [
        model.get_submodule(layer.path).register_forward_pre_hook(
            lambda module, arguments, name=layer.path: count(name, arguments[1], module.num_experts)
        )
        for layer in served(model)
    ]
    return counts, hooks


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss", "olmoe", "deepseek_v3"])
def test_loads_are_the_routing(architecture: str) -> None:
    model = accelerate(built(architecture))
    inputs = zoo.inputs_of(model)
    with torch.no_grad():
        before = zoo.outputs(model, inputs)
        counts, hooks = given_to(model)
        with moestro.profile(model) as p:
            inside = zoo.outputs(model, inputs)
        for hook in hooks:
            hook.remove()  # type: ignore[attr-defined]
        after = zoo.outputs(model, inputs)
    assert torch.equal(before, inside)
    assert torch.equal(before, after)
    report = p.report
    assert {layer.name: list(layer.loads) for layer in report.layers} == counts
    assert all(layer.router_entropy is not None for layer in report.layers)
    assert list(report.phases) == ["prompt"]
    assert {span.place.stage for span in p.profiler.marks.spans} >= {"router", "experts", "attention", "dense"}
    assert is_clean(model)


@pytest.mark.parametrize("architecture", ["llama4", "jetmoe", "dbrx", "switch_transformers", "nemotron_h"])
def test_families_of_their_own(architecture: str) -> None:
    model = accelerate(built(architecture))
    with torch.no_grad(), moestro.profile(model) as p:
        zoo.outputs(model, zoo.inputs_of(model))
    assert [layer.name for layer in p.report.layers] == [layer.path for layer in served(model)]
    assert all(layer.rows > 0 for layer in p.report.layers)
    assert is_clean(model)


def test_entropy_is_that_of_the_routers_logits() -> None:
    model = accelerate(built("qwen3_moe"))
    logits: dict[str, Tensor] = {}
    inputs = zoo.inputs_of(model)
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(lambda m, a, out, name=name: logits.update({name: out[0]}))
    with torch.no_grad(), moestro.profile(model) as p:
        zoo.outputs(model, inputs)
    for layer, mine in zip(p.report.layers, logits.values(), strict=True):
        shares = mine.float().softmax(-1)
        assert layer.router_entropy == pytest.approx(float(-(shares * shares.log2()).sum(-1).mean()), rel=1e-4)


class Block(nn.Module):
    """A layer with all that a stage is made of, in plain modules."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.self_attn = SelfAttention()
        self.mlp = layer
        self.head = nn.Linear(8, 50)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        return self.head(self.mlp(x + self.self_attn(x)))  # type: ignore[no-any-return]


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.qkv(x)  # type: ignore[no-any-return]


def ffn(**options: object) -> moestro.FFN:
    return moestro.FFN(8, 16, 6, 2, **options)  # type: ignore[arg-type]


IDS = torch.arange(40).view(2, 20)


def test_stages_of_plain_modules_add_up_to_the_whole() -> None:
    """By a clock that goes on by one at every look: all looks are in the sum, each in one stage."""
    model = Block(ffn()).eval()

    class Looks(Steps):
        def now(self) -> float:
            self.time += 1
            return self.time

    clock = Looks()
    p = Profile(model, clock=clock)
    with torch.no_grad(), p.profiler.taken():
        begin = clock.time
        model(IDS)
        model(IDS[:, :1])
    phases = p.report.phases
    assert list(phases) == ["prompt", "decode"]
    assert sum(phase.total for phase in phases.values()) == clock.time - begin
    assert [phase.tokens for phase in phases.values()] == [40, 2]
    spent = {stage for stage in STAGES if phases["prompt"].seconds[stage]}
    assert spent >= {"router", "experts", "dense", "attention", "other", "outside"}


def test_grouping_is_seen_where_it_is_an_operation_of_its_own() -> None:
    layer = ffn()
    with moestro.use(implementation="torch", strategy="grouped"), torch.no_grad(), moestro.profile(layer) as p:
        layer(torch.randn(64, 8))
    assert p.report.phases["forward"].seconds["grouping"] > 0
    assert any("the sum over slots is inside experts" in note for note in p.report.notes)


def test_a_training_loop_is_as_without() -> None:
    def trained(watched: bool) -> tuple[list[Tensor], Profile | None]:
        torch.manual_seed(0)
        model = Block(ffn())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def steps() -> None:
            for _ in range(3):
                optimizer.zero_grad()
                model(IDS).square().mean().backward()
                optimizer.step()

        if not watched:
            steps()
            return list(model.parameters()), None
        with moestro.profile(model) as p:
            steps()
        assert is_clean(model)
        return list(model.parameters()), p

    plain, _ = trained(False)
    own, p = trained(True)
    assert all(torch.equal(a, b) for a, b in zip(plain, own, strict=True))
    assert p is not None
    phase = p.report.phases["training"]
    assert (phase.passes, phase.tokens) == (3, 120)
    assert phase.seconds["outside"] > 0  # gradients and the optimizer
    assert p.report.layers[0].rows == 240


def test_slots_that_a_rewrite_dropped() -> None:
    told: list[DropReport] = []

    def rewrite(routing: Routing) -> Routing:
        kept, report = drop_over_capacity(routing, 6, 1.0)
        told.append(report)
        return kept

    layer = moestro.MoE(moestro.TopKRouter(8, 6, 2), moestro.Experts(6, 8, 16), rewrite=rewrite)
    with torch.no_grad(), moestro.profile(layer) as p:
        layer(torch.randn(50, 8))
    (load,) = p.report.layers
    assert load.dropped == told[0].total > 0
    assert load.rows == 100 - load.dropped


def test_experts_by_themselves() -> None:
    experts = moestro.Experts(6, 8, 16)
    routing = moestro.TopKRouter(8, 6, 2)(torch.randn(5, 8))
    with torch.no_grad(), moestro.profile(experts) as p:
        experts(torch.randn(5, 8), routing)
    (load,) = p.report.layers
    assert load.loads == tuple(expert_counts(routing, 6).tolist())
    assert load.router_entropy is None
    assert p.report.phases["forward"].total > 0


def test_an_error_inside_leaves_nothing_behind() -> None:
    model = Block(ffn()).eval()

    def fail() -> None:
        with torch.no_grad():
            model(IDS)
            model.mlp.experts(torch.randn(2, 3), None)

    with pytest.raises(Exception, match=r"."), moestro.profile(model) as p:
        fail()
    assert is_clean(model)
    assert p.report.layers[0].tokens == 40
    with torch.no_grad(), moestro.profile(model) as p:
        model(IDS)
    assert p.report.layers[0].tokens == 40


def test_other_threads_are_not_in_it() -> None:
    model = Block(ffn()).eval()
    with torch.no_grad(), moestro.profile(model) as p:
        other = threading.Thread(target=model, args=(IDS,))
        other.start()
        other.join()
        model(IDS[:, :3])
    assert p.report.layers[0].tokens == 6
    assert p.report.phases["prompt"].passes == 1


def test_profiles_within_each_other_see_the_same() -> None:
    model = Block(ffn()).eval()
    with torch.no_grad(), moestro.profile(model) as outer:
        model(IDS)
        with moestro.profile(model.mlp) as inner:
            model(IDS)
    assert outer.report.layers[0].tokens == 80
    assert inner.report.layers[0].tokens == 40
    assert is_clean(model)


def test_what_comes_out(tmp_path: Path) -> None:
    model = Block(ffn()).eval()
    with torch.no_grad(), moestro.profile(model) as p:
        model(IDS)
        model(IDS[:, :1])
    lines = str(p).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "model: Block; 1 expert layer (6 experts, top 2)"
    assert [line.split()[0] for line in lines if "%" in line and " ms " in line][-1] == "total"
    found = json.loads(json.dumps(p.as_json()))
    assert found["layers"][0]["rows"] == 84
    assert set(found) == set(ProfileReport.__dataclass_fields__)
    p.plot(tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    p.chrome_trace(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    whole = [event for event in events if event["ph"] == "X" and event["name"] == "Block"]
    inside = [event for event in events if event["ph"] == "X" and event["name"] == "mlp.experts"]
    assert len(whole) == len(inside) == 2
    for outer, inner in zip(whole, inside, strict=True):
        assert outer["ts"] <= inner["ts"]
        assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]


def test_nothing_ran(tmp_path: Path) -> None:
    with moestro.profile(Block(ffn())) as p:
        pass
    assert "none was run" in str(p)
    p.plot(tmp_path / "p.svg")


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: "model", InvalidInputError),
        (lambda: nn.Linear(2, 2), UnsupportedError),
        (lambda: built("qwen3_moe"), UnsupportedError),
        (lambda: torch.compile(Block(ffn())), UnsupportedError),
        (lambda: Block(torch.compile(ffn())), UnsupportedError),
    ],
    ids=["no module", "dense", "not served", "compiled", "compiled inside"],
)
def test_what_is_refused(make: object, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"\[profile\] got .+; needs .+\. .+\."), moestro.profile(make()):  # type: ignore[operator]
        pass
