"""Ranks that disagree, die or stall: every other one raises an error that names them, in time, and nothing hangs."""

from __future__ import annotations

import re

import pytest

from moestro.errors import CollectiveError, InvalidInputError, no_answer
from moestro.parallel import Placement, make_mesh
from moestro.parallel.guard import Peers
from parallel import cases, failing
from parallel.cases import Layer

FOUR_PARTS = re.compile(r"\[(?P<operation>[^\]]+)\] got (?P<got>.+?); needs (?P<needs>.+?)\. (?P<fix>\S.+)", re.DOTALL)


def parts(said):
    found = FOUR_PARTS.search(said)
    assert found, said
    return found


@pytest.mark.parametrize(
    ("field", "named"),
    [
        ("num_experts", r"sizes \[E, H, I\] of the layer: \[8, 64, 64\] on ranks 0, 2, \[16, 64, 64\] on rank 1"),
        ("hidden_size", r"sizes \[E, H, I\] of the layer: \[8, 64, 64\] on ranks 0, 2, \[8, 16, 64\] on rank 1"),
        ("dtype", "dtypes of the layer: .*torch.float32.* on ranks 0, 2, .*torch.bfloat16.* on rank 1"),
        ("format", "formats of the layer: .*float32.* on ranks 0, 2, .*int8.* on rank 1"),
        ("mesh", r"mesh: \[1, 3, 1\] on ranks 0, 2, \[3, 1, 1\] on rank 1"),
    ],
)
def test_ranks_that_disagree(group, field, named):
    for said in group(3).run(cases.disagree, field):
        assert said.startswith("CollectiveError: ")
        assert re.search(named, parts(said)["got"]), said


def test_ranks_that_send_other_rows(group):
    for said in group(2).run(cases.disagree_later):
        assert "CollectiveError: [AllToAllDispatcher] got different dtype: " in said
        assert '"torch.float64" on rank 0' in said
        assert '"torch.float16" on rank 1' in said


SAME = {
    "all-reduce": (Layer((1, 3, 1), dispatcher="all-reduce"), False, "AllReduceDispatcher"),
    "slices of experts": (Layer((1, 1, 3), intermediate_size=96), False, "AllToAllDispatcher"),
    "slices of experts, gathered": (
        Layer((1, 1, 3), intermediate_size=96, dispatcher="all-gather"),
        False,
        "AllGather",
    ),
    "slices of the batch": (Layer((1, 3, 1)), True, "SlicedDispatcher"),
    "exact slices of the batch": (Layer((1, 3, 1), dispatcher="exact"), True, "SlicedDispatcher"),
}


@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize(
    ("what", "got"),
    [
        ("size", "different number of tokens: 13 on ranks 0, 2, 12 on rank 1"),
        ("ids", r'different experts chosen for the same tokens \(digest\): "\w{16}" on ranks 0, 2, "\w{16}" on rank 1'),
    ],
)
def test_ranks_that_should_have_the_same_tokens(group, name, what, got):
    case, shared, operation = SAME[name]
    for said in group(3).run(cases.another_batch, case, what, shared):
        assert said.startswith(f"CollectiveError: [{operation}"), said
        assert re.search(got, parts(said)["got"]), said
        assert parts(said)["fix"].startswith("Give every rank of the group the same batch")
        assert ("the same kind of processor" in parts(said)["fix"]) is (what == "ids")


def test_a_rank_whose_number_of_tokens_alone_changes(fresh):
    """Of four: it waits for three others, of whom each waits 2 s for it."""
    first, other, *rest = fresh(4).run(cases.fewer_later)
    for said in (first, *rest):
        assert parts(said)["operation"] == "all-reduce of rows", said
        assert parts(said)["got"] == "rank 1 at AllReduceDispatcher with 12 tokens"
    assert parts(other)["got"] == "; ".join(f"rank {i} at all-reduce of rows" for i in (0, 2, 3))


def test_ranks_with_other_options(fresh):
    """At the first call, and where the group has agreed on both before."""
    ranks = fresh(3)
    for got in ("option", "exact"):
        for said in ranks.run(cases.other_options):
            assert said.startswith("CollectiveError: [AllToAllDispatcher] "), said
            assert parts(said)["got"] == f"different {got}: false on ranks 0, 2, true on rank 1"
        for dispatcher in ("exact", "all-to-all"):
            assert [said for said, _ in ranks.run(cases.compare, Layer((1, 3, 1), dispatcher=dispatcher))] == [None] * 3


