"""Print the tables of docs/benchmarks.md from the stored results.

python benchmarks/summary.py             moestro against the best of Transformers' own ways
python benchmarks/summary.py --formats   every format against the best peer whose weights have as many bits
python benchmarks/summary.py FILE.json   the points of one result against the best peer whose error is no larger
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moestro.bench.schema import points_of
from moestro.bench.timing import is_steady

RESULTS = Path(__file__).parent / "results"
LAYERS = ("olmoe", "qwen3-30b-a3b", "gpt-oss-20b", "mixtral")
TOKENS = (1, 16, 128, 512, 2048)
TRANSFORMERS = ("eager", "batched_mm", "grouped_mm")
OTHER_THREADS = ("ggml-", "ort-")
"""Peers with threads of their own, which in these results shared a process with PyTorch's and slept through part of a
short call."""
MOST_ERROR = 1.1
"""Times moestro's error, that a peer may have and still be compared with."""
SHORT = 16
"""Tokens below which the times of these peers do not count."""


def points(results: Path = RESULTS) -> Iterator[list[dict[str, Any]]]:
    """The measured rows of each point of each result of a CPU, the oldest result first."""
    for file in sorted(results.glob("*.json")):
        stored = json.loads(file.read_text())
        if "gpu" not in stored.get("machine", {}):  # which is another kind of machine
            yield from of_points(stored)


