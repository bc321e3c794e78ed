"""How rows travel between ranks: as they are, or in 8 bits with a scale for each row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from moestro.errors import invalid_input
from moestro.parallel.exchange import collective
from moestro.parallel.guard import Peers

WireFormat = Literal["float", "int8", "fp8-e4m3"]

_LARGEST = {"int8": 127.0, "fp8-e4m3": 448.0}
_SCALE_BYTES = 4


def check_wire_format(wire_format: str, exact: bool, operation: str = "AllToAllDispatcher") -> None:
    """Raise `InvalidInputError` for another format, or for one that loses bits where none may be lost."""
    if wire_format not in get_args(WireFormat) or (exact and wire_format != "float"):
        raise invalid_input(
            operation,
            got=f"wire_format={wire_format!r}" + (" and exact=True" if exact else ""),
            needs=f"one of {', '.join(get_args(WireFormat))}; float, where it is to be exact",
            fix='Leave wire_format out: rows travel as they are. "int8" and "fp8-e4m3" lose bits.',
        )


def encode(rows: Tensor, wire_format: WireFormat) -> Tensor:
    """Rows [n, H] -> bytes [n, H + 4]: 8 bits a number, the largest of a row at the format's own, then the scale."""
    wide = rows.float()
    largest = wide.abs().amax(1, keepdim=True) if rows.shape[1] else wide.new_zeros(len(rows), 1)
    scale = largest / _LARGEST[wire_format]
    parts = wide / torch.where(scale == 0, 1.0, scale)
    if wire_format == "int8":
        data = parts.round().clamp(-127, 127).to(torch.int8)
    else:
        data = parts.clamp(-448, 448).to(torch.float8_e4m3fn)
    return torch.cat([data.view(torch.uint8), scale.flatten().view(torch.uint8).view(-1, _SCALE_BYTES)], 1)


def decode(data: Tensor, wire_format: WireFormat, dtype: torch.dtype) -> Tensor:
    """Bytes [n, H + 4] of `encode` -> rows [n, H]. A row in which a number was not finite is not finite as a whole.

    Numbers that float32 does not reach count as not finite. The largest that it has comes back as no more than that.
    """
    numbers = data[:, :-_SCALE_BYTES].contiguous()
    values = numbers.view(torch.int8 if wire_format == "int8" else torch.float8_e4m3fn).float()
    scale = data[:, -_SCALE_BYTES:].clone(memory_format=torch.contiguous_format).flatten().view(torch.float32)[:, None]
    largest = torch.finfo(torch.float32).max  # which a scale that was rounded up takes to infinity
    return torch.where(scale.isfinite(), (values * scale).clamp(-largest, largest), torch.nan).to(dtype)


def wire_error(rows: Tensor, wire_format: WireFormat) -> float:
    """The relative L2 error of rows [n, H] that travel in a format; 0.0 of "float".

    Raises:
        InvalidInputError: another format, or rows that are no floating-point [n, H].
    """
    check_wire_format(wire_format, False, "wire_error")
    if rows.dim() != 2 or not rows.is_floating_point():
        raise invalid_input(
            "wire_error",
            got=f"rows {list(rows.shape)} of {rows.dtype}",
            needs="floating-point rows [n, H]",
            fix="Pass what a dispatcher is given; flatten other dimensions.",
        )
    if wire_format == "float" or not rows.numel():
        return 0.0
    there = decode(encode(rows, wire_format), wire_format, torch.float32).double()
    size = float(rows.double().norm())
    return float((there - rows.double()).norm()) / size if size else 0.0


def send_rows(
    peers: Peers, x: Tensor, splits: tuple[Sequence[int], Sequence[int]], wire_format: WireFormat, where: str
) -> Tensor:
    """Rows [sum(send), H] to the ranks that they are for -> [sum(receive), H]; `splits` is (send, receive).

    All rows are encoded, those that stay on their rank too: what is computed does not depend on where experts are.
    """
    send, receive = splits

    def there(t: Tensor) -> Tensor:
        if wire_format == "float":
            return peers.all_to_all(t, send, receive, "rows", where)
        return decode(peers.all_to_all(encode(t, wire_format), send, receive, "rows", where), wire_format, t.dtype)

    return collective(x, there, lambda g: peers.all_to_all(g, receive, send, "gradients of rows", where))
