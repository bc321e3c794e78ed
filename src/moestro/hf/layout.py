"""Turn an expert parameter stored [E, K, N] into K-contiguous storage without changing its logical shape.

A checkpoint that stores ``x @ weight`` matrices keeps the summed dimension K apart in memory. Dot products want it
together, so each expert's matrix is transposed inside its own piece of the storage, and the parameter becomes the
transposed view of the result: same object, same shape, same values at every index, same state dict.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

K_CONTIGUOUS = "K-contiguous"
STRIDED = "strided"


def is_k_contiguous(weight: Tensor) -> bool:
    """Whether weight [E, K, N] already has K next to each other in memory."""
    return weight.transpose(1, 2).is_contiguous()


def why_not_in_place(weight: Tensor) -> str | None:
    """The reason why the storage of `weight` must not be rearranged, or None.

    Rearranging is safe only where nobody else looks at the same bytes.
    """
    if weight.is_meta:
        return "it has no storage yet"
    if type(weight) not in (nn.Parameter, Tensor):
        return f"it is a {type(weight).__name__}, whose storage belongs to somebody else"
    if not weight.is_contiguous():
        return "it is not contiguous"
    storage = weight.untyped_storage()
    if storage.nbytes() != weight.numel() * weight.element_size():
        return "it shares its storage with other tensors"
    if storage.is_shared():
        return "its storage is mapped or shared between processes"
    if _users(weight) != _users(torch.empty(1)):
        return "another tensor uses the same storage"
    return None


def make_k_contiguous(weight: nn.Parameter) -> str:
    """Rearrange `weight` [E, K, N] in place where that is safe, with one expert's matrix as temporary storage.

    Returns:
        "K-contiguous", or "strided (reason)" when the storage was left as it was.
    """
    if is_k_contiguous(weight):
        return K_CONTIGUOUS
    reason = why_not_in_place(weight)
    if reason is not None:
        return f"{STRIDED} ({reason})"
    _, rows, columns = weight.shape
    with torch.inference_mode(False), torch.no_grad():
        stored = weight.detach().view(-1, columns, rows)
        turned = torch.empty_like(stored[0])
        for matrix in stored:
            matrix.copy_(turned.copy_(matrix.view(rows, columns).t()))
        weight.data = stored.transpose(1, 2)
    return K_CONTIGUOUS


def _users(tensor: Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))
