"""What a model is made of: counted from its configuration and the headers of its files; no weight is read."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache

from moestro.checkpoint import Checkpoint, open_checkpoint
from moestro.errors import unsupported
from moestro.formats import WeightFormat, check_shape, find_format
from moestro.formats.dense import DENSE_FORMATS
from moestro.hf.config import MoestroConfig
from moestro.hf.dense import PROJECTIONS, check_projections, storable
from moestro.hf.memory import layer_size
from moestro.hf.models import explained, find_model, read_config, routed_experts_of
from moestro.hf.sources import Reader, empty_model, places_of, take_quantization
from moestro.hf.store import Stored
from moestro.hf.text_model import BUNDLED, bundled_folder
from moestro.memory.sizes import LayerSize, total_bytes

OPERATION = "plan"
_DENSE = {form.storage: form.name for form in DENSE_FORMATS}
_PUBLISHED = {"fp8": "fp8-e4m3-b128", "mxfp4": "mxfp4"}


@dataclass(frozen=True)
class ExpertLayer:
    """The experts of one layer.

    Attributes:
        name: of the module that holds them.
        gate_up, down: [N, K] of one expert's matrices.
        format: as stored, by name.
        size: their number, top-k, and the bytes of one as stored.
    """

    name: str
    gate_up: tuple[int, int]
    down: tuple[int, int]
    format: str
    size: LayerSize

    def stored_as(self, name: str | None) -> ExpertLayer:
        """The same, quantised to a format while it is read; None leaves it.

        Raises:
            InvalidInputError: the format cannot store matrices of these shapes.
        """
        form = None if name is None else find_format(name)
        if form is None or form.name == self.format:
            return self
        for shape in (self.gate_up, self.down):
            check_shape(form, *shape, f"{OPERATION} {self.name}")
        nbytes = _stored_bytes(form, self.gate_up, self.down)
        return replace(self, format=form.name, size=replace(self.size, expert_bytes=nbytes, pool_key=form.name))

    def cut(self, parts: int) -> ExpertLayer | None:
        """The widest of so many slices along the intermediate size, in whole groups and blocks as a mesh cuts them.

        None where there are fewer of these than slices.
        """
        if parts == 1:
            return self
        form, (hidden, width) = find_format(self.format), self.down
        scaling = form.scaling
        unit = math.lcm(form.row_unit, *(size for size in (scaling.rows, scaling.columns) if size) if scaling else ())
        units = -(-width // unit)
        if units < parts:
            return None
        own = min(-(-units // parts) * unit, width)
        gate_up, down = (self.gate_up[0] * own // width, self.gate_up[1]), (hidden, own)
        size = replace(self.size, expert_bytes=_stored_bytes(form, gate_up, down))
        return replace(self, gate_up=gate_up, down=down, size=size)

    @property
    def weights(self) -> int:
        """Of one expert."""
        return math.prod(self.gate_up) + math.prod(self.down)

    @property
    def bits(self) -> float:
        """Of one weight, scales included."""
        return 8 * self.size.expert_bytes / self.weights


@dataclass(frozen=True, eq=False)
class Model:
    """A model of Transformers without its weights.

    Attributes:
        name: as it was given.
        folder: where that was found, or the hub id.
        config: Transformers' configuration.
        dtype: of all that is no expert.
        layers: with experts, in their order.
        rest_bytes: of parameters and buffers beside the experts.
        looked_up_bytes: those of them that are embeddings alone, of which a pass reads the rows of its tokens.
        copied_bytes: those of them that a process holds for itself: not as its files have them, which are mapped.
        checkpoint: the headers of its files; None where there is a configuration only.
    """

    name: str
    folder: str
    config: Any
    dtype: torch.dtype
    layers: tuple[ExpertLayer, ...]
    rest_bytes: int
    looked_up_bytes: int
    checkpoint: Checkpoint | None
    copied_bytes: int = 0

    @property
    def depth(self) -> int:
        """Layers of all kinds."""
        return int(getattr(self.config.get_text_config(), "num_hidden_layers", len(self.layers)))

    def stored_as(self, name: str | None) -> Model:
        """The same with its experts in a format; None leaves them. Errors as of `ExpertLayer.stored_as`."""
        return replace(self, layers=tuple(layer.stored_as(name) for layer in self.layers))

    @property
    def sizes(self) -> tuple[LayerSize, ...]:
        return tuple(layer.size for layer in self.layers)

    @property
    def bits(self) -> float:
        """Of a weight of the experts, in the mean."""
        weights = sum(layer.size.experts * layer.weights for layer in self.layers)
        return 8 * total_bytes(self.sizes) / weights

    @property
    def context(self) -> int | None:
        """The most tokens it was made for, prompt included, if its configuration says."""
        length = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return length if isinstance(length, int) and length > 0 else None


@dataclass(frozen=True)
class Counts:
    """What one pass needs beside the experts.

    Attributes:
        flops: multiply-adds count two.
        weight_bytes: of parameters that are read.
        cache_bytes: of keys and values after it.
    """

    flops: int
    weight_bytes: int
    cache_bytes: int


def read_model(source: str | Path | None, projections: str = "auto") -> Model:
    """Of a checkpoint's folder, a folder that has config.json only, or a hub id; None is the bundled model.

    `projections` is as for `moestro.load`: a format makes its linear modules smaller.

    Raises:
        InvalidInputError: a folder or files that cannot be read; as of `load`.
        UnsupportedError: a dense model, or one whose experts `load` does not read.
    """
    path = str(bundled_folder() if source is None else find_model(_folder(source), OPERATION))
    files = open_checkpoint(Path(path)) if any(Path(path).glob("*.safetensors")) else None
    config = read_config(path, OPERATION, files)
    quantization = take_quantization(config)
    config.dtype = config.dtype or _stored_dtype(files)
    skeleton = empty_model(config)
    with explained(OPERATION, path, "a configuration that a model can be made of", "Check config.json."):
        read = None if files is None else _Read(files, Reader(skeleton, files, quantization))
        layers = tuple(_config_layers(skeleton, quantization) if read is None else read.layers(skeleton))
    projected = _take_projections(skeleton, projections)
    return Model(
        name=BUNDLED if source is None else str(source),
        folder=path,
        config=config,
        dtype=config.dtype,
        layers=layers,
        rest_bytes=_rest_bytes(skeleton) + projected,
        looked_up_bytes=_looked_up_bytes(skeleton),
        checkpoint=files,
        copied_bytes=projected + (0 if read is None else read.copied_bytes(skeleton)),
    )


def _stored_bytes(form: WeightFormat, *shapes: tuple[int, int]) -> int:
    """Of matrices [N, K] in a format."""
    parts = (part for shape in shapes for part in form.parts(shape).values())
    return sum(math.prod(size) * dtypes[0].itemsize for dtypes, size in parts)


def _folder(source: str | Path) -> str | Path:
    """That of a config.json which was named itself."""
    path = Path(source)
    return path.parent if path.name == "config.json" and path.is_file() else source


@dataclass(frozen=True)
class _Read:
    """Files, and what of a model is where in them."""

    files: Checkpoint
    reader: Reader

    def layers(self, skeleton: Any) -> Iterator[ExpertLayer]:
        top_k = routed_experts_of(skeleton.config)
        for _, stored in self.reader.layers:
            first, last = stored.recipes
            size = layer_size(stored, self.files, top_k)
            yield ExpertLayer(stored.path, first.shape[1:], last.shape[1:], _one_format(stored), size)

    def copied_bytes(self, skeleton: Any) -> int:
        """Beside the experts, of what files do not have as the model holds it: in another dtype, or in parts."""
        rest = _rest(skeleton)
        return sum(named[0].nbytes for named in rest if not any(map(self._is_mapped, named)))

    def _is_mapped(self, tensor: _Tensor) -> bool:
        key = self.reader.names.single(tensor.name)
        return key is not None and self.files.entry(key).dtype == tensor.dtype


def _one_format(stored: Stored) -> str:
    names = {recipe.format.name for recipe in stored.recipes}
    if len(names) > 1:
        raise unsupported(
            OPERATION,
            got=f"{stored.path} with experts in {' and '.join(sorted(names))}",
            needs="one format for both matrices of an expert",
            fix="Measure it: moestro bench model FOLDER.",
        )
    return names.pop()


def _config_layers(skeleton: Any, quantization: MoestroConfig) -> Iterator[ExpertLayer]:
    top_k = routed_experts_of(skeleton.config)
    for _, path, projections in places_of(skeleton):
        holder, count = skeleton.get_submodule(path), projections.num_experts
        shapes, dtypes = [], []
        for projection in projections.both:
            stacks = [projection.stack(holder.get_parameter(name), count) for name in projection.parameters]
            shapes.append((sum(t.shape[1] for t in stacks), stacks[0].shape[2]))
            dtypes.append(stacks[0].dtype)
        form = quantization.format or _PUBLISHED.get(quantization.method) or _DENSE[dtypes[0]]
        plain = ExpertLayer(path, shapes[0], shapes[1], "", LayerSize(count, min(top_k, count), 1))
        yield plain.stored_as(form)


def _stored_dtype(files: Checkpoint | None) -> torch.dtype:
    """That of a model whose configuration names none: of the first tensor of a usual dtype, as Transformers has it."""
    entries = () if files is None else (files.entry(name) for name in files.names)
    return next((entry.dtype for entry in entries if entry.dtype in _DENSE), torch.bfloat16)


@dataclass(frozen=True)
class _Tensor:
    """A parameter or buffer beside the experts, under one of its names."""

    name: str
    nbytes: int
    dtype: torch.dtype


def _rest(skeleton: Any) -> list[list[_Tensor]]:
    """Parameters and buffers that are no experts', each once, with all its names."""
    experts = {
        id(skeleton.get_submodule(path).get_parameter(name))
        for _, path, projections in places_of(skeleton)
        for name in projections.parameters
    }
    wide = skeleton._keep_in_fp32_modules_strict or ()  # Transformers keeps these in float32 whatever the dtype
    found: dict[int, list[_Tensor]] = {}
    for name, t in (*skeleton.named_parameters(remove_duplicate=False), *skeleton.named_buffers()):
        is_wide = any(re.search(rf"(^|\.){part}($|\.)", name) for part in wide)
        size, dtype = (4 * t.numel(), torch.float32) if is_wide else (t.nbytes, t.dtype)
        found.setdefault(id(t), []).append(_Tensor(name, size, dtype))
    return [named for key, named in found.items() if key not in experts]


