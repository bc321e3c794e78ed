"""Measure what a format costs a language model: in one format after the other, two models in memory at a time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moestro.bench.measure import about
from moestro.errors import MoestroError, invalid_input, not_one_of
from moestro.formats import FORMATS, check_shape, find_format
from moestro.hf.config import MoestroConfig
from moestro.hf.corpus import OPERATION, Corpus, read_corpus
from moestro.hf.dense import check_choice, served_projections
from moestro.hf.loading import load
from moestro.hf.models import find_device
from moestro.hf.serving import find, stored_in
from moestro.hf.side_by_side import SideBySide
from moestro.hf.store import ExpertStore
from moestro.hf.text_model import DTYPES, TextModel, find_text_model
from moestro.quality.report import Model, QualityReport, Row
from moestro.quality.score import Tally
from moestro.types import InputFormat
from moestro.weights import check_input_format

CONTEXT = 1024
"""The most tokens of a window, for models that were made for more: two windows' logits are in memory."""
DEFAULT_TOKENS = 32_768
WIDEST = 32
"""The most bits of the formats that are meant by "all"."""


@dataclass(frozen=True)
class Variant:
    """A format to measure, by its name and not an alias, and how scales are chosen, None where there are none.

    Where the format cannot store the model, that is an error if it is `needed`, else a line in the report.
    """

    format: str
    search: str | None = None
    needed: bool = True

    @property
    def name(self) -> str:
        """Format and search, for people."""
        return " ".join(filter(None, (self.format, self.search)))


def variants(
    formats: Sequence[str], searches: Sequence[str] = ("nearest",), all_formats: bool = False
) -> list[Variant]:
    """Each format with each search ("nearest", "mse" or both), once where there is nothing to search.

    The model must be storable in `formats`, by names or aliases; `all_formats` adds those of at most 32 bits that can.
    """
    for search in searches:
        MoestroConfig(search=search)  # which checks it
    named = dict.fromkeys(find_format(name).name for name in formats)
    others = [name for name, form in FORMATS.items() if form.bits <= WIDEST and name not in named]
    names = {**dict.fromkeys(named, True), **dict.fromkeys(others if all_formats else (), False)}
    if not names:
        raise invalid_input(
            OPERATION, got="no format", needs="one to measure", fix="Name it with --format, or ask for --all-formats."
        )
    return [
        Variant(name, search, needed)
        for name, needed in names.items()
        for search in ([None] if FORMATS[name].is_dense else dict.fromkeys(searches))
    ]


@dataclass(frozen=True)
class Options:
    """What to measure on, and against what.

    Attributes:
        against: the baseline's format; None for the experts as the checkpoint stores them. It is computed in float32.
        dtype, input_format, projections: of the variants, as for `moestro.load`; the dtype by its name.
        device: a torch device.
        text: a UTF-8 file; None for the standard library's files that the bundled model's training held out.
        tokens: how many to predict; None for 32,768, or all if there are fewer; 0 for all.
    """

    against: str | None = None
    dtype: str = "float32"
    device: str = "cpu"
    text: Path | None = None
    tokens: int | None = None
    input_format: InputFormat = "float"
    projections: str = "torch"

    def __post_init__(self) -> None:
        check_choice(self.projections, OPERATION)
        check_input_format(self.input_format, (), OPERATION)
        if self.dtype not in DTYPES:
            raise not_one_of(OPERATION, "dtype", self.dtype, DTYPES)
        if self.tokens is not None and self.tokens < 0:
            needs = "a number of tokens, or 0 for all"
            raise invalid_input(
                OPERATION, got=f"tokens={self.tokens}", needs=needs, fix="Leave it out for the default."
            )


