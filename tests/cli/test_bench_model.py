"""Whole models, timed in processes of their own: what is counted, what is refused, and what is left of a dead one."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moestro.bench import model as cases
from moestro.bench.memory import resident, restart
from moestro.bench.model import ModelCase, ModelPoint, measure
from moestro.errors import CollectiveError, InvalidInputError
from moestro.hf import timed
from moestro.profiling import STAGES

FOUR_PARTS = re.compile(r"\[[\w ]+\] got .+; needs .+\. .+\.")
SHORT = {"prompt_tokens": 4, "new_tokens": 3}
EXPERT = 3 * 16 * 8 * 4
"""Bytes of one expert of the tiny model, in float32."""


@pytest.fixture(autouse=True)
def forked_cases(forked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "COMMAND", (*shlex.split(forked)[:-1], "moestro.hf.timed"))


def asked(folder: Path, **options: object) -> dict:
    return {**vars(ModelCase(str(folder), **options)), "threads": 1}  # type: ignore[arg-type]


def test_a_case_is_measured_in_a_process_of_its_own(model_folder: Path) -> None:
    case = ModelCase(str(model_folder), batch=2, prompt_tokens=5, new_tokens=4)
    point = measure(case)
    assert point.case == case
    assert list(point.stages) == ["prompt", "decode"]
    assert all(set(stages) == set(STAGES) for stages in point.stages.values())
    assert min(point.prompt_seconds, point.first_step_seconds, point.decode_seconds, point.load_seconds) > 0
    assert 0 < point.peak_bytes < 2**30
    assert 3 <= point.runs <= 30
    assert (point.steps, point.threads) == (2 * point.runs, torch.get_num_threads())
    assert (point.dtype, point.experts) == ("float32", "float32, memory-mapped")
    assert point.decode_tokens_per_second == pytest.approx(2 / point.decode_seconds)
    assert point.prompt_tokens_per_second == pytest.approx(10 / point.prompt_seconds)


@pytest.mark.parametrize(
    ("options", "each"),
    [({}, EXPERT), ({"format": "int8"}, None), ({"memory": 2 * 4 * EXPERT}, EXPERT), ({"projections": "int8"}, EXPERT)],
    ids=str,
)
def test_bytes_of_a_step(model_folder: Path, options: dict, each: int | None) -> None:
    """One token has two experts in each of two layers; beside them all is read but the embedding."""
    found = timed.run(asked(model_folder, prompt_tokens=4, new_tokens=5, **options))
    if each is not None:
        assert found["expert_bytes"] == 2 * 2 * each
    else:
        assert EXPERT / 4 < found["expert_bytes"] / 4 < EXPERT / 2
    model = timed._loaded(asked(model_folder))
    embedding = model.get_input_embeddings().weight.nbytes
    others = sum(p.nbytes for name, p in model.named_parameters() if ".experts." not in name) - embedding
    rest = found["step_bytes"] - found["expert_bytes"]
    assert rest == others if "projections" not in options else others / 4 < rest < others
    assert sum(found["stages"]["decode"].values()) > 0


def test_a_head_that_is_the_embedding_is_read_whole(model_folder: Path) -> None:
    model = timed._loaded(asked(model_folder))
    apart = timed.other_bytes(model)
    model.lm_head.weight = model.get_input_embeddings().weight
    assert timed.other_bytes(model) == apart


def test_the_most_that_a_process_held() -> None:
    before = restart()
    filled = torch.ones(2**24)  # more than the allocator ever keeps of what other tests have freed
    now = resident()
    assert now.now - before.now > 0.9 * filled.nbytes
    del filled
    assert resident().most - before.now > 0.9 * 2**26


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"batch": 0}, "batch 0; needs a whole number of at least 1"),
        ({"prompt_tokens": 0}, "prompt_tokens 0"),
        ({"new_tokens": 2}, "new_tokens 2; needs a whole number of at least 3"),
        ({"memory": -1}, "memory -1"),
        ({"batch": 1.5}, "batch 1.5"),
    ],
)
def test_numbers_that_are_refused(options: dict, sentence: str) -> None:
    with pytest.raises(InvalidInputError, match=re.escape(sentence)) as caught:
        ModelCase("folder", **options)
    assert FOUR_PARTS.match(str(caught.value))


@pytest.mark.parametrize(
    ("fault", "options", "kind"),
    [
        ("absent", {}, "InvalidInputError"),
        ("dense", SHORT, "UnsupportedError"),
        ("no weights", SHORT, "InvalidInputError"),
        ("no tokenizer", {**SHORT, "format": "int3"}, "InvalidInputError"),
        ("no tokenizer", {"prompt_tokens": 60, "new_tokens": 5}, "InvalidInputError"),
    ],
)
def test_what_a_process_refuses(broken: Callable[[str], str], fault: str, options: dict, kind: str) -> None:
    found = json.loads(timed.main(json.dumps(asked(Path(broken(fault)), **options))))
    assert found["error"] == kind
    assert FOUR_PARTS.match(found["text"])


def test_a_refusal_is_that_of_the_process(broken: Callable[[str], str]) -> None:
    with pytest.raises(InvalidInputError, match="where there is no folder"):
        measure(ModelCase(broken("absent")))


@pytest.mark.parametrize(
    ("program", "sentence"),
    [
        ("import os; os.kill(os.getpid(), 9)", "whose process was ended by signal 9"),
        ("raise KeyError('x')", "whose process ended with KeyError: 'x'"),
        ("raise SystemExit(3)", "whose process ended with code 3"),
    ],
)
def test_a_process_without_a_result(program: str, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "COMMAND", (sys.executable, "-c", program))
    with pytest.raises(CollectiveError, match=sentence):
        measure(ModelCase("folder"))


def test_what_a_process_says_before_its_result_is_none_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    result = {"prompt_seconds": 2.0, "decode_seconds": 0.5, "peak_bytes": 7}
    program = f"import json; print('a warning'); print(json.dumps({result!r}))"
    monkeypatch.setattr(cases, "COMMAND", (sys.executable, "-c", program))
    case = ModelCase("folder", batch=3)
    assert measure(case) == ModelPoint(case, 2.0, 0.5, 7)
