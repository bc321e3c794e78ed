"""Which architectures of the installed Transformers moestro serves, measured: ``python tools/architectures.py``.

For every architecture of `zoo.architectures` a tiny model with random weights runs twice on the same inputs, with
Transformers' own ("eager") expert code and with moestro, and the logits are compared.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

import zoo
from moestro.errors import UnsupportedError, unsupported
from moestro.hf import IMPLEMENTATION
from moestro.hf.attention import serve_attention
from moestro.hf.experts import flags_of
from moestro.hf.families.base import INTERFACE
from moestro.hf.serving import accelerate, adapter_of, served

FLOAT32, BFLOAT16 = 1e-5, 2e-2
"""Largest relative errors of the logits."""

INFLUENCE = 1e-2
"""How far the logits must move when one layer's experts are zeroed, for the comparison to prove anything."""

MOST_SEEDS = 16
"""How many random models are tried for one whose own bfloat16 result is steady."""

NOISE_DRAWS = 64
"""How often noise is drawn to find out."""

NEVER_STEADY = "never steady"
"""In place of a seed, where no model was."""

STEADY = BFLOAT16
"""A model is steady if two bfloat16 steps of noise in its experts' outputs never move its logits further."""


@dataclass(frozen=True)
class Row:
    """What was measured for one architecture.

    Attributes:
        architecture: the folder of Transformers' models.
        model: the class that was built.
        seam: "interface", or "adapter (FAMILY)"; empty if it is not served.
        layout: what is unusual about its experts.
        float32: relative error of the logits, max|a - b| / max|b|: the largest of both ways in, for a padded batch and
            for a single token.
        bfloat16: the same in bfloat16.
        influence: how far the logits move when the least important layer's experts are zeroed (relative).
        generate: whether greedy generation gives the same tokens; None for a model that does not generate.
        seed: of the random weights in bfloat16; None if no model tried was steady: `bfloat16` proves nothing then.
        reason: why it is not served, or None.
    """

    architecture: str
    model: str
    seam: str = ""
    layout: str = ""
    float32: float | None = None
    bfloat16: float | None = None
    influence: float | None = None
    generate: bool | None = None
    seed: int | None = None
    reason: str | None = None

    @property
    def covered(self) -> bool:
        """Whether moestro serves it."""
        return self.reason is None

    @property
    def agrees(self) -> bool:
        """Whether everything measured stands within the tolerances, and proves something."""
        return (
            None not in (self.float32, self.bfloat16, self.influence, self.seed)
            and self.float32 <= FLOAT32  # type: ignore[operator]
            and self.bfloat16 <= BFLOAT16  # type: ignore[operator]
            and self.influence > INFLUENCE  # type: ignore[operator]
            and self.generate is not False
        )


def rows(architectures: Iterable[str] | None = None) -> Iterator[Row]:
    """Measure the given architectures, or all of them, one after the other."""
    for architecture in zoo.architectures() if architectures is None else architectures:
        yield measure(architecture)


def measure(architecture: str, seeds: Sequence[int] = range(MOST_SEEDS)) -> Row:
    """Build one architecture tiny and compare moestro with its own code, in bfloat16 with the first steady seed."""
    try:
        model = zoo.build(architecture).model
    except UnsupportedError as error:
        return Row(architecture, "", reason=str(error))
    name = type(model).__name__
    try:
        ours = accelerate(copy.deepcopy(model))
    except UnsupportedError as error:
        return Row(architecture, name, reason=str(error))
    inputs = zoo.inputs_of(model)
    wanted = zoo.outputs(model, inputs)
    one = zoo.inputs_of(model, batch=1, length=1)
    ways = (ours, *by_argument(model))
    errors = [relative_error(zoo.outputs(way, i), zoo.outputs(model, i)) for way in ways for i in (inputs, one)]
    try:
        bfloat16, seed = measure_bfloat16(architecture, seeds)
    except UnsupportedError as error:
        return Row(architecture, name, reason=str(error))
    return Row(
        architecture,
        name,
        seam_of(ours),
        layout_of(ours),
        float32=max(errors),
        bfloat16=bfloat16,
        influence=influence(model, inputs, wanted),
        generate=same_tokens(model, ours, inputs),
        seed=seed,
    )


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """max|got - wanted| / max|wanted|; infinite if either holds a NaN."""
    error = (got.double() - wanted.double()).abs().max() / wanted.double().abs().max()
    return float(error.detach().nan_to_num(nan=float("inf")))


