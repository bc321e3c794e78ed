"""What quantising will write, from headers alone: every tensor, every shard, every byte; or why it cannot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from moestro.checkpoint.header import TensorSpec, in_file_order, render_header, shown
from moestro.checkpoint.read import Checkpoint
from moestro.checkpoint.scheme import OPERATION, Scheme
from moestro.checkpoint.write import plan_shards, shard_names
from moestro.errors import invalid_input
from moestro.formats import PackedTensor, StoredExperts, WeightFormat
from moestro.formats.encode import Search
from moestro.weights import quantized

CHUNK_BYTES = 16 * 2**20
METADATA = {"format": "pt"}
"""What Transformers asks of every file."""
_SHOWN = 5


@dataclass(frozen=True, eq=False)
class ExpertSource:
    """One projection of one layer's experts, as a checkpoint stores it.

    Attributes:
        target: the full name of its parameter in the Transformers model ("model.layers.0.mlp.experts.gate_up_proj").
        stored: its experts in the logical layout [E, N, K], memory-mapped; rows of gate_up in the model's own order.
        names: the tensors of the checkpoint that it is made of, which quantising replaces.
    """

    target: str
    stored: StoredExperts
    names: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Item:
    """A tensor that is copied byte for byte, or (`Projection`) several that are made and written together.

    `specs` are of what is written, `reads` the tensors of the source that it is made of.
    """

    specs: tuple[TensorSpec, ...]
    reads: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs)

    def pieces(self, checkpoint: Checkpoint, search: Search) -> Iterator[tuple[str, Tensor]]:
        """Names and next rows of tensors, as `write_file` takes them; here a few MiB at a time."""
        (name,) = self.reads
        tensor = checkpoint.tensor(name)
        if tensor.dim() and tensor.nbytes:
            for rows in torch.split(tensor, max(1, CHUNK_BYTES * len(tensor) // tensor.nbytes)):
                yield name, rows
        else:
            yield name, tensor


@dataclass(frozen=True, eq=False)
class Projection(Item):
    """The experts of one projection, and the format they get: a stack for each part of the format."""

    source: ExpertSource
    format: WeightFormat

    @classmethod
    def of(cls, source: ExpertSource, format: WeightFormat) -> Projection:
        """What these experts become in this format."""
        parts = format.parts(source.stored.shape)
        specs = {
            part: TensorSpec(f"{source.target}_{part}", dtypes[0], shape) for part, (dtypes, shape) in parts.items()
        }
        made = cls(tuple(specs.values()), source.names, source, format)
        if made.kept:
            first = source.stored.blocks(0)[0]
            kept = (replace(spec, dtype=getattr(first, part).dtype) for part, spec in specs.items())
            return replace(made, specs=tuple(kept))
        return made

    @property
    def kept(self) -> bool:
        """Whether the experts are packed in this very format already, so that no value is rounded again."""
        return not self.format.is_dense and self.source.stored.format == self.format

    @property
    def joins(self) -> bool:
        """Whether an expert's blocks of rows, one below the other, are one matrix of their format."""
        *upper, _ = self.source.stored.blocks(0)
        scaling = self.format.scaling
        if not upper or scaling is None:
            return True
        return scaling.rows > 0 and not scaling.global_scales and all(b.shape[0] % scaling.rows == 0 for b in upper)

    def pieces(self, checkpoint: Checkpoint, search: Search) -> Iterator[tuple[str, Tensor]]:
        """An expert at a time, every part of it before the next."""
        stored = self.source.stored
        kept = (_joined(stored.blocks(e)) for e in range(stored.num_experts))
        experts = kept if self.kept else quantized(stored, self.format, search, self.source.target)
        for expert in experts:
            for spec, part in zip(self.specs, expert.tensors, strict=True):
                yield spec.name, part[None]


def _joined(blocks: tuple[PackedTensor, ...]) -> PackedTensor:
    """Blocks of rows, one below the other, as one matrix."""
    if len(blocks) == 1:
        return blocks[0]
    parts = zip(blocks[0].format.names, zip(*(block.tensors for block in blocks), strict=True), strict=True)
    return PackedTensor(format=blocks[0].format, **{name: torch.cat(tensors) for name, tensors in parts})


@dataclass(frozen=True, eq=False)
class Outputs:
    """Everything that will be written besides the configuration and the files that are copied.

    By file name: its items in the order in which they are written, its tensors, and its bytes.
    """

    shards: Mapping[str, Sequence[Item]]
    specs: Mapping[str, Sequence[TensorSpec]]
    sizes: Mapping[str, int]

    @property
    def projections(self) -> tuple[Projection, ...]:
        return tuple(item for items in self.shards.values() for item in items if isinstance(item, Projection))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.nbytes for specs in self.specs.values() for spec in specs)


