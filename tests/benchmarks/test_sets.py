"""`benchmarks/sets.py` on a small layer: every set of this processor, outputs checked, a plain read beside them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import sets
from moestro.bench import make_layer
from moestro.errors import InvalidInputError
from moestro.ops import native

pytestmark = pytest.mark.skipif(native.module is None, reason="the native engine is not there")
HERE = [isa.name for isa in native.ISAS if isa.runs_here]


@pytest.fixture
def layer(tiny):
    return make_layer(tiny("olmoe"), torch.float32, 6)


def test_every_set_is_checked_and_timed_beside_a_read(layer) -> None:
    rows = sets.measure(layer, ["dense", "int8/int8"], (1, 5), sets.chosen("all"), 1e-4)
    assert [row.name for row in rows] == [*HERE, sets.READ] * 4
    assert {row.status for row in rows} <= {"ok", "skipped"}
    for row in rows:
        assert (row.microseconds is None) == (row.status != "ok") == (row.reason is not None)
    timed = [row for row in rows if row.status == "ok"]
    assert {"portable", sets.READ} <= {row.name for row in timed}
    for row in timed:
        assert row.low <= row.microseconds <= row.high
        assert row.samples >= 5
    firsts = [row for row in timed if row.ratio is None]
    assert len(firsts) == 4
    assert all(row.ratio_low <= row.ratio <= row.ratio_high for row in timed if row not in firsts)
    assert all(row.read_share == 1.0 for row in timed if row.name == sets.READ)
    (dense, int8) = sets.tables(layer.spec, "float32", rows)
    assert dense.row_count == int8.row_count == 2 * (len(HERE) + 1)


def test_a_wrong_output_has_no_time(layer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sets, "disagreement", lambda actual, expected, dtype: "it is wrong")
    *rows, read = sets.measure(layer, ["dense"], (1,), ["portable"], 1e-4)
    assert [(row.status, row.reason, row.microseconds) for row in rows] == [("wrong output", "it is wrong", None)]
    assert read.microseconds is not None
    assert read.ratio is None
    assert "wrong output" in sets.cells(rows[0])


def test_the_command_writes_what_it_prints(tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sets, "named", lambda name: tiny("olmoe"))
    path = tmp_path / "sets.json"
    given = ["--tokens", "2", "--sets", "portable", "--seconds", "1e-4", "--json", str(path)]
    result = CliRunner().invoke(sets.app, given)
    assert result.exit_code == 0, result.output
    found = json.loads(path.read_text())
    assert [row["name"] for row in found["rows"]] == ["portable", sets.READ]
    assert {"command", "machine", "versions", "dtype", "layer"} <= found.keys()
    assert "portable" in result.output


@pytest.mark.parametrize(
    ("given", "needs"),
    [
        (("--sets", "avx9"), "set 'avx9'; needs one of"),
        (("--tokens", "1,two"), "tokens 'two'; needs whole numbers"),
        (("--dtype", "int8"), "dtype 'int8'; needs one of float32"),
        (("--layer", "gpt5"), "layer 'gpt5'; needs one of"),
    ],
)
def test_arguments_that_cannot_be(given: tuple[str, str], needs: str) -> None:
    result = CliRunner().invoke(sets.app, [*given])
    assert result.exit_code == 2
    assert needs in " ".join(result.output.split())


def test_a_set_that_the_processor_lacks_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = [isa.name for isa in native.ISAS if not isa.runs_here]
    assert sets.chosen(",".join([*lacking, "portable"])) == ["portable"]
    if lacking:
        with pytest.raises(InvalidInputError, match="one that this processor has"):
            sets.chosen(lacking[0])
