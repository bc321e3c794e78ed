from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest
import torch

from documents import check_document
from moestro import machine
from moestro.bench import LAYERS, PEERS, Plan, Row, Variant, make_layer, measure, ours, point, run
from moestro.bench.layers import RESERVE_BYTES, expected_output, inputs
from moestro.bench.peers import Numbers
from moestro.bench.point import CALL_LIMIT_SECONDS, no_room, too_much
from moestro.bench.records import BUDGET_SPENT
from moestro.bench.timing import Budget
from moestro.errors import InvalidInputError, UnsupportedError, unsupported
from moestro.machine import Roof
from peers.bounds import QUANTISED

SECONDS = 1e-4


def plan(*specs, tokens=(1, 5), dtypes=(torch.float32,), variants=("auto",), peers=("eager",)) -> Plan:
    return Plan(
        layers=specs,
        tokens=tokens,
        dtypes=dtypes,
        ours=tuple(v if isinstance(v, Variant) else ours(v) for v in variants),
        peers=tuple(p if isinstance(p, Variant) else PEERS[p] for p in peers),
        seconds=SECONDS,
    )


def spoiled(name: str, spoil) -> Variant:
    """moestro's own computation with `spoil` applied to its output."""
    good = ours("auto")

    def prepare(layer):
        bind = good.prepare(layer)
        return lambda x, routing: lambda: spoil(bind(x, routing)())

    return Variant(name, good.refuses, prepare, good.cost)


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_end_to_end(tiny, known_roof: Roof, name: str) -> None:
    points: list[str] = []
    dense = {n: peer for n, peer in PEERS.items() if peer.numbers.bits is None}
    wanted = plan(tiny(name), dtypes=(torch.float32, torch.bfloat16), variants=("auto", "grouped"), peers=tuple(dense))
    report = run(wanted, points.append)
    assert points == [f"{name} {dtype} T={t}" for dtype in ("float32", "bfloat16") for t in (1, 5)]
    here = [n for n, peer in dense.items() if peer.device is None]
    assert [row.variant for row in report.rows] == ["moestro", "moestro-grouped", *here] * 4
    assert report.notes["run"][0] == "deepgemm, sonicmoe skipped: it needs a cuda device, this run is on cpu"
    assert not report.wrong
    for row in report.rows:
        if row.status == "skipped":
            assert name == "llama4-scout"
            assert row.reason == "Transformers has one way to compute Llama 4"
            assert row.microseconds is row.ratio is None
            continue
        assert row.samples >= 5
        seconds = row.microseconds / 1e6
        weights = row.active_experts * (3 * 24 * 16 + (24 + 32 if name == "gpt-oss-20b" else 0))
        nbytes = weights * (4 if row.dtype == "float32" else 2)
        flops = 6 * 24 * 16 * row.num_tokens * row.top_k
        assert row.gigabytes_per_second == pytest.approx(nbytes / seconds / 1e9)
        assert row.gigaflops == pytest.approx(flops / seconds / 1e9)
        assert row.flop_per_byte == pytest.approx(flops / nbytes)
        assert row.bandwidth_share == pytest.approx(nbytes / seconds / 1e10)
        assert (row.peak, row.peak_share) == ("fma", pytest.approx(flops / seconds / 2e11))
        assert 0 <= row.error < (1e-5 if row.dtype == "float32" else 2e-2)
        assert row.roof_share == pytest.approx(max(nbytes / 1e10, flops / 1e11) / seconds)
        assert (row.ratio is None) == (row.variant == "moestro")
        assert row.ratio is None or 0 < row.ratio_low <= row.ratio <= row.ratio_high


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda y: y * 1.001, "worst error"),
        (lambda y: y.index_fill(0, torch.tensor([y.shape[0] - 1]), 0.0), "worst error"),
        (lambda y: y.index_fill(1, torch.tensor([3]), torch.nan), "not finite in different places"),
        (lambda y: y[:, :-1], "shape"),
    ],
)
def test_a_wrong_peer_gets_no_ratio(tiny, known_roof: Roof, spoil, sentence: str) -> None:
    report = run(plan(tiny("olmoe"), peers=("eager", spoiled("cheat", spoil))))
    for row in report.rows:
        if row.variant == "cheat":
            assert row.status == "wrong output"
            assert sentence in row.reason
            assert row.microseconds is row.gigaflops is row.ratio is None
        else:
            assert row.status == "ok"
    assert {row.variant for row in report.wrong} == {"cheat"}


