"""What docs/reference/load.md says is read and what is not: every architecture, and every published layout."""

from __future__ import annotations

import re

import pytest
import torch

import moestro
import zoo
from hf.checkpoints import FAMILIES, FUSABLE
from moestro.errors import MoestroError, UnsupportedError
from moestro.hf import served
from moestro.hf.serving import find
from moestro.hf.sources import read_sources
from source import ROOT
from tolerances import assert_close

PAGE = (ROOT / "docs" / "reference" / "load.md").read_text(encoding="utf-8")
NOT_LOADED = set(re.findall(r"`([a-z]+[a-z0-9]*(?:_\w+)?)`", PAGE.partition("## Not loaded")[2].partition("\n## ")[0]))
NOT_LOADED.discard("accelerate")
LAYOUTS = [line.split("|")[1:4] for line in PAGE.splitlines() if re.match(r"\| `.*\| `(mxfp4|fp8|bfloat16)", line)]


def accelerates(model):
    """Whether moestro serves it at all, in this version of Transformers."""
    try:
        find(model)
    except UnsupportedError:
        return False
    return True


@pytest.mark.parametrize("architecture", zoo.architectures())
def test_logits_are_those_of_transformers(architecture, tmp_path):
    try:
        model = zoo.build(architecture).model
    except MoestroError as error:
        pytest.skip(str(error))  # a version of Transformers whose own code does not run
    model.save_pretrained(tmp_path)
    if architecture in NOT_LOADED or not accelerates(model):
        with pytest.raises(UnsupportedError) as caught:
            moestro.load(tmp_path)
        text = str(caught.value)
        assert type(model).__name__ in text or "Transformers converts" in text
        return
    loaded = moestro.load(tmp_path)
    own = type(model).from_pretrained(tmp_path, experts_implementation="eager")
    layers = served(loaded)
    assert layers
    assert all(layer.stored and layer.layout == "float32, memory-mapped" for layer in layers)
    parameters = sum(p.numel() for p in loaded.parameters())
    assert parameters < sum(p.numel() for p in own.parameters())
    inputs = zoo.inputs_of(model)
    assert_close(zoo.outputs(loaded, inputs), zoo.outputs(own, inputs), torch.float32)


def quoted(cell):
    return re.findall(r"`([^`]+)`", cell)


def layouts():
    for names, tensors, form in LAYOUTS:
        for like in quoted(names):
            if like != "--fused":
                yield like, "--fused" in names, tensors, quoted(form)[0]


def test_every_layout_has_a_row():
    found = {(like, fused) for like, fused, _, _ in layouts()}
    assert found == {(like, False) for like in FAMILIES} | {(like, True) for like in FUSABLE}


@pytest.mark.parametrize(("like", "fused", "tensors", "form"), list(layouts()), ids=str)
def test_layouts_are_those_of_the_page(made, like, fused, tensors, form):
    wanted = {name for name in quoted(tensors) if name != "_scale_inv"}
    wanted |= {f"{name}_scale_inv" for name in wanted} if "`_scale_inv`" in tensors else set()
    _, _, sources = read_sources(made.folder(like, fused))
    names = {
        re.sub(r"\.\d+\.", ".{e}.", re.sub(r".*\.(layers|blocks)\.\d+\.", "", n)) for s in sources for n in s.names
    }
    assert names == wanted
    assert {source.stored.format.name for source in sources} == {form}
