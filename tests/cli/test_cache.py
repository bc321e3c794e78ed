"""`moestro generate --trace` and `moestro cache`: record, replay, and one line for what cannot be replayed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from documents import check_document
from moestro.cli import app
from moestro.memory import POLICIES, Trace, cycle_bytes, least_budget, read_trace, total_bytes

FOUR_PARTS = re.compile(r"\[\w+\] got .+; needs .+\. .+\.")
CSV = "step,layer,token,expert\n" + "".join(
    f"{step},{layer},0,{(step * 3 + layer + slot) % 8}\n"
    for step in range(12)
    for layer in range(2)
    for slot in range(2)
)


def run(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="module")
def trace_file(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a prompt of more than 32 tokens, and 12 after it."""
    path = tmp_path_factory.mktemp("trace") / "run.npz"
    run(
        "generate", "a b c d e " * 4, "--model", model_folder, "--max-new-tokens", 13, "--no-do-sample", "--trace", path
    )
    return path


@pytest.fixture(scope="module")
def trace(trace_file: Path) -> Trace:
    return read_trace(trace_file)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "t.csv"
    path.write_text(CSV)
    return path


def test_what_generate_records(model_folder: Path, trace: Trace) -> None:
    """A visit for each of two layers and each forward: the prompt's, and those of all new tokens but the last."""
    assert trace.model == str(model_folder)
    assert [(size.experts, size.top_k, size.expert_bytes) for size in trace.layers] == [(4, 2, 3 * 16 * 8 * 4)] * 2
    assert trace.at.tolist() == [0, 1] * 13
    assert trace.prompted == trace.tokens[0] > 32
    assert trace.decoded == 12
    assert all(visit.last is not None for visit in trace.visits[:2])
    assert all(visit.last is None and len(visit.experts) == 2 for visit in trace.visits[2:])