def measure(
    model: str | Path | None,
    wanted: Sequence[Variant],
    options: Options | None = None,
    on_window: Callable[[str, int, int], object] = lambda variant, done, total: None,
) -> QualityReport:
    """Compare a model whose experts are stored in other formats with itself.

    Args:
        model, wanted: a local folder, a hub id, or None for the bundled model; and what `variants` returned.
        on_window: called after each window with the variant's name, and windows done and in all, over all variants.

    Raises:
        InvalidInputError, UnsupportedError: as `load`; a text, a format or predictions that cannot be measured with.
    """
    options = Options() if options is None else options
    find_device(options.device, OPERATION)
    source = find_text_model(model)
    limit = DEFAULT_TOKENS if options.tokens is None else options.tokens or None
    corpus = read_corpus(source.tokenizer, min(source.context or CONTEXT, CONTEXT), options.text, limit)
    how = None if options.against is None else MoestroConfig(options.against)
    baseline = load(source.path, how, "float32", options.device, "float")
    refused = {variant: _why_not(baseline, variant, options.input_format) for variant in wanted}
    for variant, refusal in refused.items():
        if refusal is not None and variant.needed:
            raise refusal
    own, rows, read = _stored(baseline), [], 0
    each, num_fitting = len(corpus.windows), list(refused.values()).count(None)

    def tell(variant: Variant, before: int) -> Callable[[int], object]:
        return lambda done: on_window(variant.name, before + done, each * num_fitting)

    for variant, refusal in refused.items():
        if refusal is None:
            try:
                own, row = _measure(source, options, variant, baseline, corpus, tell(variant, read))
            except MoestroError as error:
                if variant.needed or num_fitting == 1:
                    raise
                refusal = error
            read += each
        rows.append(row if refusal is None else _skipped(variant, refusal))
    num_experts, hidden_size, intermediate_size = _stores(baseline)[0].down.shape
    sizes = len(_stores(baseline)), hidden_size, intermediate_size, num_experts
    return QualityReport(
        **about(options.device),
        model=Model(source.name, type(baseline).__name__, *sizes),
        text=corpus.text,
        baseline=own,
        rows=rows,
    )


def _measure(
    source: TextModel,
    options: Options,
    variant: Variant,
    baseline: Any,
    corpus: Corpus,
    tell: Callable[[int], object],
) -> tuple[Row, Row]:
    """The rows of the baseline and of a variant; `tell` is called with the number of windows that both have read."""
    tell(0)
    start = time.perf_counter()
    how = MoestroConfig(variant.format, variant.search or "nearest", projections=options.projections)
    model = load(source.path, how, options.dtype, options.device, options.input_format)
    pair = SideBySide(model, baseline)
    tally = Tally(pair.paths)
    for done, window in enumerate(corpus.windows, 1):
        pair.read(*window, tally)
        tell(done)
    row = replace(_stored(model), format=variant.format, search=variant.search)
    own, row = tally.rows(_stored(baseline), row, corpus.text.num_bytes)
    return own, replace(row, seconds=time.perf_counter() - start)


def _stores(model: Any) -> list[ExpertStore]:
    return [store for layer in find(model) if (store := stored_in(layer.module)) is not None]


def _why_not(baseline: Any, variant: Variant, input_format: InputFormat) -> MoestroError | None:
    """What a format refuses the model's experts with, if it does."""
    form = find_format(variant.format)
    try:
        check_input_format(input_format, (form,), OPERATION)
        for store in _stores(baseline):
            for projection in (store.gate_up, store.down):
                check_shape(form, projection.shape[1], projection.shape[2], OPERATION)
    except MoestroError as refusal:
        return refusal
    return None


def _skipped(variant: Variant, refusal: MoestroError) -> Row:
    """The reason says what was met and needed; formats with the same reason share a line of the report."""
    reason = str(refusal).removeprefix(f"[{OPERATION}] ").partition(". ")[0]
    return Row(variant.format, variant.search, "skipped", reason.replace(f" for format {variant.format}", ""))


def _stored(model: Any) -> Row:
    """How a model stores its experts."""
    kept = [projection for store in _stores(model) for projection in (store.gate_up, store.down)]
    nbytes = sum(projection.nbytes for projection in kept)
    rest = sorted({module.stored.format.name for module in served_projections(model).values() if module.stored})
    return Row(
        format=" and ".join(dict.fromkeys(projection.format.name for projection in kept)),
        dtype=str(model.dtype).removeprefix("torch."),
        input_format=_stores(model)[0].input_format,
        projections=" and ".join(rest) or "torch",
        bits_per_weight=8 * nbytes / sum(math.prod(projection.shape) for projection in kept),
        expert_bytes=nbytes,
    )