def test_agreements_leave_the_store_as_large_as_it_was(fresh):
    ranks, sizes = fresh(2), []
    for number in (3, 50):
        assert ranks.run(cases.agreements, number) == [number] * 2
        sizes.append(ranks.store.num_keys())
    assert sizes[0] == sizes[1]


def test_the_timeout_of_a_mesh_is_that_of_the_job(fresh):
    assert fresh(3).run(cases.timeouts) == [(77.0, 77.0, 77.0)] * 3


def test_the_backend_that_pytorch_chooses(fresh):
    """init_process_group() without one: for CPUs it is gloo, and called "undefined"."""
    ranks = fresh(3, None)
    for dispatcher in ("all-to-all", "all-gather", "all-reduce"):
        found = ranks.run(cases.compare, Layer((1, 3, 1), 7, 3, 32, 32, dispatcher=dispatcher))
        assert [said for said, _ in found] == [None] * 3
    first, dead, last = ranks.run(cases.failing, "all-gather", "inside", "killed", 30.0)
    assert dead == "dead"
    for said, took, _ in (first, last):
        assert parts(said)["got"] == "no answer from rank 1", said
        assert took < 30


@pytest.mark.parametrize("dispatcher", ["all-to-all", "all-gather", "all-reduce"])
@pytest.mark.parametrize("when", ["before", "inside", "after"])
def test_a_killed_rank_is_named(fresh, dispatcher, when):
    ranks = fresh(3)
    first, dead, last = ranks.run(cases.failing, dispatcher, when, "killed", 30.0)
    assert dead == "dead"
    for said, took, again in (first, last):
        assert parts(said)["got"] == "no answer from rank 1", said
        assert took < 30
        assert "rows" in parts(said)["operation"] or "counts" in parts(said)["operation"]
        assert "a group that has failed before: no answer from rank 1" in again


def test_a_stalled_rank_is_named(fresh):
    ranks = fresh(3)
    first, late, last = ranks.run(cases.failing, "all-to-all", "inside", "stalled", 3.0)
    for said, took, _ in (first, last):
        assert parts(said)["got"] == "no answer from rank 1", said
        assert took < 3 + 3
    assert "[all-to-all of rows] got " in late[0]
    again = fresh(3)  # the job is started anew
    assert [said for said, _ in again.run(cases.compare, Layer((1, 3, 1)))] == [None] * 3


RANKS = {"move": 3, "flow": 4, "slices": 4, "prompt": 3, "step": 3}


@pytest.mark.parametrize(
    ("how", "what"), [*(("killed", what) for what in RANKS), *(("stalled", what) for what in ("move", "flow", "step"))]
)
def test_a_rank_that_goes_inside_a_move_a_flow_or_a_sequence(fresh, what, how):
    """On a mesh one rank is neither in the row nor in the column of the one that is gone: it hears of it."""
    found = fresh(RANKS[what]).run(failing.failing, what, how)
    gone = found.pop(1)
    assert gone == "dead" if how == "killed" else "CollectiveError" not in gone[0]
    for rank, (said, took, again) in zip((0, 2, 3), found, strict=False):
        if RANKS[what] == 4 and rank == 2:
            heard = "rank [03] at all-to-all of [a-z ]+, layers.3 of ranks ([01], [13])"
            named = heard if how == "stalled" else f"{heard}: no answer from rank 1"
            assert re.search(named, parts(said)["got"]), said
        else:
            assert parts(said)["got"] == "no answer from rank 1", said
        assert what == "move" or "layers.3" in parts(said)["operation"]
        assert took < failing.LONG / 2
        assert "a group that has failed before: " in again
        assert what != "move" or "move_experts of the layer ended with CollectiveError" in again


def test_a_rank_that_fails_alone_inside_a_move(fresh):
    """The others have moved; the layer runs nowhere."""
    first, failed, last = fresh(3).run(failing.without_room)
    assert [first[0], failed[0], last[0]] == ["nothing", "no room", "nothing"]
    for _, said in (first, last):
        assert parts(said)["got"] == "rank 1 at move_experts of the layer ended with MemoryError: no room"
    assert "failed before: move_experts of the layer ended with MemoryError: no room" in failed[1]


