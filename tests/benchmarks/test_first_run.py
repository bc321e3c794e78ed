"""The first run on a GPU, rehearsed on a device that is none: every step, its budget and its files, by a fake clock.

What is launched is plain PyTorch; a timed call takes as long as the rehearsal says, and time passes by it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import moestro
from gpu import first_checks, first_points, first_run, first_tools, tune
from gpu.first_points import GRAPH, OURS, PEER, Device
from gpu.items import DONE, FAILED, LEFT, REFUSED, SCHEMA, Item, Record
from moestro.bench import LAYERS, LayerSpec
from moestro.ops import gpu
from moestro.ops.expert_mlp import triton_maps
from moestro.ops.expert_mlp.triton_tuning import Plan
from moestro.types import Routing
from moestro.weights import ExpertWeights
from source import ROOT

HOPPER = gpu.Device((9, 0), 132, 227 << 10)
RATES = {"bytes_per_second": {"sum": 4e12}, "flops_per_second": {"bf16-mm": 7e14}}
TOKENS = (1, 16)


def tiny(name: str) -> LayerSpec:
    """The layer of this name at sizes of whole groups and tiles."""
    return replace(
        LAYERS[name], hidden_size=128, intermediate_size=128, num_experts=6, top_k=min(LAYERS[name].top_k, 2)
    )


@dataclass
class Rehearsal:
    """A device on which every timed call takes `cost` seconds, and a host on which nothing else takes any.

    `broken` adds to what a plan computes; `launched` are the plans of all launches.
    """

    now: float = 0.0
    cost: float = 0.01
    broken: Callable[[Plan], float] = lambda how: 0.0
    costs: Callable[[str], float] = lambda kind: 1.0
    launched: list[Plan] = field(default_factory=list)
    captured: int = 0

    def timer(self, kind: str, cold: int) -> Callable[[Any], float]:
        def seconds(call: Any) -> float:
            call()
            taken = self.cost * self.costs(kind)
            self.now += taken
            return taken

        return seconds

    def capture(self, call: Any) -> Any:
        self.captured += 1
        return call

    def device(self) -> Device:
        timers = (lambda cold, kind=kind: self.timer(kind, cold) for kind in ("queued", "idle"))
        return Device("cpu", *timers, self.capture, 1 << 20, lambda: RATES, lambda: 1 << 40)

    def prepared(self, x: torch.Tensor, weights: ExpertWeights, how: Plan) -> Callable[..., torch.Tensor]:
        return lambda x, routing, weights: self.launch(x, routing, weights, how)

    def launch(self, x: torch.Tensor, routing: Routing, weights: ExpertWeights, how: Plan) -> torch.Tensor:
        self.launched.append(how)
        with moestro.use(implementation="torch"):
            return moestro.expert_mlp(x, routing, weights) + self.broken(how)


@pytest.fixture
def rehearsal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rehearsal]:
    found = Rehearsal()
    monkeypatch.setattr(first_run, "named", tiny)
    monkeypatch.setattr(tune, "prepared", found.prepared)
    monkeypatch.setattr(gpu, "device_of", lambda tensor: HOPPER)
    monkeypatch.setattr(first_run, "_compile_ahead", lambda run: Item("compile", lambda left: []))
    return found


def step(
    rehearsal: Rehearsal, name: str, results: Path, seconds: float = 1e6, layers: tuple[str, ...] | None = ("olmoe",)
) -> tuple[int, dict[str, Any]]:
    """The exit code and the file of a step that is run in this process."""
    run = first_run.Run(name, results, rehearsal.device(), layers, TOKENS, clock=lambda: rehearsal.now)
    code = first_run.work(run, rehearsal.now + seconds)
    found = json.loads((results / f"{name}.json").read_text())
    check(name, found)
    return code, found


def check(name: str, found: dict[str, Any]) -> None:
    """The schema that every file has."""
    kinds = {"step": str, "about": dict, "rows": list, "done": dict, "failed": dict, "left": dict, "notes": list}
    assert found.keys() == {*kinds, "at", "until", "schema"}
    assert all(isinstance(found[key], kind) for key, kind in kinds.items())
    assert (found["step"], found["schema"], found["at"], found["until"]) == (name, SCHEMA, None, None)
    assert found["about"].keys() == {"command", "date", "machine", "versions"}
    assert all(isinstance(row["item"], str) and isinstance(row["status"], str) for row in found["rows"])


def test_layers_are_timed_as_calls_graphs_and_from_idle(rehearsal: Rehearsal, tmp_path: Path) -> None:
    rehearsal.costs = lambda kind: 2.0 if kind == "idle" else 1.0
    code, found = step(rehearsal, "layers", tmp_path, layers=("olmoe", "mixtral"))
    assert code == DONE
    assert list(found["done"]) == [
        "roof",
        "compile",
        *(f"point {n} T={t}" for n in ("olmoe", "mixtral") for t in TOKENS),
    ]
    rows = [row for row in found["rows"] if "way" in row]
    assert len(rows) == 2 * 2 * 3 * 2
    for row in rows:
        assert row["status"] == "ok"
        assert row["us"] == pytest.approx(2e4 if row["way"] == "idle" else 1e4)
        assert row["us_quartiles"] == pytest.approx([row["us"]] * 2)
        assert row["samples"] >= 5
        assert row["of_read"] == pytest.approx(row["read_us"] / row["us"])
        assert row["of_matrix_rate"] == pytest.approx(row["flops"] / row["us"] * 1e6 / 7e14)
        assert row["bytes"] % (3 * 128 * 128 * 2) == 0  # whole experts in bfloat16
        ratios = row["peer_over_ours"]
        assert ratios == (pytest.approx([1.0] * 3) if row["variant"] == OURS else None)
    assert rehearsal.captured > 0
    page = (tmp_path / "summary.md").read_text()
    assert "| olmoe | 1 | moestro | graph | 10,000.0 | 10,000.0 to 10,000.0 |" in page
    assert "layers: 6 items done" in page


def test_a_wrong_output_has_no_time_and_the_point_no_ratio(rehearsal, tmp_path, monkeypatch) -> None:
    right = first_points.PEERS[PEER]
    wrong = replace(right, prepare=lambda layer: lambda x, r: lambda: right.prepare(layer)(x, r)() + 1)
    monkeypatch.setattr(first_points, "PEERS", {PEER: wrong})
    code, found = step(rehearsal, "layers", tmp_path)
    assert code == FAILED
    rows = [row for row in found["rows"] if "way" in row]
    for row in rows:
        assert row.get("peer_over_ours") is None
        if row["variant"] == PEER:
            assert (row["status"], "us" in row) == ("wrong", False)
            assert "error" in row["reason"]
        else:
            assert "wrong or missing" in row["no_ratio"]
    assert "worst error" in (tmp_path / "summary.md").read_text()


def test_a_peer_that_cannot_be_captured_keeps_its_other_ratios(rehearsal, tmp_path, monkeypatch) -> None:
    def capture(call: Any) -> Any:
        if call.func.__module__.endswith("torch_grouped"):
            raise RuntimeError("operation not permitted when stream is capturing")
        return call

    monkeypatch.setattr(rehearsal, "capture", capture)
    code, found = step(rehearsal, "layers", tmp_path)
    assert code == DONE
    rows = [row for row in found["rows"] if "way" in row]
    skipped = [row for row in rows if row["status"] == "skipped"]
    assert {(row["variant"], row["way"]) for row in skipped} == {(PEER, GRAPH)}
    ours = {(row["tokens"], row["way"]): row["peer_over_ours"] for row in rows if row["variant"] == OURS}
    assert ours[16, GRAPH] is None
    assert ours[16, "call"] == pytest.approx([1.0] * 3)


def test_a_step_ends_with_its_budget_and_goes_on_when_it_is_run_again(rehearsal, tmp_path) -> None:
    rehearsal.cost = 1.0
    code, found = step(rehearsal, "layers", tmp_path, seconds=100.0, layers=("olmoe", "mixtral"))
    assert code == LEFT
    assert rehearsal.now <= 100.0
    done, left = [k for k in found["done"] if k.startswith("point")], list(found["left"])
    assert done
    assert left
    assert len(done) + len(left) == 4
    assert all("were left of the budget, and it needs about" in why for why in found["left"].values())
    assert f"left: {left[0]}" in (tmp_path / "summary.md").read_text()
    rows = len(found["rows"])
    code, found = step(rehearsal, "layers", tmp_path, layers=("olmoe", "mixtral"))
    assert code == DONE
    assert found["left"] == {}
    assert len(found["rows"]) > rows


def test_correctness_meets_every_plan_and_says_which_bits_differ(rehearsal, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(first_tools, "ran", lambda command, seconds, **env: (0, "3 passed in 1 s"))
    monkeypatch.setattr(
        triton_maps,
        "refusal",
        lambda data, asked: "the driver refuses" if asked.strides[1] < asked.strides[2] else None,
    )
    monkeypatch.setattr(first_checks, "TOKENS", (1, 4096))
    code, found = step(rehearsal, "correctness", tmp_path)
    assert code == DONE
    kinds = [name.partition(" ")[0] for name in found["done"]]
    order = list(dict.fromkeys(kinds))
    assert order == ["maps", "compile", "plan", "tests"]
    assert kinds.count("plan") == len(first_checks.FORMS) * len(TOKENS)
    assert kinds.count("tests") == len(first_tools.DEVICE_TESTS)
    maps = {row["product"]: (row["status"], row["map"] is not None) for row in found["rows"] if "product" in row}
    assert maps == {"gate_up": ("refused", True), "down": ("ok", True)}
    plans = [row for row in found["rows"] if "plan" in row]
    assert {row["format"] for row in plans} == set(first_checks.FORMS)
    assert all(row["bits"]["again"] and row["bits"]["graph with other ids"] for row in plans)


def test_plans_through_maps_are_held_against_pointers(rehearsal: Rehearsal) -> None:
    spec = replace(tiny("olmoe"), num_experts=8)
    how = first_checks.choose(spec, "dense", 4096, HOPPER)
    assert how.gate_up.tensor_map
    kernel = first_checks.Kernel(spec, "dense", 40, how)
    [row] = first_checks.check_rows(rehearsal.device(), kernel)
    assert (row["status"], row["bits"]["pointers"]) == ("ok", True)
    rehearsal.broken = lambda how: 0.0 if how.gate_up.tensor_map else 2.0**-6
    [row] = first_checks.check_rows(rehearsal.device(), kernel)
    assert (row["status"], row["reason"]) == ("wrong", "pointers: other bits")
    rehearsal.broken = lambda how: 1.0
    [row] = first_checks.check_rows(rehearsal.device(), kernel)
    assert "error" in row["reason"]


def test_a_graph_that_keeps_its_ids_is_noticed(rehearsal: Rehearsal, monkeypatch) -> None:
    def capture(call: Any) -> Any:
        output = call()
        return lambda: output

    monkeypatch.setattr(rehearsal, "capture", capture)
    spec = tiny("olmoe")
    kernel = first_checks.Kernel(spec, "mxfp4", 16, first_checks.choose(spec, "mxfp4", 16, HOPPER))
    [row] = first_checks.check_rows(rehearsal.device(), kernel)
    assert (row["status"], row["reason"]) == ("wrong", "graph with other ids: other bits")


def test_kernels_themselves_pass_the_checks(rehearsal, monkeypatch, triton_device) -> None:
    """What is launched are Triton's kernels, in its interpreter where there is no GPU, by plans for it."""
    monkeypatch.undo()
    here = replace(rehearsal.device(), kind=triton_device.type)
    spec = replace(tiny("olmoe"), num_experts=3)
    for form in ("dense", "mxfp4"):
        how = first_checks.choose(spec, form, 16, gpu.device_of(torch.empty(0, device=triton_device)))
        [row] = first_checks.check_rows(here, first_checks.Kernel(spec, form, 16, how))
        assert (row["status"], row["reason"]) == ("ok", None)


