"""Which strategy, and which way to multiply: functions of shape, dtype and the processor's features."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from moestro import settings
from moestro.errors import invalid_input
from moestro.formats import PackedTensor, StoredExperts, WeightFormat
from moestro.ops.expert_mlp.matmul import Span, Way
from moestro.weights import ExpertWeights

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


def batch_rows(stored: StoredExperts) -> int:
    """Experts of few rows share what stands between their matmuls up to this many rows."""
    stack = dense_stack(stored)
    return 4096 if stack is not None and small_experts(stack) else 32


def dense_stack(stored: StoredExperts) -> Tensor | None:
    """The experts as one ordinary tensor [E, N, K], or None where they are packed or unstacked."""
    return stored.data if isinstance(stored, PackedTensor) and stored.format.is_dense else None


ACCUMULATE_BYTES = 32 << 20
"""Beyond this, a buffer of all rows costs more in fresh pages than adding each expert's rows to the sums at once."""


def choose_strategy(num_pairs: int, num_experts: int) -> tuple[str, str]:
    """The strategy and the sentence why: by T * K against alpha * E.

    Few pairs touch few experts, and a walk over the pairs themselves costs less than ordering them; from there on
    rows are grouped by expert. Blockwise and all_experts do more work in plain torch; they run when asked for.
    """
    limit = SELECTIVE_ALPHA * num_experts
    name, sign = ("selective", "<=") if num_pairs <= limit else ("grouped", ">")
    return name, f"T*K = {num_pairs} {sign} {limit:g} = alpha*E with alpha = {SELECTIVE_ALPHA:g}"


def parse_strategy(strategy: str, operation: str = "expert_mlp") -> tuple[str, int | None]:
    """Split a block size off: blockwise-64 -> ("blockwise", 64); any other strategy -> (name, None); else an error."""
    if strategy == "auto":
        return strategy, None
    name, _, size = strategy.partition("-") if isinstance(strategy, str) else ("", "", "")
    if name in (*STRATEGIES, "auto") and (not size or (name == "blockwise" and size.isdigit() and int(size) > 0)):
        return name, int(size) if size else None
    raise invalid_input(
        operation,
        got=f"strategy={strategy!r}",
        needs=f'"auto" or one of {", ".join(STRATEGIES)}; "blockwise-64" also sets the block size (at least 1)',
        fix="moestro.explain shows what each call would choose.",
    )


def named_strategy(strategy: str) -> tuple[str, int | None, str]:
    """The strategy that the caller or the settings name, with its block size and by whom; "auto" if none is."""
    asked, block_size = parse_strategy(strategy)
    if asked != "auto":
        return asked, block_size, "asked for by the caller"
    forced = settings.current().strategy
    if forced is None:
        return "auto", None, ""
    return *parse_strategy(forced), f"forced by moestro.use or {settings.STRATEGY_VARIABLE}"


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


def choose_mixed_way(num_rows: int, device_type: str) -> Way:
    """The same for rows of a wider dtype than the matrix: on a CPU it is converted a panel at a time."""
    if device_type != "cpu":
        return Way.ROWS
    return Way.WIDEN if num_rows <= 8 else Way.WIDEN_COLUMNS


def choose_panel_way(num_rows: int, dtype: torch.dtype) -> Way:
    """How to multiply `num_rows` rows by a dequantised panel of `dtype` that is still in cache (see docs/log.md)."""
    if num_rows == 1:
        return Way.VECTOR
    if dtype == torch.bfloat16:
        return Way.COLUMNS
    return Way.COLUMNS if 16 <= num_rows < 128 else Way.ROWS


def panel_dtype(num_rows: int, dtype: torch.dtype) -> torch.dtype:
    """What a panel is dequantised to for rows of `dtype`: for few rows, converting it from float32 costs the most."""
    return torch.float32 if dtype == torch.bfloat16 and num_rows < 24 else dtype


def panel_rows(size: int, x: Tensor) -> int:
    """Rows of a panel of a matrix [N, size], to be multiplied by rows like x.

    On a CPU it is to stay in cache: 1 MiB, or 2 MiB of bfloat16. Elsewhere it is large enough to be worth its calls.
    """
    items = (1 << 20 if x.dtype == torch.bfloat16 else 1 << 18) if x.device.type == "cpu" else 1 << 24
    return max(items // max(size, 1), 16)


def choose_ways(rows: Tensor, stored: StoredExperts, spans: Sequence[Span], dtype: torch.dtype) -> list[Way]:
    """How to multiply each span of the rows, as the caller passed them, by its expert; `dtype` computes."""
    sizes = [stop - start for _, start, stop in spans]
    if not stored.format.is_dense:
        return [choose_panel_way(size, panel_dtype(size, dtype)) for size in sizes]
    stack = stored.data if isinstance(stored, PackedTensor) else stored.matrices[0][0].data[None]
    if small_experts(stack):
        return [Way.ROWS] * len(sizes)
    if torch.promote_types(rows.dtype, stack.dtype) != stack.dtype:
        return [choose_mixed_way(size, rows.device.type) for size in sizes]
    return [choose_way(size, stack) for size in sizes]


def widens(dtype: torch.dtype, device_type: str) -> bool:
    """Whether rows of this dtype are float32 between the two matmuls."""
    if device_type != "cpu":
        return False
    return dtype == torch.float16 or (dtype == torch.bfloat16 and not multiplies_bfloat16())


def compute_dtype(x: Tensor, weights: ExpertWeights) -> torch.dtype:
    """What rows like x are multiplied in, and what stands between the two matmuls."""
    first, last = weights.gate_up.format, weights.down.format
    dtype = _compute_dtype(x, first)
    return dtype if last is first else torch.promote_types(dtype, _compute_dtype(x, last))


def _compute_dtype(x: Tensor, stored: WeightFormat) -> torch.dtype:
    """Packed weights take the dtype of x, as wide as `widens` asks; float16 could not hold all of their scales."""
    device_type = x.device.type
    if stored.is_dense and x.dtype != stored.storage:
        return torch.promote_types(x.dtype, stored.storage)
    packed_half = not stored.is_dense and x.dtype == torch.float16
    return torch.float32 if packed_half or widens(x.dtype, device_type) else x.dtype
