"""The benchmark of a GPU: what it measures by default, and what came of the goals."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from statistics import median

import torch

from moestro.bench.layers import LAYERS
from moestro.bench.peers import known_peers, ours
from moestro.bench.records import Plan, Report, Row
from peers.graphs import GRAPH, MOST_TOKENS, graphed

DEVICE = "cuda"
TOKENS = (1, 2, 4, 8, 16, 32, 64, 512, 4096, 8192, 16384)
NAMES = ("olmoe", "gpt-oss-20b", "qwen3-30b-a3b", "deepseek-v3", "mixtral", "llama4-scout")
FORMATS = ("dense", "fp8-e4m3-b128", "fp8-e4m3-b128/fp8-e4m3", "mxfp4")
TRANSFORMERS = ("eager", "batched_mm", "grouped_mm")
OF_8_BITS = ("torch-scaled_grouped_mm", "transformers-fp8")
TRITON_KERNELS = ("triton_kernels-bf16", "triton_kernels-mxfp4")
PEER_NAMES = (*TRANSFORMERS, "torch-grouped_mm", *TRITON_KERNELS, *OF_8_BITS)
GRAPHED = ("grouped_mm", "torch-grouped_mm", *TRITON_KERNELS, "torch-scaled_grouped_mm")
"""Peers that are also timed as graphs: eager waits for the device, and batched_mm would hold its copies of weights."""
SECONDS = 0.15
BUDGET = 420.0
"""Seconds of a whole run, which is to stay below eight minutes with what stands before and after it."""

LARGE_BYTES = 1e8
PREFILL_TOKENS = 4096
PREFILL_SIZE = 768
DECODE_SHARE, PREFILL_SHARE, FP8_SHARE = 0.85, 0.70, 0.55


def missing() -> str | None:
    """None, or the sentence why nothing can be measured here."""
    if torch.cuda.is_available():
        return None
    return f"there is no CUDA device that PyTorch {torch.__version__} can use, so GPU speed cannot be measured here"


def default_plan(names: tuple[str, ...] = NAMES, formats: tuple[str, ...] = FORMATS) -> Plan:
    """moestro on the named layers in the formats, and Transformers' ways; each also as a CUDA graph if it can be one.

    Raises:
        InvalidInputError: no such format, or no CUDA device.
    """
    mine = tuple(ours("auto", name) for name in formats)
    known = known_peers()
    peers = tuple(known[name] for name in PEER_NAMES if name in known)
    return Plan(
        layers=tuple(LAYERS[name] for name in names),
        tokens=TOKENS,
        dtypes=(torch.bfloat16,),
        ours=(*mine, *map(graphed, mine)),
        peers=(*peers, *(graphed(peer) for peer in peers if peer.name in GRAPHED)),
        seconds=SECONDS,
        device=DEVICE,
        budget=BUDGET,
    )


@dataclass(frozen=True)
class Point:
    """What was found at one layer, number of bits and number of tokens; None where nothing was.

    Attributes:
        ours, graph: moestro's rows, called and replayed as a graph.
        peer, peer_ratio: the fastest peer, and its time over moestro's, each called.
        graph_peer, graph_ratio: the same of graphs.
        transformers_ratio: of the fastest of Transformers' ways, called.
    """

    ours: Row
    graph: Row | None
    peer: str | None = None
    peer_ratio: float | None = None
    graph_peer: str | None = None
    graph_ratio: float | None = None
    transformers_ratio: float | None = None


def points(rows: list[Row]) -> list[Point]:
    """Rows of reports put together by point and by moestro's format, for those where moestro was measured."""
    found = []
    for _, group in groupby(rows, key=lambda row: (row.layer, row.dtype, row.bits, row.num_tokens)):
        measured = {row.variant: row for row in group if row.status == "ok"}
        for mine in [row for row in measured.values() if row.kind == "moestro" and not is_graph(row)]:
            graph = measured.get(f"{mine.variant}{GRAPH}")
            peers = [row for row in measured.values() if row.kind == "peer"]
            called = _fastest([row for row in peers if not is_graph(row)], mine)
            replayed = _fastest([row for row in peers if is_graph(row)], graph)
            own = _fastest([row for row in peers if row.variant in TRANSFORMERS], mine)
            found.append(Point(mine, graph, *called, *replayed, own[1]))
    return found


def is_graph(row: Row) -> bool:
    """Whether the row is of a CUDA graph."""
    return row.variant.endswith(GRAPH)