def test_plans_that_none_before_has_come_first() -> None:
    specs = [LAYERS["olmoe"], LAYERS["mixtral"]]
    found = first_checks.kernels(HOPPER, specs)
    assert len(found) == 2 * len(first_checks.FORMS) * len(first_checks.TOKENS)
    keys = [(kernel.form, kernel.how) for kernel in found]
    count = len(set(keys))
    assert len(set(keys[:count])) == count < len(keys)
    for kernel in found:
        scaled = kernel.form.endswith("/fp8-e4m3")
        assert first_checks.problem_of(kernel.spec, kernel.form, kernel.num_tokens).itemsize == (1 if scaled else 2)


def test_a_sweep_finds_winners_and_the_next_step_measures_them(rehearsal, tmp_path, monkeypatch) -> None:
    """Tiles of half the depth are twice as fast, for either product."""
    last: list[Plan] = []
    launch = rehearsal.launch
    rehearsal.launch = lambda *given: last.append(given[3]) or launch(*given)
    rehearsal.costs = lambda kind: (
        (0.5 if last[-1].gate_up.depth == 64 else 1.0) * (0.5 if last[-1].down.depth == 64 else 1.0)
    )
    code, found = step(rehearsal, "sweep", tmp_path)
    assert code == DONE
    assert list(found["done"]) == ["compile", *(f"sweep olmoe T={t}" for t in TOKENS)]
    won = first_points.winners(found["rows"])
    assert won.keys() == {("olmoe", t) for t in TOKENS}
    for how in won.values():
        assert (how.gate_up.depth, how.down.depth) == (64, 64)
    gains = [row["gain"] for row in found["rows"] if row.get("winner")]
    assert gains == pytest.approx([4.0, 4.0])
    rehearsal.launch = launch
    rehearsal.costs = lambda kind: 1.0
    rehearsal.launched.clear()
    code, found = step(rehearsal, "winners", tmp_path)
    assert code == DONE
    assert set(rehearsal.launched) == set(won.values())
    assert all(row["plan"] for row in found["rows"] if "way" in row)
    kernels = first_run.kernels_of(first_run.Run("winners", tmp_path, rehearsal.device(), ("olmoe",), TOKENS))
    assert [kernel.how for kernel in kernels] == list(won.values())


