"""Requests to a model within a memory budget: the text of the whole model, and errors in words that end no server."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig

from endpoint import Endpoint, serving
from heard import Heard
from moestro.errors import UnsupportedError
from moestro.hf import MoestroConfig
from moestro.hf.memory import expert_memory
from moestro.hf.text_model import TextModel, bundled_folder, load_text_model, quiet_transformers
from moestro.memory import slots
from moestro.memory.reader import ReadError, Ticket
from moestro.serve.engine import Engine
from moestro.serve.request import Request
from moestro.serve.service import Service
from moestro.serve.step_model import StepModel

PROMPTS = ([7, 8, 9], list(range(4, 60)), [11] * 17)
COMPLETIONS = "/v1/completions"
TEXTS = ("def test_add(self):", "logging.getLogger(", "# Copyright")
ASKED = [{"prompt": text, "max_tokens": 12, "temperature": 0} for text in TEXTS]


@pytest.fixture(autouse=True)
def poisoned_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "POISON", True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model, in a folder whose files may go."""
    return Path(shutil.copytree(bundled_folder(), tmp_path_factory.mktemp("model") / "bundled"))


def within(folder: Path, memory: int | str) -> TextModel:
    with quiet_transformers():
        found = load_text_model(folder, format=MoestroConfig(memory=memory))
    # As of the fixture text_model.
    found.model.generation_config.update(eos_token_id=4096, repetition_penalty=1.0, no_repeat_ngram_size=0)
    return found


@pytest.fixture(scope="module")
def least(folder: Path) -> int:
    return expert_memory(within(folder, "1GB").model).residents.least


@contextmanager
def engine_of(text_model: TextModel, **options: int) -> Iterator[Engine]:
    engine = Engine(text_model, **options)
    try:
        yield engine
    finally:
        engine.close()


@pytest.fixture
def gone(folder: Path) -> Iterator[Callable[[], Callable[[], None]]]:
    """Takes the file of weights away; what it returns brings it back."""
    (file,) = folder.glob("*.safetensors")
    kept = file.with_suffix(".kept")

    def bring_back() -> None:
        os.rename(kept, file)

    def take_away() -> Callable[[], None]:
        os.rename(file, kept)
        return bring_back

    yield take_away
    if kept.exists():
        bring_back()


def submitted(engine: Engine, new_tokens: int, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[Heard]:
    found = []
    for prompt in prompts:
        config = GenerationConfig(max_new_tokens=new_tokens, pad_token_id=0, do_sample=False)
        found.append(Heard())
        engine.submit(Request(tuple(prompt), config), found[-1])
    return found


def ids_of(engine: Engine, new_tokens: int = 12) -> list[list[int]]:
    return [heard.wait().ids for heard in submitted(engine, new_tokens)]


def test_steps_of_several_requests_have_the_bits_of_the_whole_model(
    text_model: TextModel, folder: Path, least: int
) -> None:
    def logits(model: StepModel) -> list[torch.Tensor]:
        caches = [model.new_cache(100) for _ in PROMPTS]
        found = [model.step(PROMPTS, caches)]
        return [*found, *(model.step([[5 + n], [9], [3, n]], caches) for n in range(4))]

    with torch.no_grad():
        wanted = logits(StepModel(text_model.model, True))
        for budget in (least, 4 * least):
            for found, right in zip(logits(StepModel(within(folder, budget).model, True)), wanted, strict=True):
                assert torch.equal(found, right)


def test_requests_that_share_steps_give_what_the_whole_model_gives(
    text_model: TextModel, folder: Path, least: int
) -> None:
    with engine_of(text_model, batch=3) as whole, engine_of(within(folder, least), batch=3) as engine:
        assert ids_of(engine) == ids_of(whole)


def test_what_is_read_is_told(endpoint: Endpoint, folder: Path, least: int) -> None:
    texts = [endpoint.post(COMPLETIONS, asked)[1]["choices"][0]["text"] for asked in ASKED]
    model = within(folder, least)
    memory = expert_memory(model.model)
    with engine_of(model, batch=3) as engine, serving(Service(model, engine, "small")) as served:
        found: dict[int, str] = {}

        def ask(number: int) -> None:
            found[number] = served.post(COMPLETIONS, ASKED[number])[1]["choices"][0]["text"]

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(ASKED))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert [found[number] for number in range(len(ASKED))] == texts
        told = memory.statistics()
        for phase in ("prompt", "decode"):
            for name in ("lookups_total", "hits_total", "hit_rate"):
                value = told[phase][name.removesuffix("_total")]
                assert served.counted(f"expert_{name}", phase=phase) == value
        assert served.counted("expert_read_bytes_total") == told["bytes_from_files"] > 0
        assert served.counted("expert_read_wait_seconds_total") == told["seconds_waiting"] > 0
        assert served.counted("expert_slot_bytes") == memory.slot_bytes <= least
        health = json.loads(served.ask("GET", "/health")[2])
        assert health["status"] == "ok"
        assert 0 <= health["experts"]["hit_rate"] <= 1
        assert health["experts"]["read_bytes"] == told["bytes_from_files"]
        assert health["experts"]["seconds_waiting"] == told["seconds_waiting"]
        assert b"moestro_expert_hit_rate" in served.ask("GET", "/metrics")[2]
    assert json.loads(endpoint.ask("GET", "/health")[2]) == {"status": "ok"}
    assert b"moestro_expert_hit_rate" not in endpoint.ask("GET", "/metrics")[2]


