"""A run on a GPU in parts and processes: its order, its budget, what it does about a device that is lost."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from gpu import crash_isolated, goals, sweep
from gpu.sweep import LOST, Found
from moestro import machine
from moestro.bench import LAYERS, Plan, Report, Row, failures, make_layer, measure, ours, point, records
from moestro.bench.failures import DeviceLostError
from moestro.bench.records import BUDGET_SPENT, PlanPoint
from moestro.bench.timing import Budget
from moestro.errors import UnsupportedError
from moestro.machine import Roof

ROOF = Roof(4e12, 8e14)


def head() -> Report:
    described = {"name": "Some GPU", "capability": "9.0", "multiprocessors": 4, "memory_bytes": 1, "l2_bytes": 5}
    about = {**machine.describe(), "device": "cuda", "gpu": described, "bandwidths": {"sum": 4e12}}
    return Report("run", "2026-01-02T00", about, {"torch": "2"}, {"bfloat16": ROOF}, {"bf16-mm": 8e14})


@pytest.fixture(autouse=True)
def gpu_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan for a CUDA device can be made; nothing is compiled ahead and no roof is measured."""
    monkeypatch.setattr(records, "_is_here", lambda device: True)
    monkeypatch.setattr(sweep, "compile_ahead", lambda plan, seconds, say: None)
    monkeypatch.setattr(sweep, "start", lambda plan: (head(), plan))
    monkeypatch.setattr(sweep, "only_those_here", lambda plan: (plan, []))


def rows_of(part: Plan, **more: object) -> list[Row]:
    """Rows as `extend` would add them, all skipped."""
    [spec], [dtype] = part.layers, part.dtypes
    places = [PlanPoint(spec, dtype, num_tokens, part.ours, part.peers) for num_tokens in part.tokens]
    return [replace(row, **more) for place in places for row in place.skipped("not run")]


def test_stages_begin_with_what_is_wanted_most() -> None:
    parts = sweep.stages(goals.default_plan())
    met = [(p.layers[0].name, p.ours[0].numbers.bits_in(torch.bfloat16), p.tokens) for p in parts]
    every = (1, 4096, 16, 64, 8192, 2, 4, 8, 32, 512, 16384)
    assert met[:3] == [("olmoe", 16, every), ("gpt-oss-20b", 4, every), ("qwen3-30b-a3b", 8, every)]
    others = [(spec, bits) for bits in (16, 8, 4) for spec in goals.NAMES if (spec, bits) not in sweep.FIRST]
    assert met[3:] == [(*key, tokens) for tokens in (every[:5], every[5:]) for key in others]
    points = [(name, bits, t) for name, bits, tokens in met for t in tokens]
    assert len(points) == len(set(points)) == 6 * 3 * 11
    for part in parts:
        bits = {v.numbers.bits_in(torch.bfloat16) for v in (*part.ours, *part.peers)}
        assert bits == {part.ours[0].numbers.bits_in(torch.bfloat16)}
        assert sweep.key_of(part) == (part.layers[0].name, "bfloat16", *bits)
    two = sweep.stages(replace(goals.default_plan(("mixtral",), ("dense",)), tokens=(2, 1)))
    assert [p.tokens for p in two] == [(1,), (2,)]