def _fastest(peers: list[Row], mine: Row | None) -> tuple[str | None, float | None]:
    if mine is None:
        return None, None
    ratios = [(peer.ratios[mine.variant], peer.variant) for peer in peers if mine.variant in peer.ratios]
    if not ratios:
        return None, None
    least, name = min(ratios)
    return name, least


def goals(rows: list[Row]) -> list[str]:
    """What was asked of the kernels, and at how many of the measured points it was reached; one line each.

    Decode counts the better of a call and its graph, which does the same work without waiting for the host.
    """
    found = points(rows)
    few = [p for p in found if p.ours.num_tokens <= MOST_TOKENS and _bytes(p.ours) > LARGE_BYTES]
    decode = [_best(p).bandwidth_share for p in few]
    many = [p.ours for p in found if p.ours.num_tokens >= PREFILL_TOKENS and p.ours.intermediate_size >= PREFILL_SIZE]
    prefill = [row.peak_share for row in many if row.bits == 16]
    eighths = [row.peak_share for row in many if row.peak == "fp8-mm"]
    called = [p.peer_ratio for p in found]
    replayed = [p.graph_ratio for p in found]
    versus = [p.transformers_ratio for p in found if p.transformers_ratio is not None]
    return [
        _reached(f"T <= {MOST_TOKENS}, over 100 MB of weights: {DECODE_SHARE:.0%} of bandwidth", decode, DECODE_SHARE),
        _reached(f"T >= {PREFILL_TOKENS}, bfloat16: {PREFILL_SHARE:.0%} of the matrix rate", prefill, PREFILL_SHARE),
        _reached(f"T >= {PREFILL_TOKENS}, fp8 inputs: {FP8_SHARE:.0%} of the fp8 matrix rate", eighths, FP8_SHARE),
        _reached("at least as fast as the best peer, called", called, 1.0),
        _reached("at least as fast as the best peer, as graphs", replayed, 1.0),
        f"Transformers' fastest way over moestro, in the median: {_number(median(versus), '.2f') if versus else '-'}",
    ]


def _best(point: Point) -> Row:
    if point.graph is None or point.graph.microseconds is None or point.ours.microseconds is None:
        return point.ours
    return min(point.ours, point.graph, key=lambda row: row.microseconds or 0.0)


def _bytes(row: Row) -> float:
    """Bytes of the active experts."""
    return (row.gigabytes_per_second or 0.0) * (row.microseconds or 0.0) * 1e3


def _reached(what: str, values: list[float | None], least: float) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return f"{what}: not measured"
    count = sum(value >= least for value in known)
    return f"{what}: {count} of {len(known)} points; least {min(known):.2f}, median {median(known):.2f}"


def summary(reports: list[Report]) -> str:
    """Markdown: the goals, and a line for each point with the fastest peer."""
    rows = [row for report in reports for row in report.rows]
    first = reports[0]
    about = ", ".join([first.machine.get("gpu", {}).get("name", first.machine["device"]), *_versions(first)])
    lines = [f"# GPU benchmark, {first.date[:10]}", "", about, "", f"`{first.command}`", ""]
    lines += [f"- {name}: {rate / 1e9:,.0f} GB/s" for name, rate in first.machine.get("bandwidths", {}).items()]
    lines += [f"- {name}: {rate / 1e12:,.0f} TFLOP/s" for name, rate in first.peaks.items()]
    lines += [f"- {note}" for note in dict.fromkeys(note for r in reports for note in r.notes.get("run", []))]
    lines += ["", *(f"- {line}" for line in goals(rows)), "", _HEAD, "|---|---|" + "---:|" * 5 + "---|---:|---|---:|"]
    lines += [_line(point) for point in points(rows)]
    skipped = sum(row.status != "ok" for row in rows)
    return (
        "\n".join([*lines, "", f"{skipped} of {len(rows)} rows have no time; the layers' own tables say why."]) + "\n"
    )


_HEAD = (
    "| layer | variant | T | us | graph us | of bw | of matrix rate | fastest peer | its time / ours | "
    "fastest graph | its time / ours |"
)


def _line(point: Point) -> str:
    row, best = point.ours, _best(point)
    cells = (
        row.layer,
        row.variant,
        str(row.num_tokens),
        _number(row.microseconds, ",.0f"),
        _number(None if point.graph is None else point.graph.microseconds, ",.0f"),
        _number(best.bandwidth_share, ".0%"),
        _number(best.peak_share, ".0%"),
        point.peer or "-",
        _number(point.peer_ratio, ".2f"),
        point.graph_peer or "-",
        _number(point.graph_ratio, ".2f"),
    )
    return f"| {' | '.join(cells)} |"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _versions(report: Report) -> list[str]:
    return [f"{name} {version}" for name, version in report.versions.items()]
