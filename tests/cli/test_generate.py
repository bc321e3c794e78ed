"""`moestro generate`: the text, the numbers, and one line for everything that cannot be done."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeForCausalLM
from typer.testing import CliRunner, Result

import moestro
from moestro.cli import app
from moestro.ops import dispatch
from moestro.ops.expert_mlp import EXPERT_MLP
from moestro.ops.native import ISAS

PROMPT = "class Queue:"
CHAT_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
_FLOATS = (isa for isa in ISAS if isa.runs_here and isa.multiplies_floats and not isa.multiplies_bfloat16)
ENGINE = next((f"cpu-{isa.name}" for isa in _FLOATS), "torch")
FOUR_PARTS = re.compile(r"\[\w[\w. ]*\] got .+; needs .+\. .+\.")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["generate", *arguments])


def as_json(*arguments: str) -> dict:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def expected_text(folder: Path, new_tokens: int) -> str:
    """What Transformers itself generates, greedily and with its own expert code."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager")
    inputs = tokenizer(PROMPT, return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
    return tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def test_greedy_text_is_transformers_own(model_folder: Path) -> None:
    found = as_json(PROMPT, "--model", str(model_folder), "--max-new-tokens", "20")
    assert found["text"] == expected_text(model_folder, 20)


def test_text_on_stdout_and_the_rest_on_stderr(model_folder: Path) -> None:
    result = run(PROMPT, "--model", str(model_folder), "--max-new-tokens", "20")
    assert result.exit_code == 0
    assert result.stdout == PROMPT + expected_text(model_folder, 20) + "\n"
    first, second = result.stderr.splitlines()
    assert re.fullmatch(r"prompt \d+ tokens, [\d.]+ tokens/s; generated 20 tokens, [\d.]+ tokens/s", first)
    assert second == (
        f"{model_folder}: 2 expert layers served; prompt by {ENGINE} (grouped), "
        f"generation by {ENGINE} (grouped); float32; experts float32, memory-mapped"
    )


def test_json_says_everything(model_folder: Path) -> None:
    found = as_json(PROMPT, "--model", str(model_folder), "--max-new-tokens", "5")
    tokens = AutoTokenizer.from_pretrained(model_folder)(PROMPT)["input_ids"]
    assert found["prompt"] == PROMPT
    assert found["tokens"] == {"prompt": len(tokens), "generated": 5}
    assert found["stopped"] == "length"
    for part in ("prompt", "generated"):
        assert found["seconds"][part] > 0
    assert found["tokens_per_second"]["prompt"] == pytest.approx(len(tokens) / found["seconds"]["prompt"])
    assert found["tokens_per_second"]["generated"] == pytest.approx(4 / found["seconds"]["generated"])
    assert found["ran"] == {
        "prompt": [{"implementation": ENGINE, "strategy": "grouped"}],
        "generated": [{"implementation": ENGINE, "strategy": "grouped"}],
    }
    assert found["model"] == str(model_folder)
    assert (found["architecture"], found["expert_layers"]) == ("Qwen3MoeForCausalLM", 2)
    assert (found["dtype"], found["device"]) == ("float32", "cpu")
    assert found["versions"].keys() == {"moestro", "python", "torch", "transformers"}


@pytest.mark.parametrize("strategy", ["grouped", "selective", "all_experts"])
def test_what_ran_is_what_was_asked_for(model_folder: Path, strategy: str) -> None:
    found = as_json(PROMPT, "--model", str(model_folder), "--max-new-tokens", "3", "--strategy", strategy)
    ran = [{"implementation": ENGINE, "strategy": strategy}]
    assert found["ran"] == {"prompt": ran, "generated": ran}


def test_a_forced_implementation_is_named(model_folder: Path) -> None:
    with moestro.use(implementation="reference"):
        found = as_json(PROMPT, "--model", str(model_folder), "--max-new-tokens", "3")
    assert {r["implementation"] for part in found["ran"].values() for r in part} == {"reference"}


def test_dtype(model_folder: Path) -> None:
    found = as_json(PROMPT, "--model", str(model_folder), "--max-new-tokens", "2", "--dtype", "bfloat16")
    assert found["dtype"] == "bfloat16"


def test_a_format_is_said(model_folder: Path, tmp_path: Path) -> None:
    options = (PROMPT, "--model", str(model_folder), "--max-new-tokens", "20")
    found = as_json(*options, "--format", "int8")
    assert found["stored_experts"] == ["int8, in memory"]
    assert run(*options, "--format", "int8").stderr.endswith("; float32; experts int8, in memory\n")
    moestro.load(model_folder, format="int8").save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(model_folder).save_pretrained(tmp_path)
    saved = as_json(PROMPT, "--model", str(tmp_path), "--max-new-tokens", "20")
    assert saved["stored_experts"] == ["int8, memory-mapped"]
    assert saved["text"] == found["text"]


def test_activations_of_eight_bits(model_folder: Path) -> None:
    options = (PROMPT, "--model", str(model_folder), "--max-new-tokens", "3", "--input-format", "int8")
    assert as_json(*options, "--format", "int8")["stored_experts"] == ["int8, in memory, int8 inputs"]
    refused(run(*options), "weights that are integers")
    refused(run(*options[:-1], "int4", "--format", "int8"), "needs one of float, int8, fp8-e4m3")


def test_projections_by_the_engine(model_folder: Path) -> None:
    options = (PROMPT, "--model", str(model_folder), "--max-new-tokens", "3", "--dtype", "bfloat16")
    plain, found = as_json(*options, "--projections", "torch"), as_json(*options)
    assert plain["projections"] == {}
    ((name, count),) = found["projections"].items()
    assert count == 2 * 4 + 1  # q, k, v and o of each layer, and the head; routers are parameters
    if any(isa.runs_here for isa in ISAS) and torch.are_deterministic_algorithms_enabled():
        assert name.startswith("cpu-")
    assert run(*options).stderr.endswith(f"; bfloat16; {count} projections by {name}\n")
    stored = as_json(*options, "--format", "int8")
    assert (stored["projections"], stored["stored_experts"]) == (found["projections"], ["int8, in memory"])
    with moestro.use(implementation="reference"):
        assert as_json(*options)["projections"] == {"reference": count}
    assert as_json(*options[:-1], "float32")["projections"] == {}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_projections_in_eight_bits(model_folder: Path, dtype: str) -> None:
    options = (PROMPT, "--model", str(model_folder), "--max-new-tokens", "3", "--dtype", dtype, "--projections", "int8")
    found = as_json(*options)
    assert (sum(found["projections"].values()), found["stored_projections"]) == (2 * 4 + 1, ["int8"])
    assert run(*options).stderr.endswith("; projections stored as int8\n")
    refused(run(*options[:-1], "bfloat16"), "projections='bfloat16'")
    refused(run(*options[:-1], "int4-g128"), "rows whose length is a multiple of 128")


@pytest.mark.parametrize("options", [(), ("--dtype", "float32")])
def test_experts_are_mapped(model_folder: Path, options: tuple[str, ...]) -> None:
    found = as_json(PROMPT, "--model", str(model_folder), "--max-new-tokens", "20", *options)
    assert found["stored_experts"] == ["float32, memory-mapped"]
    assert found["text"] == expected_text(model_folder, 20)


def test_another_dtype_is_read_where_memory_holds_it(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = (PROMPT, "--model", str(model_folder), "--max-new-tokens", "2", "--dtype", "bfloat16")
    assert as_json(*options)["stored_experts"] == []
    monkeypatch.setattr("moestro.hf.text_model.available_bytes", lambda: 1000)
    assert as_json(*options)["stored_experts"] == ["float32, memory-mapped"]


def test_a_checkpoint_without_safetensors_is_read(model_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(model_folder, tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(weights, tmp_path / "pytorch_model.bin")
    found = as_json(PROMPT, "--model", str(tmp_path), "--max-new-tokens", "20")
    assert found["stored_experts"] == []
    assert found["text"] == expected_text(model_folder, 20)


def test_one_token_has_no_generation_speed(model_folder: Path) -> None:
    found = as_json(PROMPT, "--model", str(model_folder), "--max-new-tokens", "1")
    assert found["tokens_per_second"]["generated"] is None
    assert found["ran"]["generated"] == []
    assert "generation by" not in run(PROMPT, "--model", str(model_folder), "--max-new-tokens", "1").stderr


def test_without_a_limit_the_context_is_filled(model_folder: Path) -> None:
    found = as_json(PROMPT, "--model", str(model_folder))
    total = found["tokens"]["prompt"] + found["tokens"]["generated"]
    assert total == 64 if found["stopped"] == "length" else total < 64


def test_seeds(model_folder: Path) -> None:
    options = (PROMPT, "--model", str(model_folder), "--max-new-tokens", "20", "--do-sample", "--temperature", "1.5")
    before = torch.random.get_rng_state()
    one, again, other = (as_json(*options, "--seed", seed)["text"] for seed in ("1", "1", "2"))
    assert one == again
    assert one != other
    assert torch.equal(torch.random.get_rng_state(), before)


def test_sampling_options_reach_transformers(model_folder: Path) -> None:
    """Each of them, at its most restrictive, makes sampling greedy."""
    options = (PROMPT, "--model", str(model_folder), "--max-new-tokens", "12")
    greedy = as_json(*options)["text"]
    for name, value in (("--top-k", "1"), ("--top-p", "1e-6"), ("--min-p", "1.0"), ("--temperature", "1e-4")):
        assert as_json(*options, "--do-sample", name, value, "--seed", "5")["text"] == greedy, name
    assert as_json(*options, "--repetition-penalty", "50.0")["text"] != greedy
    assert as_json(*options, "--no-repeat-ngram-size", "1")["text"] != greedy


def test_chat_uses_the_template(model_folder: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    tokenizer.chat_template = CHAT_TEMPLATE
    AutoModelForCausalLM.from_pretrained(model_folder).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    found = as_json("hi", "--model", str(tmp_path), "--chat", "--max-new-tokens", "2")
    assert found["tokens"]["prompt"] == len(tokenizer("[user] hi\n[assistant]")["input_ids"])
    shown = run("hi", "--model", str(tmp_path), "--chat", "--max-new-tokens", "2").stdout
    assert shown == found["text"] + "\n"


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("absent", "where there is no folder"),
        ("name", "where there is no folder"),
        ("hub", "hub id that can be reached"),
        ("empty", "holds no config.json"),
        ("no tokenizer", "without a tokenizer"),
        ("no weights", "needs readable weights"),
        ("cut", "bytes that are missing"),
        ("missing weight", "without a tensor for model.norm.weight"),
        ("other shapes", "as the model's configuration says"),
        ("dense", "Qwen3ForCausalLM, a dense model"),
        ("image", "needs a causal language model"),
        ("unknown", "no_such_architecture"),
        ("nobody", "where there is no folder"),
        ("wrong type", "needs a configuration that Transformers knows"),
        ("empty tokenizer", "needs a tokenizer beside the model"),
    ],
)
def test_a_model_that_cannot_run(broken: Callable[[str], str], fault: str, says: str) -> None:
    refused(run(PROMPT, "--model", broken(fault)), says)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--chat"], "no chat template"),
        (["--temperature", "0.5"], "temperature without do_sample"),
        (["--no-do-sample", "--top-k", "5"], "top_k without do_sample"),
        (["--seed", "5"], "seed without do_sample"),
        (["--do-sample", "--temperature", "0"], "temperature=0.0; needs at least 1e-06 with do_sample"),
        (["--do-sample", "--temperature", "1e-40"], "temperature=1e-40; needs at least 1e-06"),
        (["--temperature", "-1"], "temperature=-1.0; needs at least 1e-06, or 0 for greedy"),
        (["--temperature", "0", "--top-k", "5"], "Add do_sample=True (--do-sample), or drop top_k."),
        (["--do-sample", "--top-p", "1.5"], "top_p=1.5"),
        (["--do-sample", "--top-p", "nan"], "top_p=nan"),
        (["--do-sample", "--min-p", "-1"], "min_p=-1.0"),
        (["--do-sample", "--top-k", "-1"], "top_k=-1"),
        (["--do-sample", "--seed", "-1"], "seed=-1"),
        (["--repetition-penalty", "0"], "repetition_penalty=0.0"),
        (["--no-repeat-ngram-size", "-1"], "no_repeat_ngram_size=-1"),
        (["--max-new-tokens", "0"], "max_new_tokens=0; needs at least 1"),
        (["--max-new-tokens", "64"], "needs at most 64 together"),
        (["--dtype", "int8"], "dtype 'int8'"),
        (["--device", "nowhere"], "device 'nowhere'"),
        (["--device", "meta"], "device 'meta'"),
        (["--strategy", "fastest"], "strategy='fastest'"),
    ],
)
def test_an_option_that_cannot_be(model_folder: Path, options: list[str], says: str) -> None:
    refused(run(PROMPT, "--model", str(model_folder), *options), says)


def test_temperature_0_is_greedy(model_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(model_folder, tmp_path, dirs_exist_ok=True)
    settings = {"do_sample": True, "temperature": 2.0, "top_k": 40, "eos_token_id": 0}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    found = as_json(PROMPT, "--model", str(tmp_path), "--max-new-tokens", "20", "--temperature", "0")
    assert found["text"] == expected_text(model_folder, 20)


def test_logits_that_are_not_finite(model_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(model_folder, tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], float("nan"))
    (tmp_path / "model.safetensors").unlink()
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    refused(run(PROMPT, "--model", str(tmp_path), "--do-sample", "--json"), "logits of")


def test_a_gguf_file_is_named_as_such(tmp_path: Path) -> None:
    path = tmp_path / "model-q4.gguf"
    path.write_bytes(b"GGUF")
    for name in (path, tmp_path):
        refused(run(PROMPT, "--model", str(name)), f"{name}, in llama.cpp's GGUF format")


@pytest.mark.parametrize("prompt", ["", " \n"])
def test_an_empty_prompt(prompt: str) -> None:
    refused(run(prompt, "--model", "nowhere/at-all"), "an empty prompt")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("mxfp4", "multiple of 32"),
        ("int3", "mxfp4"),
        ("nf4", "[find_format] got "),
        ("int4", "int4-g128"),
        ("fp8", ". Perhaps fp8-e4m3"),
        ("MXFP4", ". Perhaps mxfp4"),
    ],
)
def test_a_format_that_cannot_be(model_folder: Path, name: str, says: str) -> None:
    refused(run(PROMPT, "--model", str(model_folder), "--format", name), says)