@pytest.fixture
def fake_points(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Layers are tiny and points are not run; the list is of (layer, bits, tokens) as `run_point` meets them."""
    met: list[tuple[str, int, int]] = []

    def run_point(place: PlanPoint, prepared: object, seconds: float) -> list[Row]:
        met.append((place.spec.name, place.ours[0].numbers.bits_in(place.dtype), place.num_tokens))
        return place.skipped("timed")

    tiny = {"hidden_size": 32, "intermediate_size": 32, "num_experts": 2}
    monkeypatch.setattr(measure, "make_layer", lambda spec, *rest: make_layer(replace(spec, **tiny), torch.bfloat16, 2))
    monkeypatch.setattr(measure, "experts_that_fit", lambda *given: 2)
    monkeypatch.setattr(measure.machine, "available_bytes", lambda device="cpu": 1 << 40)
    monkeypatch.setattr(measure, "Point", lambda layer, place, limits: place)
    monkeypatch.setattr(measure, "run_point", run_point)
    return met


PLAN_OPTIONS = {"peers": (), "tokens": (1, 2, 64)}


def test_a_budget_that_is_spent_leaves_what_is_wanted_most(
    fake_points: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each point takes two seconds whatever it was given, at one token seven more; compiling ahead takes twenty."""
    now, met = [0.0], fake_points
    counted = measure.run_point

    def run_point(place: PlanPoint, *rest: object) -> list[Row]:
        now[0] += 2.0 + 7.0 * (place.num_tokens == 1)
        return counted(place, *rest)

    monkeypatch.setattr(measure, "run_point", run_point)
    monkeypatch.setattr(sweep, "compile_ahead", lambda plan, seconds, say: now.__setitem__(0, now[0] + 20.0))
    plan = replace(goals.default_plan(("mixtral", "olmoe"), ("dense", "mxfp4")), budget=90.0, **PLAN_OPTIONS)
    list(sweep.run_stages(plan, Found(), clock=lambda: now[0]))
    wanted = [
        *(("olmoe", 16, 1), ("olmoe", 16, 64), ("olmoe", 16, 2)),
        *(("mixtral", 16, 1), ("mixtral", 16, 64), ("mixtral", 4, 1), ("mixtral", 4, 64)),
        *(("olmoe", 4, 1), ("olmoe", 4, 64)),
        *(("mixtral", 16, 2), ("mixtral", 4, 2), ("olmoe", 4, 2)),
    ]
    assert met == wanted
    assert now[0] < plan.budget
    met.clear()
    now[0] = 0.0
    found = Found()
    list(sweep.run_stages(replace(plan, budget=60.0), found, clock=lambda: now[0]))
    assert met == wanted[:8]
    assert now[0] == 64.0  # a point that was begun is ended
    for report in found.reports.values():
        keys = [(-row.bits, row.num_tokens) for row in report.rows]
        assert keys == sorted(keys)
        assert {row.reason for row in report.rows} == {"timed", BUDGET_SPENT}
        assert len(report.rows) == 2 * 3 * 2  # a call and its graph


def test_layers_that_do_not_fit_end_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def extend(report: Report, part: Plan, budget: Budget, on_point: object) -> list[UnsupportedError]:
        if part.layers[0].name == "mixtral":
            return [UnsupportedError("too large")]
        report.rows += rows_of(part)
        return []

    monkeypatch.setattr(sweep, "extend", extend)
    plan = goals.default_plan(("olmoe", "mixtral", "deepseek-v3"), ("dense",))
    names = [found.rows[0].layer for found in sweep.run_stages(plan, Found())]
    assert names == ["olmoe", "deepseek-v3", "deepseek-v3"]
    with pytest.raises(UnsupportedError, match="too large"):
        list(sweep.run_stages(goals.default_plan(("mixtral",), ("dense",)), Found()))


def test_peers_that_are_not_here_are_left_out_and_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Plan] = []

    def start(plan: Plan) -> tuple[Report, Plan]:
        found = head()
        found.notes["run"] = ["eager skipped: not here"]
        return found, plan

    def extend(report: Report, part: Plan, budget: Budget, on_point: object) -> list[UnsupportedError]:
        asked.append(part)
        report.rows += rows_of(part)
        return []

    monkeypatch.setattr(sweep, "start", start)
    monkeypatch.setattr(sweep, "only_those_here", lambda plan: (replace(plan, peers=plan.peers[1:]), []))
    monkeypatch.setattr(sweep, "extend", extend)
    plan = goals.default_plan(("olmoe", "mixtral"), ("dense", "mxfp4"))
    found = list(sweep.run_stages(plan, Found()))
    assert any(peer.name == "grouped_mm" for part in asked for peer in part.peers)
    assert not any(peer.name == "eager" for part in asked for peer in part.peers)
    assert all(report.notes["run"] == ["eager skipped: not here"] for report in found)
    assert "eager skipped: not here" in goals.summary(found)


