"""`moestro simulate`: arguments in, a table out; the work is in `moestro.parallel`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moestro.cli.progress import waiting, wide_console
from moestro.cli.refusal import check_targets, refusals
from moestro.errors import invalid_input

if TYPE_CHECKING:
    from torch import Tensor

    from moestro.parallel.simulate_links import Mesh
    from moestro.parallel.simulate_report import SimulationReport

TOKENS = 4096
EXPERTS = 256
TOP_K = 8
LOAD = "zipf:0.8"
HISTORY = 262_144
MAX_ROW_BYTES = 2**31


def simulate(
    mesh: Annotated[str, typer.Option(help="ROWSxCOLUMNS, or a number of ranks in one column.")] = "4x8",
    links: Annotated[str, typer.Option(help="Between the rows of a column: ring, line, switch.")] = "ring",
    experts: Annotated[int | None, typer.Option(help="Of the layer; else 256, or those of the trace.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Experts of a token; else 8.")] = None,
    tokens: Annotated[int | None, typer.Option(help=f"Of all ranks together; else {TOKENS}.")] = None,
    load: Annotated[str | None, typer.Option(help=f"uniform, or zipf:EXPONENT; else {LOAD}.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the tokens; else 0.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Recorded ids, .npz, .npy or .json, in place of a load.")] = None,
    trace_layer: Annotated[int, typer.Option(help="Of a .npz file: the expert layer, counted from 0.")] = 0,
    policy: Annotated[str, typer.Option(help="Of placement: contiguous, eplb, balanced.")] = "contiguous,balanced",
    redundant: Annotated[int | None, typer.Option(help="Slots beside one for each expert; else an eighth.")] = None,
    groups: Annotated[int, typer.Option(help="Of experts, each kept on one node.")] = 1,
    nodes: Annotated[int, typer.Option(help="Of ranks.")] = 1,
    dispatch: Annotated[str, typer.Option(help="dense, unicast, sparse.")] = "dense,sparse",
    row_bytes: Annotated[int, typer.Option(help="Of one token's row.")] = 2 * 7168,
    bandwidth: Annotated[float, typer.Option(help="Of a link in each direction, GB/s.")] = 12.5,
    hop: Annotated[float, typer.Option(help="Of a link, microseconds.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, and no table.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a picture (.png, .svg, .pdf).")] = None,
    report: Annotated[Path | None, typer.Option(help="Write the table as a Markdown page.")] = None,
) -> None:
    """Run a routing over a mesh of ranks that need not be there, before and after balancing.

    Experts are placed by the loads of other tokens than those that are run. Lists are separated by commas. Times are
    those of a cost model, not of this machine. What cannot be simulated ends with one line and exit code 2.
    For instance: moestro simulate --mesh 4x8 --load zipf:0.8 --plot mesh.png
    """
    with refusals():
        check_targets("simulate", plot, report)
        from moestro.parallel.simulate_links import Mesh

        asked = Mesh.parse(mesh, links, bandwidth * 1e9, hop * 1e-6)  # type: ignore[arg-type]
        drawn = {"tokens": tokens, "top-k": top_k, "load": load, "seed": seed}
        routed = _draw(experts, drawn) if trace is None else _recorded(trace, trace_layer, experts, drawn)
        count = routed.num_experts
        slots = count + (min(-(-count // 8), count * (asked.num_ranks - 1)) if redundant is None else redundant)
        with waiting("simulating"):
            found = _compare(asked, routed, (_split(policy), slots, (groups, nodes)), (_split(dispatch), row_bytes))
        if as_json:
            typer.echo(json.dumps(found.as_json()))
        else:
            _print(found)
        _write(found, plot, report)


@dataclass(frozen=True)
class Routed:
    """A batch's ids, those of the tokens before it, and what to call them."""

    name: str
    num_experts: int
    before: Tensor
    ids: Tensor


