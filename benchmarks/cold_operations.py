"""What small operations of a step cost after a layer's weights have passed through the caches, and when nothing has.

    python benchmarks/cold_operations.py

Operations of gpt-oss-20b's sizes, each timed by itself, warm and behind a product that reads 58 MB. Microseconds,
medians.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
import typer
from rich.table import Table
from torch.nn import functional as F
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm, apply_rotary_pos_emb

from moestro.cli.progress import wide_console
from moestro.ops.attention import attention
from moestro.ops.projection import projection

HIDDEN, EXPERTS, HEADS, GROUPS, COLUMNS, KEYS, ROWS = 2880, 32, 64, 8, 64, 128, 10_000
WARM, COLD = 200, 60

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
@torch.no_grad()
def main() -> None:
    """Print a table."""
    x, weights = random(1, 1, HIDDEN), random(ROWS, HIDDEN)
    table = Table("operation", "warm, us", "cold, us")
    for name, call in operations(x).items():
        warm = seconds(call, lambda: None, WARM)
        cold = seconds(call, lambda: projection(x, weights), COLD)
        table.add_row(name, f"{1e6 * warm:.1f}", f"{1e6 * cold:.1f}")
    wide_console().print(table)


def operations(x: torch.Tensor) -> dict[str, Callable[[], object]]:
    """By name."""
    norm = GptOssRMSNorm(HIDDEN).to(torch.bfloat16)
    router, bias = random(EXPERTS, HIDDEN), random(EXPERTS)
    query, key, keys = random(1, HEADS, 1, COLUMNS), random(1, GROUPS, 1, COLUMNS), random(1, GROUPS, KEYS, COLUMNS)
    cos, sin = random(1, 1, COLUMNS // 2), random(1, 1, COLUMNS // 2)
    return {
        "empty_like": lambda: torch.empty_like(x),
        "x + x": lambda: x + x,
        "norm": lambda: norm(x),
        "rotary embedding": lambda: apply_rotary_pos_emb(query, key, cos, sin),
        "topk": lambda: torch.topk(x[0], 4),
        "keys of one more token": lambda: torch.cat([keys, key], dim=-2),
        "router, PyTorch": lambda: F.linear(x, router, bias),
        "router, engine": lambda: projection(x, router, bias),
        "attention, engine": lambda: attention(query[:, :, 0], keys, keys, 0.125),
    }


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16)


def seconds(call: Callable[[], object], before: Callable[[], object], rounds: int) -> float:
    """The median of a call, each behind another that is not counted."""
    found = []
    for _ in range(rounds):
        before()
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return median(found)


if __name__ == "__main__":
    app()