def test_a_job_that_one_process_of_another_job_begins_again(fresh):
    """It has made a group of the same ranks before, and the process beside it none."""
    old, new, job = fresh(2), fresh(1), fresh(0)
    assert [said for said, _ in old.run(cases.compare, Layer((1, 2, 1)))] == [None] * 2
    for rank, ranks in enumerate((old, new)):
        ranks.pipes[0].send((failing.begin_again, (job.store.port, rank, 2)))
    assert [ranks.result(0) for ranks in (old, new)] == [2, 2]


@pytest.mark.parametrize("copied", [1 << 20, 0])
def test_digests_of_a_shared_batch(group, copied):
    """Beside few bytes they need no collective of their own."""
    for found, said in group(3).run(failing.other_slices, copied):
        assert found.count("all-gather of digests") == (not copied)
        assert said.startswith("[SlicedDispatcher] got different experts chosen for the same tokens"), said


def test_a_gradient_beside_a_digest(group):
    assert group(3).run(failing.gradient_of_slices) == [(True, (9, 4))] * 3


def test_a_rank_that_never_comes(fresh):
    ranks = fresh(2)
    (said,) = ranks.run(cases.alone, ranks=[0])
    assert parts(said)["operation"] == "process group"
    assert parts(said)["got"] == "no answer from rank 1"


REFUSED = {
    "more ranks than experts": (cases.refused, "2 experts of the layer for ep=3", "one expert a rank"),
    "sizes": (cases.wrong_mesh, "dp=1, ep=2, tp=1 with 3 ranks", "product is 3"),
    "no layer": (cases.no_layer, "Linear, without a moestro.MoE in it", "layers in it"),
    "twice": (cases.twice, "layer itself, which has a dispatcher", "on one device"),
    "placement": (cases.other_placement, "placement of 8 experts on 2 ranks", "8 experts on 3 ranks"),
    "groups": (cases.few_groups, "intermediate_size 64 in mxfp4, to be cut into 3 slices", "at most 2 slices"),
    "exact": (cases.exact_slices, "exact=True and experts that are cut along I", "whole experts"),
    "tokens": (cases.too_many, "41 tokens", "at most num_tokens=40"),
    "falling ranks": (cases.falling, "a mesh of ranks [2, 1, 0], which fall along ep", "ranks that rise"),
    "names": (cases.other_names, "a mesh with dimensions rows", "dimensions among dp, ep, tp"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(group, name):
    function, got, needs = REFUSED[name]
    for said in group(3).run(function):
        found = parts(said)
        assert got in found["got"], said
        assert needs in found["needs"], said


def test_sizes_below_one():
    with pytest.raises(InvalidInputError, match=r"\[make_mesh\] got dp=1, ep=0, tp=1; needs sizes of at least 1"):
        make_mesh(ep=0)


def test_a_device_with_a_number():
    with pytest.raises(InvalidInputError, match=r"\[make_mesh\] got device 'cuda:0'; needs \"cpu\" or \"cuda\""):
        make_mesh(ep=2, device="cuda:0")


def test_the_default_placement_is_in_order():
    assert Placement.contiguous(5, 2).experts == ((0, 1, 2), (3, 4))


class Alone(Peers):
    """A group whose collectives a test makes up."""

    waits = True

    def __init__(self):
        self._failed, self.timeout = "", 5.0

    def _another_failed(self):
        return False

    def _broken(self, operation, where, error):
        return no_answer(f"{operation}, {where}", got=str(error), needs="an end", fix="None.")


@pytest.mark.parametrize("failure", [None, "gone"])
def test_what_ends_while_its_wait_gives_up_has_ended(failure):
    """A wait may be over before the collective is, which is over before it is asked whether it is."""

    class Work:
        def wait(self, timeout=None):
            if timeout is not None:
                raise RuntimeError("Operation timed out!")
            if failure is not None:
                raise RuntimeError(failure)

        def is_completed(self):
            return True

    if failure is None:
        assert Alone()._run(Work, "barrier", "plan") is None
    else:
        with pytest.raises(CollectiveError, match="got gone"):
            Alone()._run(Work, "barrier", "plan")
