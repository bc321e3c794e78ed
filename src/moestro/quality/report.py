"""What a quality run found: as plain values, as a table for a terminal, as a Markdown page."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from moestro.bench.report import machine_line, written

if TYPE_CHECKING:
    from rich.table import Table

_NUMBERS = {
    "bits/weight": ("bits_per_weight", ".2f"),
    "bits/byte": ("bits_per_byte", ".4f"),
    "change": ("change", "+.3%"),
    "perplexity": ("perplexity", ".3f"),
    "KL mean": ("kl_mean", ".2e"),
    "KL 99%": ("kl_p99", ".2e"),
    "same top-1": ("top1_agreement", ".2%"),
    "expert error": ("expert_error", ".3%"),
    "routing changed": ("routing_changed", ".2%"),
}
"""Columns: the attribute of a row, and how it is written."""
COLUMNS = ("format", "scales", *_NUMBERS)


@dataclass(frozen=True)
class Layer:
    """One expert layer, by its name in the model, against the baseline's.

    The error is the L2 norm of the difference of both outputs over that of the baseline's, all tokens together, given
    the baseline's inputs and routing; `changed` is the share of its choices that the model does not make by itself.
    """

    path: str
    error: float
    changed: float


@dataclass(frozen=True)
class Row:
    """One variant, or the baseline, which is compared with nothing. What was not measured is None.

    Attributes:
        format, search: of the experts (the names of both projections' formats), and how scales were chosen ("nearest",
            "mse"), None where there are none to choose. Of a variant as they were asked for.
        status: "ok", or "skipped" with the sentence why in `reason`; the rest is then None.
        dtype: of activations and of all other weights.
        input_format: "int8" or "fp8-e4m3" where rows are rounded before they meet experts, else "float".
        bits_per_weight: of the experts, scales included, biases not.
        expert_bytes: of all of them.
        bits_per_byte, bits_per_token: negative log2-likelihood of the text over its bytes of UTF-8 and its tokens.
        change: of bits_per_byte, over the baseline's.
        perplexity: e to the mean nats a token.
        kl_mean, kl_p99: mean and 99th percentile over tokens of KL(baseline || variant), in nats.
        top1_agreement: share of tokens for which both models hold the same token for the likeliest.
        expert_error, routing_changed: means over the layers.
        layers: in the order in which they run.
        seconds: for loading and measuring, the baseline's part included.
        projections: "torch", or the format in which linear modules beside the experts are stored.
    """

    format: str
    search: str | None = None
    status: Literal["ok", "skipped"] = "ok"
    reason: str | None = None
    dtype: str | None = None
    input_format: str | None = None
    bits_per_weight: float | None = None
    expert_bytes: int | None = None
    bits_per_byte: float | None = None
    bits_per_token: float | None = None
    change: float | None = None
    perplexity: float | None = None
    kl_mean: float | None = None
    kl_p99: float | None = None
    top1_agreement: float | None = None
    expert_error: float | None = None
    routing_changed: float | None = None
    layers: tuple[Layer, ...] | None = None
    seconds: float | None = None
    projections: str | None = None


@dataclass(frozen=True)
class Text:
    """What was predicted: so many documents of a file, or of the "held-out standard library".

    `num_bytes` are those of UTF-8 that the predicted tokens stand for, `context` the most tokens that a prediction
    looked at, and `sha256` is of the documents' bytes, one after the other.
    """

    name: str
    documents: int
    num_tokens: int
    num_bytes: int
    context: int
    sha256: str


@dataclass(frozen=True)
class Model:
    """What was measured: name, Transformers class, and the experts' sizes."""

    name: str
    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_experts: int


@dataclass
class QualityReport:
    """Everything one run found."""

    command: str
    date: str
    machine: dict[str, Any]
    versions: dict[str, str]
    model: Model
    text: Text
    baseline: Row
    rows: list[Row]

    @property
    def measured(self) -> list[Row]:
        """Rows with numbers."""
        return [row for row in self.rows if row.status == "ok"]

    def as_json(self) -> dict[str, Any]:
        """Plain values for json.dumps: the attributes by name."""
        return asdict(self)


def cells(report: QualityReport) -> list[tuple[str, ...]]:
    """The baseline's line and one for each measured variant, in `COLUMNS`; none where no variant was measured."""
    if not report.measured:
        return []
    named = [("baseline", "", report.baseline), *((row.format, row.search or "", row) for row in report.measured)]
    return [(format, search, *written(row, _NUMBERS.values(), none="")) for format, search, row in named]


def reasons(report: QualityReport) -> list[str]:
    """Why formats were skipped, a line for each reason."""
    found: dict[str, list[str]] = {}
    for row in report.rows:
        if row.status == "skipped":
            found.setdefault(row.reason or "", []).append(row.format)
    return [f"{', '.join(dict.fromkeys(formats))} skipped: {reason}" for reason, formats in found.items()]


def headline(report: QualityReport) -> list[str]:
    """Model, text and baseline, a line each."""
    model, text, own = report.model, report.text, report.baseline
    sizes = f"H {model.hidden_size}, I {model.intermediate_size}, E {model.num_experts}"
    computed = {
        f"{r.dtype}{'' if r.input_format == 'float' else f', {r.input_format} inputs'}"
        f"{'' if r.projections in (None, 'torch') else f', projections {r.projections}'}"
        for r in report.measured
    }
    return [
        f"model: {model.name} ({model.architecture}, {model.num_layers} expert layers, {sizes})",
        f"text: {text.name}: {_count(text.num_tokens, 'token')}, {_count(text.num_bytes, 'byte')}, "
        f"{_count(text.documents, 'document')}, context {text.context:,}",
        f"baseline: experts in {own.format}, computed in {own.dtype}; "
        f"variants computed in {', '.join(sorted(computed)) or own.dtype}",
    ]


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def table(report: QualityReport) -> Table:
    """The table for `rich.print`."""
    from rich.table import Table

    made = Table(padding=0)
    for name in COLUMNS:
        broken = name.replace(" ", "\n").replace("/", "/\n")
        made.add_column(broken, justify="right" if name in _NUMBERS else "left", no_wrap=True)
    for line in cells(report):
        made.add_row(*line, style="bold" if line[0] == "baseline" else None, end_section=line[0] == "baseline")
    return made


def markdown(report: QualityReport) -> str:
    """The whole report as a dated page: machine, versions, command, table."""
    lines = [
        f"# Quality, {report.date[:10]}",
        "",
        f"- machine: {machine_line(report.machine)}",
        f"- versions: {', '.join(f'{k} {v}' for k, v in report.versions.items())}",
        f"- command: `{report.command}`",
        *(f"- {line}" for line in headline(report)),
        *(f"- {reason}" for reason in reasons(report)),
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|---|---|" + "---:|" * len(_NUMBERS),
        *(f"| {' | '.join(line)} |" for line in cells(report)),
    ]
    return "\n".join(lines) + "\n"
