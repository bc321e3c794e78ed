"""Run as a script: the native module is called with wrong codes, sizes and addresses, and must refuse or compute.

An address is null or that of a buffer that any sizes drawn here stay within; whatever else is wrong must be found. What
it prints counts the calls that computed, and the refusals by what they say.
"""

from __future__ import annotations

import collections
import ctypes
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moestro.ops import native

BUFFERS = [ctypes.create_string_buffer(1 << 20) for _ in range(8)]
DATA, SCALES, ZEROS, GLOBAL, X, WEIGHTS, OUT, BIAS = (ctypes.addressof(b) for b in BUFFERS)
IDS = (ctypes.c_int64 * 512)()

CODES = (-1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 1 << 31, -(1 << 31), 1 << 40)
SIZES = (-(1 << 62), -8, -1, 0, 1, 3, 8, 16, 20, 32, 1 << 31, 1 << 40, 1 << 62)
STRIDES = (0, 1, 8, 64)
PLACES = (
    "element", "scale", "rows", "columns", "group rows", "group columns", "addresses", "blocks", "experts", "expert",
    "matrices", "isa", "threads", "block", "tokens", "slots", "ids", "x", "x dtype", "routing", "bias dtype", "kind",
    "out", "out dtype", "int8 input", "integers",
)  # fmt: skip

seen: collections.Counter[str] = collections.Counter()


def stored(
    pick: Callable[..., Any], draw: Callable[..., Any], shape: tuple[int, int], elements: tuple[int, ...]
) -> Any:
    rows, columns = shape

    def addresses() -> tuple[int, ...]:
        return tuple(pick("addresses", a, (0, a)) for a in (DATA, SCALES, ZEROS, GLOBAL))

    def stride() -> int:
        return draw(st.sampled_from(STRIDES))

    element = draw(st.sampled_from(elements))
    made = native.module.Stored(
        element=pick("element", element, CODES),
        scale=pick("scale", 0 if element < 3 else draw(st.integers(1, 5)), CODES),
        rows=pick("rows", rows, SIZES),
        columns=pick("columns", columns, SIZES),
        group_rows=pick("group rows", draw(st.sampled_from((0, 1, 2, 128))), (-1, 3)),
        group_columns=pick(
            "group columns",
            0 if element == 4 and 0 not in elements else draw(st.sampled_from((0, 16, 32))),
            (-16, 1, 3, 8, 24, 48, 16),
        ),
        row_stride=stride(),
        scale_row_stride=stride(),
        zero_row_stride=stride(),
        base=addresses(),
        step=(stride(), stride(), stride(), draw(st.sampled_from((0, 4, 8)))),
    )
    for _ in range(draw(st.sampled_from((0, 1, 2)))):
        blocks = pick("blocks", draw(st.sampled_from((1, 2))), SIZES)
        experts = [pick("expert", e, SIZES) for e in draw(st.sampled_from(((0, 1, 2, 3), (1,), (3, 1), ())))]
        count = pick("matrices", len(experts) * max(min(blocks, 64), 0), (0, 1, 9))
        try:
            table = {"experts": experts, "matrices": [addresses()] * count}
            made.use_table(num_experts=pick("experts", 4, SIZES), num_blocks=blocks, **table)
            seen["tables"] += 1
        except (ValueError, TypeError) as error:
            seen[f"table: {error}".partition("(")[0]] += 1  # refused; the table of before stands
    return made


def call(pick: Callable[..., Any], draw: Callable[..., Any]) -> None:
    inner, hidden, gated = draw(st.sampled_from((8, 32))), draw(st.sampled_from((8, 32))), draw(st.booleans())
    isa = draw(st.sampled_from([isa for isa in native.ISAS if isa.runs_here]))
    int8 = isa.multiplies_int8 and (not isa.multiplies_floats or draw(st.booleans()))
    elements = (2,) if isa.multiplies_bfloat16 else pick("integers", (4, 5, 6, 7), ((0, 3),)) if int8 else range(8)
    for i in range(len(IDS)):
        IDS[i] = pick("ids", i % 2, (-2, -1, 3, 4, 1 << 31, -(1 << 62))) if i < 6 else -1
    limit = draw(st.sampled_from((None, float("nan"))))
    kind = pick("kind", draw(st.integers(0, 7)), CODES)
    bias = native.module.Array(BIAS, pick("bias dtype", 0, CODES), 8)
    dtype = pick("x dtype", 2 if isa.multiplies_bfloat16 else 0, CODES)
    experts = native.module.ExpertMlp(
        isa=pick("isa", isa.index, CODES),
        gate_up=stored(pick, draw, (inner * (2 if gated else 1), hidden), tuple(elements)),
        down=stored(pick, draw, (hidden, inner), tuple(elements)),
        gate_up_bias=draw(st.sampled_from((bias, None))),
        down_bias=native.module.Array(0, pick("bias dtype", 1, CODES), 0),
        activation=native.module.Activation(kind, gated, draw(st.booleans()), 1.0, limit, -1e30),
        num_experts=pick("experts", 4, SIZES),
        top_k=pick("slots", 3, (-1, 0, 256, 257, 1 << 62)),
        x_dtype=dtype,
        out_dtype=pick("out dtype", 0, CODES),
        ids_are_64_bit=draw(st.booleans()),
        weight_on_input=draw(st.booleans()),
        int8_input=pick("int8 input", int8, (not int8,)),
        all_experts=draw(st.booleans()),
        same_bits=draw(st.booleans()),
        token_block=pick("block", 0, SIZES),
        pieces=pick("pieces", 0, (-1, 1, 7, 1 << 40)),
    )
    threads = pick("threads", draw(st.sampled_from((1, 2))), (-1, 0, 1 << 20, 1 << 31, 1 << 40))
    tokens = pick("tokens", 2, (-1, 0, 1 << 40, 1 << 62))
    ids = pick("routing", ctypes.addressof(IDS), (0,))
    experts.plan(threads, tokens, ids)
    experts.workspace_bytes(tokens)
    out = pick("out", OUT, (0,))
    x = pick("x", X, (0,))
    experts.run(threads, tokens, x, draw(st.sampled_from(STRIDES)), ids, pick("routing", WEIGHTS, (0,)), out)


@settings(max_examples=1000, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), wrong=st.sets(st.sampled_from(PLACES), max_size=2))
def fuzz(data: st.DataObject, wrong: set[str]) -> None:
    """Arguments that fit but for what the places of `wrong` stand for."""

    def pick(place: str, right: Any, others: tuple[Any, ...]) -> Any:
        return data.draw(st.sampled_from(others)) if place in wrong else right

    try:
        call(pick, data.draw)
        seen["computed"] += 1
    except (ValueError, TypeError) as error:
        seen[f"{type(error).__name__}: {error}".partition("(")[0]] += 1


if __name__ == "__main__":
    fuzz()
    for name, count in sorted(seen.items()):
        print(f"{count:6} {name}")
