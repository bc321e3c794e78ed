"""`moestro bench parallel`: what it counts is what the definition says, on the ranks of a job and on its own."""

from __future__ import annotations

import json
import multiprocessing

import pytest
import torch
from typer.testing import CliRunner

from documents import check_document
from moestro.bench import ranks
from moestro.bench.layers import LAYERS, LayerSpec
from moestro.bench.ranks import RankPlan
from moestro.bench.ranks_records import RanksReport
from moestro.bench.ranks_report import cost_lines, error_lines, headline, pairs_table, stages_table
from moestro.cli import app
from moestro.errors import CollectiveError, InvalidInputError
from moestro.parallel import processes

SMALL = LayerSpec("small", "olmoe", 64, 32, 8, 2)
PLAN = RankPlan(SMALL, (30, 7), tuple(ranks.DISPATCHERS), torch.float32, seconds=0.01)


@pytest.fixture(scope="module")
def report(group) -> RanksReport:
    first, *others = group(3).run(ranks.measure, PLAN)
    assert not isinstance(first, str), first
    for rank, other in enumerate(others, 1):
        assert other.rank == rank
        assert [(row.row_bytes, row.pairs) for row in other.rows] == [(r.row_bytes, r.pairs) for r in first.rows]
    return first


def test_every_point_is_there_and_right(report):
    assert [(row.num_tokens, row.dispatcher) for row in report.rows] == [
        (t, d) for t in (30, 7) for d in PLAN.dispatchers
    ]
    assert report.wrong == []
    assert (report.ranks, report.threads, len(report.hosts)) == (3, 1, 1)
    for row in report.rows:
        assert sum(row.pairs) == row.num_tokens * 2
        assert row.imbalance == max(row.pairs) / (sum(row.pairs) / 3)
        assert all(len(times) == 3 and min(times) > 0 for times in row.stages.values())
        assert row.alone_microseconds > 0
        assert row.ratio_low <= row.ratio <= row.ratio_high


def test_bytes_beside_the_fewest(report):
    for row in report.rows:
        least = row.least_row_bytes
        assert all(least[a][a] == row.row_bytes[a][a] == 0 for a in range(3))
        assert sum(map(sum, least)) > 0
        if row.dispatcher == "all-to-all":
            assert row.row_bytes == least
        elif row.dispatcher in ranks.IN_8_BITS:
            assert all(row.row_bytes[a][b] < least[a][b] for a in range(3) for b in range(3) if a != b)
        else:
            assert all(row.row_bytes[a][b] >= least[a][b] for a in range(3) for b in range(3))
    gathered = next(row for row in report.rows if row.dispatcher == "all-gather")
    assert gathered.row_bytes[0][1] == 2 * 10 * 64 * 4  # ten rows there, ten sums back


def test_tables(report):
    assert stages_table(report).row_count == 12
    assert pairs_table(report).row_count == 12 * 6
    assert "3 processes of 1 thread" in headline(report)[-1]
    assert len(cost_lines(report)) == 12
    assert len(error_lines(report)) == 4
    assert all((row.error > 0) is (row.dispatcher in ranks.IN_8_BITS) for row in report.rows)
    assert "1 process of 3" in cost_lines(report)[0]
    assert json.loads(json.dumps(report.as_json()))["points"][0]["imbalance"] == report.rows[0].imbalance


def test_the_command_starts_its_own_processes(monkeypatch):
    monkeypatch.setitem(LAYERS, "small", SMALL)
    options = ["--layer", "small", "--tokens", "12", "--dispatcher", "all-to-all", "--load", "zipf:1"]
    options += ["--seconds-per-point", "0.01", "--json", "-"]
    result = CliRunner().invoke(app, ["bench", "parallel", *options])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    check_document(found)
    assert (found["settings"]["ranks"], found["settings"]["exponent"]) == (2, 1.0)
    assert found["points"][0]["row_bytes"] == found["points"][0]["least_row_bytes"]
    assert "rows / least" in result.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--layer", "gpt5"], "[bench parallel] got layer 'gpt5'"),
        (["--dispatcher", "pigeons"], "[bench parallel] got dispatchers pigeons"),
        (["--processes", "1"], "[bench parallel] got 1 processes; needs 2 to 64"),
        (["--threads", "0"], "0 threads"),
        (["--load", "heavy"], "[bench parallel] got load 'heavy'"),
        (["--tokens", "0"], "[bench parallel] got tokens '0'"),
    ],
)
def test_what_cannot_be(options, said):
    result = CliRunner().invoke(app, ["bench", "parallel", *options])
    assert result.exit_code == 2
    assert said in result.stderr


def test_more_ranks_than_experts(group):
    for said in group(3).run(ranks.measure, RankPlan(LayerSpec("few", "olmoe", 64, 32, 2, 2), dtype=torch.float32)):
        assert said.startswith("InvalidInputError: [bench parallel] got 2 experts of few and 3 ranks"), said


class Gone:
    def recv(self):
        raise EOFError


def test_a_process_that_ends_without_a_word():
    assert isinstance(processes.received("bench parallel", 1, Gone()), CollectiveError)


def test_the_first_process_to_fail_is_named_while_others_wait():
    pipes = [multiprocessing.Pipe(duplex=False) for _ in range(3)]
    pipes[2][1].send("a result")
    pipes[1][1].close()  # as of a process that was killed; the first says nothing
    (error,) = processes.results("bench parallel", [mine for mine, _ in pipes])
    assert "got no result from rank 1, whose process has ended" in str(error)


def test_results_come_in_the_order_of_ranks():
    pipes = [multiprocessing.Pipe(duplex=False) for _ in range(3)]
    for rank in (2, 0, 1):
        pipes[rank][1].send(rank)
    assert processes.results("bench parallel", [mine for mine, _ in pipes]) == [0, 1, 2]


def test_an_unknown_dtype_is_refused():
    with pytest.raises(InvalidInputError, match=r"\[bench parallel\] got dtype"):
        RankPlan(SMALL, dtype="float3")
