"""What every engine asks of tensors that it reads by their address, and what it says where it cannot."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

TRACED = "a graph that is traced is to see every operation"
WATCHED = "it reads and writes memory, and a tracer, a transform or a dispatch mode is to see every operation"
NOT_ORDINARY = "it reads memory as it is, and a tensor is of a subclass or stands for its negative"
REQUIRES_GRAD = "it computes no gradients, and a tensor requires one"
FORWARD_MODE = "it computes no gradients, and forward-mode differentiation is on"

_ORDINARY = (Tensor, torch.nn.Parameter)
_CPU = torch.device("cpu")


def is_watched() -> bool:
    """Whether somebody is to see every operation, and so must not be handed results of none."""
    return (
        torch._C._get_tracing_state() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def differentiates(tensor: Tensor) -> bool:
    """Whether what is computed of the tensor is recorded for a gradient, or forward-mode differentiation is on."""
    return (torch.is_grad_enabled() and tensor.requires_grad) or forward_ad._current_level >= 0


def is_ordinary(tensor: Tensor) -> bool:
    """Whether the tensor's memory holds its values as they are: not a subclass, not lazily negated."""
    return type(tensor) in _ORDINARY and not tensor.is_neg()


def empty(num_rows: int, num_columns: int, dtype: torch.dtype, device: torch.device = _CPU) -> Tensor:
    """What `torch.empty` returns for a matrix, in half of its time."""
    return torch.empty_strided((num_rows, num_columns), (num_columns, 1), dtype=dtype, device=device)


def contiguous_rows(matrix: Tensor) -> Tensor:
    """A matrix, copied only if a row of it is not contiguous; rows may be apart."""
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()
