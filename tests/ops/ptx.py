"""The few instructions of PTX that the engine's assembly is written in, run on Python's numbers."""

from __future__ import annotations

import re
from collections.abc import Callable

import ml_dtypes
import numpy as np

_MASK = 0xFFFFFFFF
_PAIRS = {"bf16x2": ml_dtypes.bfloat16, "f16x2": np.float16}


def _prmt(a: int, b: int, selector: int) -> int:
    """Four of the eight bytes of a and b; with the selector's fourth bit, the sign of a byte eight times."""
    both, found = b << 32 | a, 0
    for i in range(4):
        choice = selector >> 4 * i & 15
        byte = both >> 8 * (choice & 7) & 0xFF
        found |= ((0xFF if byte & 0x80 else 0) if choice & 8 else byte) << 8 * i
    return found


def _halves(kind: str, operation: Callable[..., float]) -> Callable[..., int]:
    """An operation on each half of a register; float64 holds what it makes of two or three numbers of 16 bits."""
    dtype = _PAIRS[kind]

    def apply(*registers: int) -> int:
        found = 0
        for shift in (0, 16):
            numbers = [np.array(r >> shift & 0xFFFF, dtype=np.uint16).view(dtype).astype(np.float64) for r in registers]
            found |= int(np.array(operation(*numbers)).astype(dtype).view(np.uint16)) << shift
        return found

    return apply


_OPERATIONS: dict[str, Callable[..., int]] = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "shl.b32": lambda a, b: a << b if b < 32 else 0,
    "shr.u32": lambda a, b: a >> b,
    "add.u32": lambda a, b: a + b,
    "mul.lo.u32": lambda a, b: a * b,
    "prmt.b32": _prmt,
    "add.f16x2": _halves("f16x2", lambda a, b: a + b),
    "fma.rn.bf16x2": _halves("bf16x2", lambda a, b, c: a * b + c),
    "fma.rn.f16x2": _halves("f16x2", lambda a, b, c: a * b + c),
}


def run(text: str, operands: list[str], **registers: int) -> dict[str, int]:
    """The registers after a text whose $0, $1, ... are called `operands`, given those that it reads.

    Raises:
        KeyError: an instruction or a register that is not known.
    """
    for i, name in reversed(list(enumerate(operands))):
        text = text.replace(f"${i}", name)
    found = dict(registers)
    for line in re.sub(r"[{}]", "", text).split(";"):
        words = line.replace(",", " ").split()
        if not words or words[0] == ".reg":
            continue
        name, target, *sources = words
        found[target] = _OPERATIONS[name](*(int(s, 0) if s[0].isdigit() else found[s] for s in sources)) & _MASK
    return found