def test_a_sweep_shares_its_time_and_says_what_it_did_not_try(rehearsal, tmp_path) -> None:
    rehearsal.cost = 1.0
    code, found = step(rehearsal, "sweep", tmp_path, seconds=60.0)
    assert rehearsal.now <= 60.0 + 2 * tune.ROUNDS
    skipped = [row for row in found["rows"] if row["reason"] == "no time was left"]
    assert skipped
    tried = {t: sum(row["us"] is not None for row in found["rows"] if row["tokens"] == t) for t in TOKENS}
    assert all(count >= 2 for count in tried.values())
    assert code == DONE


def test_wrong_plans_do_not_win(rehearsal, tmp_path) -> None:
    """All but the default are wrong."""
    rehearsal.broken = lambda how: float(how != rehearsal.launched[0])
    _, found = step(rehearsal, "sweep", tmp_path)
    assert any("error" in (row["reason"] or "") for row in found["rows"])
    assert next(row for row in found["rows"] if row.get("winner"))["gain"] == pytest.approx(1.0)


def test_winners_without_a_sweep_say_so(rehearsal, tmp_path) -> None:
    code, found = step(rehearsal, "winners", tmp_path)
    assert code == FAILED
    assert found["failed"] == {"plans": "the sweep has found none: run it first"}


