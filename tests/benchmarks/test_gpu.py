"""The GPU's benchmark, as far as a machine without one shows it: plans, budgets, clocks, graphs, tables, refusals."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from gpu import goals
from moestro import machine
from moestro.bench import LAYERS, PEERS, Plan, make_layer, measure, ours, point, records
from moestro.bench.failures import failures
from moestro.bench.layers import expected_output, inputs
from moestro.bench.point import peak_of
from moestro.bench.records import BUDGET_SPENT, Report, Row
from moestro.bench.timing import Budget, cold_bytes, event_clock, queued_clock
from moestro.errors import InvalidInputError, UnsupportedError
from moestro.machine import Roof
from moestro.tolerances import disagreement
from page import markdown
from peers.graphs import MOST_TOKENS, graphed

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


class FakeCuda:
    """As much of torch.cuda as clocks and graphs use; `log` holds what was asked of it, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.recording: list[object] = []

    def synchronize(self, device: object) -> None:
        self.log.append("synchronize")

    def Event(self, enable_timing: bool) -> SimpleNamespace:
        assert enable_timing
        return SimpleNamespace(record=lambda: self.log.append("record"), elapsed_time=lambda end: 2.5)

    def Stream(self) -> SimpleNamespace:
        return SimpleNamespace(wait_stream=lambda other: self.log.append("wait"), synchronize=lambda: None)

    def current_stream(self) -> SimpleNamespace:
        return self.Stream()

    def stream(self, stream: object) -> nullcontext[None]:
        return nullcontext()

    def graph_pool_handle(self) -> str:
        return "pool"

    def CUDAGraph(self) -> SimpleNamespace:
        return SimpleNamespace(
            capture_begin=lambda pool: self.log.append(f"begin in {pool}"),
            capture_end=lambda: self.log.append("end"),
            replay=lambda: self.log.append("replay"),
        )


def test_an_event_clock_waits_before_it_starts_and_clears_the_cache() -> None:
    cuda = FakeCuda()
    seconds = event_clock("cpu", 64, cuda)(lambda: cuda.log.append("call"))
    assert seconds == 2.5e-3
    assert cuda.log == ["synchronize", "record", "call", "record", "synchronize"]
    own = SimpleNamespace(seconds=lambda: 7.0)
    assert event_clock("cpu", 0, cuda)(own) == 7.0


@pytest.mark.parametrize(("late", "timed"), [(0, 1), (2, 3), (9, 4)])
def test_a_queued_clock_launches_behind_a_delay_that_outlasts_the_host(late: int, timed: int) -> None:
    """A call that is launched too late is timed again behind a longer one, up to the longest."""
    cuda = FakeCuda()
    found = iter([True] * late + [False] * 9)
    event = cuda.Event
    cuda.Event = lambda enable_timing: SimpleNamespace(**vars(event(enable_timing)), query=lambda: next(found))
    cuda._sleep = lambda cycles: cuda.log.append(f"sleep {cycles >> 18}")
    clock = queued_clock("cpu", 64, cuda)
    assert clock(lambda: cuda.log.append("call")) == 2.5e-3
    one = ["synchronize", "sleep", "record", "call", "record", "synchronize"]
    assert [word.split()[0] for word in cuda.log] == one * timed
    assert [word for word in cuda.log if word.startswith("sleep")] == [f"sleep {1 << i}" for i in range(timed)]
    assert clock(SimpleNamespace(seconds=lambda: 7.0)) == 7.0


