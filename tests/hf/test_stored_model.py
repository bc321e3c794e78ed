"""A model whose experts are stored: copied, pickled, moved, cast, compiled, trained around, saved as a state dict."""

from __future__ import annotations

import copy
import io
import os
import pickle
import re

import pytest
import torch
from transformers import AutoModelForCausalLM

import moestro
from hf.checkpoints import IDS, differing, logits, read
from moestro.hf import served
from moestro.hf.store import ExpertStore
from tolerances import assert_close, bit_equal

KINDS = {
    "apart": ("mixtral-8x7b", None),
    "stacked, biases": ("gpt-oss-20b", None),
    "FP8 apart": ("qwen3-30b-a3b-fp8", None),
    "transposed": ("llama4-scout", None),
    "rows of all experts": ("dbrx", None),
    "quantised": ("wide", "int4-g32-zp"),
}


@pytest.fixture(params=KINDS)
def model(request, made):
    like, form = KINDS[request.param]
    return moestro.load(made.wide() if like == "wide" else made.folder(like), form, dtype="float32")


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled, saved])
def test_a_copy_is_whole_and_its_own(model, duplicate):
    wanted = logits(model)
    other = duplicate(model)
    assert {layer.layout.split(", ")[1] for layer in served(other)} == {"in memory"}
    assert [layer.path for layer in served(other)] == [layer.path for layer in served(model)]
    state = other.state_dict()
    assert differing(model.state_dict(), state) == set()
    for name, tensor in state.items():
        if ".experts." in name and not name.endswith("bias"):
            tensor.view(torch.uint8).zero_()
    assert bit_equal(logits(model), wanted)
    assert not torch.equal(logits(other), wanted)


def test_a_pickle_holds_each_expert_once(made):
    model = moestro.load(made.wide(), dtype="float32")
    logits(model)
    nbytes = sum(t.nbytes for t in model.state_dict().values())
    assert len(pickle.dumps(model)) < nbytes * 1.2 + (1 << 16)


@pytest.mark.filterwarnings("ignore:Casting complex values to real")  # a buffer of Llama 4's vision model
@pytest.mark.parametrize(
    ("cast", "dtype"),
    [
        (lambda m: m.half(), torch.float16),
        (lambda m: m.to(torch.bfloat16), torch.bfloat16),
        (lambda m: m.double(), torch.float64),
        (lambda m: m.to("cpu", torch.bfloat16), torch.bfloat16),
    ],
    ids=["half", "to", "double", "device and dtype"],
)
def test_casts_leave_what_is_stored(model, cast, dtype):
    before = {n: t for n, t in model.state_dict().items() if ".experts." in n and "bias" not in n}
    wanted = logits(model)
    if dtype == torch.float16 and getattr(model, "is_quantized", False):
        with pytest.raises(ValueError, match="not supported for quantized"):  # Transformers' own rule
            cast(model)
        return
    cast(model)
    assert {p.dtype for p in model.parameters()} == {dtype}
    after = model.state_dict()
    assert [n for n, t in before.items() if not bit_equal(t, after[n])] == []
    found = logits(model)
    assert found.dtype == dtype
    assert torch.isfinite(found).all()
    if dtype == torch.float64:
        assert_close(found.float(), wanted)


def test_to_meta_and_back(made, model):
    state = {n: t.clone() for n, t in model.state_dict().items()}
    wanted = logits(model)
    inverse = {n: b.clone() for n, b in model.named_buffers()}
    model.to("meta")
    assert {t.device.type for t in model.state_dict().values()} == {"meta"}
    model.to_empty(device="cpu")
    missing, unexpected = model.load_state_dict(state)
    assert (missing, unexpected) == ([], [])
    for name, buffer in model.named_buffers():
        buffer.copy_(inverse[name])
    assert bit_equal(logits(model), wanted)


def test_state_dicts_are_exchanged(model):
    state = {n: t.clone() for n, t in model.state_dict().items()}
    wanted = logits(model)
    for name, tensor in model.state_dict().items():
        if ".experts." in name or "mlp" in name:
            tensor.view(torch.uint8).zero_()
    assert not torch.equal(logits(model), wanted)
    assert model.load_state_dict(state) == ([], [])
    assert bit_equal(logits(model), wanted)
    assert model.load_state_dict(state, assign=True) == ([], [])
    assert bit_equal(logits(model), wanted)
    name = next(n for n in sorted(state) if ".experts." in n and "bias" not in n)
    assert model.state_dict()[name].data_ptr() == state[name].data_ptr()


