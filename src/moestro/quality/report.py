"""What a quality run found: as plain values, as a table for a terminal, as a Markdown page."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from moestro.bench.report import machine_line
from moestro.quality.score import Change, Likelihood

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = (
    "format",
    "scales",
    "bits/weight",
    "bits/byte",
    "change",
    "perplexity",
    "KL mean",
    "KL 99%",
    "same top-1",
    "expert error",
    "routing changed",
)


@dataclass(frozen=True)
class Stored:
    """Experts as a variant stores them.

    Attributes:
        format: its name, or the names of both projections' formats.
        search: how scales were chosen ("nearest", "mse"); None where there are none to choose.
        dtype: of activations and of all other weights.
        bits_per_weight: of the experts, scales included, biases not.
        expert_bytes: of all of them.
        input_format: "int8" where rows are rounded before they meet experts, else "float".
    """

    format: str
    search: str | None
    dtype: str
    bits_per_weight: float
    expert_bytes: int
    input_format: str = "float"


@dataclass(frozen=True)
class Row:
    """One variant.

    Attributes:
        format, search: as they were asked for.
        status: "ok", or "skipped" with the sentence why in `reason`; the rest is then None.
        seconds: for loading and measuring, the baseline's part included.
    """

    format: str
    search: str | None
    status: Literal["ok", "skipped"]
    reason: str | None = None
    stored: Stored | None = None
    change: Change | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Text:
    """What was predicted.

    Attributes:
        name: a file, or "held-out standard library".
        documents: number of them.
        num_tokens: that were predicted.
        num_bytes: of UTF-8 that these tokens stand for.
        context: the most tokens that a prediction looked at.
        sha256: of the documents' bytes, one after the other.
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
    """Everything one run found; `baseline` says how the experts of the baseline are stored."""

    command: str
    date: str
    machine: dict[str, Any]
    versions: dict[str, str]
    model: Model
    text: Text
    baseline: Stored
    rows: list[Row]

    @property
    def measured(self) -> list[Row]:
        """Rows with numbers."""
        return [row for row in self.rows if row.change is not None]

    @property
    def baseline_likelihood(self) -> Likelihood | None:
        """How well the baseline predicts the text; None if no variant was measured against it."""
        return next((row.change.baseline for row in self.rows if row.change is not None), None)

    def as_json(self) -> dict[str, Any]:
        """Plain values for json.dumps; a variant's numbers stand beside its format, null where it was skipped."""
        own = self.baseline_likelihood
        baseline = {**asdict(self.baseline), **_likelihood(own)}
        rows = [_row_json(row) for row in self.rows]
        return {**asdict(self), "baseline": baseline, "rows": rows}


def _likelihood(found: Likelihood | None) -> dict[str, float | None]:
    names = ("bits_per_byte", "bits_per_token", "perplexity")
    return {name: None if found is None else getattr(found, name) for name in names}


def _row_json(row: Row) -> dict[str, Any]:
    stored, change = row.stored, row.change
    return {
        "format": row.format,
        "search": row.search,
        "status": row.status,
        "reason": row.reason,
        "dtype": None if stored is None else stored.dtype,
        "input_format": None if stored is None else stored.input_format,
        "bits_per_weight": None if stored is None else stored.bits_per_weight,
        "expert_bytes": None if stored is None else stored.expert_bytes,
        **_likelihood(None if change is None else change.likelihood),
        "kl_mean": None if change is None else change.divergence,
        "kl_p99": None if change is None else change.divergence_p99,
        "top1_agreement": None if change is None else change.agreement,
        "expert_error": None if change is None else change.expert_error,
        "routing_changed": None if change is None else change.changed_routing,
        "layers": None if change is None else [asdict(layer) for layer in change.layers],
        "seconds": row.seconds,
    }


def cells(report: QualityReport) -> list[tuple[str, ...]]:
    """The baseline's line and one for each measured variant, in `COLUMNS`."""
    own = report.baseline_likelihood
    lines = [] if own is None else [_line("baseline", report.baseline, own)]
    return [*lines, *(found for row in report.rows if (found := _cells(row)) is not None)]


def _line(name: str, stored: Stored, found: Likelihood) -> tuple[str, ...]:
    start = (name, f"{stored.bits_per_weight:.2f}", f"{found.bits_per_byte:.4f}")
    return (start[0], "", *start[1:], "", f"{found.perplexity:.3f}", *[""] * 5)


def _cells(row: Row) -> tuple[str, ...] | None:
    stored, change = row.stored, row.change
    if stored is None or change is None:
        return None
    of = change.likelihood.nats / change.baseline.nats - 1 if change.baseline.nats else 0.0
    return (
        row.format,
        row.search or "",
        f"{stored.bits_per_weight:.2f}",
        f"{change.likelihood.bits_per_byte:.4f}",
        f"{of:+.3%}",
        f"{change.likelihood.perplexity:.3f}",
        f"{change.divergence:.2e}",
        f"{change.divergence_p99:.2e}",
        f"{change.agreement:.2%}",
        f"{change.expert_error:.3%}",
        f"{change.changed_routing:.2%}",
    )


def reasons(report: QualityReport) -> list[str]:
    """Why formats were skipped, a line for each reason."""
    found: dict[str, list[str]] = {}
    for row in report.rows:
        if row.status == "skipped":
            found.setdefault(row.reason or "", []).append(row.format)
    return [f"{', '.join(dict.fromkeys(formats))} skipped: {reason}" for reason, formats in found.items()]


def headline(report: QualityReport) -> list[str]:
    """Model, text and baseline, a line each."""
    model, text, stored = report.model, report.text, report.baseline
    sizes = f"H {model.hidden_size}, I {model.intermediate_size}, E {model.num_experts}"
    dtypes = sorted({_computed(row.stored) for row in report.measured if row.stored is not None})
    return [
        f"model: {model.name} ({model.architecture}, {model.num_layers} expert layers, {sizes})",
        f"text: {text.name}: {_count(text.num_tokens, 'token')}, {_count(text.num_bytes, 'byte')}, "
        f"{_count(text.documents, 'document')}, context {text.context:,}",
        f"baseline: experts in {stored.format}, computed in {stored.dtype}; "
        f"variants computed in {', '.join(dtypes) or stored.dtype}",
    ]


def _computed(stored: Stored) -> str:
    return stored.dtype if stored.input_format == "float" else f"{stored.dtype}, {stored.input_format} inputs"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def table(report: QualityReport) -> Table:
    """The table for `rich.print`."""
    from rich.table import Table

    made = Table(padding=0)
    for name in COLUMNS:
        made.add_column(
            name.replace(" ", "\n").replace("/", "/\n"),
            justify="left" if name in ("format", "scales") else "right",
            no_wrap=True,
        )
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
        *markdown_table(report),
    ]
    return "\n".join(lines) + "\n"


def markdown_table(report: QualityReport) -> list[str]:
    """The table's lines."""
    rule = "|---|---|" + "---:|" * (len(COLUMNS) - 2)
    return [f"| {' | '.join(COLUMNS)} |", rule, *(f"| {' | '.join(line)} |" for line in cells(report))]
