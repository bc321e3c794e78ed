"""What the engine's calls for one new token's attention refuse, and what a call leaves behind."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch

from moestro.ops import native

from .engines import HERE, RUNNING
from .steps import HIDDEN, NOWHERE, WIDE, angles, attend, dtypes, every_engine, module, project, seen

MOST_KEPT = 1 << 20
"""Bytes: calls below have a workspace of more than ten times as many."""

ZERO = torch.zeros(64, dtype=torch.bfloat16)


def blank(isa, rows, columns, dtype=torch.bfloat16, out_dtype=None):
    """A matrix of zeros that lies nowhere but for its first value, for what is refused before it is read."""
    code = native.FLOATS[dtype]
    stored = native.engine().Stored(
        element=native.ELEMENTS["bfloat16"], scale=native.SCALES["none"], rows=rows, columns=columns, row_stride=0,
        base=(ZERO.data_ptr(), 0, 0, 0),
    )  # fmt: skip
    out = code if out_dtype is None else native.FLOATS[out_dtype]
    return native.engine().Linear(
        isa=isa.index, weights=stored, bias=None, x_dtype=code, out_dtype=out, same_bits=False
    )


@every_engine
def test_steps_whose_parts_do_not_fit_are_refused(isa):
    parameters = module(torch.bfloat16, (4, 2, 16), normed="head")
    fixed = parameters.arguments(isa)
    make, (q, k, v, o) = native.engine().AttentionStep, fixed["projections"]
    make(**fixed)
    for shape in (
        *((heads, 2, 16) for heads in (0, 3, -4, 2, 8, 1 << 31, 1 << 62)),
        *((4, groups, 16) for groups in (0, 3, -2, 1, 4, 1 << 62)),
        *((4, 2, size) for size in (0, 8, 32, -16, 1 << 31, 1 << 62)),
        (1 << 33, 1 << 33, 1 << 33),
    ):
        with pytest.raises(ValueError, match=r"out of range|do not share|belong together|a norm of other"):
            make(**fixed | {"shape": shape})
    for wrong in (
        *({"projections": parts} for parts in ((k, q, v, o), (q, k, v, q), (q, k, q, o), (o, k, v, o))),
        {"projections": (q, k, v, blank(isa, 24, 63))},
        {"projections": (q, k, v, None)},
        {"projections": (None, None, None, None)},
        {"q_norm": parameters.norm(isa, torch.ones(17))},
        {"k_norm": parameters.norm(isa, torch.ones(64))},  # of the queries
        {"norm_before": parameters.norm(isa, torch.ones(WIDE))},
        {"norm_after": parameters.norm(isa, torch.ones(HIDDEN))},
        *({"isa": n} for n in (-1, len(native.ISAS), 1 << 40)),
        *({"isa": other.index} for other in HERE if not other.multiplies_floats),
    ):
        with pytest.raises(ValueError, match=r"belong together|no projection|a norm of other|lacks|no floats"):
            make(**fixed | wrong)


@every_engine
def test_heads_that_are_not_there_are_refused(isa):
    """Of matrices without rows, and where the product of sizes leaves 64 bits."""
    none, all_of_none = blank(isa, 0, HIDDEN), blank(isa, WIDE, 0)
    for shape in ((0, 1, 16), (1 << 24, 1 << 24, 1 << 40), (1 << 62, 1 << 62, 4)):
        with pytest.raises(ValueError, match="out of range"):
            native.engine().AttentionStep(
                isa=isa.index, projections=(none, none, none, all_of_none), shape=shape, q_norm=None, k_norm=None,
                scale=1.0, sinks=None,
            )  # fmt: skip
    few = blank(isa, 97, HIDDEN), blank(isa, 1, HIDDEN), blank(isa, 1, HIDDEN), blank(isa, WIDE, 97)
    with pytest.raises(ValueError, match="heads that groups do not share"):
        native.engine().AttentionStep(
            isa=isa.index, projections=few, shape=(97, 1, 1), q_norm=None, k_norm=None, scale=1.0, sinks=None
        )


@pytest.mark.parametrize("isa", RUNNING, ids=lambda isa: isa.name)
@pytest.mark.parametrize("place", range(4))
def test_projections_of_several_dtypes_are_refused(isa, place):
    sizes = ((64, HIDDEN), (32, HIDDEN), (32, HIDDEN), (WIDE, 64))
    for dtypes_of in ({"dtype": torch.float32}, {"out_dtype": torch.float32}):
        parts = [blank(isa, *size, **(dtypes_of if i == place else {})) for i, size in enumerate(sizes)]
        with pytest.raises(ValueError, match="several dtypes"):
            native.engine().AttentionStep(
                isa=isa.index, projections=tuple(parts), shape=(4, 2, 16), q_norm=None, k_norm=None, scale=1.0,
                sinks=None,
            )  # fmt: skip


@every_engine
def test_calls_that_do_not_fit_are_refused(isa):
    parameters, rows = module(torch.bfloat16, (4, 2, 16)), torch.zeros(5, 512, dtype=torch.bfloat16)
    made, (x, cos, sin, out, kept) = parameters.engine(isa), (row.data_ptr() for row in rows)
    turned, refused = (cos, sin, 0, 16, 8), r"out of range|no address|positions that do not fit"
    good = {"threads": 1, "batch": 1, "x": x, "stride": 64, "turned": turned, "out": out}
    good |= {"keys": NOWHERE, "values": (kept, 64, 16)}
    made.project(*good.values())
    made.project(*(good | {"turned": (0, 0, 0, 0, 0)}).values())  # nothing is turned
    for wrong in (
        *({"threads": n} for n in (0, -1, 1 << 31, 1 << 40)),
        *({"batch": n} for n in (0, -1, 1 << 38, 1 << 62)),
        *({name: 0} for name in ("x", "out")),
        *({"turned": (*two, 0, 16, 8)} for two in ((0, sin), (cos, 0))),
        *({"turned": (cos, sin, 0, n, 0)} for n in (-2, 1, 7, 15, 17, 18, 1 << 62)),
        *({"turned": (cos, sin, 0, 8, n)} for n in (-1, 9, 1 << 62)),
    ):
        with pytest.raises(ValueError, match=refused):
            made.project(*(good | wrong).values())
    place = x, 64, 32, 16
    good = {"threads": 1, "batch": 1, "query": cos, "key": place, "value": place, "keys": 2, "mask": (0, 0), "out": out}
    made.attend(*good.values())
    for wrong in (
        *({"threads": n} for n in (0, -1, 1 << 31, 1 << 40)),
        *({"batch": n} for n in (0, -1, 1 << 38, 1 << 62)),
        *({"keys": n} for n in (0, -1, 1 << 39, 1 << 62)),
        *({name: 0} for name in ("query", "out")),
        *({name: (0, 64, 32, 16)} for name in ("key", "value")),
    ):
        with pytest.raises(ValueError, match=refused):
            made.attend(*(good | wrong).values())
    with pytest.raises(ValueError, match="a place without a norm"):
        made.attend(*good.values(), 0, kept)
    with_norm = replace(parameters, around=(None, torch.ones(WIDE)))
    with pytest.raises(ValueError, match="a norm without a place"):
        with_norm.engine(isa).attend(*good.values())


class Allocated(ctypes.Structure):
    """What `mallinfo2` of the C library says, bytes."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def allocated():
    """Bytes that this process has from the C library."""
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = Allocated
    found = library.mallinfo2()
    return found.hblkhd + found.uordblks


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="the C library does not say")
@every_engine
def test_calls_of_many_sequences_keep_no_more_memory_than_those_of_few(isa):
    dtype, batch = dtypes(isa)[-1], 1 << 15
    parameters, turn = module(dtype, (1, 1, 8), around=True), angles(dtype, 1, 8, False)
    made, x = parameters.engine(isa), torch.randn(batch, HIDDEN).to(dtype)
    project(made, parameters, x[:1], turn)
    before = allocated()
    found = project(made, parameters, x, turn)
    assert allocated() - before - sum(part.nbytes for part in found) < MOST_KEPT
    del found

    parameters, batch = module(dtype, (16, 1, 64), around=True), 1 << 12
    made, query = parameters.engine(isa), torch.randn(batch, 16, 64).to(dtype)
    key, value, _ = seen(dtype, batch, 1, 1, 64)
    attend(made, query[:1], key[:1], value[:1], None, normed=True)
    before = allocated()
    attend(made, query, key, value, None, normed=True)
    assert allocated() - before < MOST_KEPT
