"""Attention of one new token by the engine's two calls, by its parts one by one, and by plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from moestro.formats import FORMATS, PackedTensor, dequantize, quantize
from moestro.ops import native
from moestro.ops.projection.cpu import linear

from .engines import RUNNING, TILED

ENGINES = [isa for isa in (*TILED, *RUNNING) if isa.multiplies_floats]
every_engine = pytest.mark.parametrize("isa", ENGINES, ids=lambda isa: isa.name)
HIDDEN, WIDE, EPSILON, SCALE = 96, 24, 1e-5, 0.3
FORMS = (None, "bfloat16", "int8", "mxfp4")
NOWHERE = 0, 0, 0
CHUNK = 256
"""Keys that the engine takes at once."""


def dtypes(isa):
    return [torch.bfloat16] if isa.multiplies_bfloat16 else [torch.float32, torch.bfloat16, torch.float16]


@dataclass(frozen=True)
class Module:
    """The parameters of attention, and what a position turns: `angles` columns of cos and sin."""

    dtype: torch.dtype
    shape: tuple[int, int, int]  # heads, groups, columns of a head
    matrices: tuple[tuple[Tensor | PackedTensor, Tensor | None], ...]  # q, k, v, o, each with its bias
    norms: tuple[Tensor | None, Tensor | None]
    sinks: Tensor | None
    around: tuple[Tensor | None, Tensor | None] = (None, None)  # norms of what comes in, and of the sum that goes out

    def linears(self, isa):
        return tuple(linear(isa, self.dtype, *matrix) for matrix in self.matrices)

    def norm(self, isa, weight):
        if weight is None:
            return None
        return native.engine().Norm(
            isa=isa.index, weight=native.array(weight), columns=len(weight), epsilon=EPSILON, offset=0.0,
            rounds_twice=False,
        )  # fmt: skip

    def arguments(self, isa):
        q_norm, k_norm = (self.norm(isa, weight) for weight in self.norms)
        return {
            "isa": isa.index,
            "projections": self.linears(isa),
            "shape": self.shape,
            "q_norm": q_norm,
            "k_norm": k_norm,
            "scale": SCALE,
            "sinks": native.array(self.sinks),
            "norm_before": self.norm(isa, self.around[0]),
            "norm_after": self.norm(isa, self.around[1]),
        }

    def engine(self, isa):
        return native.engine().AttentionStep(**self.arguments(isa))


def matrix(form, dtype, rows, columns, biased=True):
    unit = 1 if form is None else FORMATS[form].row_unit
    weight = torch.randn(rows, columns) / columns**0.5
    if form in (None, "bfloat16"):
        stored = weight.to(dtype if form is None else torch.bfloat16)
    else:
        stored = quantize(weight, form if columns % unit == 0 else "int8")
    return stored, torch.randn(rows).to(dtype) if biased else None


def module(dtype, shape, form=None, biased=True, normed=None, sinks=False, around=False):
    """`normed`: "head", "heads" for all of a token together, or None."""
    heads, groups, size = shape
    sizes = ((heads * size, HIDDEN), (groups * size, HIDDEN), (groups * size, HIDDEN), (WIDE, heads * size))
    columns = {None: None, "head": (size, size), "heads": (heads * size, groups * size)}[normed]
    return Module(
        dtype,
        shape,
        tuple(matrix(form, dtype, *each, biased) for each in sizes),
        (None, None) if columns is None else tuple((torch.rand(n) + 0.5).to(dtype) for n in columns),
        torch.randn(heads).to(dtype) if sinks else None,
        tuple((torch.rand(n) + 0.5).to(dtype) for n in (HIDDEN, WIDE)) if around else (None, None),
    )


def multiplied(made: Any, x: Tensor, rows: int) -> Tensor:
    """By the engine's matrix itself."""
    out = torch.empty(len(x), rows, dtype=x.dtype)
    made.run(1, len(x), x.data_ptr(), x.stride(0), out.data_ptr())
    return out


def product(matrix: tuple[Tensor | PackedTensor, Tensor | None], x: Tensor) -> Tensor:
    """By plain PyTorch."""
    weight, bias = matrix
    dense = dequantize(weight, torch.float64) if isinstance(weight, PackedTensor) else weight.double()
    y = x.double() @ dense.T
    return (y if bias is None else y + bias.double()).to(x.dtype)


def engine_normalised(norm: Any, columns: int, x: Tensor) -> Tensor:
    """By the engine's norm itself."""
    rows, out = x.reshape(-1, columns), torch.empty(x.numel(), dtype=x.dtype)
    norm.run(1, len(rows), rows.data_ptr(), rows.stride(0), native.FLOATS[x.dtype], out.data_ptr())
    return out.view(x.shape)


def normalised(weight: Tensor | None, x: Tensor) -> Tensor:
    if weight is None:
        return x
    wide = x.reshape(-1, len(weight)).double()
    y = wide * (wide.square().mean(1, keepdim=True) + EPSILON).rsqrt() * weight.double()
    return y.to(x.dtype).view(x.shape)


