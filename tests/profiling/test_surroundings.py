"""What happens around a profile: overlapping ones, copies, other threads and models, what runs after it."""

from __future__ import annotations

import contextvars
import copy
import gc
import threading
import weakref
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure

import moestro
import zoo
from hf.models import built
from moestro.bench.plot import STYLE
from moestro.hf import accelerate
from moestro.profiling import Profile
from profiling.test_profile import IDS, Block, ffn, is_clean


@torch.no_grad()
def test_profiles_that_overlap() -> None:
    """The one that began first ends first."""
    model = Block(ffn()).eval()
    first, second = ExitStack(), ExitStack()
    one = first.enter_context(moestro.profile(model))
    other = second.enter_context(moestro.profile(model))
    first.close()
    model(IDS)
    second.close()
    assert is_clean(model)
    assert one.report.layers == ()
    assert other.report.layers[0].tokens == 40


@torch.no_grad()
def test_a_thread_with_the_context_of_this_one() -> None:
    """As asyncio.to_thread has it: its calls come to the same observers, while this thread is within a layer."""
    model, other = Block(ffn()).eval(), Block(ffn()).eval()

    def beside(module: object, arguments: object) -> None:
        thread = threading.Thread(target=contextvars.copy_context().run, args=(other, IDS))
        thread.start()
        thread.join()

    with moestro.profile(model) as p:
        hook = model.mlp.experts.register_forward_pre_hook(beside)
        model(IDS[:, :3])
        hook.remove()
    assert p.report.layers[0].tokens == 6


@torch.no_grad()
def test_another_model_is_outside() -> None:
    model, other = Block(ffn()).eval(), Block(ffn()).eval()
    with moestro.profile(model) as p:
        model(IDS)
        with moestro.use(implementation="torch", strategy="grouped"):
            other(IDS)
    assert "torch" not in p.report.ran
    assert p.report.phases["prompt"].seconds["grouping"] == 0


@torch.no_grad()
def test_copies_are_not_in_it() -> None:
    model = Block(ffn()).eval()
    with moestro.profile(model) as p:
        made = copy.deepcopy(model)
        model(IDS)
        made(IDS)
    assert is_clean(made)
    assert p.report.layers[0].tokens == 40


def test_a_profile_keeps_no_model() -> None:
    model = Block(ffn()).eval()
    with torch.no_grad(), moestro.profile(model) as p:
        model(IDS)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert p.report.layers[0].tokens == 40


@torch.no_grad()
def test_passes_by_embeddings() -> None:
    """As `generate` of Transformers calls a model: what it has not is None."""
    model = accelerate(built("qwen3_moe")).eval()
    embedded = model.get_input_embeddings()(IDS[:, :4])
    with moestro.profile(model) as p:
        model(input_ids=None, inputs_embeds=embedded)
        model(input_ids=IDS[:, :1], inputs_embeds=None)
    assert {name: phase.passes for name, phase in p.report.phases.items()} == {"prompt": 1, "decode": 1}


@torch.no_grad()
def test_passes_of_experts_by_themselves() -> None:
    experts = moestro.Experts(6, 8, 16).eval()
    x = torch.randn(5, 8)
    routing = moestro.TopKRouter(8, 6, 2)(x)
    with moestro.profile(experts) as p:
        for _ in range(3):
            experts(x, routing)
    phase = p.report.phases["forward"]
    assert (phase.passes, phase.tokens) == (3, 15)
    assert phase.seconds["experts"] > 0


@torch.no_grad()
def test_no_tokens_and_one_expert(tmp_path: Path) -> None:
    layer = moestro.FFN(8, 16, 1, 1)
    with moestro.profile(layer) as p:
        layer(torch.zeros(0, 8))
    assert (p.report.layers[0].tokens, p.report.layers[0].imbalance) == (0, 0)
    assert "1 expert layer" in str(p)
    p.plot(tmp_path / "p.png")


@torch.no_grad()
def test_a_long_name_stays_within_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = ffn()
    p = Profile(layer, name="/models" + "/a-folder-with-a-name" * 15)
    with p.profiler.taken():
        layer(torch.randn(4, 8))
    sizes: list[tuple[float, float]] = []
    ticks: list[list[float]] = []

    def measure(figure: Figure, path: object) -> None:
        save(figure, path)
        ticks.extend(axis.get_yticks().tolist() for axis in figure.axes if axis.get_ylabel() == "expert layer")
        sizes.append((figure._suptitle.get_window_extent().width, figure.get_figwidth() * STYLE["savefig.dpi"]))

    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", measure)
    p.plot(tmp_path / "p.png")
    ((title, whole),) = sizes
    assert title <= whole
    assert all(tick == int(tick) for each in ticks for tick in each)  # a layer has no half


def test_nothing_ran_is_no_pass() -> None:
    with moestro.profile(ffn()) as p:
        pass
    assert p.report.phases == {}


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["llama4", "switch_transformers", "jetmoe"])
def test_entropy_is_that_of_logits_and_not_of_scores(architecture: str) -> None:
    """The router of Llama 4 returns its scores first: sigmoids of the best, zeros elsewhere."""
    model = accelerate(built(architecture)).eval()
    for name, parameter in model.named_parameters():
        if "router" in name or "gate" in name.rsplit(".", 2)[-2:]:
            parameter.zero_()  # all experts are the same to it
    with moestro.profile(model) as p:
        zoo.outputs(model, zoo.inputs_of(model))
    layer = p.report.layers[0]
    assert layer.router_entropy == pytest.approx(torch.tensor(float(layer.num_experts)).log2().item(), rel=1e-4)
