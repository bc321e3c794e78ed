"""The few integer instructions of PTX that the engine's assembly is written in, run on Python's numbers."""

from __future__ import annotations

import re
from collections.abc import Callable

_MASK = 0xFFFFFFFF

_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "shl.b32": lambda a, b: a << b if b < 32 else 0,
    "shr.u32": lambda a, b: a >> b,
    "mul.lo.u32": lambda a, b: a * b,
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
        a, b = (int(s, 0) if s[0].isdigit() else found[s] for s in sources)
        found[target] = _OPERATIONS[name](a, b) & _MASK
    return found
