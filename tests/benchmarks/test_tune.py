"""The tuner as far as a machine without a GPU shows it: its search, what it tries, and what it keeps."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import tune as script
from gpu import tune, tuned
from moestro.bench import make_layer
from moestro.errors import UnsupportedError
from moestro.ops.expert_mlp.triton_tuning import Plan, Problem, choose, shared_bytes
from moestro.ops.gpu import INTERPRETER, Device
from peers.graphs import captured

HOPPER = Device((9, 0), 132, 227 << 10)
PROBLEM = Problem(512, 8, 128, 2048, 768, 2, 2, (16.0, 16.0))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def plan_for(problem: Problem) -> Plan:
    return choose(problem, HOPPER, ("auto", None), False)


@pytest.mark.parametrize("num_tokens", [1, 64, 512, 8192])
def test_neighbours_are_new_and_fit(num_tokens: int) -> None:
    problem = replace(PROBLEM, num_tokens=num_tokens)
    plan = plan_for(problem)
    found = list(tune.neighbours(plan, problem, HOPPER))
    assert plan not in found
    assert len(set(found)) == len(found) >= 8
    for other in found:
        assert other.rows >= other.block
        for tile in (other.gate_up, other.down):
            assert shared_bytes(tile, other.rows, 2, 16.0, HOPPER) <= HOPPER.shared_memory
            assert {n & (n - 1) for n in (tile.columns, tile.depth, tile.warps, other.rows)} == {0}
    small = Device((8, 6), 84, 99 << 10)
    assert len(list(tune.neighbours(plan, problem, small))) < len(found) or num_tokens == 1


def test_the_search_ends_at_the_best_it_can_reach() -> None:
    """Seconds that fall with the distance of each product's depth and stages from one place."""

    def seconds(plan: Plan) -> float:
        tiles = (plan.gate_up, plan.down)
        return 1.0 + sum(abs(t.depth - 128) / 64 + abs(t.stages - 3) for t in tiles)

    best = tune.descend(PROBLEM, HOPPER, seconds)
    assert seconds(best.plan) == best.seconds == 1.0
    assert best.default_seconds == seconds(plan_for(PROBLEM)) > 1.0
    assert 1 < best.tried <= tune.MOST_CANDIDATES
    assert f"{best.default_seconds:.2f}x" in str(best)


def test_what_does_not_run_or_is_hardly_faster_is_not_taken() -> None:
    start = plan_for(PROBLEM)
    taken = tune.descend(PROBLEM, HOPPER, lambda plan: 1.0 if plan == start else 0.985)
    assert taken.plan == start
    assert tune.descend(PROBLEM, HOPPER, lambda plan: 1.0 if plan == start else None).plan == start
    other = tune.descend(PROBLEM, HOPPER, lambda plan: None if plan == start else 2.0)
    assert other.plan != start
    assert other.default_seconds == float("inf")


def test_plans_are_kept_and_found_again(own_cache: Path) -> None:
    plan = replace(plan_for(PROBLEM), splits=3)
    path = tuned.store("Some GPU sm_90 x132", {PROBLEM: plan})
    assert path == own_cache / "moestro" / "tuned" / "some-gpu-sm-90-x132.json"
    more = replace(PROBLEM, num_tokens=4096)
    tuned.store("Some GPU sm_90 x132", {more: plan_for(more)})
    stored = tuned._read(path)
    for num_tokens, expected in ((512, plan), (400, plan), (768, plan), (4096, plan_for(more))):
        found = tuned.nearest(stored, replace(PROBLEM, num_tokens=num_tokens))
        assert replace(found, reason="") == replace(expected, reason="")
        assert f"T = {512 if num_tokens < 1000 else 4096}" in found.reason
    for unlike in (replace(PROBLEM, num_tokens=300), replace(PROBLEM, num_tokens=1024), replace(PROBLEM, top_k=4)):
        assert tuned.nearest(stored, unlike) is None


def test_files_that_cannot_be_used_are_as_none(own_cache: Path) -> None:
    path = tuned.store("gpu", {PROBLEM: plan_for(PROBLEM)})
    good = json.loads(path.read_text())
    [[plan]] = [list(of.values()) for of in good["plans"].values()]
    for text in ("", "[]", "{", json.dumps({**good, "version": 0})):
        path.write_text(text)
        assert tuned._read(path) == {}
    del plan["splits"]
    path.write_text(json.dumps(good))
    assert [*tuned._read(path).values()] == [{}]
    path.unlink()
    assert tuned._read(path) == {}


