"""Profiles of layers whose experts are cut over ranks: loads before anything is sent, and what sending takes."""

from __future__ import annotations

import pytest

from parallel import profiled
from parallel.cases import Layer


@pytest.mark.parametrize("dispatcher", ["exact", "all-to-all", "all-gather", "all-reduce"])
def test_loads_stages_and_bytes(group, dispatcher):
    case = Layer((1, 2, 1), 8, 3, 32, 48, dispatcher=dispatcher, bias=True)
    for same, exact, spent, counted in group(2).run(profiled.profiled, case):
        assert same
        assert exact
        assert {"grouping", "experts", "combine"} <= set(spent)
        assert counted


def test_nothing_is_left_where_experts_have_moved(group):
    for own, counted in group(2).run(profiled.moved, Layer((1, 2, 1), 8, 3, 32, 48, bias=True)):
        assert own
        assert counted


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)], ids=["ep", "tp"])
def test_loaded_models(group, tmp_path, sizes):
    pytest.importorskip("transformers.distributed.expert_parallel")
    from hf.checkpoints import Checkpoints

    folder = Checkpoints(tmp_path).folder("gpt-oss-20b")
    for same, exact, spent in group(2).run(profiled.of_a_model, folder, *sizes):
        assert same
        assert exact
        assert {"router", "grouping", "experts", "combine", "attention"} <= set(spent)
