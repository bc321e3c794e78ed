"""What ids must be: an integer [T, K] in -1..num_experts-1."""

from __future__ import annotations

import torch
from torch import Tensor

from moestro import types
from moestro.errors import invalid_input
from moestro.ops import gpu_checks, native
from moestro.ops.inputs import check_tensor


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
    """`moestro.types.check_range`, in one pass of the engine or one launch where the ids lie so."""
    if native.ids_and_weights_fit(expert_ids, None, num_experts) or gpu_checks.check(expert_ids, None, num_experts):
        return
    types.check_range(expert_ids, num_experts, operation)
