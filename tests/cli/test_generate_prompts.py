"""`moestro generate`: stop strings, system prompts, files, and several prompts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner, Result

from moestro.cli import app
from moestro.hf.text_model import load_text_model

PROMPT = "class Queue:"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools. None') }}{% endif %}"
    "[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}x"


def run(*arguments: str, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(app, ["generate", *arguments], input=stdin)


def lines(*arguments: str, stdin: bytes | None = None) -> list[dict]:
    result = run(*arguments, "--json", stdin=stdin)
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def refused(result: Result, says: str) -> None:
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert re.fullmatch(r"\[\w[\w. ]*\] got .+; needs .+\. .+\.", line), line
    assert says in line


@pytest.fixture(scope="module")
def greedy() -> tuple[str, str]:
    """The bundled model's own text, and a part of its middle."""
    (found,) = lines(PROMPT, "--no-do-sample", "--max-new-tokens", "24")
    return found["text"], found["text"][9:14]


def test_a_stop_string_ends_the_text(greedy: tuple[str, str]) -> None:
    text, stop = greedy
    options = (PROMPT, "--no-do-sample", "--max-new-tokens", "24", "--stop", "no such text", "--stop", stop)
    (found,) = lines(*options)
    assert found["text"] == text[: text.index(stop)]
    assert found["stopped"] == "stop"
    assert found["tokens"]["generated"] < 24
    assert run(*options).stdout == PROMPT + found["text"] + "\n"
    (whole,) = lines(*options[:-1], "nor this")
    assert (whole["text"], whole["stopped"]) == (text, "length")


def test_an_empty_stop_string(model_folder: Path) -> None:
    refused(run(PROMPT, "--model", str(model_folder), "--stop", ""), "the stop string ''")


@pytest.fixture(scope="module")
def chat_folder(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    AutoModelForCausalLM.from_pretrained(model_folder).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def test_a_system_prompt(chat_folder: Path) -> None:
    (found,) = lines("hi", "--chat", "--system", "be brief", "--model", str(chat_folder), "--max-new-tokens", "2")
    expected = AutoTokenizer.from_pretrained(chat_folder)("[system] be brief\n[user] hi\n[assistant]")["input_ids"]
    assert found["tokens"]["prompt"] == len(expected)
    assert found["prompt"] == "hi"
    refused(run("hi", "--system", "be brief", "--model", str(chat_folder)), "--system without --chat")


def test_a_template_that_refuses(chat_folder: Path, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(chat_folder).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(chat_folder)
    tokenizer.chat_template = NO_SYSTEM
    tokenizer.save_pretrained(tmp_path)
    refused(
        run("hi", "--chat", "--system", "x", "--model", str(tmp_path)),
        "messages of system, user (System role not supported)",
    )


@pytest.mark.parametrize("batch", ["1", "3"])
def test_several_prompts_are_each_its_own(model_folder: Path, tmp_path: Path, batch: str) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("def é(n):\n")
    options = ("--model", str(model_folder), "--max-new-tokens", "12", "--repetition-penalty", "1.3")
    sampled = (*options, "--do-sample", "--temperature", "1.2")
    texts = [PROMPT, "x", "def é(n):\n"]
    together = lines(PROMPT, "-", "--file", str(path), *sampled, "--seed", "7", "--batch", batch, stdin=b"x")
    alone = [lines(text, *sampled, "--seed", str(7 + index))[0] for index, text in enumerate(texts)]
    for key in ("prompt", "text", "stopped", "tokens", "seed"):
        assert [found[key] for found in together] == [found[key] for found in alone], key
    assert [found["seed"] for found in together] == [7, 8, 9]
    assert all(found["ran"]["generated"] for found in together)


def test_a_batch_ends_each_at_its_own_stop(model_folder: Path) -> None:
    options = ("--model", str(model_folder), "--max-new-tokens", "12", "--no-do-sample")
    texts = [lines(prompt, *options)[0]["text"] for prompt in ("a", "b", "c")]
    stop = texts[1][3]
    found = lines("a", "b", "c", *options, "--stop", stop, "--batch", "2")
    assert [one["text"] for one in found] == [text.split(stop)[0] for text in texts]
    assert found[1]["stopped"] == "stop"


@pytest.mark.parametrize("batch", ["1", "2"])
def test_texts_stand_apart(model_folder: Path, tmp_path: Path, batch: str) -> None:
    path = tmp_path / "p.txt"
    path.write_bytes(b"def f")
    options = ("--model", str(model_folder), "--max-new-tokens", "3", "--no-do-sample")
    first, second = (found["text"] for found in lines("x", "def f", *options))
    result = run("x", "--file", str(path), *options, "--batch", batch)
    assert result.stdout == f"==> 1 of 2: argument 1 <==\nx{first}\n\n==> 2 of 2: {path} <==\ndef f{second}\n"
    assert len(result.stderr.splitlines()) == 4


def test_prompts_that_cannot_be(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    (tmp_path / "empty").write_bytes(b"\n")
    model = ("--model", str(model_folder))
    refused(run(*model), "got no prompt")
    refused(run("-", "-", *model), "- twice")
    refused(run("--file", str(tmp_path / "none"), *model), "(No such file or directory)")
    refused(run("--file", str(tmp_path), *model), "(Is a directory)")
    refused(run("--file", str(tmp_path / "latin"), *model), "(no UTF-8 at byte 3)")
    refused(run("a", "--file", str(tmp_path / "empty"), *model), "an empty prompt")
    refused(run("a", "x" * 65, *model), "65 prompt tokens")
    refused(run("a", "b", "--do-sample", "--seed", str(2**63 - 1), *model), f"seed={2**63}")


def test_a_batch_needs_one_process() -> None:
    result = run("a", "b", "--batch", "2", "--ep", "2")
    assert result.exit_code == 2
    assert "--batch 2 with --ep or --tp" in result.stderr


def test_an_error_ends_a_batch(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_text_model(model_folder)

    def broken(self: object, *args: object, **options: object) -> None:
        raise KeyError("lost")

    monkeypatch.setattr("moestro.hf.text_model.load_text_model", lambda *args: loaded)
    monkeypatch.setattr("moestro.serve.step_model.StepModel.step", broken)
    result = run("a", "b", "--batch", "2", "--model", str(model_folder))
    assert isinstance(result.exception, KeyError)