def test_another_process_goes_on_behind_what_lost_the_device(
    fake_points: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    met, said, file = fake_points, [], tmp_path / "found"
    counted = measure.run_point
    broken = {("olmoe", 16, 64): "moestro-graph", ("mixtral", 16, 1): None, ("mixtral", 4, 64): "moestro-mxfp4"}

    def run_point(place: PlanPoint, prepared: dict[str, object], seconds: float) -> list[Row]:
        rows = counted(place, prepared, seconds)
        refused = {name: bind for name, bind in prepared.items() if isinstance(bind, str)}
        culprit = broken.get(met[-1], "nobody")
        if culprit not in refused and culprit != "nobody":
            raise DeviceLostError(culprit, "an illegal memory access")
        return [replace(row, reason=refused.get(row.variant, "timed")) for row in rows]

    monkeypatch.setattr(measure, "run_point", run_point)
    monkeypatch.setattr(sweep, "compile_ahead", lambda plan, seconds, say: said.append("compiled"))
    plan = replace(goals.default_plan(("olmoe", "mixtral"), ("dense", "mxfp4")), **PLAN_OPTIONS)
    for _ in range(3):
        found = Found.load(file)
        with pytest.raises(DeviceLostError):
            list(sweep.run_stages(plan, found))
        found.save(file)
    found = Found.load(file)
    list(sweep.run_stages(plan, found))
    why = "it cost its process the device: an illegal memory access"
    assert found.variants == {
        (("olmoe", "bfloat16", 16), "moestro-graph"): why,
        (("mixtral", "bfloat16", 4), "moestro-mxfp4"): why,
    }
    assert found.points == {(("mixtral", "bfloat16", 16), 1): why}
    assert met == [
        *(("olmoe", 16, 1), ("olmoe", 16, 64)),
        *(("olmoe", 16, 64), ("olmoe", 16, 2), ("mixtral", 16, 1)),
        *(("mixtral", 16, 64), ("olmoe", 4, 1), ("olmoe", 4, 64), ("mixtral", 4, 1), ("mixtral", 4, 64)),
        *(("mixtral", 4, 64), ("mixtral", 16, 2), ("olmoe", 4, 2), ("mixtral", 4, 2)),
    ]
    assert said == ["compiled"]
    rows = [row for report in found.reports.values() for row in report.rows]
    reasons = {(r.layer, r.num_tokens, r.variant): r.reason for r in rows}
    assert len(reasons) == len(rows) == 2 * 2 * 3 * 2
    assert {key for key, reason in reasons.items() if reason == why} == {
        *(("olmoe", t, "moestro-graph") for t in (2, 64)),
        *(("mixtral", 1, name) for name in ("moestro", "moestro-graph")),
        *(("mixtral", t, name) for t in (2, 64) for name in ("moestro-mxfp4", "moestro-mxfp4-graph")),
    }
    assert found.reports["olmoe"].notes["run"] is found.reports["mixtral"].notes["run"]


@pytest.mark.parametrize("where", ["output", "bind", "clock", "prepare", "expected"])
def test_who_lost_the_device_is_known(where: str, monkeypatch: pytest.MonkeyPatch, tiny) -> None:
    """The device breaks in the third variant, and raises whenever anybody waits for it from then on."""
    lost: list[bool] = []
    calls: list[int] = []

    def check_device(device: torch.device, variant: str | None, reason: str) -> None:
        if lost:
            raise DeviceLostError(variant, reason)

    def breaks(*given: object) -> None:
        lost.append(True)
        raise RuntimeError("an illegal memory access")

    def culprit(layer):
        if where == "prepare":
            breaks()

        class Output:
            def __getattr__(self, name: str) -> object:
                return breaks() if where == "output" else pytest.fail(name)

        def bind(x, routing):
            if where == "bind":
                breaks()
            good = ours().prepare(layer)(x, routing)

            def call():
                calls.append(1)
                if where == "clock" and len(calls) > 2:
                    breaks()
                return Output() if where == "output" else good()

            return call

        return bind

    for module in (measure, point):
        monkeypatch.setattr(module, "check_device", check_device)
    if where == "expected":
        monkeypatch.setattr(point, "expected_output", breaks)
    monkeypatch.setattr(machine, "measure", lambda dtype, device="cpu": ROOF)
    monkeypatch.setattr(machine, "peaks", dict)
    variants = (ours(), ours("grouped"), replace(ours("selective"), prepare=culprit), ours("blockwise"))
    plan = Plan((tiny("olmoe"),), (5,), (torch.float32,), variants, (), seconds=1e-4)
    culprit_name = None if where == "expected" else "moestro-selective"
    with pytest.raises(DeviceLostError, match="an illegal memory access") as error:
        measure.extend(measure.start(plan)[0], plan, Budget(None, 1), print)
    assert error.value.variant == culprit_name
    lost.clear()
    calls.clear()
    rows = measure.run(replace(plan, tokens=(5, 1))).rows
    by = "" if culprit_name is None else f" by {culprit_name}"
    assert {row.reason for row in rows} == {f"the device was lost{by}: an illegal memory access"}
    assert [(row.num_tokens, row.variant) for row in rows] == [(t, v.name) for t in (5, 1) for v in variants]


def test_a_device_is_lost_where_waiting_for_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(device: torch.device) -> None:
        raise RuntimeError("an illegal memory access")

    failures.check_device(torch.device("cpu"), "it", "why")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    failures.check_device(torch.device("cuda"), "it", "out of memory")
    monkeypatch.setattr(torch.cuda, "synchronize", fails)
    with pytest.raises(DeviceLostError, match="why"):
        failures.check_device(torch.device("cuda"), "it", "why")
    assert not issubclass(DeviceLostError, failures.failures())


CHILD = """
import os, pathlib, sys, time
path, log = map(pathlib.Path, sys.argv[1:3])
starts = len(log.read_text()) if log.exists() else 0
log.write_text("x" * (starts + 1))
os.utime(path)
what = sys.argv[3 + starts]
if what == "hang":
    time.sleep(60)
sys.exit(int(what))
"""


@pytest.mark.parametrize(
    ("lives", "code", "given_up"),
    [
        (["0"], 0, []),
        (["2"], 2, []),
        ([str(LOST), "0"], 0, []),
        (["1", "hang", "0"], 0, ["ended with code 1", "did not end"]),
    ],
)
def test_a_process_that_ends_before_its_time_is_followed_by_another(
    lives: list[str], code: int, given_up: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crash_isolated, "POINT_SECONDS", 1.0)
    script, path, log = (tmp_path / name for name in ("child.py", "found", "log"))
    script.write_text(CHILD)
    Found(head()).save(path)
    plan = replace(goals.default_plan(("olmoe",), ("dense",)), tokens=(64, 1))
    command = [sys.executable, str(script), str(path), str(log), *lives]
    said: list[str] = []
    assert crash_isolated.supervise(command, plan, path, time.time() + 120, said.append) == code
    assert len(said) == len(lives) - 1
    points = Found.load(path).points
    assert [t for _, t in points] == [1, 64][: len(given_up)]
    assert list(points.values()) == [f"its process {how} at this point" for how in given_up]


def test_the_time_ends_every_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *given: started.append(popen(*given)) or started[-1])
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert (
        crash_isolated.supervise(command, goals.default_plan(("olmoe",)), tmp_path / "found", time.time() + 0.5, print)
        == 1
    )
    assert [process.returncode for process in started] == [-9]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_one_line_says_so(
    command: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert command.main(["--gpu", "--all", "--results", str(tmp_path / "results")]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert "there is no CUDA device" in said.err
    assert not (tmp_path / "results").exists()


OPTIONS = ("--gpu", "--layers", "olmoe,mixtral", "--tokens", "1,16", "--formats", "dense,int8", "--budget", "50")


def test_one_process_leaves_pages_after_each_part(
    command: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(goals, "missing", lambda: None)
    asked: list[Plan] = []

    def extend(report: Report, part: Plan, budget: Budget, on_point: object) -> list[UnsupportedError]:
        if len(asked) == 3:
            raise DeviceLostError("moestro-int8", "an illegal memory access")
        asked.append(part)
        report.rows += rows_of(part)
        on_point("a point")
        return []

    monkeypatch.setattr(sweep, "extend", extend)
    options = [*OPTIONS, "--results", str(tmp_path / "results"), "--until", str(time.time() + 50)]
    assert command.main([*options, "--state", str(tmp_path / "found")]) == LOST
    assert [(p.layers[0].name, p.tokens) for p in asked] == [(n, (1, 16)) for n in ("olmoe", "mixtral", "olmoe")]
    names = [[v.name for v in p.ours] for p in asked]
    assert names == [["moestro", "moestro-graph"]] * 2 + [["moestro-int8", "moestro-int8-graph"]]
    assert all(0 < p.budget <= 50 for p in asked)
    found = Found.load(tmp_path / "found")
    assert {name: {r.bits for r in report.rows} for name, report in found.reports.items()} == {
        "olmoe": {16, 8},
        "mixtral": {16},
    }
    assert found.variants == {
        (("mixtral", "bfloat16", 8), "moestro-int8"): "it cost its process the device: an illegal memory access"
    }
    written = sorted(p.name.split("-", 3)[3] for p in (tmp_path / "results").iterdir())
    assert written == sorted(f"gpu{n}.{e}" for n in ("", "-olmoe", "-mixtral") for e in ("json", "md"))
    asked.clear()
    assert command.main([*options, "--state", str(tmp_path / "found")]) == 0
    [last] = asked
    assert (last.layers[0].name, last.ours[0].numbers.bits) == ("mixtral", 8)
    assert "cost its process the device" in last.ours[0].refuses(LAYERS["mixtral"], torch.bfloat16)


def test_the_command_supervises_and_draws(
    command: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(goals, "missing", lambda: None)
    ran: list[list[str]] = []

    def supervise(child: list[str], plan: Plan, path: Path, end: float, say: object) -> int:
        ran.append(child)
        assert [spec.name for spec in plan.layers] == ["olmoe", "mixtral"]
        assert 0 < end - time.time() <= 50 + command.AFTER_SECONDS
        reports = {}
        for part in sweep.stages(replace(plan, peers=plan.peers[:1])):
            report = reports.setdefault(part.layers[0].name, head())
            report.rows += rows_of(
                part,
                status="ok",
                reason=None,
                microseconds=9.0,
                gigabytes_per_second=1.0,
                gigaflops=1.0,
                flop_per_byte=2.0,
            )
        Found(head(), reports).save(path)
        return 0

    monkeypatch.setattr(crash_isolated, "supervise", supervise)
    assert command.main([*OPTIONS, "--results", str(tmp_path)]) == 0
    [child] = ran
    assert child[0] == sys.executable
    assert child[2 : 2 + len(OPTIONS)] == list(OPTIONS)
    assert child[-4::2] == ["--until", "--state"]
    names = sorted(p.name.split("-", 3)[3] for p in tmp_path.iterdir())
    assert names == sorted(
        [*(f"gpu-{n}.{e}" for n in ("olmoe", "mixtral") for e in ("json", "md", "png")), "gpu.json", "gpu.md"]
    )
    [page] = tmp_path.glob("*-gpu.md")
    assert page.read_text() in capsys.readouterr().out
    assert page.read_text().count("| olmoe | moestro |") == page.read_text().count("| mixtral | moestro |") == 2
    [stored] = tmp_path.glob("*-gpu-olmoe.json")
    assert json.loads(stored.read_text())["machine"]["gpu"]["name"] == "Some GPU"
    monkeypatch.setattr(crash_isolated, "supervise", lambda *given: 2)
    assert command.main([*OPTIONS, "--results", str(tmp_path / "nothing")]) == 2
    assert not (tmp_path / "nothing").exists()
