"""From floating point to stored weights, a panel of rows at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from moestro.errors import InvalidInputError, invalid_input, not_one_of
from moestro.formats.base import PackedTensor, Scaling, WeightFormat
from moestro.formats.codec import Bounds, Codec, Steps, float32_steps
from moestro.formats.decode import DTYPES, panel_height
from moestro.formats.elements import pack_nibbles
from moestro.formats.nvfp4 import LARGEST
from moestro.formats.registry import CODECS, find_format

Search = Literal["nearest", "mse"]
_AT_ONCE = 4096


def quantize(
    weight: Tensor, format: WeightFormat | str, search: Search = "nearest", name: str = "weight"
) -> PackedTensor:
    """Store a weight in a format.

    Rounding is to nearest, ties to even; docs/reference/formats.md says how each format chooses its scales. The result
    does not depend on the number of threads.

    Args:
        weight: [N, K] or [E, N, K] of float32, bfloat16, float16, or float64 (rounded to float32 first); any strides.
        format: a value of `FORMATS`, or its name. Dense formats are a cast.
        search: "nearest" takes scales from the largest weights of each block; "mse" tries scales about these and
            takes, block by block, the one whose stored weights have the least squared error, never a worse one.
        name: what errors call the weight.

    Returns:
        The packed weight, on the weight's device. Beside it a few MiB are used, however large the weight.

    Raises:
        InvalidInputError: a weight is NaN or infinite, or too large for the format; the format cannot store the shape;
            the dtype is not floating point; the search is neither of the two.
    """
    format = find_format(format) if isinstance(format, str) else format
    if weight.dim() not in (2, 3) or weight.dtype not in DTYPES:
        raise invalid_input(
            "quantize",
            got=f"{name} {list(weight.shape)} of {weight.dtype}",
            needs="[rows, columns] or [num_experts, rows, columns] of float32, bfloat16, float16 or float64",
            fix="Dequantize packed weights first.",
        )
    check_search(search, "quantize")
    check_shape(format, weight.shape[-2], weight.shape[-1], "quantize")
    with torch.no_grad():
        if format.is_dense:
            packed = PackedTensor(weight.detach().to(format.storage), format)
        else:
            parts = format.parts(weight.shape).items()
            empty = {part: weight.new_empty(shape, dtype=dtypes[0]) for part, (dtypes, shape) in parts}
            packed = PackedTensor(format=format, **empty)
        given = weight.detach()
        matrices = [((), given)] if given.dim() == 2 else [((e,), matrix) for e, matrix in enumerate(given)]
        for index, matrix in [] if given.is_meta else matrices:
            source, target = _Source(matrix, index, name), packed[index[0]] if index else packed
            if format.is_dense:
                _check_cast(source, target)
            else:
                _Encoder(source, CODECS[find_format(format.name)], target).write(search)
    return packed


def check_search(search: str, operation: str) -> None:
    """Refuse what is no `Search`."""
    if search not in get_args(Search):
        raise not_one_of(operation, "search", search, get_args(Search), "mse takes longer, and errs less.")


def check_shape(format: WeightFormat, num_rows: int, num_columns: int, operation: str) -> None:
    """Whether the format can store a matrix [num_rows, num_columns]; `operation` is what the error names.

    Raises:
        InvalidInputError: it cannot: its groups, or its bytes, do not come out even along a row.
    """
    if num_columns % format.row_unit:
        raise invalid_input(
            operation,
            got=f"a matrix of {num_rows} x {num_columns} for format {format.name}",
            needs=f"rows whose length is a multiple of {format.row_unit}",
            fix="Choose a format with smaller groups, or int8, fp8 or bfloat16, which take any length.",
        )


@dataclass(frozen=True, eq=False)
class _Source:
    """One matrix of the weight, its index in the stack (() if there is none), and what errors call the weight."""

    matrix: Tensor
    index: tuple[int, ...]
    name: str

    def refuse(self, row: int, column: int, needs: str) -> InvalidInputError:
        """The error about one weight."""
        place = [*self.index, row, column]
        return invalid_input(
            "quantize",
            got=f"{float(self.matrix[row, column])!r} at {place} of {self.name}",
            needs=needs,
            fix="Look at where the weight comes from: this is damage, or a training run that diverged.",
        )

    def check(self, panel: Tensor, start: int, format: WeightFormat) -> None:
        """Raise for the first value of a converted panel [n, K] that is not finite, if there is one."""
        if not panel.numel() or bool(torch.stack(panel.aminmax()).isfinite().all()):
            return
        row, column = panel.isfinite().logical_not_().nonzero()[0].tolist()
        finite = math.isfinite(float(self.matrix[start + row, column]))
        needs = f"weights within the range of {panel.dtype} for {format.name}" if finite else "finite weights"
        raise self.refuse(start + row, column, needs)


def _check_cast(source: _Source, target: PackedTensor) -> None:
    height = panel_height(target.format, *target.shape)
    for start in range(0, target.shape[0], height):
        source.check(target.data[start : start + height], start, target.format)


@dataclass(frozen=True, eq=False)
class _Encoder:
    """One matrix on its way into packed tensors that hold nothing yet."""

    source: _Source
    codec: Codec
    target: PackedTensor

    def write(self, search: Search) -> None:
        scaling = self.target.format.scaling
        assert scaling is not None
        unit = whole = None
        if self.target.global_scales is not None:
            unit = float32_steps(self._extremes().amax, LARGEST).step[0, 0]
            self.target.global_scales.copy_(unit)
        if not scaling.rows:
            whole = self._choose_whole(search)
            self._store(self.target, whole)
        for part, start, blocks in self._panels():
            steps = whole
            if steps is None:
                steps = choose(blocks, self._bounds(blocks, unit), self.codec, search)
                self._check_range(steps, blocks, start)
                self._store(part, steps)
            codes = self.codec.encode(blocks / steps.step, steps)
            codes = from_blocks(codes, part.shape, scaling)
            part.data.copy_(pack_nibbles(codes) if part.format.per_item == 2 else codes)

    def _panels(self) -> Iterator[tuple[PackedTensor, int, Tensor]]:
        """Rows of the target, where they start, and their weights as float32 blocks [B, M], finite."""
        n, k = self.target.shape
        scaling = self.target.format.scaling
        assert scaling is not None
        height = panel_height(self.target.format, n, k)
        for start in range(0, n, height):
            part = self.target.rows(start, min(start + height, n))
            panel = self.source.matrix[start : start + height].to(torch.float32).contiguous()
            self.source.check(panel, start, self.target.format)
            yield part, start, to_blocks(panel, scaling)

    def _bounds(self, blocks: Tensor, unit: Tensor | None) -> Bounds:
        if not blocks.shape[1]:
            zero = blocks.new_zeros((blocks.shape[0], 1))
            return Bounds(zero, zero, unit)
        low, high = torch.aminmax(blocks, dim=1, keepdim=True)
        return Bounds(low.clamp_(max=0.0), high.clamp_(min=0.0), unit)

    def _extremes(self) -> Bounds:
        """Those of the whole matrix, [1, 1]."""
        low = high = torch.zeros((1, 1), device=self.target.device)
        for _, _, blocks in self._panels():
            bounds = self._bounds(blocks.reshape(1, -1), None)
            low, high = torch.minimum(low, bounds.low), torch.maximum(high, bounds.high)
        return Bounds(low, high)

    def _choose_whole(self, search: Search) -> Steps:
        """The steps of a matrix that is one block, of which no more than a panel is in memory at a time."""
        bounds = self._extremes()
        nearest = self.codec.nearest(bounds)
        if search == "nearest":
            return nearest
        candidates = [nearest, *self.codec.others(bounds, nearest)]
        errors: list[list[float]] = [[] for _ in candidates]
        for _, _, blocks in self._panels():
            for steps, found in zip(candidates, errors, strict=True):
                found.extend(squared_errors(blocks, steps, self.codec).flatten().tolist())
        totals = [math.fsum(found) for found in errors]
        return candidates[totals.index(min(totals))]

    def _check_range(self, steps: Steps, blocks: Tensor, start: int) -> None:
        beyond = steps.step.isinf().nonzero()
        if beyond.numel():
            block = int(beyond[0, 0])
            across = self.target.shape[1] // blocks.shape[1]
            column = block % across * blocks.shape[1] + int(blocks[block].abs().argmax())
            most = torch.finfo(steps.scales.dtype).max
            raise self.source.refuse(
                start + block // across, column, f"weights whose scale in {self.target.format.name} is at most {most:g}"
            )

    def _store(self, part: PackedTensor, steps: Steps) -> None:
        assert part.scales is not None
        part.scales.copy_(steps.scales.view(part.scales.shape))
        if part.zeros is not None and steps.zeros is not None:
            part.zeros.copy_(steps.zeros.view(part.zeros.shape))


def choose(blocks: Tensor, bounds: Bounds, codec: Codec, search: Search) -> Steps:
    """The steps of each block [B, M]."""
    nearest = codec.nearest(bounds)
    if search == "nearest":
        return nearest
    best, least = nearest, _errors_in_units(blocks, nearest, codec)
    for steps in codec.others(bounds, nearest):
        # In units of the nearest step, so that no square leaves the range of float32.
        errors = _errors_in_units(blocks, steps, codec).mul_((steps.step / nearest.step).square_())
        better = errors < least
        best, least = Steps.where(better, steps, best), torch.where(better, errors, least)
    better = squared_errors(blocks, best, codec) < squared_errors(blocks, nearest, codec)
    return Steps.where(better, best, nearest)


def squared_errors(blocks: Tensor, steps: Steps, codec: Codec) -> Tensor:
    """[B, 1] float64: the sum over each block of the squares of what is stored less what was given."""
    stored = codec.round(blocks / steps.step, steps).mul_(steps.step)
    return row_sums(stored.to(torch.float64).sub_(blocks).square_())


def _errors_in_units(blocks: Tensor, steps: Steps, codec: Codec) -> Tensor:
    units = blocks / steps.step
    return row_sums(codec.round(units, steps).sub_(units).square_())


def to_blocks(panel: Tensor, scaling: Scaling) -> Tensor:
    """[n, K] -> [B, M], blocks from left to right and top to bottom; what a cut-off block lacks is zero.

    Where all rows share a scale, each row stands for itself.
    """
    if scaling.rows <= 1:
        return panel.view(-1, scaling.columns) if scaling.columns else panel
    rows, columns = scaling.rows, scaling.columns
    n, k = panel.shape
    down, across = scaling.blocks(n, k)
    full = F.pad(panel, (0, across * columns - k, 0, down * rows - n))
    return full.view(down, rows, across, columns).transpose(1, 2).reshape(down * across, rows * columns)


def from_blocks(blocks: Tensor, shape: Sequence[int], scaling: Scaling) -> Tensor:
    """[B, M] -> [n, K], what `to_blocks` was given."""
    n, k = shape
    if scaling.rows <= 1:
        return blocks.view(n, k)
    rows, columns = scaling.rows, scaling.columns
    down, across = scaling.blocks(n, k)
    full = blocks.view(down, across, rows, columns).transpose(1, 2).reshape(down * rows, across * columns)
    return full[:n, :k]


def row_sums(x: Tensor) -> Tensor:
    """[B, M] -> [B, 1], each row summed in an order that depends on M alone, not on B or the number of threads."""
    # torch divides a sum among threads when it has a single result and more than 32768 terms.
    total = x[:, :_AT_ONCE].sum(1, keepdim=True)
    for start in range(_AT_ONCE, x.shape[1], _AT_ONCE):
        total += x[:, start : start + _AT_ONCE].sum(1, keepdim=True)
    return total