def test_a_read_that_fails_ends_no_request_that_waits(
    folder: Path, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, wait, left = within(folder, least), Ticket.wait, [1]

    def fail_once(self: Ticket) -> None:
        if left:
            left.pop()
            raise ReadError("once")
        wait(self)

    with engine_of(model, batch=2) as engine:
        (*_, wanted) = ids_of(engine)
        engine.prefixes.clear()
        running, (waiting,) = submitted(engine, 600, PROMPTS[:2]), submitted(engine, 12, PROMPTS[2:])
        for listener in running:
            assert listener.begun.wait(60)
        monkeypatch.setattr(Ticket, "wait", fail_once)
        assert [str(listener.wait().ended.error) for listener in running] == ["once", "once"]
        assert (waiting.wait().ended.reason, waiting.ids) == ("length", wanted)


def test_a_file_that_goes_ends_the_requests_of_a_step_and_they_work_once_it_is_back(
    folder: Path, least: int, gone: Callable[[], Callable[[], None]]
) -> None:
    with engine_of(within(folder, least), batch=3) as engine:
        wanted = ids_of(engine)
        heard = submitted(engine, 900)
        for listener in heard:
            assert listener.begun.wait(60)
        bring_back = gone()
        ended = [listener.wait().ended for listener in heard]
        assert {(each.reason, type(each.error)) for each in ended} == {("failed", ReadError)}
        bring_back()
        assert ids_of(engine) == wanted


def test_a_read_that_fails_is_answered_in_words(
    folder: Path, least: int, gone: Callable[[], Callable[[], None]], logged: io.StringIO
) -> None:
    model = within(folder, least)
    with engine_of(model) as engine, serving(Service(model, engine, "small")) as served:
        before = served.post(COMPLETIONS, ASKED[0])
        assert before[0] == 200
        bring_back = gone()
        status, problem = served.post(COMPLETIONS, ASKED[1])
        words = r"\[serve\] got experts that could not be read from the model's files; needs .+\. Look at .+"
        assert (status, problem["error"]["code"]) == (500, "failed")
        assert re.fullmatch(words, problem["error"]["message"])
        assert str(folder) in logged.getvalue(), "which file it is stands in the server's messages"
        assert str(folder) not in problem["error"]["message"]
        bring_back()
        stream = iter(served.client().completions.create(model="small", stream=True, prompt="a", max_tokens=900))
        next(stream)
        bring_back = gone()
        with pytest.raises(Exception, match="experts that could not be read"):
            list(stream)
        assert served.counted("requests_total", reason="failed") == 2
        bring_back()
        after = served.post(COMPLETIONS, ASKED[0])
        assert after[1]["choices"][0]["text"] == before[1]["choices"][0]["text"]


@pytest.mark.parametrize("batch", [1, 2])
def test_what_the_experts_refuse_is_not_taken_for_a_kind_of_model(
    folder: Path, gone: Callable[[], Callable[[], None]], batch: int
) -> None:
    model = within(folder, "1GB")
    gone()
    with pytest.raises(ReadError, match=r"\[memory\] got .+safetensors"):
        Engine(model, batch)


def test_a_strategy_that_reads_all_experts_is_refused(folder: Path) -> None:
    with quiet_transformers():
        model = load_text_model(folder, strategy="all_experts", format=MoestroConfig(memory="1GB"))
    with pytest.raises(UnsupportedError, match=r"\[memory\] got .+ the strategy all_experts"):
        Engine(model)