def test_no_ratio_at_all_if_moestro_is_wrong(tiny, known_roof: Roof) -> None:
    report = run(plan(tiny("olmoe"), variants=(spoiled("broken", torch.neg),)))
    assert [row.status for row in report.rows] == ["wrong output", "ok"] * 2
    assert all(row.ratio is None for row in report.rows)
    assert all(row.microseconds for row in report.rows if row.variant == "eager")


def quantising(name: str, spoil, bits: int = 4) -> Variant:
    """A peer that stores the weights in a way of its own: every output is off by 0.15, then spoiled."""
    numbers = Numbers("own", bits, bits_per_weight=4.5, bound=QUANTISED[bits], products="int8")

    def prepare(layer):
        def call(x, routing):
            y = expected_output(layer, x, routing)
            generator = torch.Generator().manual_seed(1)
            noise = torch.randn(y.shape, generator=generator)
            return spoil(y + 0.15 * y.norm(dim=-1, keepdim=True) * noise / noise.norm(dim=-1, keepdim=True))

        return lambda x, routing: lambda: call(x, routing)

    return Variant(name, lambda spec, dtype: None, prepare, ours().cost, numbers=numbers)


def test_formats_against_peers_of_as_many_bits(tiny, known_roof: Roof) -> None:
    spec = replace(tiny("gpt-oss-20b"), hidden_size=64, intermediate_size=32)
    variants = tuple(ours("auto", name) for name in ("mxfp4", "dense", "int4-g32", "int8"))
    peers = (quantising("right", lambda y: y), "eager", quantising("eight", lambda y: y, bits=8))
    points: list[str] = []
    report = run(plan(spec, tokens=(3,), dtypes=(torch.bfloat16,), variants=variants, peers=peers), points.append)
    assert points == [
        "gpt-oss-20b bfloat16 mxfp4, int4-g32 T=3",
        "gpt-oss-20b bfloat16 T=3",
        "gpt-oss-20b bfloat16 int8 T=3",
    ]
    assert [(row.bits, row.variant, row.format, row.status) for row in report.rows] == [
        (4, "moestro-mxfp4", "mxfp4", "ok"),
        (4, "moestro-int4-g32", "int4-g32", "ok"),
        (4, "right", "own", "ok"),
        (16, "moestro", "bfloat16", "ok"),
        (16, "eager", "bfloat16", "ok"),
        (8, "moestro-int8", "int8", "ok"),
        (8, "eight", "own", "wrong output"),  # too much for 8 bits
    ]
    mxfp4, int4, right = report.rows[:3]
    weights, biases = 3 * 64 * 32, 64 + 64
    seconds = mxfp4.microseconds / 1e6
    each = weights * 4.25 / 8 + biases * 2
    assert mxfp4.gigabytes_per_second == pytest.approx(mxfp4.active_experts * each / seconds / 1e9)
    seconds = right.microseconds / 1e6
    each = weights * 4.5 / 8 + biases * 4
    assert right.gigabytes_per_second == pytest.approx(right.active_experts * each / seconds / 1e9)
    assert (right.peak, right.peak_share) == ("vnni", pytest.approx(right.gigaflops / 800))
    assert right.error == pytest.approx(0.15, rel=0.01)
    assert 0.05 < int4.error < mxfp4.error < 0.3
    assert right.ratios["moestro-mxfp4"] == right.ratio
    assert right.ratios.keys() == {"moestro-mxfp4", "moestro-int4-g32"}
    assert mxfp4.ratios["moestro-mxfp4"] == 1.0
    assert report.rows[-1].ratios == {}


@pytest.mark.parametrize(
    "spoil",
    [
        torch.neg,
        lambda y: torch.zeros_like(y),
        lambda y: y * 1.4,
        lambda y: y[:, :-1],
        lambda y: y.index_fill(0, torch.tensor([2]), 0.0),  # one token of five
        lambda y: y.index_fill(1, torch.tensor([0]), torch.nan),
    ],
)
def test_a_wrong_peer_of_its_own_format_gets_no_ratio(tiny, known_roof: Roof, spoil) -> None:
    spec = replace(tiny("olmoe"), hidden_size=64, intermediate_size=32)
    report = run(plan(spec, tokens=(5,), variants=(ours("auto", "mxfp4"),), peers=(quantising("cheat", spoil),)))
    [good, bad] = report.rows
    assert good.status == "ok"
    assert bad.status == "wrong output"
    assert bad.microseconds is bad.gigaflops is bad.ratio is bad.error is bad.peak_share is None


def test_a_format_that_the_layer_has_no_room_for(tiny, known_roof: Roof) -> None:
    report = run(plan(tiny("olmoe"), tokens=(1,), variants=(ours("auto", "int8"), ours("auto", "mxfp4")), peers=()))
    skipped = report.rows[1]
    assert (skipped.variant, skipped.status) == ("moestro-mxfp4", "skipped")
    assert "a multiple of 32" in skipped.reason
    assert skipped.flop_per_byte > 0


