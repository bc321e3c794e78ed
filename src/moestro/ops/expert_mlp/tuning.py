"""Which strategy, and which way to multiply: functions of shape, dtype and the processor's features."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from moestro.errors import invalid_input
from moestro.ops.expert_mlp.matmul import Way

STRATEGIES = ("grouped", "blockwise", "selective", "all_experts")

SELECTIVE_ALPHA = 4.0
"""Mean rows per expert up to which pairs are walked instead of sorted."""

SMALL_BYTES = 1 << 20
"""Expert matrices up to this size cost less to multiply than to call for one by one."""


def small_experts(stack: Tensor) -> bool:
    """Whether calls, not weights, are what one expert's matmul costs: then all go into one call."""
    if stack.dtype == torch.bfloat16 and not multiplies_bfloat16():
        return False
    return stack.dtype in (torch.float32, torch.bfloat16) and stack[:1].nbytes <= SMALL_BYTES


def batch_rows(stack: Tensor) -> int:
    """Experts of few rows share what stands between their matmuls up to this many rows."""
    return 4096 if small_experts(stack) else 32


@dataclass(frozen=True)
class Choice:
    """A strategy and the sentence why."""

    strategy: str
    reason: str


ACCUMULATE_BYTES = 32 << 20
"""Beyond this, a buffer of all rows costs more in fresh pages than adding each expert's rows to the sums at once."""


def choose_strategy(num_pairs: int, num_experts: int) -> Choice:
    """Pick by T * K against alpha * E.

    Few pairs touch few experts, and a walk over the pairs themselves costs less than ordering them; from there on
    rows are grouped by expert. Blockwise and all_experts do strictly more work in plain torch, and run only when
    asked for.
    """
    limit = SELECTIVE_ALPHA * num_experts
    if num_pairs <= limit:
        return Choice("selective", f"T*K = {num_pairs} <= {limit:g} = alpha*E with alpha = {SELECTIVE_ALPHA:g}")
    return Choice("grouped", f"T*K = {num_pairs} > {limit:g} = alpha*E with alpha = {SELECTIVE_ALPHA:g}")


def parse_strategy(strategy: str, operation: str = "expert_mlp") -> tuple[str, int | None]:
    """Split a block size off: blockwise-64 -> ("blockwise", 64); any other name -> (name, None).

    Raises:
        InvalidInputError: not a strategy, or a block size that is not a positive integer.
    """
    name, _, size = strategy.partition("-") if isinstance(strategy, str) else ("", "", "")
    if name in (*STRATEGIES, "auto") and (not size or (name == "blockwise" and size.isdigit() and int(size) > 0)):
        return name, int(size) if size else None
    raise invalid_input(
        operation,
        got=f"strategy={strategy!r}",
        needs=f'"auto" or one of {", ".join(STRATEGIES)}; "blockwise-64" also sets the block size (at least 1)',
        fix="moestro.explain shows what each call would choose.",
    )


@functools.cache
def multiplies_bfloat16() -> bool:
    """Whether this processor has bfloat16 dot products (AVX-512 BF16 or AMX), so that torch need not emulate them."""
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, probe, lambda: False)() for probe in probes)


def choose_way(num_rows: int, stack: Tensor) -> Way:
    """How to multiply `num_rows` rows by one matrix of the stack [E, N, K] (thresholds measured; see docs/log.md)."""
    dtype = stack.dtype
    if stack.device.type != "cpu" or dtype == torch.float64 or small_experts(stack):
        return Way.ROWS
    if dtype == torch.float32:
        return Way.COLUMNS if 6 <= num_rows < 40 else Way.ROWS
    if num_rows == 1 and dtype == torch.bfloat16:
        return Way.VECTOR
    if dtype == torch.bfloat16 and multiplies_bfloat16():
        return Way.COLUMNS if num_rows < 112 else Way.ROWS
    return Way.WIDEN if num_rows <= 8 else Way.WIDEN_COLUMNS


def widens(dtype: torch.dtype, device_type: str) -> bool:
    """Whether rows of this dtype are float32 between the two matmuls."""
    if device_type != "cpu":
        return False
    return dtype == torch.float16 or (dtype == torch.bfloat16 and not multiplies_bfloat16())
