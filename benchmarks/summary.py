"""Print the tables of docs/benchmarks.md from the stored results.

python benchmarks/summary.py             moestro against the best of Transformers' own ways
python benchmarks/summary.py --formats   every format against the best peer whose weights have as many bits
"""

from __future__ import annotations

import argparse
import json
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
SHORT = 16
"""Tokens below which the times of these peers do not count."""


def points(results: Path = RESULTS) -> Iterator[list[dict[str, Any]]]:
    """The measured rows of each point of each result of a CPU, the oldest result first."""
    for file in sorted(results.glob("*.json")):
        found: dict[tuple[object, ...], list[dict[str, Any]]] = {}
        stored = json.loads(file.read_text())
        if "gpu" in stored.get("machine", {}):
            continue  # of another kind of machine
        for row in points_of(stored):
            if "layer" in row and "kind" in row:  # of bench layer, beside its peers
                key = (row["layer"], row["dtype"], row.get("bits"), row["num_tokens"])
                found.setdefault(key, []).append(row)
        yield from found.values()


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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", action="store_true")
    print(formats_table() if parser.parse_args().formats else table())
