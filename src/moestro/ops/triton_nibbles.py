"""Four-bit codes to 16-bit floats in a few integer instructions, two at a time.

A word holds the nibbles of four columns, the first in its lowest bits. Two words in one register of 32 bits give, for
each of the four, a pair of 16-bit floats in one register. Their bits are those below; what they stand for:

- e2m1: sign, exponent and mantissa in the places of the float's: the value times `E2M1_UNIT`, a power of two;
- int4, uint4: the code (of int4 with its sign bit turned, which adds 8) as the lowest bits of a power of two whose last
  place counts one: the value plus `OFFSET`.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

# Both fields of bfloat16 that e2m1 fills lie 6 bits apart as its own do not: one product copies a nibble to both.
BFLOAT16_E2M1 = """{
.reg .b32 t, u;
and.b32 t, $4, 0x000F000F;
mul.lo.u32 t, t, 0x1040;
and.b32 $0, t, 0x81C081C0;
and.b32 t, $4, 0x00F000F0;
mul.lo.u32 t, t, 0x104;
and.b32 $1, t, 0x81C081C0;
shr.u32 u, $4, 8;
and.b32 t, u, 0x000F000F;
mul.lo.u32 t, t, 0x1040;
and.b32 $2, t, 0x81C081C0;
and.b32 t, u, 0x00F000F0;
mul.lo.u32 t, t, 0x104;
and.b32 $3, t, 0x81C081C0;
}"""

FLOAT16_E2M1 = """{
.reg .b32 t, u;
shl.b32 t, $4, 9;
and.b32 t, t, 0x0E000E00;
shl.b32 u, $4, 12;
and.b32 u, u, 0x80008000;
or.b32 $0, t, u;
shl.b32 t, $4, 5;
and.b32 t, t, 0x0E000E00;
shl.b32 u, $4, 8;
and.b32 u, u, 0x80008000;
or.b32 $1, t, u;
shl.b32 t, $4, 1;
and.b32 t, t, 0x0E000E00;
shl.b32 u, $4, 4;
and.b32 u, u, 0x80008000;
or.b32 $2, t, u;
shr.u32 t, $4, 3;
and.b32 t, t, 0x0E000E00;
and.b32 u, $4, 0x80008000;
or.b32 $3, t, u;
}"""

_INTEGERS = """{{
.reg .b32 t;
and.b32 t, $4, 0x000F000F;
xor.b32 $0, t, {bits};
shr.u32 t, $4, 4;
and.b32 t, t, 0x000F000F;
xor.b32 $1, t, {bits};
shr.u32 t, $4, 8;
and.b32 t, t, 0x000F000F;
xor.b32 $2, t, {bits};
shr.u32 t, $4, 12;
and.b32 t, t, 0x000F000F;
xor.b32 $3, t, {bits};
}}"""

ASSEMBLY = {
    ("e2m1", "bf16"): BFLOAT16_E2M1,
    ("e2m1", "fp16"): FLOAT16_E2M1,
    ("int4", "bf16"): _INTEGERS.format(bits="0x43084308"),
    ("int4", "fp16"): _INTEGERS.format(bits="0x64086408"),
    ("uint4", "bf16"): _INTEGERS.format(bits="0x43004300"),
    ("uint4", "fp16"): _INTEGERS.format(bits="0x64006400"),
}
"""By element and float: four registers from one, in PTX."""

_BFLOAT16_E2M1 = tl.constexpr(ASSEMBLY["e2m1", "bf16"])
_FLOAT16_E2M1 = tl.constexpr(ASSEMBLY["e2m1", "fp16"])
_BFLOAT16_INT4 = tl.constexpr(ASSEMBLY["int4", "bf16"])
_FLOAT16_INT4 = tl.constexpr(ASSEMBLY["int4", "fp16"])
_BFLOAT16_UINT4 = tl.constexpr(ASSEMBLY["uint4", "bf16"])
_FLOAT16_UINT4 = tl.constexpr(ASSEMBLY["uint4", "fp16"])


@triton.jit
def nibbles(words, ELEMENT: tl.constexpr, FLOAT: tl.constexpr):
    """int16 words [BN, W] -> the floats of each one's four nibbles, four tensors [BN, W] of FLOAT (16 bits).

    Of float32 in the interpreter, and of elements that have no assembly.
    """
    ASSEMBLED: tl.constexpr = ELEMENT == "e2m1" or ELEMENT == "int4" or ELEMENT == "uint4"
    if INTERPRETED or not ASSEMBLED:
        return (
            _value(words & 15, ELEMENT, FLOAT),
            _value((words >> 4) & 15, ELEMENT, FLOAT),
            _value((words >> 8) & 15, ELEMENT, FLOAT),
            _value((words >> 12) & 15, ELEMENT, FLOAT),
        )
    elif tl.bfloat16 == FLOAT:
        TEXT: tl.constexpr = (
            _BFLOAT16_E2M1 if ELEMENT == "e2m1" else _BFLOAT16_INT4 if ELEMENT == "int4" else _BFLOAT16_UINT4
        )
        return tl.inline_asm_elementwise(
            TEXT, "=r,=r,=r,=r,r", [words], (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), True, 2
        )
    else:
        HALF_TEXT: tl.constexpr = (
            _FLOAT16_E2M1 if ELEMENT == "e2m1" else _FLOAT16_INT4 if ELEMENT == "int4" else _FLOAT16_UINT4
        )
        return tl.inline_asm_elementwise(
            HALF_TEXT, "=r,=r,=r,=r,r", [words], (tl.float16, tl.float16, tl.float16, tl.float16), True, 2
        )


@triton.jit
def _value(code, ELEMENT: tl.constexpr, FLOAT: tl.constexpr):
    """One nibble in float32: what the assembly makes of it, or, where there is none, its value."""
    code = code.to(tl.int32)
    if ELEMENT == "e2m1" or ELEMENT == "int4" or ELEMENT == "uint4":
        return _assembled(code, ELEMENT, FLOAT)
    else:
        tl.static_assert(False)
        return code


@triton.jit
def _assembled(code, ELEMENT: tl.constexpr, FLOAT: tl.constexpr):
    """What the assembly makes of one nibble, in float32: the interpreter takes small bfloat16 for 0."""
    if ELEMENT == "e2m1":
        bits = ((code & 8) << 12) | ((code & 7) << (6 if tl.bfloat16 == FLOAT else 9))
    elif ELEMENT == "int4":
        bits = (code ^ 8) | (0x4300 if tl.bfloat16 == FLOAT else 0x6400)
    else:
        tl.static_assert(ELEMENT == "uint4")
        bits = code | (0x4300 if tl.bfloat16 == FLOAT else 0x6400)
    if tl.bfloat16 == FLOAT:
        return (bits << 16).to(tl.float32, bitcast=True)
    else:
        return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
