"""Bytes of int8 and e4m3 to 16-bit floats in a few instructions, four at a time.

- int8 to bfloat16: the lower seven bits, and the sign's bit, as the lowest bits of 128, whose last place counts one;
  the difference of the two is the value. To float16: the byte, its sign's bit turned, as the lowest bits of 1024, 1152
  less.
- e4m3, where no instruction converts it: sign, exponent and mantissa in the places of the float's, times the power of
  two by which the biases differ; bytes that are NaN become one by bits of their own.
"""

from __future__ import annotations

import triton
import triton.language as tl

INT8_BFLOAT16 = """{
.reg .b32 m, p, q, u, v;
mov.b32 m, 0xBF80BF80;
prmt.b32 p, $2, 0x43434343, 0x4140;
prmt.b32 q, $2, 0x43434343, 0x4342;
and.b32 u, p, 0xFF7FFF7F;
and.b32 v, p, 0xFF80FF80;
fma.rn.bf16x2 $0, v, m, u;
and.b32 u, q, 0xFF7FFF7F;
and.b32 v, q, 0xFF80FF80;
fma.rn.bf16x2 $1, v, m, u;
}"""

INT8_FLOAT16 = """{
.reg .b32 m, p, q;
mov.b32 m, 0xE480E480;
xor.b32 p, $2, 0x80808080;
prmt.b32 q, p, 0x64646464, 0x4140;
add.f16x2 $0, q, m;
prmt.b32 q, p, 0x64646464, 0x4342;
add.f16x2 $1, q, m;
}"""

_E4M3 = """{{
.reg .b32 m, z, p, q, n, u;
mov.b32 m, {factor};
mov.b32 z, 0x80008000;
and.b32 n, $2, 0x7F7F7F7F;
add.u32 n, n, 0x01010101;
prmt.b32 p, $2, 0, 0x1404;
prmt.b32 q, $2, 0, 0x3424;
shr.u32 u, p, {shift};
and.b32 u, u, {fields};
and.b32 p, p, 0x80008000;
or.b32 p, p, u;
fma.rn.{pair} p, p, m, z;
shr.u32 u, q, {shift};
and.b32 u, u, {fields};
and.b32 q, q, 0x80008000;
or.b32 q, q, u;
fma.rn.{pair} q, q, m, z;
prmt.b32 u, n, 0, 0x9988;
or.b32 $0, p, u;
prmt.b32 u, n, 0, 0xBBAA;
or.b32 $1, q, u;
}}"""

ASSEMBLY = {
    ("int8", "bf16"): INT8_BFLOAT16,
    ("int8", "fp16"): INT8_FLOAT16,
    ("e4m3", "bf16"): _E4M3.format(factor="0x7B807B80", shift=4, fields="0x07F007F0", pair="bf16x2"),
    ("e4m3", "fp16"): _E4M3.format(factor="0x5C005C00", shift=1, fields="0x3F803F80", pair="f16x2"),
}
"""By element and float: two registers from one, in PTX."""

_INT8_BFLOAT16 = tl.constexpr(ASSEMBLY["int8", "bf16"])
_INT8_FLOAT16 = tl.constexpr(ASSEMBLY["int8", "fp16"])
_E4M3_BFLOAT16 = tl.constexpr(ASSEMBLY["e4m3", "bf16"])
_E4M3_FLOAT16 = tl.constexpr(ASSEMBLY["e4m3", "fp16"])


@triton.jit
def bytes_as(codes, ELEMENT: tl.constexpr, FLOAT: tl.constexpr):
    """uint8 of any shape -> the values, in FLOAT (16 bits)."""
    if tl.bfloat16 == FLOAT:
        INTO_BFLOAT16: tl.constexpr = _INT8_BFLOAT16 if ELEMENT == "int8" else _E4M3_BFLOAT16
        return tl.inline_asm_elementwise(INTO_BFLOAT16, "=r,=r,r", [codes], tl.bfloat16, True, 4)
    else:
        INTO_FLOAT16: tl.constexpr = _INT8_FLOAT16 if ELEMENT == "int8" else _E4M3_FLOAT16
        return tl.inline_asm_elementwise(INTO_FLOAT16, "=r,=r,r", [codes], tl.float16, True, 4)
