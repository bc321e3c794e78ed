"""What ids must be: an integer [T, K] in -1..num_experts-1."""

from __future__ import annotations

import torch
from torch import Tensor

from moestro.errors import invalid_input
from moestro.ops import gpu_checks, native
from moestro.ops.inputs import check_tensor
from moestro.types import EMPTY


def check_ids(operation: str, expert_ids: Tensor, num_experts: int) -> None:
    """Refuse ids that are not an integer [T, K] in -1..num_experts-1 (the range only where reading is free)."""
    check_form(operation, expert_ids, num_experts)
    check_range(operation, expert_ids, num_experts)


def check_form(operation: str, expert_ids: Tensor, num_experts: int) -> None:
    """Refuse what is not an integer [T, K], and num_experts < 1."""
    check_tensor(operation, "expert_ids", expert_ids)
    if expert_ids.dim() != 2 or expert_ids.dtype not in (torch.int32, torch.int64) or num_experts < 1:
        raise invalid_input(
            operation,
            got=f"expert_ids {list(expert_ids.shape)} of {expert_ids.dtype}, num_experts={num_experts}",
            needs="int32 or int64 [num_tokens, top_k] and num_experts >= 1",
            fix="Flatten the batch, or use expert_ids.long().",
        )


def check_range(operation: str, expert_ids: Tensor, num_experts: int) -> None:
    """Refuse ids outside -1..num_experts-1; an assertion on the device where reading them is not free."""
    if native.ids_and_weights_fit(expert_ids, None, num_experts) or gpu_checks.check(expert_ids, None, num_experts):
        return
    if torch.compiler.is_compiling() or expert_ids.device.type != "cpu":
        in_range = ((expert_ids >= EMPTY) & (expert_ids < num_experts)).all()
        torch._assert_async(in_range, f"[{operation}] expert_ids must lie in -1..{num_experts - 1}")
        return
    if expert_ids.numel() == 0:
        return
    low, high = (int(v) for v in torch.aminmax(expert_ids))
    if low < EMPTY or high >= num_experts:
        raise invalid_input(
            operation,
            got=f"expert_ids from {low} to {high}",
            needs=f"ids in -1..{num_experts - 1} (-1 is an empty slot)",
            fix="Check the router's num_experts.",
        )