def by_argument(model: PreTrainedModel) -> list[PreTrainedModel]:
    """The model served through experts_implementation="moestro", if its family takes that argument."""
    if any(adapter_of(m) is not None and adapter_of(m) is not INTERFACE for m in model.modules()):
        return []
    other = copy.deepcopy(model)
    other.set_experts_implementation(IMPLEMENTATION)
    return [other]


def measure_bfloat16(architecture: str, seeds: Sequence[int]) -> tuple[float, int | None]:
    """Relative error in bfloat16 and the seed of the first steady model (None, with the last one's error, if none is).

    A router's top-k is a step: where two experts score alike, rounding decides and the logits jump, in Transformers'
    own code as much as in ours. Such a model proves nothing either way. Whether it is one is decided by its own code
    alone: its logits must survive rounding-size noise in its experts' outputs.

    Raises:
        UnsupportedError: the model's own code does not run in bfloat16.
    """
    for seed in seeds:
        model = zoo.to_bfloat16(zoo.build(architecture, seed).model)
        serve_attention(model)  # both sides have it: here experts are compared
        inputs = zoo.inputs_of(model, seed)
        try:
            wanted = zoo.outputs(model, inputs)
        except RuntimeError as error:
            raise unsupported(
                "coverage",
                got=f"{type(model).__name__}, whose own code fails in bfloat16: {error}",
                needs="a model that runs without moestro",
                fix="Try another version of Transformers.",
            ) from error
        found = steady(model, inputs, wanted)
        if found:
            break
    distance = relative_error(zoo.outputs(accelerate(copy.deepcopy(model)), inputs), wanted)
    return distance, seed if found else None


def steady(model: PreTrainedModel, inputs: dict[str, Tensor], wanted: Tensor) -> bool:
    """Whether rounding-size noise in every expert layer's output leaves the logits where they are."""
    generator = torch.Generator().manual_seed(0)
    hooks = [m.register_forward_hook(partial(_jitter, generator)) for m in model.modules() if adapter_of(m) is not None]
    still = all(relative_error(zoo.outputs(model, inputs), wanted) <= STEADY for _ in range(NOISE_DRAWS))
    for hook in hooks:
        hook.remove()
    return still


def _jitter(generator: torch.Generator, module: nn.Module, arguments: Any, output: Any) -> Any:
    first: Tensor = output[0] if isinstance(output, tuple) else output
    noise = 1 + (torch.rand(first.shape, generator=generator) - 0.5) * 2**-6
    noisy = (first.float() * noise).to(first.dtype)
    return (noisy, *output[1:]) if isinstance(output, tuple) else noisy


_LAST = re.compile(
    r"^(experts\.)?(down_proj|down_proj_bias|output_linear\.weight|up_embed\.weight|mlp\.w2|expert_\d+\.(wo|fc2)\.\w+)$"
)
"""Parameters of a served module through which everything its routed experts add must pass."""


def influence(model: PreTrainedModel, inputs: dict[str, Tensor], wanted: Tensor) -> float:
    """The smallest relative move of the logits when one layer's experts are made to add nothing."""
    moves = []
    for module in [m for m in model.modules() if adapter_of(m) is not None]:
        last = [p for name, p in module.named_parameters() if _LAST.match(name)]
        kept = [p.detach().clone() for p in last]
        _set(last, [torch.zeros_like(p) for p in kept])
        moves.append(relative_error(zoo.outputs(model, inputs), wanted))
        _set(last, kept)
    return min(moves)