@dataclass(frozen=True)
class Angles:
    """cos and sin [1 or B, columns]: of a head's `columns` the second half is turned by those from `second` on."""

    cos: Tensor
    sin: Tensor
    columns: int
    second: int

    @property
    def given(self):
        stride = self.cos.stride(0) if len(self.cos) > 1 else 0
        return self.cos.data_ptr(), self.sin.data_ptr(), stride, self.columns, self.second

    def turn(self, x):
        """Heads [B, heads, size], as models in PyTorch turn them: each product and sum in their dtype."""
        h, s = self.columns // 2, self.second
        cos, sin = self.cos[:, None], self.sin[:, None]
        first, second = x[..., :h], x[..., h : 2 * h]
        return torch.cat(
            (
                first * cos[..., :h] - second * sin[..., :h],
                second * cos[..., s : s + h] + first * sin[..., s : s + h],
                x[..., 2 * h :],
            ),
            -1,
        )


def angles(dtype, batch, columns, doubled):
    """Angles of each half of `columns` columns, or where `doubled` the same for both; NaN between rows."""
    width = columns // 2 if doubled else columns
    rows = [torch.full((batch, width + 3), torch.nan, dtype=dtype) for _ in range(2)]
    for row in rows:
        row[:, :width] = torch.randn(batch, width)
    cos, sin = (row[:, :width] for row in rows)
    return Angles(cos, sin, columns, 0 if doubled else columns // 2)


def places(batch, groups, size, dtype):
    """Where one row of keys, and one of values, goes: in the midst of NaN, heads outside of tokens and inside them."""
    outside = torch.full((batch + 1, groups + 1, 5, size + 3), torch.nan, dtype=dtype)
    inside = torch.full((batch + 1, 4, groups + 2, size), torch.nan, dtype=dtype)
    return (outside, outside[:-1, 1:, 2, 1:-2]), (inside, inside[1:, 3, 1:-1])


def row_place(row):
    return row.data_ptr(), row.stride(0), row.stride(1)


def project(made, parameters, x, turn, places=(NOWHERE, NOWHERE), num_threads=1):
    """Queries, keys and values [B, heads, size] of x [B, 1, hidden]; nothing beside them is written."""
    (heads, groups, size), batch = parameters.shape, len(x)
    counts = [batch * n * size for n in (heads, groups, groups)]
    out = torch.full((sum(counts) + 64,), torch.nan, dtype=x.dtype)
    body = out[32:-32]
    made.project(num_threads, batch, x.data_ptr(), x.stride(0), turn.given, body.data_ptr(), *places)
    assert out[:32].isnan().all()
    assert out[-32:].isnan().all()
    return [part.view(batch, -1, size) for part in body.split(counts)]


def spread(x):
    """The same rows, with NaN between them."""
    wide = torch.full((len(x), x.shape[1] + 7), torch.nan, dtype=x.dtype)
    wide[:, 3:-4] = x
    return wide[:, 3:-4]


def seen(dtype, batch, groups, num_keys, size):
    """Keys and values as caches hold them, in the midst of NaN; and a mask whose rows are apart."""
    long = torch.full((batch, groups, num_keys + 9, size + 1), torch.nan, dtype=dtype)
    inside = torch.full((batch, num_keys + 1, groups + 1, size), torch.nan, dtype=dtype)
    key, value = long[:, :, 5:-4, 1:], inside[:, :num_keys, :groups].transpose(1, 2)
    key.copy_(torch.randn(key.shape))
    value.copy_(torch.randn(value.shape))
    mask = torch.full((batch, num_keys + 2), torch.nan, dtype=dtype)
    mask[:, 1:-1] = torch.zeros(batch, num_keys).masked_fill(torch.rand(batch, num_keys) < 0.3, torch.finfo(dtype).min)
    return key, value, mask[:, 1:-1]


def rows_place(rows):
    return rows.data_ptr(), *rows.stride()[:3]


def attend(made, query, key, value, mask, num_threads=1, residual=None, normed=False):
    """What the step gives for queries [B, heads, size], and where `normed` what its norm makes of it.

    Nothing beside these is written.
    """
    out = torch.full((2, len(query) + 2, WIDE), torch.nan, dtype=query.dtype)
    body, after = out[0, 1:-1], out[1, 1:-1]
    given = (0, 0) if mask is None else (mask.data_ptr(), mask.stride(0))
    added = 0 if residual is None else residual.data_ptr()
    to = body.data_ptr(), added, after.data_ptr() if normed else 0
    made.attend(num_threads, len(query), query.data_ptr(), rows_place(key), rows_place(value), key.shape[2], given, *to)
    assert out[:, [0, -1]].isnan().all()
    assert normed or out[1].isnan().all()
    return (body, after) if normed else body


def weighed(query, key, value, mask, sinks):
    """Attention by plain PyTorch."""
    per_group = query.shape[1] // key.shape[1]
    key, value = (t.double().repeat_interleave(per_group, 1) for t in (key, value))
    logits = SCALE * torch.einsum("bhc,bhtc->bht", query.double(), key)
    logits = logits if mask is None else logits + mask.double()[:, None]
    if sinks is not None:
        logits = torch.cat((logits, sinks.double()[None, :, None].expand(len(query), -1, 1)), -1)
    weights = logits.softmax(-1)[..., : key.shape[2]]
    return torch.einsum("bht,bhtc->bhc", weights, value).to(query.dtype)