def plan_outputs(checkpoint: Checkpoint, experts: Sequence[ExpertSource], scheme: Scheme, shard_bytes: int) -> Outputs:
    """Plan what quantising writes; no byte of a tensor is read.

    Tensors that are no experts are copied; a projection, or a copied tensor, of more than `shard_bytes` has a file of
    its own. Refused are no experts, an override that matches none, two tensors of one name, and formats that cannot
    store a projection or are no use for one that is packed already: all such projections are named.
    """
    _check_overrides(checkpoint, experts, scheme)
    projections = [Projection.of(source, scheme.format_of(source.target)) for source in experts]
    _check_shapes(projections)
    _check_sources(projections)
    items = _in_source_order(checkpoint, projections)
    _check_names(items)
    groups = plan_shards(items, shard_bytes)
    shards = dict(zip(shard_names(len(groups)), groups, strict=True))
    specs = {name: [spec for item in items for spec in item.specs] for name, items in shards.items()}
    headers = {name: len(render_header(in_file_order(found), METADATA)) for name, found in specs.items()}
    sizes = {name: headers[name] + sum(spec.nbytes for spec in found) for name, found in specs.items()}
    return Outputs(shards, specs, sizes)


def _in_source_order(checkpoint: Checkpoint, projections: Sequence[Projection]) -> list[Item]:
    """Projections and copied tensors as the source's files have them, so that it is read from front to back."""
    place = {file: i for i, file in enumerate(checkpoint.files)}
    entries = {name: checkpoint.entry(name) for name in checkpoint.names}
    replaced = {name for projection in projections for name in projection.reads}
    copied = (Item((TensorSpec(e.name, e.dtype, e.shape),), (e.name,)) for e in entries.values())
    items: list[Item] = [*projections, *(item for item in copied if item.reads[0] not in replaced)]
    return sorted(items, key=lambda item: min((place[entries[n].file], entries[n].start, n) for n in item.reads))


def _check_overrides(checkpoint: Checkpoint, experts: Sequence[ExpertSource], scheme: Scheme) -> None:
    if not experts:
        raise invalid_input(
            OPERATION,
            got=f"{checkpoint.location}, a checkpoint without experts",
            needs="a Mixture-of-Experts model",
            fix="Only experts are quantised; a dense model has none.",
        )
    targets = [source.target for source in experts]
    for pattern in scheme.overrides:
        if any(fnmatchcase(target, pattern) for target in targets):
            continue
        others = [name for name in checkpoint.names if fnmatchcase(name, pattern)]
        matched = f"matches only {_some(others)}, no experts" if others else "matches nothing"
        raise invalid_input(
            OPERATION,
            got=f"override {pattern!r}, which {matched}",
            needs=f"a pattern on the names of experts, such as {targets[0]} or *.layers.0.*",
            fix="Only experts get a format; routers, attention and everything else are copied.",
        )


def _some(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _check_shapes(projections: Iterable[Projection]) -> None:
    alike: dict[tuple[WeightFormat, int, int], list[str]] = {}
    for projection in projections:
        _, n, k = projection.source.stored.shape
        if k % projection.format.row_unit:
            alike.setdefault((projection.format, n, k), []).append(projection.source.target)
    if alike:
        raise invalid_input(
            OPERATION,
            got="; ".join(f"{_some(targets)} [{n}, {k}] for {form.name}" for (form, n, k), targets in alike.items()),
            needs="; ".join(dict.fromkeys(f"rows of a multiple of {form.row_unit} weights" for form, _, _ in alike)),
            fix="Pick another format, or leave these as they are with --override NAME=bfloat16.",
        )


def _check_names(items: Iterable[Item]) -> None:
    counts = Counter(spec.name for item in items for spec in item.specs)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise invalid_input(
            OPERATION,
            got=f"a source that has a tensor {shown(twice[0])} already",
            needs="that name for the quantised experts",
            fix="Rename the tensor, which no published model has.",
        )


def _check_sources(projections: Iterable[Projection]) -> None:
    """Raise for experts that are packed already, unless the format keeps them, unpacks them, or is smaller."""
    twice = [
        p
        for p in projections
        if not (p.kept or p.format.is_dense or p.source.stored.format.is_dense)
        and int(p.format.bits) >= int(p.source.stored.format.bits)
    ]
    if twice:
        stored, wanted = twice[0].source.stored.format, twice[0].format
        raise invalid_input(
            OPERATION,
            got=f"{_some([p.source.target for p in twice])} stored as {stored.name}, for {wanted.name}",
            needs=f"{stored.name} itself, bfloat16, or elements of fewer than its {int(stored.bits)} bits",
            fix="Rounding again would lose and save nothing: quantise from the original weights.",
        )
    cut = [p for p in projections if p.kept and not p.joins]
    if cut:
        raise invalid_input(
            OPERATION,
            got=f"{_some([p.source.target for p in cut])} stored as {cut[0].format.name}, each expert in pieces",
            needs="matrices whose blocks of scales are not cut where they meet, to keep them in the same format",
            fix="Pick bfloat16, or a format of fewer bits, for these.",
        )
