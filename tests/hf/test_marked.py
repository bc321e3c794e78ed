"""What moestro stores and Transformers alone would fill with random numbers is refused there; see `scheme.MARK`."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

import moestro
from cli.conftest import IMPORTS
from forked import python
from hf.checkpoints import logits
from moestro.errors import InvalidInputError
from moestro.hf import MoestroConfig
from moestro.hf.sources import read_sources
from tolerances import bit_equal

ALONE = """
import sys
import transformers
transformers.logging.set_verbosity_error()
for folder in sys.argv[1:]:
    try:
        transformers.AutoModelForCausalLM.from_pretrained(folder)
    except ValueError as error:
        assert 'experts_implementation="moestro"' in str(error), error
    else:
        raise AssertionError(folder)
assert "moestro" not in sys.modules
"""


@pytest.fixture(scope="module")
def stored(made, tmp_path_factory):
    """A model's folder as `quantize` writes it, and as save_pretrained does after every way of quantising."""
    root = tmp_path_factory.mktemp("marked")
    arguments = ["-m", "moestro", "quantize", str(made.wide()), str(root / "command"), "--format=mxfp4"]
    command = [*python(*IMPORTS), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    moestro.load(made.wide(), format="mxfp4").save_pretrained(root / "load")
    own = AutoModelForCausalLM.from_pretrained(made.wide(), quantization_config=MoestroConfig("mxfp4"))
    own.save_pretrained(root / "config")
    moestro.load(root / "command").save_pretrained(root / "again")
    moestro.load(made.folder("dbrx"), format="int8").save_pretrained(root / "family")
    return sorted(root.iterdir())


def test_transformers_alone_refuses_it(stored):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(
        [sys.executable, "-c", ALONE, *map(str, stored)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr


def test_with_moestro_it_is_right(stored):
    wanted = {folder.name: logits(moestro.load(folder)) for folder in stored}
    for folder in stored:
        assert bit_equal(logits(AutoModelForCausalLM.from_pretrained(folder)), wanted[folder.name])
    assert all(torch.equal(wanted["command"], wanted[name]) for name in ("load", "config", "again"))


def test_what_is_stored_as_published_is_not_marked(made, tmp_path):
    for like in ("gpt-oss-20b", "olmoe"):
        moestro.load(made.folder(like)).save_pretrained(tmp_path / like)
        assert "moestro" not in (tmp_path / like / "config.json").read_text()


def edit(folder, change):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config, indent=2))


def unmark(config):
    del config["experts_implementation"], config["quantization_config"]["version"]


def written_before(folder, model):
    """As it was written before folders were marked."""
    model.save_pretrained(folder)
    edit(folder, unmark)
    return folder


@pytest.fixture
def before(made, tmp_path):
    return written_before(tmp_path / "old", moestro.load(made.wide(), format="int8"))


@pytest.mark.parametrize("kind", ["quantised", "published in FP8"])
@pytest.mark.parametrize("loading", [moestro.load, AutoModelForCausalLM.from_pretrained], ids=["load", "transformers"])
def test_a_folder_written_before_is_right_and_says_how_to_mend_it(made, tmp_path, loading, kind):
    published = kind == "published in FP8"
    right = moestro.load(made.folder("qwen3-30b-a3b-fp8")) if published else moestro.load(made.wide(), format="int8")
    before = written_before(tmp_path / "old", right)
    with pytest.warns(UserWarning, match="earlier moestro") as caught:
        model = loading(before)
    (said,) = caught
    assert bit_equal(logits(model), logits(right))
    path = before / "config.json"
    assert str(path) in str(said.message)
    line = str(said.message).partition("add the line ")[2].partition(" after")[0]
    path.write_text(path.read_text().replace("{", "{" + line, 1))
    assert bit_equal(logits(loading(before)), logits(model))
    model.save_pretrained(before.parent / "new")
    loading(before.parent / "new")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"overides": {}}, "overides"),
        ({"version": 2}, "version 2"),
        ({"version": None}, "version None"),
        ({"version": True}, "version True"),
        ({"input_format": "int8"}, "input_format"),
        ({"format": ["int8"]}, "['int8']"),
        ({"overrides": {"*": 5}}, "5"),
        ({"overrides": ["x"]}, "['x']"),
        ({"rest": "fp8"}, "'fp8'"),
        ({"overrides": {"*": None}}, "None"),
    ],
    ids=str,
)
def test_what_this_version_does_not_know_is_refused(before, changed, words):
    edit(before, lambda config: config["quantization_config"].update(changed))
    for loading in (moestro.load, AutoModelForCausalLM.from_pretrained, read_sources):
        with pytest.raises(InvalidInputError) as caught:
            loading(before)
        assert words in str(caught.value)