def test_a_prompt_beyond_the_context(model_folder: Path) -> None:
    refused(run("x" * 65, "--model", str(model_folder)), "65 prompt tokens")


def refused(result: Result, says: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert FOUR_PARTS.fullmatch(line), line
    assert says in line


MODULE = f"{sys.executable} -m moestro"


def script(start: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*shlex.split(start), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=240,
    )


def test_as_a_process(model_folder: Path, forked: str) -> None:
    done = script(MODULE, "generate", PROMPT, "--model", str(model_folder), "--max-new-tokens", "3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(PROMPT)
    assert len(done.stderr.splitlines()) == 2, done.stderr
    options = ("--model", str(model_folder), "--max-new-tokens", "3")
    narrow = script(forked, "generate", "é", *options, PYTHONIOENCODING="ascii")
    assert narrow.returncode == 0, narrow.stderr
    assert narrow.stdout.startswith("?")
    failed = script(forked, "generate", PROMPT, "--model", "./nowhere")
    assert failed.returncode == 2
    assert len(failed.stderr.splitlines()) == 1


def test_the_bundled_model() -> None:
    options = ("def fibonacci(n):", "--max-new-tokens", "24")
    found = as_json(*options, "--no-do-sample")
    assert found["model"] == "bundled"
    assert found["architecture"] == "Qwen3MoeForCausalLM"
    assert found["expert_layers"] >= 4
    assert found["text"].startswith("\n    ")
    one, again = (as_json(*options, "--seed", "1")["text"] for _ in range(2))  # its own configuration samples
    assert one == again != found["text"]


def test_greedy_prints_no_warning(forked: str) -> None:
    done = script(forked, "generate", "def ", "--no-do-sample", "--max-new-tokens", "2")
    assert done.returncode == 0
    assert len(done.stderr.splitlines()) == 2, done.stderr


def test_ranks_share_one_standard_input() -> None:
    refused = run("-", "--ep", "2")
    assert refused.exit_code == 2
    assert "processes of torchrun share one standard input" in refused.stderr


@pytest.mark.parametrize("options", [["--chat"], ["--max-new-tokens", "64"], ["--strategy", "fastest"]])
def test_refused_before_the_weights_are_read(
    model_folder: Path, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moestro.hf.text_model._weights", lambda *args: pytest.fail("weights were read"))
    assert run(PROMPT, "--model", str(model_folder), *options).exit_code == 2


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
        MemoryError(),
        OSError(errno.ENOMEM, "Not enough space"),
    ],
)
def test_too_little_memory_is_named(model_folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    monkeypatch.setattr(Qwen3MoeForCausalLM, "from_pretrained", fail)
    options = (PROMPT, "--model", str(model_folder))
    for given, advice in {
        (): "Choose a 16-bit dtype, experts of fewer bits (--format mxfp4, in Python",
        ("--dtype", "bfloat16"): "Choose experts of fewer bits (--format mxfp4, in Python",
        ("--dtype", "bfloat16", "--format", "int8"): "Choose a smaller model.",
    }.items():
        result = run(*options, *given)
        refused(result, "for which the memory does not suffice")
        assert advice in result.stderr


def test_overlapping_observers_leave_nothing_behind() -> None:
    first, second = (dispatch.observed(EXPERT_MLP, lambda *told: None) for _ in range(2))
    with first, second:
        assert len(dispatch._OBSERVERS.get()[EXPERT_MLP]) == 2
    assert not dispatch._OBSERVERS.get()


def test_help_loads_no_library() -> None:
    code = """
import sys
from moestro.cli import app
try:
    app(["generate", "--help"])
except SystemExit:
    pass
print("\\nLOADED", *({"transformers", "matplotlib", "tokenizers"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.stdout.splitlines()[-1].strip() == "LOADED", done.stdout + done.stderr


def test_version() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout == f"moestro {moestro.__version__}\n"


def test_within_a_memory_budget(model_folder: Path) -> None:
    options = (PROMPT, "--model", str(model_folder), "--max-new-tokens", "20")
    result = run(*options, "--memory", "4kB")
    assert result.exit_code == 0
    assert result.stdout == PROMPT + expected_text(model_folder, 20) + "\n"
    speeds, layers, hits, memory = result.stderr.splitlines()
    assert speeds.startswith("prompt ")
    assert layers.endswith("experts float32, read as needed")
    assert re.match(
        r"prompt [\d.]+% of \d+ lookups hit, .+ s waited for$|generation [\d.]+% of \d+ lookups hit, ", hits
    )
    assert memory.startswith("experts in 3.1 kB of 12.3 kB, below the 6.1 kB of a token: 2 slots, policy expected, ")
    found = as_json(*options, "--memory", "8KiB")
    assert found["memory"]["budget_bytes"] == 8192
    assert found["memory"]["decode"]["lookups"] > 0
    assert found["memory"]["prefetch"] is None
    assert as_json(*options, "--memory", "8KiB", "--prefetch")["memory"]["prefetch"]["layers"] == 1
    assert as_json(*options)["memory"] is None
    refused(run(*options, "--prefetch"), "--prefetch without --memory")
    refused(run(*options, "--device-memory", "8KiB"), "--device-memory without --memory")
    refused(run(*options, "--device-memory", ""), "--device-memory without --memory")
    refused(run(*options, "--memory", "8KiB", "--device-memory", "much"), "device_memory 'much'")
    refused(run(*options, "--memory", "8KiB", "--device-memory", "4KiB"), "device_memory= on the CPU")
    refused(run(*options, "--memory", "8KiB", "--prefetch", "--device-memory", "4KiB"), "prefetch and device_memory")


@pytest.mark.parametrize("memory", ["2kB", "much", "0"])
def test_memory_budgets_that_do_not_work(model_folder: Path, memory: str) -> None:
    result = run(PROMPT, "--model", str(model_folder), "--memory", memory)
    assert result.exit_code == 2
    assert FOUR_PARTS.fullmatch(result.stderr.strip().removeprefix("moestro: "))
