"""What any implementation asks of tensors before it reads their memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_ORDINARY = (Tensor, torch.nn.Parameter)
_KINDS = frozenset(_ORDINARY)
_CPU = torch.device("cpu")

Layout = tuple[int, tuple[int, ...], torch.dtype, torch.Size, bool]
"""Of a tensor: address, strides, dtype, shape, and whether it stands for its negative."""

INTERCEPTED = "it reads and writes memory, and a tracer, a transform or a dispatch mode is to see every operation"
TRACED = "a graph that is traced is to see every operation"
NOT_ORDINARY = "it reads memory as it is, and a tensor is of a subclass or stands for its negative"
GRADIENT = "it computes no gradients, and a tensor requires one"
FORWARD_MODE = "it computes no gradients, and forward-mode differentiation is on"


def not_on_cpu(tensor: Tensor) -> str | None:
    """Why what computes on the CPU cannot take this tensor; None if it can."""
    return None if tensor.is_cpu else f"it computes on the CPU, and its argument is on {tensor.device.type}"


def not_of(dtypes: Iterable[torch.dtype], *tensors: Tensor, named: str = "a tensor is") -> str | None:
    """Why what computes in float32 does not take tensors of other dtypes than these; None if all are of them."""
    for t in tensors:
        if t.dtype not in dtypes:
            return f"it computes in float32, and {named} of {t.dtype}"
    return None


def is_ordinary(tensor: Tensor) -> bool:
    """Whether the tensor's memory holds its values as they are: not a subclass, not lazily negated."""
    return type(tensor) in _ORDINARY and not tensor.is_neg()


def is_intercepted() -> bool:
    """Whether somebody is to see every operation, and so must not be handed results of none."""
    return (
        torch._C._get_tracing_state() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def no_gradient(*tensors: Tensor) -> str | None:
    """Why nothing without gradients can be computed of these tensors; None if it can."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return GRADIENT
    return FORWARD_MODE if forward_ad._current_level >= 0 else None


def no_memory(*tensors: Tensor) -> str | None:
    """Why the memory of these tensors cannot be read and written behind PyTorch's back; None if it can."""
    if torch.compiler.is_compiling():
        return TRACED
    if not all(map(is_ordinary, tensors)):
        return NOT_ORDINARY
    return INTERCEPTED if is_intercepted() else None


def no_extent(*tensors: Tensor) -> str | None:
    """Why a tensor does not lie inside its storage, which somebody has made smaller; None if all do."""
    for t in tensors:
        if t.numel():
            last = t.storage_offset() + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
            if (last + 1) * t.element_size() > t.untyped_storage().nbytes():
                return "it reads memory, and the storage of a tensor has been made smaller than the tensor"
    return None


def empty(num_rows: int, num_columns: int, dtype: torch.dtype, device: torch.device = _CPU) -> Tensor:
    """What `torch.empty` returns for a matrix, in half of its time."""
    return torch.empty_strided((num_rows, num_columns), (num_columns, 1), dtype=dtype, device=device)


def rows(matrix: Tensor) -> Tensor:
    """The matrix, copied only if a row of it is not contiguous; rows may be apart."""
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def call_key(*tensors: Tensor) -> tuple[Any, ...] | None:
    """All of the tensors but their addresses that decides how a call is computed; None where no call is like it."""
    if is_intercepted() or forward_ad._current_level >= 0:
        return None
    recorded = torch.is_grad_enabled()
    key: list[Any] = [recorded]
    for t in tensors:
        if type(t) not in _KINDS:
            return None
        key.append((t.dtype, t.shape, t.device, t.stride(), t.is_neg(), recorded and t.requires_grad))
    return tuple(key)


def layout_key(tensors: Iterable[Tensor]) -> list[Layout]:
    """Where and how each tensor lies: what `.to()`, `.data =`, `resize_` and the like change."""
    return [(t.data_ptr(), t.stride(), t.dtype, t.shape, t.is_neg()) for t in tensors]


def without_autocast(x: Tensor, compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same outside autocast: the dtypes of the arguments say what is computed in."""
    kind = x.device.type

    def called(*arguments: Any) -> Tensor:
        if not torch.is_autocast_enabled(kind):
            return compute(*arguments)
        with torch.autocast(kind, enabled=False):
            return compute(*arguments)

    return called
