"""Collectives that gradients flow through: each goes back by the collective that undoes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from moestro.parallel.guard import Peers


class _Collective(torch.autograd.Function):
    """`there` of a tensor, whose gradient is `back` of the gradient of what came out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grads[0].contiguous()), None, None


def collective(x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
    """`there` of x; its gradient is `back` of the gradient of what came out."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return there(x)
    found: Tensor = _Collective.apply(x, there, back)  # type: ignore[no-untyped-call]
    return found


def swap_rows(peers: Peers, x: Tensor, splits: tuple[Sequence[int], Sequence[int]], kind: str, where: str) -> Tensor:
    """Rows [sum(send), ...] to the ranks that they are for -> [sum(receive), ...]; `splits` is (send, receive)."""
    send, receive = splits
    return collective(
        x,
        lambda t: peers.all_to_all(t, send, receive, kind, where),
        lambda g: peers.all_to_all(g, receive, send, f"gradients of {kind}", where),
    )


def gather_rows(peers: Peers, x: Tensor, kind: str, where: str) -> Tensor:
    """x [n, ...] of every rank -> [R * n, ...]; the gradients of all ranks are summed."""
    return collective(
        x,
        lambda t: peers.all_gather(t, kind, where),
        lambda g: peers.reduce_scatter(g, f"gradients of {kind}", where),
    )


def scatter_sums(peers: Peers, x: Tensor, kind: str, where: str) -> Tensor:
    """x [R * n, ...] of every rank -> the sum of this rank's part, [n, ...]."""
    return collective(
        x,
        lambda t: peers.reduce_scatter(t, kind, where),
        lambda g: peers.all_gather(g, f"gradients of {kind}", where),
    )


def share(peers: Peers, x: Tensor, kind: str, where: str) -> Tensor:
    """x, which all ranks have, as it is; each computes a part of what depends on it, so gradients are summed."""
    return collective(x, lambda t: t.view_as(t), lambda g: peers.all_reduce(g, f"gradients of {kind}", where))


def join_slices(peers: Peers, x: Tensor, kind: str, where: str) -> Tensor:
    """x [n, ...] of every rank -> [R * n, ...] on every rank, whose gradient, the same on all, is cut again."""
    own = slice(peers.rank * x.shape[0], (peers.rank + 1) * x.shape[0])
    return collective(x, lambda t: peers.all_gather(t, kind, where), lambda g: g[own])