@torch.no_grad()
def _set(parameters: list[nn.Parameter], values: list[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


def same_tokens(model: PreTrainedModel, ours: PreTrainedModel, inputs: dict[str, Tensor]) -> bool | None:
    """Whether both write the same eight words greedily; None if the model does not generate."""
    if not model.can_generate():
        return None
    settings = GenerationConfig(
        max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=2, decoder_start_token_id=1
    )
    prompt = {k: v for k, v in inputs.items() if not k.startswith("decoder")}
    written = [m.generate(**prompt, generation_config=settings) for m in (model, ours)]
    return bool(torch.equal(*written))


def seam_of(model: nn.Module) -> str:
    """How a served model is reached."""
    families = sorted({s.family for s in served(model)})
    return "interface" if families == [INTERFACE.family] else f"adapter ({', '.join(families)})"


def layout_of(model: nn.Module) -> str:
    """What is unusual about a served model's experts, in words."""
    found: dict[str, None] = {}
    for entry in served(model):
        module = model.get_submodule(entry.path)
        adapter, flags = adapter_of(module), flags_of(module)
        words = {
            adapter.layout if adapter else "": True,
            "transposed": flags.transposed,
            "interleaved": not getattr(module, "is_concatenated", True),
            "biases": flags.biased,
            "not gated": not flags.gated,
            "output norm": flags.output_norm,
            entry.activation: entry.activation != "silu",
        }
        found.update(dict.fromkeys(word for word, holds in words.items() if word and holds))
    return ", ".join(found)


def markdown(measured: list[Row]) -> str:
    """The page docs/reference/architectures.md, whole."""
    covered = sum(r.covered for r in measured)
    rule = {"seeds": MOST_SEEDS, "draws": NOISE_DRAWS, "steady": STEADY, "never": NEVER_STEADY}
    lines = [_INTRODUCTION.format(version=transformers.__version__, covered=covered, **rule)]
    lines += [
        "| architecture | model | seam | experts | float32 | bfloat16 | seed | generate |",
        "|---|---|---|---|--:|--:|--:|---|",
    ]
    for row in measured:
        if row.covered:
            seed = NEVER_STEADY if row.seed is None else row.seed
            same = {True: "same tokens", False: "differs", None: "no head"}[row.generate]
            lines.append(
                f"| {row.architecture} | {row.model} | {row.seam} | {row.layout} "
                f"| {row.float32:.1e} | {row.bfloat16:.1e} | {seed} | {same} |"
            )
    lines += ["", "## Not served", "", "| architecture | reason |", "|---|---|"]
    lines += [f"| {row.architecture} | {row.reason} |" for row in measured if not row.covered]
    return "\n".join(lines) + "\n"


_INTRODUCTION = """# Architectures

Written by `python tools/architectures.py --markdown docs/reference/architectures.md`; Transformers {version},
{covered} architectures served.

The list is Transformers' own registry of models, filtered by whether the modeling file defines routed experts. Each is
built tiny with random weights and run on a padded batch and on a single token, once with its own code
(`experts_implementation="eager"`) and once with moestro. `float32` and `bfloat16` are max\\|a - b\\| / max\\|b\\| of
the logits (of the last hidden states where the text model has no head). Zeroing any one layer's experts moves those by
more than 1e-2, so agreement means the experts agree. `generate` compares eight greedy tokens. A multimodal family is
represented by its text model.

A router's choice is a step: where two experts score alike, rounding decides, and bfloat16 logits jump in Transformers'
own code too. `bfloat16` is therefore measured on the first of at most {seeds} random models (`seed` says which) that is
steady by Transformers' code alone: {draws} times, noise of two bfloat16 steps in every expert layer's output moves its
logits by at most {steady:g}. *{never}* means that none was; such a row proves nothing in bfloat16 and counts as
a failure.

*interface* means that `experts_implementation="moestro"` and `moestro.accelerate(model)` both serve it; an *adapter*
needs `accelerate`.
"""


def main() -> int:
    """Measure, print the table, and write it where asked; 0 if everything that is served agrees."""
    parser = argparse.ArgumentParser(prog="python tools/architectures.py", description=__doc__)
    parser.add_argument("architectures", nargs="*", help="only these (default: all)")
    parser.add_argument("--markdown", type=Path, help="write the page to this file")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    names = options.architectures or zoo.architectures()
    transformers.logging.set_verbosity_error()
    console = Console(stderr=True)
    measured = list(track(rows(names), "architectures", total=len(names), console=console, transient=True))
    if options.markdown:
        options.markdown.write_text(markdown(measured))
    print(json.dumps([asdict(row) for row in measured], indent=2) if options.json else markdown(measured))
    return 0 if all(row.agrees for row in measured if row.covered) else 1


if __name__ == "__main__":
    raise SystemExit(main())