NCU = """==PROF== Connected
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","7","gate_up_kernel","gpu__time_duration.sum","ns","12,345"
"0","7","gate_up_kernel","launch__registers_per_thread","register/thread","168"
"1","7","down_kernel","gpu__time_duration.sum","ns","1.5e+03"
"1","7","down_kernel","dram__bytes_read.sum","byte","n/a"
"""


def test_counters_come_from_tools_or_say_that_they_are_not_there(rehearsal, tmp_path, monkeypatch) -> None:
    met: list[tuple[list[str], float, dict[str, str]]] = []

    def ran(command: Any, seconds: float, **env: str) -> tuple[int, str]:
        met.append((list(command), seconds, env))
        if "ncu" in command[0]:
            return 0, NCU
        if "racecheck" in command:
            return 9, "========= ERROR SUMMARY: 2 errors"
        return 0, "========= ERROR SUMMARY: 0 errors"

    monkeypatch.setattr(first_tools, "ran", ran)
    monkeypatch.setattr(first_tools, "find", lambda tool: f"/tools/{tool}")
    code, found = step(rehearsal, "counters", tmp_path, seconds=400.0)
    assert code == FAILED
    rows = {row["item"]: row for row in found["rows"]}
    assert rows["sanitizer racecheck"]["status"] == "wrong"
    assert rows["sanitizer racecheck"]["errors"] == [2]
    assert rows["sanitizer memcheck"]["status"] == "ok"
    counted = [row for row in found["rows"] if row["item"] == "ncu"]
    assert [row["kernel"] for row in counted] == ["gate_up_kernel", "down_kernel"]
    assert counted[0]["metrics"] == {"gpu__time_duration.sum": 12345.0, "launch__registers_per_thread": 168.0}
    assert counted[1]["metrics"] == {"gpu__time_duration.sum": 1500.0, "dram__bytes_read.sum": "n/a"}
    assert all(command[-4:][1] == "small" for command, _, _ in met)
    assert all(seconds <= 400.0 for _, seconds, _ in met)
    assert met[2][2] == {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    monkeypatch.setattr(first_tools, "find", lambda tool: None)
    code, found = step(rehearsal, "counters", tmp_path / "without")
    assert code == DONE
    skipped = [row for row in found["rows"] if row["status"] == "skipped"]
    assert len(skipped) == 5
    assert all("is not on this machine" in row["reason"] for row in skipped)


def test_the_small_layer_is_right_or_says_why_not(rehearsal, monkeypatch, capsys) -> None:
    monkeypatch.setattr(first_run, "SMALL", replace(tiny("olmoe"), name="small"))
    monkeypatch.setattr(first_run, "SMALL_TOKENS", (1, 16))
    assert first_run.small(rehearsal.device()) == 0
    assert "every output is right" in capsys.readouterr().out
    rehearsal.broken = lambda how: 1.0
    assert first_run.small(rehearsal.device()) == 1
    assert "error" in capsys.readouterr().out


def test_the_table_is_two_files(rehearsal, tmp_path, monkeypatch) -> None:
    def ran(command: Any, seconds: float, **env: str) -> tuple[int, str]:
        folder = Path(command[command.index("--results") + 1])
        assert float(command[command.index("--budget") + 1]) <= 400.0
        rows = [{"layer": "olmoe", "status": status, "reason": None, "us": 1.0} for status in ("ok", "wrong output")]
        (folder / "2026-01-01-gpu-olmoe.json").write_text(json.dumps({"rows": rows}))
        (folder / "2026-01-01-gpu.json").write_text(json.dumps({"rows": [], "goals": ["reached"]}))
        (folder / "2026-01-01-gpu.md").write_text("# page\n")
        return 1, ""

    monkeypatch.setattr(first_tools, "ran", ran)
    code, found = step(rehearsal, "table", tmp_path, seconds=470.0, layers=None)
    assert code == FAILED
    assert found["rows"][0]["goals"] == ["reached"]
    assert [row["status"] for row in found["rows"]] == ["ok", "ok", "wrong"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["summary.md", "table.json", "table.md"]
    assert len(first_run.STEPS) + len(["summary.md", "table.md"]) == 8
    monkeypatch.setattr(first_tools, "ran", lambda command, seconds, **env: (2, "no device"))
    _, found = step(rehearsal, "table", tmp_path / "broken")
    assert found["rows"][0]["reason"] == "it ended with code 2"


@pytest.mark.parametrize(
    ("code", "said", "status", "failed"),
    [
        (0, "5 passed in 2 s", "ok", []),
        (1, "[gw1] [ 5%] FAILED a.py::b[c] \nFAILED a.py::b[c] - no\n1 failed", "wrong", ["a.py::b[c]"]),
        (1, "python: No module named pytest", "skipped", None),
        (124, "[gw0] [ 9%] PASSED tests/a.py::b ", "skipped", []),
        (124, "[gw0] [ 9%] FAILED tests/a.py::b ", "wrong", ["tests/a.py::b"]),
    ],
)
def test_tests_on_the_device_are_a_row_a_file(code: int, said: str, status: str, failed, monkeypatch) -> None:
    monkeypatch.setattr(first_tools, "ran", lambda command, seconds, **env: (code, said))
    [row] = first_tools.test_rows("tests/ops/test_gpu.py", 10.0)
    assert (row["status"], row.get("failed")) == (status, failed)


def test_device_tests_are_there() -> None:
    assert [path for path in first_tools.DEVICE_TESTS if not (ROOT / path).is_file()] == []


def test_a_command_that_is_not_there_or_takes_too_long(tmp_path: Path) -> None:
    assert first_tools.ran(["/no/such/tool"], 5.0)[0] == 127
    assert first_tools.ran(["sleep", "60"], 1.0)[0] == 124
    assert first_tools.ran(["sh", "-c", "echo $WORD; exit 3"], 30.0, WORD="said") == (3, "said\n")


def test_kernels_are_compiled_by_shares_within_a_part_of_the_time(rehearsal, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(first_run, "named", tiny)
    monkeypatch.setattr(tune, "prepared", rehearsal.prepared)
    monkeypatch.setattr(gpu, "device_of", lambda tensor: HOPPER)
    monkeypatch.setattr(first_run.os, "cpu_count", lambda: 2)
    started: list[list[str]] = []

    class Process:
        def __init__(self, command: list[str]) -> None:
            started.append(command)

        def wait(self, seconds: float | None = None) -> None:
            if seconds is not None and len(started) == 2 and "1/2" in started[-1]:
                raise subprocess.TimeoutExpired("it", seconds)

        def kill(self) -> None:
            pass

    monkeypatch.setattr(first_run.subprocess, "Popen", Process)
    run = first_run.Run("layers", tmp_path, rehearsal.device(), ("olmoe",), TOKENS, options=("--layers", "olmoe"))
    [row] = first_run._compile_ahead(run).run(100.0)
    assert (row["processes"], row["ended"]) == (2, 2)
    met: list[Plan] = []
    for command in started:
        arguments = command[2:]
        assert arguments[:3] == ["layers", "--layers", "olmoe"]
        assert first_run.main([*arguments, "--tokens", "1,16"], rehearsal.device) == 0
        met += rehearsal.launched
        rehearsal.launched.clear()
    assert met == [kernel.how for kernel in first_run.kernels_of(run)]
    rehearsal.broken = lambda how: [][1]
    first_run.main([*started[0][2:], "--tokens", "1,16"], rehearsal.device)
    assert "olmoe dense T=1: list index out of range" in capsys.readouterr().err


def test_a_step_runs_in_a_process_of_its_own_until_its_time(rehearsal, tmp_path, monkeypatch) -> None:
    met: list[Any] = []
    Record("layers", done={"compile": 3.0, "roof": 1.0}).save(tmp_path / "layers.json")
    monkeypatch.setattr(first_run, "supervise", lambda *given: met.append(given) or LEFT)
    given = ["layers", "--results", str(tmp_path), "--seconds", "300"]
    assert first_run.main(given, rehearsal.device) == LEFT
    command, name, path, end = met[0]
    assert (command[2:-2], name, path) == (given, "layers", tmp_path / "layers.json")
    assert command[-2:] == ["--until", str(end)]
    assert list(Record.load(path, "layers").done) == ["roof"]  # what was compiled may be on another machine
    first_run.main([*given, "--again"], rehearsal.device)
    assert Record.load(path, "layers").done == {}
    assert first_run.main([*given[:3], "--seconds", "541"], rehearsal.device) == REFUSED
    assert first_run.MOST_SECONDS + 20 < 540


def test_it_runs_from_the_source_tree_without_the_native_extension(tmp_path: Path) -> None:
    """As a file, and with nothing of this project installed."""
    path = ROOT / "benchmarks" / "gpu" / "first_run.py"
    code = f"""
import importlib.abc, runpy, sys
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "moestro._native":
            raise ImportError(name)
sys.meta_path[:] = [Missing()] + [f for f in sys.meta_path if "editable" not in type(f).__module__]
sys.path[:] = [{str(path.parent)!r}] + [p for p in sys.path if p]
sys.argv = [{str(path)!r}, "layers", "--results", {str(tmp_path)!r}]
runpy.run_path({str(path)!r}, run_name="__main__")
"""
    environment = {**os.environ, "PYTHONPATH": "src", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == REFUSED, run.stderr
    assert run.stderr.startswith("first_run.py: there is no CUDA device")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert first_run.main(["layers", "--results", str(tmp_path)]) == REFUSED
    said = capsys.readouterr().err
    assert "no CUDA device" in said
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