def _rest_bytes(skeleton: Any) -> int:
    return sum(named[0].nbytes for named in _rest(skeleton))


def _take_projections(skeleton: Any, projections: str) -> int:
    """Remove the weights of linear modules that are to be stored in a format; how many bytes they take there."""
    if projections in PROJECTIONS:
        return 0
    check_projections(skeleton, projections, OPERATION)
    modules = [module for _, module in storable(skeleton)]
    shapes = [module._parameters.pop("weight").shape for module in modules]  # type: ignore[union-attr]
    return _stored_bytes(find_format(projections), *((n, k) for n, k in shapes))


def _looked_up_bytes(skeleton: Any) -> int:
    tied = {id(m._parameters.get("weight")) for m in skeleton.modules() if isinstance(m, nn.Linear)}
    tables = {id(m.weight): m.weight for m in skeleton.modules() if isinstance(m, nn.Embedding)}
    return sum(table.nbytes for key, table in tables.items() if key not in tied)


def count(model: Model, batch: int, prompt_tokens: int, new_tokens: int) -> tuple[Counts, Counts, int]:
    """What the pass of a prompt and the step after it need beside the experts, and bytes of keys and values at the end.

    The passes are run without memory: shapes alone are computed.

    Raises:
        InvalidInputError: a model whose forward needs numbers to know shapes.
    """
    skeleton = empty_model(model.config)
    without_experts(skeleton)
    cache = DynamicCache(config=skeleton.config.get_text_config())
    needs, fix = "a language model whose shapes do not depend on its numbers", "Measure it: moestro bench model FOLDER."
    read = model.rest_bytes - model.looked_up_bytes

    def run(length: int) -> int:
        ids = torch.zeros((batch, length), dtype=torch.int64, device="meta")
        with explained(OPERATION, model.name, needs, fix), torch.no_grad():
            skeleton(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return sum(t.nbytes for each in cache.layers for t in vars(each).values() if isinstance(t, Tensor))

    def counted(length: int) -> Counts:
        with FlopCounterMode(display=False) as counter:
            cached = run(length)
        return Counts(counter.get_total_flops(), read, cached)

    prompt, step = counted(prompt_tokens), counted(1)
    return prompt, step, run(max(new_tokens - 1, 1))


def without_experts(skeleton: Any) -> None:
    """Have the experts of a model return what they are given.

    Raises:
        UnsupportedError: expert layers that return something else than a tensor like the first they get.
    """
    from moestro.hf.families.base import INTERFACE
    from moestro.hf.serving import find

    for layer in find(skeleton):
        if layer.adapter is not INTERFACE:
            raise unsupported(
                OPERATION,
                got=f"{type(skeleton).__name__}, whose {layer.path} belongs to {layer.adapter.family}",
                needs="experts of Transformers' interface",
                fix="Measure it: moestro bench model FOLDER.",
            )
        layer.module.forward = _unchanged


def _unchanged(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    return hidden_states