def test_a_copy_that_memory_does_not_hold_is_not_made(tiny, known_roof: Roof, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer(tiny("olmoe"), torch.float32, 6)
    peer = quantising("own", lambda y: y)
    needed = RESERVE_BYTES + 6 * 3 * 24 * 16 * 4.5 / 8
    monkeypatch.setattr(machine, "available_bytes", lambda device="cpu": needed)
    assert no_room(peer, layer) is None
    monkeypatch.setattr(machine, "available_bytes", lambda device="cpu": needed - 1)
    assert no_room(peer, layer) == "needs 2.1 GB for a copy of the weights and what else there is; 2.1 GB are free"
    assert no_room(ours(), layer) is None


def test_what_is_not_on_this_machine_is_named_once(tiny, known_roof: Roof) -> None:
    absent = [replace(spoiled(name, lambda y: y), absent=lambda: "nobody installed it") for name in ("one", "two")]
    report = run(plan(tiny("olmoe"), peers=(*absent, "eager")))
    assert report.notes["run"] == ["one, two skipped: nobody installed it"]
    assert {row.variant for row in report.rows} == {"moestro", "eager"}


class OwnClock:
    """A call that counts a second, whatever it took."""

    def __init__(self, call, fails: bool = False) -> None:
        self.call, self.fails = call, fails

    def __call__(self):
        return self.call()

    def seconds(self) -> float:
        if self.fails:
            raise RuntimeError("its clock stopped")
        return 1.0


@pytest.mark.parametrize("fails", [False, True])
def test_a_call_with_a_clock_of_its_own(tiny, known_roof: Roof, fails: bool) -> None:
    good = ours("auto")

    def prepare(layer):
        bind = good.prepare(layer)
        return lambda x, routing: OwnClock(bind(x, routing), fails)

    report = run(plan(tiny("olmoe"), tokens=(1,), peers=(Variant("timed", good.refuses, prepare, good.cost),)))
    timed = report.rows[1]
    if fails:
        assert (timed.status, timed.reason, timed.microseconds) == ("skipped", "its clock stopped", None)
    else:
        assert (timed.status, timed.microseconds) == ("ok", 1e6)


@pytest.mark.parametrize("short", [True, False])
def test_short_calls_follow_others(tiny, known_roof: Roof, short: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    warmed: list[int] = []
    monkeypatch.setattr(point, "WARM_SECONDS", 100.0 if short else -1.0)
    monkeypatch.setattr(point, "warm_up", lambda calls, i: warmed.append(len(calls)))
    report = run(Plan((tiny("olmoe"),), (2,), (torch.float32,), (ours("auto"),), (), seconds=1e-4))
    assert report.rows[0].status == "ok"
    assert bool(warmed) == short
    assert all(number > 1 for number in warmed)


def test_an_error_in_the_first_input_only_is_not_what_is_checked(tiny, known_roof: Roof) -> None:
    seen: list[int] = []

    def right_at_first(y):
        seen.append(1)
        return y if len(seen) == 1 else y + 1

    report = run(plan(tiny("olmoe"), tokens=(5,), peers=(spoiled("later", right_at_first),)))
    assert [row.variant for row in report.wrong] == ["later"]


def test_an_unsupported_variant_is_skipped_with_its_sentence(tiny, known_roof: Roof) -> None:
    def refuse(y):
        raise unsupported("peer", got="this", needs="that", fix="Do it.")

    report = run(plan(tiny("olmoe"), tokens=(1,), peers=(spoiled("picky", refuse),)))
    assert (report.rows[1].status, report.rows[1].reason) == ("skipped", "[peer] got this; needs that. Do it.")


@pytest.mark.parametrize("calls_before", [0, 3])
def test_an_error_skips_its_row_only(tiny, known_roof: Roof, calls_before: int) -> None:
    calls: list[int] = []

    def fail(y):
        calls.append(1)
        if len(calls) > calls_before:
            raise RuntimeError("no memory\nfor this")
        return y

    report = run(plan(tiny("olmoe"), tokens=(1,), peers=(spoiled("fragile", fail), "eager")))
    found = {row.variant: (row.status, row.reason, row.ratio is None) for row in report.rows}
    assert found["fragile"] == ("skipped", "no memory for this", True)
    assert found["eager"] == ("ok", None, False)


def test_an_error_in_preparing_skips_its_rows(tiny, known_roof: Roof) -> None:
    good = ours("auto")

    def prepare(layer):
        raise ImportError("no kernels")

    report = run(plan(tiny("olmoe"), peers=(Variant("absent", good.refuses, prepare, good.cost),)))
    assert [row.reason for row in report.rows if row.variant == "absent"] == ["no kernels"] * 2


def test_a_layer_too_large_does_not_end_the_others(tiny, known_roof: Roof, monkeypatch: pytest.MonkeyPatch) -> None:
    def fit(spec, dtype, free, num_tokens, copies):
        if spec.name == "mixtral":
            raise unsupported("bench layer", got="mixtral", needs="more memory", fix="Buy some.")
        return 6

    monkeypatch.setattr("moestro.bench.measure.experts_that_fit", fit)
    report = run(plan(tiny("olmoe"), tiny("mixtral"), peers=()))
    assert {row.layer for row in report.rows} == {"olmoe"}
    assert report.notes["run"] == ["[bench layer] got mixtral; needs more memory. Buy some."]
    with pytest.raises(UnsupportedError):
        run(plan(tiny("mixtral"), peers=()))


def test_too_much_memory_or_time(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer(tiny("olmoe"), torch.float32, 6)
    _, routings = inputs(layer, 5, count=1)
    batched, fast = PEERS["batched_mm"], Roof(1e10, 1e11)
    copies = 15 * 3 * 24 * 16 * 4
    assert too_much(batched, layer, routings[0], fast) is None
    monkeypatch.setattr(machine, "available_bytes", lambda device="cpu": 2 * copies)
    assert too_much(batched, layer, routings[0], fast) is None
    monkeypatch.setattr(machine, "available_bytes", lambda device="cpu": 2 * copies - 2)
    assert too_much(batched, layer, routings[0], fast) == (
        "needs 0.0 GB beside the weights; half of the free memory is 0.0 GB"
    )
    monkeypatch.setattr(machine, "available_bytes", lambda device="cpu": 1 << 40)
    slow = Roof(3 * copies / (2 * CALL_LIMIT_SECONDS), 1e11)
    assert too_much(batched, layer, routings[0], slow) == (
        "one call takes 60 s even at this machine's roof; the limit is 30 s"
    )


def test_fewer_experts_than_published(tiny, known_roof: Roof, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moestro.bench.measure.experts_that_fit", lambda *given: 4)
    report = run(plan(tiny("deepseek-v3"), peers=()))
    assert {(row.num_experts, row.published_num_experts) for row in report.rows} == {(4, 6)}
    assert report.notes["deepseek-v3 float32"][0].startswith("4 of 6 experts")


def test_room_is_asked_for_what_variants_make_of_the_weights(tiny, known_roof: Roof, monkeypatch) -> None:
    """All that a point's variants hold at once, and the most that one takes while it makes its own."""
    asked = []
    monkeypatch.setattr("moestro.bench.measure.experts_that_fit", lambda *given: asked.append(given[-1]) or 6)
    good = PEERS["eager"]

    def peer(name, refuses=good.refuses, **numbers):
        return Variant(name, refuses, good.prepare, good.cost, numbers=Numbers(bits=32, bound=1.0, **numbers))

    peers = (
        peer("small", bits_per_weight=8.0, bits_to_prepare=40.0),
        peer("large", bits_per_weight=16.0, bits_to_prepare=3.0),
        peer("refused", lambda spec, dtype: "no", bits_per_weight=100.0),
    )
    run(plan(tiny("olmoe"), peers=(good, *peers)))
    run(plan(tiny("olmoe"), peers=(good,)))
    assert asked == [64.0, 0.0]


def test_json_schema(tiny, known_roof: Roof) -> None:
    report = json.loads(json.dumps(run(plan(tiny("gpt-oss-20b"))).as_json()))
    check_document(report)
    assert report["roof"]["peaks"] == {"fma": 2e11, "vnni": 8e11}
    assert report["roof"]["dtypes"] == {
        "float32": {"bytes_per_second": 1e10, "flops_per_second": 1e11, "balance": pytest.approx(10)}
    }
    assert set(report["versions"]) >= {"python", "moestro", "torch", "transformers"}
    assert report["machine"]["threads"] == torch.get_num_threads()
    assert len(report["points"]) == 4
    for row in report["points"]:
        names = {name for name in row if not name.startswith("ratios.")}
        assert names == {f.name for f in fields(Row)} - {"ratios"}
        assert isinstance(row["microseconds"], float)
        assert isinstance(row["num_tokens"], int)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"tokens": (4, 0)}, "got tokens 0; needs more than 0"),
        ({"seconds": 0.0}, "got seconds per point 0.0; needs more than 0"),
        ({"seconds": float("nan")}, "got seconds per point nan"),
        ({"layers": ()}, "got 0 layers"),
        ({"dtypes": (torch.int8,)}, "got dtype torch.int8; needs float32, bfloat16 or float16"),
        ({"device": "abacus"}, "got device 'abacus'; needs a torch device of this machine"),
        ({"device": "meta"}, "got device 'meta'; needs a torch device of this machine"),
    ],
)
def test_bad_plans(tiny, change: dict, sentence: str) -> None:
    good = {
        "layers": (tiny("olmoe"),),
        "tokens": (1,),
        "dtypes": (torch.float32,),
        "ours": (ours("auto"),),
        "peers": (),
        "seconds": 1.0,
    }
    Plan(**good)
    with pytest.raises(InvalidInputError, match=r"\[bench layer\] ") as caught:
        Plan(**{**good, **change})
    assert sentence in str(caught.value)


