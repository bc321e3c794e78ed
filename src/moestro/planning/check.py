"""A plan against what is measured: its first candidates are loaded and run, each in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from moestro.bench.model import FEWEST_NEW_TOKENS, ModelCase, ModelPoint, measure
from moestro.errors import unsupported
from moestro.planning import Plan
from moestro.planning.report import candidate_json
from moestro.planning.sample import Say
from moestro.planning.search import Candidate, neighbours

MOST_NEW_TOKENS = 32
"""That are generated to be timed."""


@dataclass(frozen=True)
class Checked:
    """One candidate, and what its process found.

    Attributes:
        candidate: as predicted.
        measured: as `moestro bench model` measures it, in as many processes as the candidate has ranks.
    """

    candidate: Candidate
    measured: ModelPoint

    @property
    def prompt_error(self) -> float | None:
        """Predicted over measured seconds of the prompt's pass, less one.

        None with a budget: what is predicted begins with empty slots, and what is measured follows another prompt.
        """
        if self.candidate.choice.memory is not None:
            return None
        return self.candidate.prompt.total / self.measured.prompt_seconds - 1

    @property
    def decode_error(self) -> float:
        """Likewise of a step."""
        return self.candidate.decode.total / self.measured.decode_seconds - 1

    @property
    def memory_error(self) -> float:
        """Likewise of what a device holds, or all processes together."""
        return self.candidate.need.device / self.measured.peak_bytes - 1

    @property
    def rate(self) -> float:
        """New tokens per second with the prompt's pass counted in, as measured."""
        return self.candidate.load.rate(self.measured.prompt_seconds, self.measured.decode_seconds)

    def as_json(self) -> dict[str, Any]:
        """Plain values for json.dumps."""
        errors = {name: getattr(self, name) for name in ("prompt_error", "decode_error", "memory_error")}
        return {"predicted": candidate_json(self.candidate), "measured": asdict(self.measured), **errors}


def check(
    plan: Plan, candidates: Sequence[Candidate] | None = None, say: Say = lambda text, done, total: None
) -> list[Checked]:
    """Run candidates, and compare; if none are given, the recommendation and two neighbours.

    Raises:
        UnsupportedError: a plan of another machine, of a model without weights, or to be run on files of a format that
            they do not have.
        MoestroError: what loading or running raises.
    """
    if not plan.machine.is_here or plan.model.checkpoint is None:
        raise unsupported(
            "plan",
            got="a check of " + ("a model without weights" if plan.machine.is_here else plan.machine.name),
            needs="a checkpoint, and this machine",
            fix="Leave --check out.",
        )
    chosen = neighbours(plan.candidates) if candidates is None else candidates
    for each in chosen:
        if each.why_not_run is not None:
            raise unsupported(
                "plan",
                got=f"a check of {each.why_not_run}",
                needs="what files as they are can be run by",
                fix="Write them first, moestro quantize FOLDER OUT, and plan OUT; or leave the format out.",
            )
    found = []
    for number, each in enumerate(chosen):
        say("running what was planned", number, len(chosen))
        load = each.load
        case = ModelCase(
            plan.model.folder,
            each.choice.format,
            each.choice.memory,
            load.batch,
            load.prompt_tokens,
            max(min(load.new_tokens, MOST_NEW_TOKENS), FEWEST_NEW_TOKENS),
            plan.projections,
            each.choice.ranks,
        )
        found.append(Checked(each, measure(case)))
    return found


def errors(checked: Sequence[Checked]) -> list[float]:
    """By how much predicted seconds are off, prompts and steps, without signs."""
    found = (error for each in checked for error in (each.prompt_error, each.decode_error))
    return [abs(error) for error in found if error is not None]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.{2 if seconds < 1 else 0}f}"


def _share(off: float | None) -> str:
    return "-" if off is None else f"{off:+.0%}"


def text(checked: Sequence[Checked]) -> str:
    """A table of 80 columns: milliseconds predicted and measured."""
    lines = [
        f"{'experts':<16}{'batch':>6}{'prompt, ms':>19}{'':6}{'a step, ms':>19}{'':6}{'memory':>8}",
        f"{'':<22}{'predicted':>10}{'measured':>9}{'off':>6}{'predicted':>10}{'measured':>9}{'off':>6}{'off':>8}",
    ]
    for each in checked:
        choice, batch = each.candidate.choice, str(each.candidate.load.batch)
        form = (choice.format or "as stored") + (f" x{choice.ranks}" if choice.ranks > 1 else "")
        pairs = (
            (each.candidate.prompt.total, each.measured.prompt_seconds, each.prompt_error),
            (each.candidate.decode.total, each.measured.decode_seconds, each.decode_error),
        )
        cells = "".join(f"{_ms(a):>10}{_ms(b):>9}{_share(off):>6}" for a, b, off in pairs)
        lines.append(f"{form} {batch:>{21 - len(form)}}{cells}{each.memory_error:>+8.1%}")
    off = errors(checked)
    best = max(each.rate for each in checked)
    lines.append(f"off by {median(off):.0%} in the median, {max(off):.0%} at most;")
    lines.append(f"the recommendation reaches {checked[0].rate / best:.0%} of the fastest of these")
    return "\n".join(lines)
