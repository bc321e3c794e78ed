"""What quantising will write, from headers alone: every tensor, every shard, every byte; or why it cannot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from moestro.checkpoint.header import TensorSpec
from moestro.checkpoint.interleave import file_size
from moestro.checkpoint.items import Copied, Item, Projection
from moestro.checkpoint.read import Checkpoint
from moestro.checkpoint.scheme import Scheme
from moestro.checkpoint.sources import ExpertSource
from moestro.checkpoint.write import plan_shards, shard_names
from moestro.errors import InvalidInputError, invalid_input
from moestro.formats import WeightFormat, check_shape

OPERATION = "quantize"
_SHOWN = 5


@dataclass(frozen=True, eq=False)
class Outputs:
    """Everything that will be written besides the configuration and the files that are copied.

    Attributes:
        shards: the items of each file, by its name, in the order in which they are written.
        sizes: bytes of each file.
    """

    shards: Mapping[str, tuple[Item, ...]]
    sizes: Mapping[str, int]

    @property
    def items(self) -> tuple[Item, ...]:
        return tuple(item for items in self.shards.values() for item in items)

    @property
    def projections(self) -> tuple[Projection, ...]:
        return tuple(item for item in self.items if isinstance(item, Projection))

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Every tensor."""
        return tuple(spec for item in self.items for spec in item.specs)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(item.nbytes for item in self.items)


def plan_outputs(checkpoint: Checkpoint, experts: Sequence[ExpertSource], scheme: Scheme, shard_bytes: int) -> Outputs:
    """Plan what quantising writes; no byte of a tensor is read.

    Args:
        checkpoint: the source.
        experts: its experts; every other tensor is copied.
        scheme: the format of each.
        shard_bytes: the most tensor bytes of a file. A projection, or a copied tensor, that is larger has its own.

    Raises:
        InvalidInputError: no experts, an override that matches none, a format that cannot store a projection, or one
            that is no use for experts that are packed already. Every such projection is named, not the first alone.
    """
    _check_overrides(checkpoint, experts, scheme)
    projections = [Projection(source, scheme.format_of(source.target)) for source in experts]
    _check_shapes(projections)
    _check_sources(projections)
    items = _in_source_order(checkpoint, projections)
    _check_names(items)
    by_name = {item.specs[0].name: item for item in items}
    whole = [TensorSpec(name, torch.uint8, (item.nbytes,)) for name, item in by_name.items()]
    groups = plan_shards(whole, shard_bytes)
    shards = {
        name: tuple(by_name[spec.name] for spec in group)
        for name, group in zip(shard_names(len(groups)), groups, strict=True)
    }
    sizes = {name: file_size([s for item in items for s in item.specs]) for name, items in shards.items()}
    return Outputs(shards, sizes)


def _in_source_order(checkpoint: Checkpoint, projections: Iterable[Projection]) -> list[Item]:
    """Projections and copied tensors as the source's files have them, so that it is read from front to back."""
    place = {file: i for i, file in enumerate(checkpoint.files)}
    entries = {name: checkpoint.entry(name) for name in checkpoint.names}
    where = {name: (place[entry.file], entry.start, name) for name, entry in entries.items()}
    found: list[tuple[tuple[int, int, str], Item]] = []
    for projection in projections:
        names = projection.source.names
        found.append((min(where[name] for name in names), projection))
    replaced = {name for projection in projections for name in projection.source.names}
    for name, entry in entries.items():
        if name not in replaced:
            found.append((where[name], Copied(TensorSpec(name, entry.dtype, entry.shape))))
    return [item for _, item in sorted(found, key=lambda pair: pair[0])]


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
        alike.setdefault((projection.format, n, k), []).append(projection.source.target)
    problems, needs = [], []
    for (weight_format, n, k), targets in alike.items():
        try:
            check_shape(weight_format, n, k, OPERATION)
        except InvalidInputError as error:
            problems.append(f"{_some(targets)} [{n}, {k}] for {weight_format.name}")
            needs.append(str(error).partition("; needs ")[2].partition(". ")[0])
    if problems:
        raise invalid_input(
            OPERATION,
            got="; ".join(problems),
            needs="; ".join(dict.fromkeys(needs)),
            fix="Pick another format, or leave these as they are with --override NAME=bfloat16.",
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
    apart = [p for p in projections if p.kept and not p.joins]
    if apart:
        raise invalid_input(
            OPERATION,
            got=f"{_some([p.source.target for p in apart])} stored as {apart[0].format.name}, each expert in pieces",
            needs="matrices whose blocks of scales are not cut where they meet, to keep them in the same format",
            fix="Pick bfloat16, or a format of fewer bits, for these.",
        )


def _check_names(items: Iterable[Item]) -> None:
    seen: set[str] = set()
    for spec in (spec for item in items for spec in item.specs):
        if spec.name in seen:
            raise invalid_input(
                OPERATION,
                got=f"a source that has a tensor {spec.name} already",
                needs="that name for the quantised experts",
                fix="Rename the tensor, which no published model has.",
            )
        seen.add(spec.name)