@pytest.mark.parametrize(("num_tokens", "queued"), [(1, False), (64, False), (65, True), (4096, True)])
def test_many_tokens_are_timed_behind_a_delay(num_tokens: int, queued: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(point.machine, "describe_gpu", lambda device: {"l2_bytes": 10})
    for name in ("event_clock", "queued_clock"):
        monkeypatch.setattr(point, name, lambda device, cold, name=name: (name, cold))
    weights = SimpleNamespace(bytes_per_expert=5)
    layer = SimpleNamespace(device=torch.device("cuda"), num_experts=2, weights=weights)
    assert point.timer(layer, num_tokens) == ("queued_clock" if queued else "event_clock", 20)


def test_the_cache_is_cleared_where_it_could_hold_weights() -> None:
    assert cold_bytes(50, 200) == 100
    assert cold_bytes(50, 201) == 0


def test_a_budget_is_shared_by_the_points_that_are_left() -> None:
    now = [0.0]
    budget = Budget(100.0, 4, lambda: now[0])
    assert budget.share(5, 1.0) == 1.0  # 100 / 4 / 5 is more than a variant may spend
    now[0] = 70.0
    assert budget.share(20, 1.0) == pytest.approx(30 / 3 / 20)
    now[0] = 100.0
    assert budget.share(1, 1.0) is None
    assert Budget(None, 1, lambda: now[0]).share(9, 3.0) == 3.0


def test_points_beyond_the_budget_say_so(tiny, known_roof: Roof, monkeypatch: pytest.MonkeyPatch) -> None:
    shares = iter([1e-4, None])
    monkeypatch.setattr(measure.Budget, "share", lambda self, n, most: next(shares))
    plan = Plan((tiny("olmoe"),), (1, 5), (torch.float32,), (ours(),), (PEERS["eager"],), budget=9.0)
    rows = measure.run(plan).rows
    assert [(row.num_tokens, row.status) for row in rows] == [(1, "ok")] * 2 + [(5, "skipped")] * 2
    assert {row.reason for row in rows[2:]} == {BUDGET_SPENT}
    with pytest.raises(InvalidInputError, match="budget 0"):
        replace(plan, budget=0.0)


@pytest.mark.parametrize("peer", [None, "grouped_mm", "torch-grouped_mm"])
def test_a_graph_is_captured_after_calls_and_replayed(tiny, peer: str | None) -> None:
    cuda, layer = FakeCuda(), make_layer(tiny("olmoe"), torch.float32, 6)
    variant = graphed(ours() if peer is None else PEERS[peer], cuda)
    assert variant.name == f"{peer or 'moestro'}-graph"
    assert variant.device == "cuda"
    x, routings = inputs(layer, 5, count=1)
    with torch.inference_mode():
        call = variant.prepare(layer)(x, routings[0])
        assert cuda.log == ["wait", "begin in pool", "end", "wait"]
        output = call()
    assert cuda.log[-1] == "replay"
    assert disagreement(output, expected_output(layer, x, routings[0]), torch.float32) is None
    many = torch.zeros(MOST_TOKENS + 1, x.shape[1])
    with pytest.raises(UnsupportedError, match="at most 64"):
        variant.prepare(layer)(many, routings[0])


def test_a_call_that_cannot_be_captured_ends_its_capture(tiny) -> None:
    cuda, layer, calls = FakeCuda(), make_layer(tiny("olmoe"), torch.float32, 6), []

    def waits() -> torch.Tensor:
        calls.append("call")
        if "begin in pool" in cuda.log:
            raise RuntimeError("operation not permitted when stream is capturing")
        return torch.zeros(())

    variant = graphed(replace(ours(), prepare=lambda layer: lambda x, routing: waits), cuda)
    x, routings = inputs(layer, 2, count=1)
    with pytest.raises(RuntimeError, match="capturing"):
        variant.prepare(layer)(x, routings[0])
    assert cuda.log[-1] == "end"
    assert len(calls) == 3


def test_the_default_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_is_here", lambda device: True)
    plan = goals.default_plan()
    assert plan.device == "cuda"
    assert plan.tokens == (1, 2, 4, 8, 16, 32, 64, 512, 4096, 8192, 16384)
    assert {spec.name for spec in plan.layers} == set(LAYERS) - {"mixtral-half"}
    assert [v.name for v in plan.ours] == [
        *(names := ["moestro", *(f"moestro-{name}" for name in goals.FORMATS[1:])]),
        *(f"{name}-graph" for name in names),
    ]
    peers = [v.name for v in plan.peers]
    assert peers[:4] == ["eager", "batched_mm", "grouped_mm", "torch-grouped_mm"]
    later = ["triton_kernels-bf16", "triton_kernels-mxfp4", "torch-scaled_grouped_mm"]
    assert peers[4:8] == [*later, "transformers-fp8"]
    assert peers[8:] == [f"{name}-graph" for name in ("grouped_mm", "torch-grouped_mm", *later)]
    # As many seconds as every variant may spend at every point leave more than half of the budget to compilers.
    groups = plan.by_bits(torch.bfloat16).values()
    timed = sum(len(g.ours) + len(g.peers) for g in groups) * len(plan.tokens) * len(plan.layers) * plan.seconds
    assert timed < plan.budget / 2 < 240


def row(variant: str, kind: str, num_tokens: int, seconds: float, **more: object) -> Row:
    share, spec = 0.3 / seconds, LAYERS["qwen3-30b-a3b"]
    sizes = {"hidden_size": spec.hidden_size, "intermediate_size": spec.intermediate_size}
    if more.get("ratio") is not None:
        more |= {"ratio_low": more["ratio"], "ratio_high": more["ratio"]}
    found = Row(
        layer=spec.name, dtype="bfloat16", bits=16, num_tokens=num_tokens, variant=variant, format="bfloat16",
        kind=kind, status="ok", reason=None, num_experts=128, published_num_experts=128, top_k=8, active_experts=64,
        flop_per_byte=1.0, microseconds=seconds * 1e6, gigabytes_per_second=share, bandwidth_share=share,
        gigaflops=1.0, peak_share=share, **sizes,
    )  # fmt: skip
    return replace(found, **more)


ROWS = [
    row("moestro", "moestro", 16, 0.5),
    row("moestro-graph", "moestro", 16, 0.25, ratio=0.5),
    row("eager", "peer", 16, 2.0, ratio=4.0, ratios={"moestro": 4.0, "moestro-graph": 8.0}),
    row("grouped_mm", "peer", 16, 1.0, ratio=2.0, ratios={"moestro": 2.0, "moestro-graph": 4.0}),
    row("torch-grouped_mm", "peer", 16, 0.4, ratio=0.8, ratios={"moestro": 0.8, "moestro-graph": 1.6}),
    row("grouped_mm-graph", "peer", 16, 0.3, ratio=0.6, ratios={"moestro": 0.6, "moestro-graph": 1.2}),
    row("batched_mm", "peer", 16, 0.1, ratio=0.1, ratios={"moestro": 0.1}, status="wrong output"),
    row("moestro", "moestro", 4096, 0.4),
    row("eager", "peer", 4096, 0.8, ratio=2.0, ratios={"moestro": 2.0}),
    row("moestro", "moestro", 8192, 0.6, status="skipped"),
]


def test_points_know_the_fastest_peer_of_each_kind() -> None:
    few, many = goals.points(ROWS)
    assert (few.peer, few.peer_ratio, few.graph_peer, few.graph_ratio) == (
        "torch-grouped_mm",
        0.8,
        "grouped_mm-graph",
        1.2,
    )
    assert few.transformers_ratio == 2.0
    assert (many.graph, many.graph_peer, many.peer) == (None, None, "eager")


def test_goals_by_hand() -> None:
    decode, prefill, eighths, called, replayed, versus = goals.goals(ROWS)
    assert eighths.endswith("fp8 matrix rate: not measured")
    rounded = row("moestro-f", "moestro", 4096, 0.5, bits=8, peak="fp8-mm")
    assert goals.goals([rounded])[2].endswith("55% of the fp8 matrix rate: 1 of 1 points; least 0.60, median 0.60")
    assert decode.endswith("85% of bandwidth: 1 of 1 points; least 1.20, median 1.20")  # the graph's 0.3 / 0.25
    assert prefill.endswith("70% of the matrix rate: 1 of 1 points; least 0.75, median 0.75")
    assert called.endswith("called: 1 of 2 points; least 0.80, median 1.40")
    assert replayed.endswith("as graphs: 1 of 1 points; least 1.20, median 1.20")
    assert versus.endswith("in the median: 2.00")
    assert all(line.endswith((": not measured", ": -")) for line in goals.goals([]))


def report(rows: list[Row]) -> Report:
    described = {"name": "Some GPU", "capability": "9.0", "multiprocessors": 4, "memory_bytes": 1, "l2_bytes": 5}
    about = {**machine.describe(), "device": "cuda", "gpu": described, "bandwidths": {"sum": 4e12, "copy": 3e12}}
    return Report(
        "run", "2026-01-02T00", about, {"torch": "2"}, {"bfloat16": Roof(4e12, 8e14)}, {"bf16-mm": 8e14}, {}, rows
    )


def test_the_pages_of_a_gpu() -> None:
    text = goals.summary([report(ROWS)])
    assert "Some GPU, torch 2" in text
    assert "- copy: 3,000 GB/s" in text
    assert "- bf16-mm: 800 TFLOP/s" in text
    expected = "| moestro | 16 | 500,000 | 250,000 | 120% | 120% | torch-grouped_mm | 0.80 | grouped_mm-graph | 1.20 |"
    assert f"| qwen3-30b-a3b {expected}" in text
    assert "| qwen3-30b-a3b | moestro | 4096 | 400,000 | - | 75% | 75% | eager | 2.00 | - | - |" in text
    assert "2 of 10 rows have no time" in text
    page = markdown(report(ROWS))
    assert "- bandwidth of each probe: sum 4,000, copy 3,000 GB/s" in page
    assert "- large matrix products: bf16-mm 800,000 GFLOP/s" in page
    assert "was captured once" in " ".join(page.split())
    assert "registers" not in page


def test_which_peak_a_rate_is_held_against() -> None:
    on_gpu, on_cpu = {"bf16-mm": 1.0, "fp8-mm": 2.0}, {"fma": 1.0, "vnni": 2.0}
    assert peak_of(ours(), torch.bfloat16, on_gpu) == "bf16-mm"
    assert peak_of(ours(), torch.float32, on_gpu) is None
    assert peak_of(ours("auto", "fp8-e4m3-b128/fp8-e4m3"), torch.bfloat16, on_gpu) == "fp8-mm"
    assert peak_of(ours("auto", "mxfp4/int8"), torch.bfloat16, on_gpu) is None
    assert peak_of(ours("auto", "mxfp4/int8"), torch.bfloat16, on_cpu) == "vnni"
    assert peak_of(ours(), torch.bfloat16, on_cpu) == "fma"


def test_kernels_that_do_not_compile_end_no_run() -> None:
    triton = pytest.importorskip("triton.runtime.errors")
    assert issubclass(triton.OutOfResources, failures())


def test_rates_of_a_matrix_unit_are_asked_of_a_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.matrix_rates("cpu") == {}
    monkeypatch.setattr(machine, "_SECONDS_PER_PROBE", 1e-3)
    assert machine._fp8_rate(64, torch.device("cpu")) > 1e5
    monkeypatch.setattr(machine, "_PROBE_BYTES", 1 << 24)
    assert set(machine.bandwidths("cpu")) == {"sum", "float32 rows", "bfloat16 rows"}
