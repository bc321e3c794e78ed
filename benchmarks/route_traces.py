"""Policies on BigMoeOnEdge's public route traces: how many lookups of decoding hit, budget by budget.

python benchmarks/route_traces.py FILE.route.csv [CYCLES ...]

The files are those of docs/bench-data/2026-07-15-route-trace in github.com/Helldez/BigMoeOnEdge. Tokens of the prompt
come one by one and are kept as those of decoding are, so that slots are filled when decoding begins; only lookups of
decoding are counted. `moestro cache` replays the same files as a live run would meet them, the prompt in one forward.
"""

from __future__ import annotations

import csv
import math
import sys
from pathlib import Path

from moestro.memory import POLICIES, Belady, Counts, Expected, LayerSize, Policy, Residents, Visit, policy_named

CYCLES = (0.5, 1.05, 2, 4)
EXPERTS = 128


def visits_of(path: Path) -> tuple[list[Visit], int]:
    """One visit for each token and layer, and how many of them are of the prompt."""
    with path.open(newline="") as file:
        lines = list(csv.DictReader(line for line in file if not line.startswith("#")))
    found: dict[tuple[int, ...], list[int]] = {}
    for line in lines:
        place = tuple(int(line[name]) for name in ("turn", "phase", "step", "layer"))
        found.setdefault(place, []).append(int(line["expert"]))
    visits = [Visit(place[3], dict.fromkeys(experts, 1)) for place, experts in found.items()]
    return visits, sum(phase == 0 for _, phase, _, _ in found)


def hit_rate(layers: list[LayerSize], visits: list[Visit], prompt: int, slots: int, policy: Policy) -> float:
    """The share of decoding's lookups that hit."""
    residents = Residents(layers, slots, policy)
    for visit in visits[:prompt]:
        residents.visit(visit.layer, visit.experts)
    before = sum(residents.decode, Counts())
    for visit in visits[prompt:]:
        residents.visit(visit.layer, visit.experts)
    after = sum(residents.decode, Counts())
    return (after.hits - before.hits) / (after.lookups - before.lookups)


def main(path: Path, *cycles: float) -> None:
    """Print a row a budget."""
    visits, prompt = visits_of(path)
    top_k = max(len(visit.experts) for visit in visits)
    layers = [LayerSize(EXPERTS, top_k, 1)] * (1 + max(visit.layer for visit in visits))
    print(
        f"{path.name}: {len(layers)} layers, top {top_k} of {EXPERTS}, {(len(visits) - prompt) // len(layers)} tokens"
    )
    for budget in cycles or CYCLES:
        slots = round(budget * top_k * len(layers))
        policies = {"belady": Belady(tuple(visits)), **{name: policy_named("cache", name) for name in POLICIES}}
        policies["expected, own rate alone"] = Expected(decay=0.1, prior=math.inf)
        rates = {name: hit_rate(layers, visits, prompt, slots, policy) for name, policy in policies.items()}
        print(f"{slots} slots:", ", ".join(f"{name} {rate:.1%}" for name, rate in rates.items()), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(float, sys.argv[2:]))
