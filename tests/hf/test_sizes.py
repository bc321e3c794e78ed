"""A config.json that lies: about sizes, which the files' headers know better, and in any other way."""

from __future__ import annotations

import copy
import json
import random
import struct

import pytest
from torch import nn

import moestro
from checkpoint.files import parts
from moestro.errors import InvalidInputError, MoestroError
from moestro.hf.sources import read_sources
from moestro.hf.text_model import find_text_model

FILE = "model.safetensors"
MUTATIONS = 60
"""Of the configuration and of the header, for each model: a few seconds in all."""


def edit_json(path, changed):
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


@pytest.fixture
def no_module(monkeypatch):
    """Fails as soon as a module is built: an error must come first."""

    def build(self, *args, **kwargs):
        raise AssertionError(f"{type(self).__name__} was built")

    monkeypatch.setattr(nn.Module, "__init__", build)


@pytest.mark.usefixtures("no_module")
@pytest.mark.parametrize("reading", [moestro.load, read_sources, find_text_model])
@pytest.mark.parametrize(
    ("changed", "needs"),
    [
        ({"num_hidden_layers": 10_000}, "no more than the 256 layers"),
        ({"num_hidden_layers": 10**30}, "no more than the 256 layers"),
        ({"num_experts": 10**7}, "the largest size in the files"),
        ({"hidden_size": 2**40}, "the largest size in the files"),
        ({"num_hidden_layers": -1}, "above 0"),
        ({"decoder_sparse_step": 0}, "above 0"),
        ({"num_attention_heads": 0}, "above 0"),
        ({"num_experts_per_tok": 1000}, "a number from 1 to that of the experts"),
        ({"num_experts_per_tok": 0}, "a number from 1 to that of the experts"),
    ],
    ids=str,
)
def test_sizes_are_compared_with_the_files_before_a_module_is_built(made, tmp_path, reading, changed, needs):
    folder = made.copy("qwen3-30b-a3b", tmp_path / "model")
    edit_json(folder / "config.json", changed)
    with pytest.raises(InvalidInputError) as caught:
        reading(folder)
    found = parts(caught.value)
    ((name, value),) = changed.items()
    assert f"{folder / 'config.json'} with {name} {value}" in found["got"]
    assert needs in found["needs"]


def test_more_experts_for_a_token_than_the_architecture_has_by_itself(made, tmp_path):
    folder = made.copy("qwen3-30b-a3b", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    del config["num_experts"]
    (folder / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": 129}))
    with pytest.raises(InvalidInputError, match=r"num_experts_per_tok 129; needs a number from 1 to .* 128"):
        read_sources(folder)


@pytest.mark.parametrize(
    "changed",
    [{"head_dim": 0}, {"dtype": [None]}, {"torch_dtype": [None]}, {"rope_theta": 2**70}, {"rope_theta": [None]}],
    ids=str,
)
@pytest.mark.parametrize("reading", [moestro.load, read_sources])
def test_what_transformers_stumbles_over(made, tmp_path, reading, changed):
    folder = made.copy("qwen3-30b-a3b", tmp_path / "model")
    edit_json(folder / "config.json", changed)
    with pytest.raises(InvalidInputError) as caught:
        reading(folder)
    assert str(folder) in parts(caught.value)["got"]


def test_sizes_of_every_published_model_are_taken(made):
    """The sound configurations, with the sizes of inner objects."""
    for like in ("deepseek-v3", "dbrx", "gpt-oss-20b", "llama4-scout", "mixtral-8x7b", "qwen2-moe"):
        assert read_sources(made.folder(like))[2]


VALUES = [
    *(0, -1, 1, 3, 1000, 10**4, 10**7, 2**31, 2**70, 0.0, -0.5, 1.5, 1e308, None, True, False, "", "x", "fp8"),
    *([], [None], [[]], [1, 2, 3], {}, {"a": [None]}, {"quant_method": "moestro"}, {"rope_type": "yarn"}),
]


def places(value, path=()):
    """Where a value stands in JSON: the keys and numbers that lead to each."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, found in inner:
        yield *path, key
        yield from places(found, (*path, key))


def mutated(rng, value):
    """JSON with one to three values replaced, or taken out."""
    changed = json.loads(json.dumps(value))
    for _ in range(rng.randint(1, 3)):
        *above, last = rng.choice(list(places(changed)))
        parent = changed
        for key in above:
            parent = parent[key]
        if rng.random() < 0.15:
            del parent[last]
        else:
            parent[last] = copy.deepcopy(rng.choice(VALUES))
        if not changed:
            break
    return changed


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("like", ["qwen3-30b-a3b", "deepseek-v3", "gpt-oss-20b", "dbrx"])
def test_nothing_but_words_comes_of_a_changed_configuration_or_header(made, tmp_path, like):
    """Read, or refused in four parts; whatever else is raised fails the test, with the change in its report."""
    rng = random.Random(f"{like} 17")
    folder = made.copy(like, tmp_path / "model")
    config, data = json.loads((folder / "config.json").read_text()), (folder / FILE).read_bytes()
    stop = 8 + struct.unpack_from("<Q", data)[0]
    header = json.loads(data[8:stop])
    refusals = 0
    for number in range(MUTATIONS):
        of_header = number % 4 == 3
        changed = mutated(rng, header if of_header else config)
        text = json.dumps(changed).encode()
        if of_header:
            (folder / FILE).unlink()  # mappings of the last one keep its bytes
            (folder / FILE).write_bytes(struct.pack("<Q", len(text)) + text + data[stop:])
        else:
            (folder / "config.json").write_bytes(text)
        try:
            read_sources(folder) if number % 3 else moestro.load(folder)
        except MoestroError as error:
            parts(error)
            refusals += 1
        if of_header:
            (folder / FILE).unlink()
            (folder / FILE).write_bytes(data)
        else:
            (folder / "config.json").write_text(json.dumps(config))
    assert refusals > MUTATIONS // 4
