"""What a recorded run would have read under other budgets and policies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moestro.errors import invalid_input, not_one_of
from moestro.memory.policy import POLICIES, Belady, Policy, Visit
from moestro.memory.residents import Counts, Residents
from moestro.memory.sizes import LayerSize, cycle_bytes, least_budget, total_bytes
from moestro.memory.trace import Trace

BELADY = Belady.name
CYCLES = (0.5, 1, 2, 4)
"""Budgets that are replayed unless others are asked for, beside the least, half of the experts, and all."""


@dataclass(frozen=True)
class Replayed:
    """One policy with one budget, on one trace.

    Attributes:
        policy: its name.
        budget: bytes of slots, at most.
        slots: how many these are.
        cycles: the budget over the bytes of one token's experts in all layers.
        hit_rate: of the lookups of decoding, from 0 to 1.
        regret: how much less than Belady's that is.
        prompt_hit_rate: of the lookups of prompts.
        prompt_bytes: read in prompts.
        token_bytes: read for a token of decoding; None where there is none.
        tokens_per_second: of decoding, if reading were all; None without a rate, or where nothing is read.
        decode, prompt: the counts of all layers.
    """

    policy: str
    budget: int
    slots: int
    cycles: float
    hit_rate: float
    regret: float
    prompt_hit_rate: float
    prompt_bytes: int
    token_bytes: float | None
    tokens_per_second: float | None
    decode: Counts
    prompt: Counts


def ladder(layers: Sequence[LayerSize]) -> list[int]:
    """Budgets in bytes from the least that works to all experts."""
    least, cycle, whole = least_budget(layers), cycle_bytes(layers), total_bytes(layers)
    asked = {least, *(int(count * cycle) for count in CYCLES), whole // 2, whole}
    return sorted(budget for budget in asked if least <= budget <= whole)


def replay(layers: Sequence[LayerSize], visits: Iterable[Visit], budget: int, policy: Policy) -> Residents:
    """Run visits through the slots of a budget, as a live run does; what it counted is in the result.

    Raises:
        InvalidInputError: a budget below the least that works, or visits of another model.
    """
    residents = Residents(layers, budget, policy)
    for visit in visits:
        residents.visit(visit.layer, visit.experts, visit.last)
    return residents


def compare(
    trace: Trace,
    budgets: Sequence[int] | None = None,
    policies: Sequence[str] | None = None,
    bytes_per_second: float | None = None,
) -> list[Replayed]:
    """Replay a trace with every budget and policy, and with Belady's, which knows the future.

    Args:
        trace: of a run.
        budgets: in bytes; those of `ladder` if None.
        policies: names in `POLICIES`, or "belady"; all if None.
        bytes_per_second: that experts are read at, to predict tokens per second from.

    Raises:
        InvalidInputError: no budget or one below the least, another policy, a rate that is not above 0.
    """
    names = [*POLICIES, BELADY] if policies is None else list(dict.fromkeys(policies))
    asked = ladder(trace.layers) if budgets is None else list(dict.fromkeys(budgets))
    if not names or not asked or (bytes_per_second is not None and not 0 < bytes_per_second < float("inf")):
        raise invalid_input(
            "cache",
            got=f"policies {names}, {len(asked)} budgets, {bytes_per_second} bytes a second",
            needs="at least one policy, one budget, and a rate above 0",
            fix="Leave them out for the defaults.",
        )
    visits = trace.visits
    chosen: list[Policy] = [Belady(visits) if name == BELADY else _online(name) for name in names]
    found = []
    for budget in asked:
        bound = replay(trace.layers, visits, budget, Belady(visits))
        for policy in chosen:
            run = bound if policy.name == BELADY else replay(trace.layers, visits, budget, policy)
            found.append(_row(run, trace.decoded, bound, bytes_per_second))
    return found


def _online(name: str) -> Policy:
    if name not in POLICIES:
        raise not_one_of("cache", "policy", name, (*POLICIES, BELADY))
    return POLICIES[name]


def _row(run: Residents, tokens: int, bound: Residents, bytes_per_second: float | None) -> Replayed:
    decode, prompt, best = (sum(counts, Counts()) for counts in (run.decode, run.prompt, bound.decode))
    token_bytes = decode.read_bytes / tokens if tokens else None
    return Replayed(
        policy=run.policy.name,
        budget=run.budget,
        slots=run.slots,
        cycles=run.budget / run.cycle,
        hit_rate=decode.hit_rate,
        regret=best.hit_rate - decode.hit_rate,
        prompt_hit_rate=prompt.hit_rate,
        prompt_bytes=prompt.read_bytes,
        token_bytes=token_bytes,
        tokens_per_second=bytes_per_second / token_bytes if bytes_per_second and token_bytes else None,
        decode=decode,
        prompt=prompt,
    )