def failing(where: str) -> Variant:
    """A peer that breaks at a stage of its life; at 5 tokens only where it has met them by then."""
    good = PEERS["eager"]

    def broken(*given: object) -> None:
        raise torch.OutOfMemoryError(f"no memory in {where}")

    def prepare(layer):
        bind, calls = good.prepare(layer), []

        def bind_or_break(x, routing):
            def call():
                calls.append(x)
                if where == "timing" and len(calls) > 3:
                    broken()
                return bind(x, routing)()

            if x.shape[0] == 5 and where in ("bind", "call"):
                return broken() if where == "bind" else broken
            return call

        return broken() if where == "prepare" else bind_or_break

    return Variant("fragile", broken if where == "refuses" else good.refuses, prepare, good.cost)


@pytest.mark.parametrize("where", ["refuses", "prepare", "bind", "call", "timing"])
def test_a_variant_that_breaks_is_a_row_with_the_reason(tiny, known_roof: Roof, where: str) -> None:
    report = run(plan(tiny("olmoe"), peers=("eager", failing(where))))
    for row in report.rows:
        if row.variant == "fragile" and (row.num_tokens == 5 or where not in ("bind", "call")):
            assert (row.status, row.reason) == ("skipped", f"no memory in {where}")
            assert row.microseconds is row.ratio is None
        else:
            assert row.status == "ok"
            assert row.microseconds > 0