def test_a_call_on_a_gpu_takes_what_was_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = replace(plan_for(PROBLEM), splits=5)
    properties = SimpleNamespace(name="Some GPU", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    tuned.store(tuned.device_name(torch.device("cuda")), {PROBLEM: plan})
    assert tuned.find(PROBLEM, torch.device("cuda")).splits == 5
    assert tuned.find(PROBLEM, torch.device("cpu")) is None
    tuned.store(tuned.device_name(torch.device("cuda")), {PROBLEM: replace(plan, splits=2)})
    assert tuned.find(PROBLEM, torch.device("cuda")).splits == 2
    tuned.find.cache_clear()


def tune_spec():
    return replace(tune_layer(), hidden_size=32, intermediate_size=32, num_experts=4, top_k=2)


def tune_layer():
    from moestro.bench import LAYERS

    return LAYERS["olmoe"]


def test_trials_refuse_plans_whose_output_is_another(
    triton_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = make_layer(tune_spec(), torch.bfloat16, 4, triton_device)
    trial = replace(
        tune.Trial.of(layer, layer.weights, 3, lambda call: call().numel() * 1.0), capture=lambda call: call
    )
    plan = choose(trial.problem, INTERPRETER, ("auto", None), False)
    assert trial.seconds(plan) == 3 * 32
    assert trial.failed == []
    launch = tune.launch
    monkeypatch.setattr(tune, "launch", lambda *given: launch(*given) * 1.5)
    assert trial.seconds(plan) is None
    monkeypatch.setattr(tune, "launch", lambda *given: (_ for _ in ()).throw(RuntimeError("out of resources")))
    assert trial.seconds(plan) is None
    assert "worst error" in trial.failed[0]
    assert trial.failed[1] == "out of resources"


@pytest.mark.parametrize(("num_tokens", "graphs"), [(1, True), (64, True), (65, False)])
def test_few_tokens_are_timed_as_graphs(num_tokens: int, graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stand-in for torch.cuda: what the clock is handed replays a graph, or launches."""
    log: list[str] = []
    output = torch.ones(num_tokens, 4)

    def launch(*given: object) -> torch.Tensor:
        log.append("launch")
        return output

    def clock(call: Callable[[], torch.Tensor]) -> float:
        log.clear()
        assert call() is output
        return {"replay": 1.0, "launch": 2.0}[" ".join(log)]

    cuda = SimpleNamespace(
        Stream=lambda: SimpleNamespace(wait_stream=lambda other: None, synchronize=lambda: None),
        current_stream=lambda: SimpleNamespace(wait_stream=lambda other: None),
        stream=lambda stream: nullcontext(),
        graph_pool_handle=lambda: "pool",
        CUDAGraph=lambda: SimpleNamespace(
            capture_begin=lambda pool: log.append("begin"),
            capture_end=lambda: log.append("end"),
            replay=lambda: log.append("replay"),
        ),
    )
    monkeypatch.setattr(tune, "launch", launch)
    x, routings = torch.zeros(num_tokens, 4), [None] * tune.ROUNDS
    trial = tune.Trial(x, routings, None, PROBLEM, output, clock, partial(captured, module=cuda))
    assert trial.seconds(plan_for(PROBLEM)) == (1.0 if graphs else 2.0)
    assert trial.failed == []
    if graphs:
        cuda.CUDAGraph = lambda: (_ for _ in ()).throw(RuntimeError("no graphs here"))
        assert trial.seconds(plan_for(PROBLEM)) is None
        assert trial.failed == ["no graphs here"]


def test_a_device_on_which_no_plan_runs_keeps_none(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tune.machine, "describe_gpu", lambda device: {"l2_bytes": 0})
    monkeypatch.setattr(tune.gpu, "device_of", lambda tensor: HOPPER)
    monkeypatch.setattr(tune, "make_layer", lambda spec, dtype, count, device: make_layer(spec, dtype, count))
    monkeypatch.setattr(tune, "queued_clock", lambda device, cold: lambda call: 1.0)
    broken = tune.Trial(torch.zeros(1, 4), [], None, PROBLEM, torch.zeros(1), lambda call: 1.0, failed=["it hangs"])
    monkeypatch.setattr(tune.Trial, "of", lambda *given: replace(broken))
    monkeypatch.setattr(tune.Trial, "seconds", lambda self, plan: None)
    with pytest.raises(UnsupportedError, match="no plan that runs at T = 1: it hangs"):
        tune.tune(tune_spec(), "dense", (1,))
    assert list(own_cache.rglob("*.json")) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_is_one_line() -> None:
    result = CliRunner().invoke(script.app, [])
    assert result.exit_code == 2
    assert "no CUDA device" in result.output
    assert result.output.count("\n") == 1
    with pytest.raises(UnsupportedError, match="no CUDA device"):
        tune.tune(tune_spec(), "dense", (1,))


@pytest.mark.parametrize(
    "given", [("--sizes", "1,2,3"), ("--sizes", "8,8,2,4"), ("--tokens", "0"), ("--layer", "none")]
)
def test_arguments_that_cannot_be(given: tuple[str, str]) -> None:
    result = CliRunner().invoke(script.app, [*given])
    assert result.exit_code == 2
    assert "needs" in result.output


def test_where_files_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert tuned.folder() == Path.home() / ".cache" / "moestro" / "tuned"