def of_points(stored: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The rows of each point of a result of bench layer: moestro's and its peers'."""
    found: dict[tuple[object, ...], list[dict[str, Any]]] = {}
    for row in points_of(stored):
        if "layer" in row and "kind" in row:
            key = (row["layer"], row["dtype"], row.get("bits"), row["num_tokens"])
            found.setdefault(key, []).append(row)
    return list(found.values())


def best_ratios(dtype: str) -> dict[tuple[str, int], float]:
    """Time of Transformers' fastest way over moestro's, by layer and number of tokens; the latest result counts."""
    found = {}
    for rows in points():
        own = [row for row in rows if row["variant"] in TRANSFORMERS and row["status"] == "ok"]
        if own and rows[0]["dtype"] == dtype:
            best = min(own, key=lambda row: float(row["ratio"]))
            point = rows[0]["layer"], rows[0]["num_tokens"]
            found.pop(point, None)
            if _is_steady(best):
                found[point] = best["ratio"]
    return found


def table() -> str:
    """Markdown: a line for each layer and dtype, a column for each number of tokens."""
    lines = _head("layer", "dtype")
    for dtype in ("bfloat16", "float32"):
        ratios = best_ratios(dtype)
        for layer in LAYERS:
            cells = [f"{ratios[layer, t]:.2f}x" if (layer, t) in ratios else "" for t in TOKENS]
            lines.append(f"| {layer} | {dtype} | {' | '.join(cells)} |")
    return "\n".join(lines)


def against_best(results: Path = RESULTS) -> dict[tuple[str, str, str], dict[int, tuple[float, str]]]:
    """How many times longer the fastest peer takes than moestro, and its name; the latest result counts.

    By layer, moestro's variant (its format, and what it does otherwise than by default) and dtype of x, then by number
    of tokens. Peers are those of the same point, whose weights have as many bits; a ratio is the median over rounds of
    calls that alternated. A point at which moestro or all peers have no time has no number. Below `SHORT` tokens peers
    with threads of their own have none. Where the quartiles of the fastest peer are too far apart there is no number.
    """
    found: dict[tuple[str, str, str], dict[int, tuple[float, str]]] = {}
    for rows in points(results):
        peers = [row for row in rows if row["kind"] == "peer" and row["status"] == "ok" and _is_fair(row)]
        for own in (row for row in rows if row["kind"] == "moestro" and row["status"] == "ok"):
            ratios = [(_ratio(peer, own["variant"], rows[0]["variant"]), peer) for peer in peers]
            rated = [(ratio, peer) for ratio, peer in ratios if ratio is not None]
            if not rated:
                continue
            ratio, peer = min(rated, key=lambda pair: pair[0])
            what = own["variant"].removeprefix("moestro").removeprefix("-") or own["dtype"]
            line = found.setdefault((own["layer"], what, own["dtype"]), {})
            line.pop(own["num_tokens"], None)
            if _is_steady(peer):
                line[own["num_tokens"]] = (ratio, peer["variant"])
    return found


def by_error(result: Path) -> str:
    """Markdown: each moestro variant of each point of a result, and the fastest peer whose error is at most 1.1 of its.

    A second column has the fastest of all, whatever its error, where that is another one. The cell of a peer whose
    quartiles are too far apart says so.
    """
    lines = ["| layer | x | bits | T | moestro's | of bandwidth | the fastest with no more error | the fastest |"]
    lines.append("|---|---|---:|---:|---|---:|---|---|")
    for rows in of_points(json.loads(result.read_text())):
        for own in (row for row in rows if row["kind"] == "moestro" and row["status"] == "ok"):
            peers = [row for row in rows if row["kind"] == "peer" and row["status"] == "ok"]
            rated = [(_ratio(peer, own["variant"], rows[0]["variant"]), peer) for peer in peers]
            found = sorted(((r, peer) for r, peer in rated if r is not None), key=lambda pair: pair[0])
            right = [pair for pair in found if (pair[1]["error"] or 0.0) <= MOST_ERROR * (own["error"] or 0.0)]
            fair, best = (_cell(*pairs[0]) if pairs else "" for pairs in (right, found))
            share = own.get("bandwidth_share")
            about = own["layer"], own["dtype"], own.get("bits"), own["num_tokens"], own["variant"]
            rest = "" if share is None else f"{share:.0%}", fair, "" if best == fair else best
            lines.append(f"| {' | '.join(map(str, (*about, *rest)))} |")
    return "\n".join(lines)


def _cell(ratio: float, peer: dict[str, Any]) -> str:
    return f"{ratio:.2f}x {peer['variant']}{'' if _is_steady(peer) else ', unsteady'}"


def _is_fair(peer: dict[str, Any]) -> bool:
    """Whether the time of a peer that alternated with moestro in one process is its own time."""
    return peer["num_tokens"] >= SHORT or not peer["variant"].startswith(OTHER_THREADS)


def _is_steady(peer: dict[str, Any]) -> bool:
    """Whether the quartiles of its ratio are close together; results without them count as steady."""
    low, high = peer.get("ratio_low"), peer.get("ratio_high")
    return low is None or high is None or is_steady(low, high)


def _ratio(peer: dict[str, Any], variant: str, first: str) -> float | None:
    """Of a peer to a variant; older results have it in an object, the oldest for the first of the point only."""
    older = peer.get("ratios", {}).get(variant, peer["ratio"] if variant == first else None)
    found: float | None = peer.get(f"ratios.{variant}", older)
    return found


def formats_table(results: Path = RESULTS) -> str:
    """Markdown: a line for each layer, format and dtype of x, a column for each number of tokens."""
    lines = _head("layer", "weights", "x")
    for (layer, what, dtype), ratios in sorted(against_best(results).items()):
        cells = ["{:.2f}x {}".format(*ratios[t]) if t in ratios else "" for t in TOKENS]
        lines.append(f"| {layer} | {what} | {dtype} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _head(*names: str) -> list[str]:
    columns = (*names, *(f"T = {t}" for t in TOKENS))
    return [f"| {' | '.join(columns)} |", f"|{'---|' * len(names)}{'---:|' * len(TOKENS)}"]


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 2 for a file that is no result, or has no points of bench layer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", action="store_true")
    parser.add_argument("result", nargs="?", type=Path, help="one file of bench layer")
    given = parser.parse_args(arguments)
    if given.result is None:
        print(formats_table() if given.formats else table())
        return 0
    try:
        found = by_error(given.result)
    except (OSError, ValueError) as error:
        print(f"summary.py: {given.result} is no result: {error}", file=sys.stderr)
        return 2
    if len(found.splitlines()) == 2:
        print(f"summary.py: {given.result} has no layers beside their peers", file=sys.stderr)
        return 2
    print(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