@pytest.mark.parametrize(("where", "lost"), [("make_layer", (1, 5)), ("Point", (5,)), ("run_point", (5,))])
def test_what_breaks_for_every_variant_is_a_row_for_each(
    tiny, known_roof: Roof, where: str, lost: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    good = getattr(measure, where)

    def broken(*given, **named):
        place = given[0].place if where == "run_point" else given[1]
        if where == "make_layer":
            meets = given[0].name == "olmoe"
        else:
            meets = (place.spec.name, place.num_tokens) == ("olmoe", 5)
        if meets:
            raise RuntimeError("an illegal memory access\n  was encountered")
        return good(*given, **named)

    monkeypatch.setattr(measure, where, broken)
    report = run(plan(tiny("olmoe"), tiny("mixtral")))
    for row in report.rows:
        if row.layer == "olmoe" and row.num_tokens in lost:
            assert (row.status, row.reason) == ("skipped", "an illegal memory access was encountered")
            assert (row.active_experts, row.num_experts, row.kind) == (
                0,
                6,
                "peer" if row.variant == "eager" else "moestro",
            )
        else:
            assert row.status == "ok"
    assert [(row.layer, row.num_tokens, row.variant) for row in report.rows] == [
        (layer, num_tokens, variant)
        for layer in ("olmoe", "mixtral")
        for num_tokens in (1, 5)
        for variant in ("moestro", "eager")
    ]
    json.dumps(report.as_json(), allow_nan=False)


def test_a_spent_budget_makes_no_layer(tiny, known_roof: Roof, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "make_layer", lambda *given: pytest.fail("made"))
    report, wanted = measure.start(plan(tiny("olmoe"), tiny("mixtral")))
    now = [0.0]
    budget = Budget(1.0, 4, lambda: now[0])
    now[0] = 2.0
    assert measure.extend(report, wanted, budget, lambda text: pytest.fail(text)) == []
    assert [row.reason for row in report.rows] == [BUDGET_SPENT] * 8


def test_points_that_are_left_out_leave_their_seconds_to_others() -> None:
    budget = Budget(100.0, 10, lambda: 0.0)
    budget.drop(6)
    assert budget.share(1, 1e9) == 25.0
    assert not budget.is_spent
    assert not Budget(None, 1).is_spent