def test_a_state_dict_is_copied_into_memory_that_is_no_file(made):
    model = moestro.load(made.folder("qwen3-30b-a3b-fp8"))
    stores = [module for module in model.modules() if isinstance(module, ExpertStore)]
    state = {n: t.clone() for n, t in model.state_dict().items()}

    def places():
        return [t.data_ptr() for store in stores for t in store.tensors.values()]

    files = places()
    model.load_state_dict(state)
    memory = places()
    assert set(memory).isdisjoint(files)
    wanted = logits(model)
    for store in stores:
        for tensor in store.tensors.values():
            tensor.view(torch.uint8).zero_()
    model.load_state_dict(state)
    assert places() == memory
    assert bit_equal(logits(model), wanted)


def test_a_state_dict_that_does_not_fit_is_named(model):
    state = model.state_dict()
    name = next(n for n in sorted(state) if ".experts." in n and "bias" not in n)
    lacking = {n: t for n, t in state.items() if n != name}
    with pytest.raises(RuntimeError, match=re.escape(name)):
        model.load_state_dict(lacking)
    with pytest.raises(RuntimeError, match=re.escape(name)):
        model.load_state_dict({**state, name: state[name][:1]})
    with pytest.raises(RuntimeError, match=re.escape(name)):
        model.load_state_dict({**state, name: state[name].to(torch.float64)})


def test_what_is_written_to_a_mapped_tensor_stays_in_this_process(made, tmp_path):
    folder = made.copy("olmoe", tmp_path / "copy")
    before = read(folder)
    model = moestro.load(folder)
    for tensor in model.state_dict().values():
        tensor.view(torch.uint8).zero_()
    assert differing(before, read(folder)) == set()


def test_files_may_go_while_they_are_mapped(made, tmp_path):
    folder = made.copy("olmoe", tmp_path / "copy")
    model = moestro.load(folder)
    wanted = logits(moestro.load(made.folder("olmoe")))
    for path in folder.iterdir():
        os.remove(path)
    assert bit_equal(logits(model), wanted)


def test_one_graph(model):
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_close(logits(compiled), logits(model))


def test_gradients_reach_what_is_not_stored(made):
    """As in fine-tuning with adapters on other layers: against Transformers' own code on the same numbers."""
    plain = AutoModelForCausalLM.from_pretrained(
        made.plain("gpt-oss-20b"), dtype=torch.float32, experts_implementation="eager"
    )
    model = moestro.load(made.folder("gpt-oss-20b"), dtype="float32")
    plain.train()
    with pytest.warns(UserWarning, match="experts are stored"):
        model.train()
    for each in (plain, model):
        each(IDS, labels=IDS).loss.backward()
    wanted = {n: p.grad for n, p in plain.named_parameters()}
    found = {n: p.grad for n, p in model.named_parameters()}
    stored = {n for n in wanted if n.endswith(("experts.gate_up_proj", "experts.down_proj"))}
    assert wanted.keys() - found.keys() == stored
    for name, gradient in found.items():
        assert gradient is not None, name
        assert_close(gradient, wanted[name])


def test_training_says_once_that_experts_are_not_trained(made):
    model = moestro.load(made.wide(), format="int8")
    copied = copy.deepcopy(model)
    for each in (model, copied):
        with pytest.warns(UserWarning, match="experts are stored") as caught:
            each.train()
        each.eval().train()  # warnings are errors here
        (said,) = caught
        assert "int8" in str(said.message)
        assert "target_parameters" in str(said.message)
        assert "moestro.accelerate" in str(said.message)
    AutoModelForCausalLM.from_pretrained(made.wide()).train()  # its experts are parameters


def test_gradients_through_every_kind(model):
    model.requires_grad_(False)
    embeddings = model.get_input_embeddings()(IDS).detach().requires_grad_()
    model(inputs_embeds=embeddings).logits.square().mean().backward()
    assert torch.isfinite(embeddings.grad).all()
    assert embeddings.grad.abs().amax() > 0


def test_accelerate_chooses_the_strategy_of_a_loaded_model(model):
    wanted = logits(model)
    for strategy in ("grouped", "selective", "blockwise-16"):
        assert moestro.accelerate(model, strategy) is model
        assert {layer.strategy for layer in served(model)} == {strategy}
        assert {layer.stored for layer in served(model)} == {True}
        assert_close(logits(model), wanted)
