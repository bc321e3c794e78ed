"""Print the README's table from the stored results: moestro against the best of Transformers' own ways.

python benchmarks/summary.py            reads benchmarks/results/*.json
"""

from __future__ import annotations

import json
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
LAYERS = ("olmoe", "qwen3-30b-a3b", "gpt-oss-20b", "mixtral")
TOKENS = (1, 16, 128, 512, 2048)
TRANSFORMERS = ("eager", "batched_mm", "grouped_mm")


def best_ratios(dtype: str) -> dict[tuple[str, int], float]:
    """Time of Transformers' fastest way over moestro's, by layer and number of tokens; the latest result counts."""
    found = {}
    for file in sorted(RESULTS.glob("*.json")):
        rows = [row for row in json.loads(file.read_text())["rows"] if "layer" in row and row["dtype"] == dtype]
        for layer, tokens in {(row["layer"], row["num_tokens"]) for row in rows}:
            ratios = [
                row["ratio"]
                for row in rows
                if (row["layer"], row["num_tokens"]) == (layer, tokens)
                and row["variant"] in TRANSFORMERS
                and row["status"] == "ok"
            ]
            if ratios:
                found[layer, tokens] = min(ratios)
    return found


def table() -> str:
    """Markdown: a line for each layer and dtype, a column for each number of tokens."""
    lines = [
        f"| layer | dtype | {' | '.join(f'T = {t}' for t in TOKENS)} |",
        f"|---|---|{'---:|' * len(TOKENS)}",
    ]
    for dtype in ("bfloat16", "float32"):
        ratios = best_ratios(dtype)
        for layer in LAYERS:
            cells = [f"{ratios[layer, t]:.2f}x" if (layer, t) in ratios else "" for t in TOKENS]
            lines.append(f"| {layer} | {dtype} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
