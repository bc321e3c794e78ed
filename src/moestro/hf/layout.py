"""Turn an expert parameter stored [E, K, N] into K-contiguous storage without changing its logical shape.

A checkpoint that stores ``x @ weight`` matrices keeps the summed dimension K apart in memory. Dot products want it
together, so each expert's matrix is transposed inside its own piece of the storage, and the parameter becomes the
transposed view of the result: same object, same shape, same values at every index, same state dict.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn

K_CONTIGUOUS = "K-contiguous"
STRIDED = "strided"

SETTLING = threading.RLock()
"""Held while storage is rearranged: two threads may call a module for the first time at once."""


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
    if weight.is_inference():
        return "it is an inference tensor"
    if not weight.is_leaf:
        return "it is computed from other tensors"
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

    Ctrl-C on the way takes effect when it is done; any other exception leaves it as it was. Returns "K-contiguous", or
    "strided (reason)" where the storage was left as it was.
    """
    if is_k_contiguous(weight):
        return K_CONTIGUOUS
    reason = why_not_in_place(weight)
    if reason is not None:
        return f"{STRIDED} ({reason})"
    _, rows, columns = weight.shape
    with torch.inference_mode(False), torch.no_grad():
        stored = weight.detach().view(-1, columns, rows)
        spare = torch.empty_like(stored[0])
        start = stored._version  # counts finished copies, in the same uninterruptible call that makes them
        interrupt: BaseException | None = None
        while not is_k_contiguous(weight):
            try:
                for matrix in stored[stored._version - start :]:
                    matrix.copy_(spare.copy_(matrix.view(rows, columns).t()))
                weight.data = stored.transpose(1, 2)
            except (KeyboardInterrupt, SystemExit) as error:
                interrupt = error
            except BaseException:
                if not is_k_contiguous(weight):
                    _turn_back(stored[: stored._version - start], spare)
                raise
        if interrupt is not None:
            raise interrupt
    return K_CONTIGUOUS


def separate(module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
    """State dict hook: contiguous copies of this module's strided parameters, as safetensors files need them.

    With ``keep_vars=True`` the state dict holds the parameters themselves, and they stay.
    """
    for name in module._parameters:
        tensor = state.get(prefix + name)
        if isinstance(tensor, Tensor) and not isinstance(tensor, nn.Parameter):
            state[prefix + name] = tensor.contiguous()


def separate_state(module: nn.Module) -> None:
    """Have `separate` run for every state dict of `module`, once."""
    if separate not in module._state_dict_hooks.values():
        module.register_state_dict_post_hook(separate)


def _turn_back(finished: Tensor, spare: Tensor) -> None:
    columns, rows = spare.shape
    for matrix in finished:
        matrix.view(rows, columns).copy_(spare.view(rows, columns).copy_(matrix.t()))


def _users(tensor: Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))
