"""The encodings of single weights: which value each code has, and which code is nearest to a value.

Rounding is to nearest, ties to the even code; what lies beyond the largest value becomes the largest. Sources: OCP
Microscaling Formats (MX) specification 1.0 (e2m1, e8m0, e4m3) and OCP 8-bit Floating Point Specification 1.0 (e4m3).
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

E4M3_LARGEST = 448.0
E2M1_LARGEST = 6.0

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NIBBLES = {
    "e2m1": (*_E2M1, *(-v for v in _E2M1)),
    "int4": tuple(float((i ^ 8) - 8) for i in range(16)),
    "uint4": tuple(float(i) for i in range(16)),
}


def divided(x: Tensor, by: float) -> Tensor:
    """x / by, rounded once on every device: CUDA multiplies by the reciprocal where a divisor is no tensor."""
    return x / x.new_full((), by)


def encode_e4m3(x: Tensor) -> Tensor:
    """Finite float32 of any shape -> float8_e4m3fn."""
    return x.clamp(-E4M3_LARGEST, E4M3_LARGEST).to(torch.float8_e4m3fn)


def round_e4m3(x: Tensor) -> Tensor:
    """The e4m3 value nearest to each finite float32."""
    return decode_e4m3(encode_e4m3(x))


def decode_e4m3(x: Tensor) -> Tensor:
    """float8_e4m3fn of any shape -> float32; the two NaN codes stay NaN."""
    return _look_up(x.view(torch.uint8), "e4m3")


def decode_e8m0(x: Tensor) -> Tensor:
    """uint8 (or float8_e8m0fnu) of any shape -> float32: 2 ** (byte - 127), and NaN for 255."""
    return _look_up(x.view(torch.uint8), "e8m0")


def round_e2m1(x: Tensor) -> Tensor:
    """The e2m1 value nearest to each finite float32; a negative value that rounds to zero may become +0."""
    x = x.clamp(-E2M1_LARGEST, E2M1_LARGEST)
    # Values are 0.5 apart below 2, 1 apart below 4, 2 apart up to 6: half the power of two at or below |x|. Adding
    # 1.5 * 2**22 of that power leaves a float32 no bits for less than half of it.
    power = (x.view(torch.int32) & 0x7F800000).view(torch.float32).clamp_(1.0, 4.0).mul_(1.5 * 2.0**22)
    return (x + power).sub_(power)


def encode_e2m1(x: Tensor) -> Tensor:
    """Finite float32 of any shape -> codes 0..15 as uint8: sign, two bits of exponent, one of mantissa."""
    # float16 has its exponent and mantissa in the same order: 2**-14 times a value of e2m1 has the code in its upper
    # bits, the subnormal 0.5 included.
    codes = round_e2m1(x).abs_().mul_(2.0**-14).to(torch.float16).view(torch.int16) >> 9
    return (codes | torch.signbit(x).to(torch.int16) << 3).to(torch.uint8)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Codes [..., K], of which the lower four bits count -> uint8 [..., K / 2]: even columns in the low nibbles."""
    codes = codes.view(torch.uint8)
    return (codes[..., ::2] & 0x0F) | (codes[..., 1::2] << 4)


def write_nibbles(data: Tensor, element: str, out: Tensor) -> None:
    """Write the values that the element ("e2m1", "int4", "uint4") gives uint8 [..., K / 2] into float32 [..., K]."""
    # One look-up a byte, of two values as one item of 8 bytes, is the fastest of torch's ways (docs/log.md).
    pairs = _table(element, data.device)
    torch.index_select(pairs, 0, data.reshape(-1).to(torch.int32), out=out.view(torch.int64).view(-1))


def write_e4m3(data: Tensor, out: Tensor) -> bool:
    """Write e4m3 values / 256 into a contiguous float32 tensor; False, and nothing written, if there is a NaN code.

    The codes become float16 with the same fields, whose exponent has a bias larger by 8; the CPU converts float16 in
    hardware and e4m3 in software (docs/log.md).
    """
    codes = data.view(torch.int8)
    if data.numel() and int((codes & 0x7F).amax()) == 0x7F:
        return False
    wide = codes.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
    out.copy_(wide.view(torch.float16))
    return True


def _byte_values(dtype: torch.dtype) -> Tensor:
    return torch.arange(256, dtype=torch.uint8, device="cpu").view(dtype).to(torch.float32)


def _pair_values(values: tuple[float, ...]) -> Tensor:
    table = torch.tensor(values, dtype=torch.float32, device="cpu")
    byte = torch.arange(256, device="cpu")
    return torch.stack([table[byte & 15], table[byte >> 4]], dim=1).view(torch.int64).reshape(256)


_TABLES = {
    "e4m3": _byte_values(torch.float8_e4m3fn),
    "e8m0": _byte_values(torch.float8_e8m0fnu),
    **{element: _pair_values(values) for element, values in _NIBBLES.items()},
}
"""[256]: the float32 of every byte, or the bytes of the two float32 that its low and its high nibble stand for."""


@cache
def _table(element: str, device: torch.device) -> Tensor:
    return _TABLES[element].to(device)


def _look_up(codes: Tensor, element: str) -> Tensor:
    table = _table(element, codes.device)
    return table.index_select(0, codes.reshape(-1).to(torch.int32)).view(codes.shape)
