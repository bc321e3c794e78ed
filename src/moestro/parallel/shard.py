"""The part of a layer's experts that a rank keeps: some of the experts, or a slice of each along I, in every format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import lcm

import torch
from torch import Tensor

from moestro.errors import unsupported
from moestro.formats import PackedTensor, SplitTensor, StoredExperts, WeightFormat
from moestro.weights import ExpertWeights

Range = tuple[int, int]


def take_experts(weights: ExpertWeights, experts: Sequence[int]) -> ExpertWeights:
    """The experts of these ids, in this order, with memory of their own where they were stacked."""
    biases = (None if b is None else _rows_of(b, experts) for b in (weights.gate_up_bias, weights.down_bias))
    first, last = biases
    return replace(
        weights,
        gate_up=stored_experts(weights.gate_up, experts),
        down=stored_experts(weights.down, experts),
        gate_up_bias=first,
        down_bias=last,
    )


def stored_experts(stored: StoredExperts, experts: Sequence[int]) -> StoredExperts:
    """The same of one projection."""
    if isinstance(stored, SplitTensor):
        return SplitTensor(tuple(stored.matrices[e] for e in experts))
    names = stored.format.names
    return PackedTensor(format=stored.format, **{name: _rows_of(getattr(stored, name), experts) for name in names})


def expert_tensors(weights: ExpertWeights, local: int) -> list[Tensor]:
    """Every tensor of one expert, biases last: views, of the same shapes for each."""
    found: list[Tensor] = []
    for stored in (weights.gate_up, weights.down):
        if isinstance(stored, SplitTensor):
            found += [tensor for block in stored.matrices[local] for tensor in block.tensors]
        else:
            found += [tensor[local] for tensor in stored.tensors]
    return [*found, *(bias[local] for bias in (weights.gate_up_bias, weights.down_bias) if bias is not None)]


@torch.no_grad()
def with_experts(weights: ExpertWeights, experts: Sequence[int | Sequence[Tensor]]) -> ExpertWeights:
    """The same kind of weights with other experts: each one of these, by its number, or all tensors of a new one.

    Stacks are copied into memory of their own; experts in tensors of their own stay where they are.
    """
    each = [[*expert_tensors(weights, e)] if isinstance(e, int) else [*e] for e in experts]
    made: list[StoredExperts] = []
    for stored in (weights.gate_up, weights.down):
        if isinstance(stored, SplitTensor):
            blocks = stored.matrices[0]
            made.append(SplitTensor(tuple(tuple(_block_like(b, own) for b in blocks) for own in each)))
        else:
            packed = room_for(stored, len(each))
            for tensor, old in zip(packed.tensors, stored.tensors, strict=True):
                for room, own in zip(tensor, each, strict=True):
                    room.copy_(own.pop(0))
                tensor.requires_grad_(old.requires_grad)
            made.append(packed)
    biases: list[Tensor | None] = []
    for bias in (weights.gate_up_bias, weights.down_bias):
        rows = None if bias is None else torch.stack([own.pop(0) for own in each])
        biases.append(rows if rows is None or bias is None else rows.requires_grad_(bias.requires_grad))
    return replace(weights, gate_up=made[0], down=made[1], gate_up_bias=biases[0], down_bias=biases[1])


def _block_like(block: PackedTensor, own: list[Tensor]) -> PackedTensor:
    """A block of one expert, of the first of its tensors that are left."""
    return PackedTensor(format=block.format, **{name: own.pop(0) for name in block.format.names})


def room_for(one: PackedTensor, num_experts: int) -> PackedTensor:
    """Memory for so many experts like those of a stack."""
    made = {
        name: t.detach().new_empty_strided((num_experts, *t.shape[1:]), (t[0].numel(), *t.stride()[1:]))
        for name, t in zip(one.format.names, one.tensors, strict=True)
    }
    return PackedTensor(format=one.format, **made)


def slice_of(weights: ExpertWeights, part: int, parts: int, operation: str) -> Range:
    """Where a slice of I begins and ends: in whole groups and blocks of both projections, as even as these allow.

    Raises:
        UnsupportedError: fewer groups than slices, or experts whose outputs are normed one by one.
    """
    size, unit = weights.intermediate_size, _unit(weights)
    if weights.output_norm is not None:
        raise unsupported(
            operation,
            got="experts with an output_norm and tp above 1",
            needs="whole experts: the norm of a sum is not the sum of norms",
            fix="Use ep instead of tp.",
        )
    units = -(-size // unit)
    if units < parts:
        forms = " and ".join(dict.fromkeys(s.format.name for s in (weights.gate_up, weights.down)))
        raise unsupported(
            operation,
            got=f"intermediate_size {size} in {forms}, to be cut into {parts} slices",
            needs=f"at most {units} slices: a group or block of {unit} is not cut",
            fix="Lower tp and raise ep, or store the experts in a format with smaller groups.",
        )
    each, more = divmod(units, parts)
    start = part * each + min(part, more)
    return start * unit, min((start + each + (part < more)) * unit, size)


def take_slice(weights: ExpertWeights, part: int, parts: int, operation: str) -> ExpertWeights:
    """Slice `part` of `parts` of every expert along I; summed over the parts the outputs are those of whole experts.

    The bias of down belongs to the first slice.

    Raises:
        UnsupportedError: as for `slice_of`, or blocks of rows that hold both gate and up.
    """
    own, size, activation = slice_of(weights, part, parts, operation), weights.intermediate_size, weights.activation
    if activation.interleaved:
        rows = [(2 * own[0], 2 * own[1])]
    else:
        rows = [own, (size + own[0], size + own[1])] if activation.gated else [own]
    bias = weights.gate_up_bias
    return replace(
        weights,
        gate_up=slice_rows(weights.gate_up, rows, operation),
        down=slice_columns(weights.down, own),
        gate_up_bias=None if bias is None else torch.cat([bias[:, start:stop] for start, stop in rows], 1),
        down_bias=weights.down_bias if part == 0 else None,
    )


def slice_rows(stored: StoredExperts, rows: Sequence[Range], operation: str) -> StoredExperts:
    """Experts [E, N, K] -> those rows of each, one range after the other; copied.

    Raises:
        UnsupportedError: a range that begins inside a block of rows with one scale.
    """
    if isinstance(stored, PackedTensor):
        return _joined([_part_of_rows(stored, start, stop, operation) for start, stop in rows])
    experts = []
    for matrices in stored.matrices:
        found, above = [], 0
        for matrix in matrices:
            height = matrix.shape[0]
            for start, stop in rows:
                first, last = max(start - above, 0), min(stop - above, height)
                if first < last:
                    found.append(_part_of_rows(matrix, first, last, operation))
            above += height
        experts.append(tuple(found))
    return SplitTensor(tuple(experts))


def slice_columns(stored: StoredExperts, columns: Range) -> StoredExperts:
    """Experts [E, N, K] -> those columns of each, which begin and end with a group; copied."""
    if isinstance(stored, SplitTensor):
        return SplitTensor(tuple(tuple(_part_of_columns(m, columns) for m in expert) for expert in stored.matrices))
    return _part_of_columns(stored, columns)


def _unit(weights: ExpertWeights) -> int:
    gate_up, down = weights.gate_up.format, weights.down.format
    rows = gate_up.scaling.rows if gate_up.scaling is not None else 0
    columns = down.scaling.columns if down.scaling is not None else 0
    halves = 2 if weights.activation.interleaved else 1
    own = rows // halves if rows % halves == 0 else rows
    return lcm(own or 1, columns or 1, down.row_unit)


def _rows_of(tensor: Tensor, experts: Sequence[int]) -> Tensor:
    """Some entries along the first dimension, with memory of their own and the strides of the others kept."""
    first = experts[0] if experts else 0
    if list(experts) == list(range(first, first + len(experts))):
        return tensor[first : first + len(experts)].clone()
    view = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
    return view[list(experts)].view(tensor.dtype)


def _part_of_rows(packed: PackedTensor, start: int, stop: int, operation: str) -> PackedTensor:
    scaling, height = packed.format.scaling, packed.shape[-2]
    parts = {"data": packed.data[..., start:stop, :]}
    if scaling is not None:
        if scaling.rows and (start % scaling.rows or (stop % scaling.rows and stop != height)):
            raise unsupported(
                operation,
                got=f"rows {start} to {stop} of {packed.format.name}",
                needs=f"rows in blocks of {scaling.rows}, which share a scale",
                fix="Use ep instead of tp.",
            )
        for name in ("scales", "zeros"):
            tensor = getattr(packed, name)
            if tensor is not None and scaling.rows:
                parts[name] = tensor[..., start // scaling.rows : -(-stop // scaling.rows), :]
            elif tensor is not None:
                parts[name] = tensor
        if packed.global_scales is not None:
            parts["global_scales"] = packed.global_scales
    return _own(packed.format, parts)


def _part_of_columns(packed: PackedTensor, columns: Range) -> PackedTensor:
    form, (start, stop) = packed.format, columns
    parts = {"data": packed.data[..., start // form.per_item : -(-stop // form.per_item)]}
    for name in form.names[1:]:
        tensor = getattr(packed, name)
        across = form.scaling.columns if form.scaling is not None and name != "global_scales" else 0
        parts[name] = tensor[..., start // across : -(-stop // across)] if across else tensor
    return _own(form, parts)


def _own(form: WeightFormat, parts: dict[str, Tensor]) -> PackedTensor:
    return PackedTensor(format=form, **{name: tensor.clone() for name, tensor in parts.items()})


def _joined(parts: Sequence[PackedTensor]) -> StoredExperts:
    """Stacks of rows [E, n, K], one below the other, as one stack where one scale does not belong to all of it."""
    first = parts[0]
    if len(parts) == 1:
        return first
    form = first.format
    if form.scaling is not None and not form.scaling.rows:
        names = [name for name in form.names if name != "data"]
        data = _cat([p.data for p in parts])
        return PackedTensor(data, form, **{name: getattr(first, name) for name in names})
    names = [name for name in form.names if name != "global_scales"]
    kept = {} if first.global_scales is None else {"global_scales": first.global_scales}
    return PackedTensor(format=form, **{name: _cat([getattr(p, name) for p in parts]) for name in names}, **kept)


def _cat(tensors: Sequence[Tensor]) -> Tensor:
    first = tensors[0]
    if first.dtype.itemsize > 1:
        return torch.cat([*tensors], -2)
    return torch.cat([t.view(torch.uint8) for t in tensors], -2).view(first.dtype)