def test_prompts_that_share_steps_are_recorded_too(model_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "batch.npz"
    run(
        *("generate", "a b", "c d", "--model", model_folder, "--max-new-tokens", 4, "--no-do-sample"),
        *("--batch", 2, "--json", "--trace", path),
    )
    found = read_trace(path)
    assert found.at.tolist() == [0, 1] * (len(found.at) // 2)
    assert found.decoded >= 4 + 4


def test_the_table(trace_file: Path, trace: Trace) -> None:
    out = run("cache", trace_file).stdout
    lines = out.splitlines()
    assert lines[0] == f"model: {trace.model}, 8 experts in 2 layers"
    assert lines[1] == f"run: {trace.prompted} tokens of prompts, 12 decoded"
    assert "experts: 0.0 MB" in lines[2]
    assert "tokens/s" not in out  # nobody said how fast experts are read
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert [row[0] for row in rows] == [*POLICIES, "belady"] * (len(rows) // 5)
    assert {row[5] for row in rows if row[0] == "belady"} == {"0.0"}


def test_json_and_picture(trace_file: Path, trace: Trace, tmp_path: Path) -> None:
    budgets = least_budget(trace.layers), total_bytes(trace.layers)
    options = ("--budget", ",".join(map(str, budgets)), "--policy", "lru,belady", "--disk", "1.5MB/s")
    found = json.loads(run("cache", trace_file, *options, "--plot", tmp_path / "p.png", "--json").stdout)
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    check_document(found)
    settings = found["settings"]
    assert settings["bytes_per_second"] == 1.5e6
    assert (settings["least_bytes"], settings["total_bytes"]) == budgets
    assert settings["cycle_bytes"] == cycle_bytes(trace.layers)
    assert [(row["budget"], row["policy"]) for row in found["points"]] == [
        (budget, policy) for budget in budgets for policy in ("lru", "belady")
    ]
    for row in found["points"]:
        assert row["hit_rate"] * row["decode.lookups"] == pytest.approx(row["decode.hits"])
        assert row["decode.lookups"] == 12 * 4
        if row["token_bytes"]:
            assert row["tokens_per_second"] == pytest.approx(1.5e6 / row["token_bytes"])
    assert found["points"][-1]["hit_rate"] == found["points"][-2]["hit_rate"] > found["points"][0]["hit_rate"]


def test_several_runs_and_a_table_of_numbers(table: Path) -> None:
    once, twice = (
        json.loads(run("cache", *[table] * count, "--expert-bytes", "1KB", "--policy", "lru", "--json").stdout)[
            "settings"
        ]
        for count in (1, 2)
    )
    assert (once["model"], once["experts"], once["total_bytes"]) == ("t.csv", 16, 16_000)
    assert (once["decoded_tokens"], twice["decoded_tokens"]) == (12, 24)
    more = json.loads(run("cache", table, "--expert-bytes", 10, "--experts", 20, "--json").stdout)
    assert more["settings"]["experts"] == 40


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["none.npz"], "got 'none.npz' (No such file or directory); needs a trace of version 1"),
        (["/dev/zero"], "got '/dev/zero' (no ordinary file); needs a trace of version 1"),
        (["TABLE"], "without the size of an expert"),
        (["TABLE", "--expert-bytes", "0"], "got --expert-bytes '0'"),
        (["TABLE", "--expert-bytes", "9", "--experts", "2"], "expert 7 where there are 2"),
        (["TRACE", "--expert-bytes", "9"], "with the size of an expert"),
        (["TRACE", "TABLE", "--expert-bytes", "9"], "with the size of an expert"),
        (["TRACE", "--budget", "1"], "a budget of 1 bytes for the experts of 2 layers"),
        (["TRACE", "--budget", "x"], "got --budget 'x'"),
        (["TRACE", "--budget", ","], "0 budgets"),
        (["TRACE", "--policy", "mru"], "policy 'mru'; needs one of expected, lru, lfu, layer_lfu, belady"),
        (["TRACE", "--policy", ","], "got policies []"),
        (["TRACE", "--disk", "2GB"], "got --disk '2GB'; needs bytes a second"),
        (["TRACE", "--disk", "0GB/s"], "got --disk '0GB'"),
        (["TRACE", "--plot", "a.xyz"], "got 'a.xyz'; needs a name ending in .png"),
    ],
)
def test_bad_arguments_are_one_line_and_code_2(
    arguments: list[str], sentence: str, trace_file: Path, table: Path
) -> None:
    named = {"TRACE": str(trace_file), "TABLE": str(table)}
    result = run("cache", *(named.get(a, a) for a in arguments), code=2)
    assert sentence in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert FOUR_PARTS.match(result.stderr.strip())
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--trace", "no/such/folder/t.npz"], "needs a file that can be written"),
        (["--trace", "t.npz", "--ep", "2"], "got --trace with --ep or --tp; needs all experts on one rank"),
    ],
)
def test_traces_that_cannot_be_recorded(arguments: list[str], sentence: str, model_folder: Path) -> None:
    result = run("generate", "x", "--model", model_folder, *arguments, code=2)
    assert sentence in result.stderr
    assert FOUR_PARTS.match(result.stderr.strip())


def test_a_disk_that_is_full(model_folder: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    result = run("generate", "x", "--model", model_folder, "--max-new-tokens", 2, "--trace", full, code=2)
    assert "got --trace /dev/full (No space left on device); needs a file" in result.stderr.splitlines()[-1]


def test_a_name_is_printed_as_it_is(trace: Trace, tmp_path: Path) -> None:
    """Nothing in it is read as markup or as mathematics, and nothing reaches the terminal as a command."""
    name = "folder [/b] $\\nothing$"
    Trace(name, trace.layers, trace.at, trace.tokens, trace.ids).write(tmp_path / "t.npz")
    out = run("cache", tmp_path / "t.npz", "--policy", "lru", "--plot", tmp_path / "p.png").stdout
    assert out.startswith(f"model: {name}, 8 experts")
    Trace("a\x1b[31mb\n", trace.layers, trace.at, trace.tokens, trace.ids).write(tmp_path / "t.npz")
    assert run("cache", tmp_path / "t.npz", "--policy", "lru").stdout.startswith(r"model: 'a\x1b[31mb\n', 8 experts")
