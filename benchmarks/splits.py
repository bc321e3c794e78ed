"""How one layer's work is split over threads: along experts, along rows of weights, or as the engine cuts it.

python benchmarks/splits.py            a table, and benchmarks/results/<date>-splits.md and .json

Rows of gate_up are the intermediate size, rows of down the hidden size, so cutting both projections of each expert is
the split along the two; leaving experts whole is the split along the blocks of rows that experts have.
"""

from __future__ import annotations

import datetime
import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch

from moestro import Activation, ExpertWeights, Routing, machine
from moestro.bench.timing import alternate, wall_clock
from moestro.ops.expert_mlp import cpu, expert_mlp

RESULTS = Path(__file__).parent / "results"
HIDDEN, INNER, EXPERTS, SECONDS = 2048, 1024, 64, 1.0


@dataclass(frozen=True)
class Case:
    """A routing: what it stands for, and how many rows each of its experts has."""

    name: str
    rows: tuple[int, ...]


CASES = (
    Case("1 token, 1 expert", (1,)),
    Case("1 token, 3 experts", (1, 1, 1)),
    Case("1 token, 8 experts", (1,) * 8),
    Case("1 expert of 64 rows, 16 of 2", (64, *(2,) * 16)),
    Case("64 experts of 32 rows", (32,) * 64),
    Case("1 expert of 256 rows, 32 of 8", (256, *(8,) * 32)),
)


def routing(case: Case) -> Routing:
    """As many slots as experts, those an expert does not fill empty."""
    ids = torch.full((max(case.rows), len(case.rows)), -1)
    for e, count in enumerate(case.rows):
        ids[:count, e] = e
    return Routing(ids, torch.full(ids.shape, 1.0 / len(case.rows)))


def splits() -> dict[str, int]:
    """Names, and into how many pieces each projection of an expert is then cut."""
    threads = torch.get_num_threads()
    return {
        "as it is cut": 0,
        "along experts": 1,
        f"along rows, {threads} pieces": threads,
        "along rows, 64 pieces": 64,
    }


def measure(weights: ExpertWeights, case: Case) -> dict[str, float]:
    """Median microseconds of each split, taken in turns.

    Raises:
        AssertionError: two splits differ in a bit.
    """
    x, slots = torch.randn(max(case.rows), HIDDEN), routing(case)

    def call(pieces: int) -> torch.Tensor:
        cpu.PIECES = pieces
        return expert_mlp(x, slots, weights)

    expected = call(0)
    for pieces in splits().values():
        assert torch.equal(call(pieces), expected), "a split changed bits"
    variants = {name: [partial(call, pieces)] for name, pieces in splits().items()}
    return {name: median(times) * 1e6 for name, times in alternate(variants, SECONDS, wall_clock()).items()}


def main() -> int:
    torch.manual_seed(0)
    parts = torch.randn(EXPERTS, 2 * INNER, HIDDEN) * 0.02, torch.randn(EXPERTS, HIDDEN, INNER) * 0.02
    dense = ExpertWeights.from_dense(*parts, activation=Activation())
    found = {}
    with torch.no_grad():
        for name in ("float32", "mxfp4"):
            weights = dense if name == "float32" else dense.quantize(name)
            for case in CASES:
                found[f"{name}, {case.name}"] = measure(weights, case)
    text = table(found)
    print(text)
    stem = RESULTS / f"{datetime.date.today()}-splits"
    where = f"{torch.get_num_threads()} threads, {machine.processor_name()}"
    head = f"# Splits of one layer, H {HIDDEN}, I {INNER}, {where}\n\nCommand: `python benchmarks/splits.py`\n\n"
    stem.with_suffix(".md").write_text(f"{head}{text}\n")
    rows = [{"case": case, "split": n, "microseconds": us} for case, times in found.items() for n, us in times.items()]
    stored = {"machine": machine.describe(), "rows": rows}
    stem.with_suffix(".json").write_text(json.dumps(stored, indent=1) + "\n")
    return 0


def table(found: dict[str, dict[str, float]]) -> str:
    """Microseconds of each case, and how many times longer than as the engine cuts it."""
    first, *others = splits()
    lines = [f"| us | {' | '.join((first, *others))} |", "|---|" + "---:|" * (len(others) + 1)]
    for case, times in found.items():
        cells = [f"{times[n]:,.0f} ({times[n] / times[first]:.2f}x)" for n in others]
        lines.append(f"| {case} | {times[first]:,.0f} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