def _draw(experts: int | None, asked: dict[str, Any]) -> Routed:
    from moestro.parallel.simulate_traces import zipf_ids

    defaults: dict[str, Any] = {"tokens": TOKENS, "top-k": TOP_K, "load": LOAD, "seed": 0}
    tokens, top_k, load, seed = (default if asked[key] is None else asked[key] for key, default in defaults.items())
    sizes = (tokens, EXPERTS if experts is None else experts, top_k)
    kind, exponent = load.partition(":")[0], exponent_of(load, "simulate")
    ids = zipf_ids(*sizes, exponent, seed)
    before = zipf_ids(HISTORY, *sizes[1:], exponent, seed + 1)
    return Routed(f"{kind} {exponent:g}" if exponent else "uniform", sizes[1], before, ids)


def exponent_of(load: str, operation: str) -> float:
    """Of "uniform", 0, or "zipf:EXPONENT"; an InvalidInputError for another text."""
    kind, _, value = load.partition(":")
    try:
        return {"uniform": 0.0, "zipf": float(value or 0.8)}[kind]
    except (KeyError, ValueError):
        needs = "uniform, or zipf:EXPONENT"
        raise invalid_input(operation, got=f"load {load!r}", needs=needs, fix="Try zipf:0.8.") from None


def _recorded(path: Path, layer: int, experts: int | None, drawn: dict[str, Any]) -> Routed:
    """The second half of a recording, with the first before it."""
    from moestro.parallel.simulate_traces import read_trace

    ids = read_trace(path, layer)
    half = len(ids) // 2
    idle = [f"--{name}" for name, value in drawn.items() if value is not None]
    if half < 1 or idle:
        got = f"{' '.join(idle)} with {str(path)!r}" if half else f"{str(path)!r} of one token"
        needs = "a recording of at least two tokens, whose second half is run as it is"
        raise invalid_input("simulate", got=got, needs=needs, fix="Those options are for tokens that are drawn.")
    return Routed(path.name, max(1, 1 + int(ids.max())) if experts is None else experts, ids[:half], ids[half:])


def _compare(
    mesh: Mesh, routed: Routed, placing: tuple[list[str], int, tuple[int, int]], sending: tuple[list[str], int]
) -> SimulationReport:
    from moestro.bench.measure import about
    from moestro.parallel import simulate_report as library
    from moestro.routing import expert_counts
    from moestro.types import Routing

    ids, before = routed.ids, routed.before
    (names, slots, nested), (dispatches, row_bytes) = placing, sending
    most = routed.num_experts * mesh.num_ranks
    if not 1 <= row_bytes <= MAX_ROW_BYTES or not dispatches or slots > most:
        got = f"row_bytes={row_bytes}, dispatch {dispatches}, {slots} slots"
        needs = f"1 to {MAX_ROW_BYTES} bytes, a dispatch, at most {most} slots"
        raise invalid_input("simulate", got=got, needs=needs, fix="Leave them out for the defaults.")
    loads = expert_counts(Routing(before, before.float()), routed.num_experts)
    placed = library.placements(names, loads, mesh.num_ranks, slots, nested)
    batch = library.Batch(routed.name, len(ids), routed.num_experts, ids.shape[1], row_bytes, len(before))
    rows = library.compare(ids, mesh, placed, dispatches, row_bytes)  # type: ignore[arg-type]
    return library.SimulationReport(**about("cpu"), mesh=mesh, batch=batch, rows=rows)


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _write(found: SimulationReport, plot: Path | None, report: Path | None) -> None:
    from moestro.parallel.simulate_plot import simulation_plot
    from moestro.parallel.simulate_report import markdown

    if report is not None:
        report.write_text(markdown(found), encoding="utf-8")
    if plot is not None:
        simulation_plot(found, plot)


def _print(found: SimulationReport) -> None:
    from moestro.parallel.simulate_report import headline, table

    console = wide_console()
    console.print(*headline(found), sep="\n", soft_wrap=True)
    console.print(table(found))
