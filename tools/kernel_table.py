"""Which kernel of the native engine runs when, as the engine itself has it, in Markdown for docs/reference/engine.md.

python tools/kernel_table.py
"""

from __future__ import annotations

from moestro.ops import native


def kernel_table() -> str:
    """The tables of `csrc/choose.cpp`; empty without the engine."""
    if native.module is None:
        return ""
    kernels, tiles = native.module.kernel_table()
    lines = ["| kernel | runs |", "|---|---|", *(f"| {name} | {when} |" for name, when in kernels), ""]
    lines += ["| weights | rows from which on, beside floats | beside int8 with a residual |", "|---|---|---|"]
    lines += [f"| {weights} | {floats} | {residual} |" for weights, floats, residual in tiles]
    lines += ["", "| instruction set | `direct_tokens` | `direct_16_bit_tokens` |", "|---|---|---|"]
    sets = [isa for isa in native.module.isas() if isa.multiplies_floats]
    lines += [f"| {isa.name} | {isa.direct_tokens} | {isa.direct_16_bit_tokens} |" for isa in sets]
    return "\n".join(lines)


if __name__ == "__main__":
    print(kernel_table())
