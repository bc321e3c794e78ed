"""Find the experts of a model among the tensors of its checkpoint, in whatever published layout it has."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from moestro.checkpoint import Checkpoint, ExpertSource, open_checkpoint
from moestro.checkpoint.scheme import format_for
from moestro.errors import MoestroError, invalid_input, unsupported
from moestro.formats import FORMATS, WeightFormat, find_format
from moestro.formats.dense import DENSE_FORMATS
from moestro.hf.config import MoestroConfig
from moestro.hf.models import explained, read_config
from moestro.hf.serving import Found, find
from moestro.hf.store import KINDS, Part, Projection, Projections, Recipe, Stored

OPERATION = "load"
_DENSE = {f.storage: f for f in DENSE_FORMATS}
_CHECK_CONFIG = "Check config.json, or update Transformers."
_AS_SAVED = "Download or save the checkpoint again."
_THROUGH_TRANSFORMERS = "Load the model with Transformers, and call moestro.accelerate on it."


def read_sources(folder: str | Path) -> tuple[Any, Checkpoint, list[ExpertSource]]:
    """A checkpoint's configuration, its tensors, and its experts as stored; no weight is read. Errors as of `load`."""
    checkpoint = open_checkpoint(Path(folder))
    config = read_config(folder, OPERATION, checkpoint)
    quantization = take_quantization(config)
    model = empty_model(config)
    with explained(OPERATION, folder, "a configuration that a model can be made of", _CHECK_CONFIG):
        layers = Reader(model, checkpoint, quantization).layers
    return (
        config,
        checkpoint,
        [ExpertSource(recipe.target, recipe.read(checkpoint), recipe.names) for _, s in layers for recipe in s.recipes],
    )


def empty_model(config: Any) -> Any:
    """The model of a configuration, with parameters that have shapes and no memory; errors as of `load`."""
    readable = explained(OPERATION, config.name_or_path, "a configuration that a model can be made of", _CHECK_CONFIG)
    with readable, torch.device("meta"):
        found = model_class(config)
        return found.from_config(config) if found is AutoModelForCausalLM else found._from_config(config)


def places_of(model: Any) -> list[tuple[Found, str, Projections]]:
    """The expert layers of a model: of each the module that holds the parameters, and which they are."""
    with torch.device("cpu"):  # Transformers builds models with the meta device as the default
        return [_place(model, layer) for layer in find(model)]


def take_quantization(config: Any) -> MoestroConfig:
    """Remove the quantisation config from a model's configuration, and return it; errors as of `MoestroConfig.of`."""
    found: Any = None
    with explained(OPERATION, config.name_or_path, "one configuration of its text model", "Check config.json."):
        text = config.get_text_config()
    for part in (config, text):
        given = getattr(part, "quantization_config", None)
        if given is not None:
            found = given.to_dict() if hasattr(given, "to_dict") else given
            del part.quantization_config
    return MoestroConfig.of(found)


def model_class(config: Any) -> Any:
    """The class that the checkpoint was saved from, or the one for text generation."""
    names = config.architectures if isinstance(config.architectures, list | tuple) else ()
    for found in (getattr(transformers, name, None) for name in names if isinstance(name, str)):
        known = getattr(found, "config_class", None)
        if isinstance(found, type) and issubclass(found, PreTrainedModel) and known and isinstance(config, known):
            return found
    return AutoModelForCausalLM


class NameMap:
    """The keys of a checkpoint by the parameters of a model that they belong to, as Transformers would rename them.

    `more` are names that the model has no parameter of, and a checkpoint may yet hold tensors for.
    """

    def __init__(self, model: Any, keys: Sequence[str], more: Iterable[str] = ()) -> None:
        mapping = get_model_conversion_mapping(model)
        self._converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        parameters = {**model.state_dict(), **dict.fromkeys(more, True)}
        self._keys: dict[str, dict[str | None, list[str]]] = {}
        for key in sorted(keys, key=dot_natural_key):
            renamed, pattern = rename_source_key(key, renamings, self._converters, model.base_model_prefix, parameters)
            if renamed not in parameters and key in parameters:
                renamed, pattern = key, None
            self._keys.setdefault(renamed, {}).setdefault(pattern, []).append(key)

    def single(self, name: str) -> str | None:
        """The key of a tensor that is stored as it is, under this name or one that is renamed to it."""
        found = self._keys.get(name, {}).get(None)
        return found[0] if found else None

    def keys(self, name: str) -> list[str]:
        """Every key that is renamed to this name, or that a parameter of this name is made of."""
        return [key for keys in self._keys.get(name, {}).values() for key in keys]

    def parts(self, parameter: str) -> list[tuple[str, ...]]:
        """The keys of what a parameter is concatenated of along its rows: each of one tensor, or of one an expert."""
        found = self._keys.get(parameter, {})
        if None in found or not found:
            return [(key,) for key in found.get(None, [])[:1]]
        patterns = {p: c for c in self._converters for p in c.source_patterns if p in found}
        (converter,) = {id(c): c for c in patterns.values()}.values()
        steps = [(type(op).__name__, getattr(op, "dim", None)) for op in converter.operations]
        if steps not in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)]):
            raise unsupported(
                OPERATION,
                got=f"{parameter}, which Transformers converts by {', '.join(name for name, _ in steps)}",
                needs="experts stored as they are, one by one or stacked",
                fix=_THROUGH_TRANSFORMERS,
            )
        return [tuple(found[p]) for p in converter.source_patterns if p in found]


class Reader:
    """Finds the weights of a model, made of empty parameters, in its checkpoint; only headers of files are read.

    Attributes:
        layers: the model's expert layers, and how each is stored.
        names: the keys of the files, by the model's names.
    """

    def __init__(self, model: Any, checkpoint: Checkpoint, quantization: MoestroConfig) -> None:
        self._checkpoint, self._quantization = checkpoint, quantization
        places = places_of(model)
        targets = [p.target(path) for _, path, projections in places for p in projections.both]
        kinds = (*KINDS, "blocks")  # those of moestro, and of published MXFP4
        self.names = NameMap(model, checkpoint.names, [f"{target}_{kind}" for target in targets for kind in kinds])
        self.layers: list[tuple[Found, Stored]] = []
        for layer, path, projections in places:
            holder = model.get_submodule(path)
            gate_up, down = (self._recipe(path, holder, projections, p) for p in projections.both)
            self.layers.append((layer, Stored(path, projections, (gate_up, down))))

    def scaled(self, model: Any) -> list[tuple[Recipe, torch.dtype]]:
        """How the plain weights [N, K] that are stored in FP8 are read, and the dtype that the model has them in."""
        found = []
        for parameter, tensor in model.named_parameters():
            keys = self.names.keys(parameter)
            if any(self._checkpoint.entry(key).dtype == torch.float8_e4m3fn for key in keys):
                parts = self._with_scales(self._parts(parameter, 1))
                shape = (1, tensor.shape[0], tensor.shape[-1])
                form = self._fp8(parts[0])
                recipe = Recipe(parameter, shape, form, parts, unstacked=True)
                found.append((self._fitting(recipe), tensor.dtype))
        return found

    def check_rest(self, model: Any, checked: Iterable[str]) -> None:
        """Check the weights that Transformers will read, but for those of the names in `checked`."""
        tied = model.all_tied_weights_keys
        optional = {*checked, *tied.keys(), *tied.values()}
        patterns = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_missing or ()]
        for name, tensor in model.state_dict().items():
            if name in optional or any(pattern.search(name) for pattern in patterns):
                continue
            if not self.names.keys(name):
                raise self._missing(name)
            key = self.names.single(name)
            if key is None:
                continue
            entry = self._checkpoint.entry(key)
            if tuple(entry.shape) != tuple(tensor.shape):
                needs = f"{list(tensor.shape)}, as the model's configuration says"
                raise self._error(key, f"a tensor of shape {list(entry.shape)}", needs)
            if (entry.dtype in _DENSE) != tensor.is_floating_point():
                kind = "bfloat16, float16 or float32" if tensor.is_floating_point() else "whole numbers"
                raise self._error(key, f"a tensor of {entry.dtype}", f"one of {kind} in its place")

    def _recipe(self, path: str, holder: nn.Module, projections: Projections, projection: Projection) -> Recipe:
        target, num_experts = projection.target(path), projections.num_experts
        wanted = [projection.stack(holder.get_parameter(name), num_experts) for name in projection.parameters]
        shape = (num_experts, sum(t.shape[1] for t in wanted), wanted[0].shape[2])
        data, blocks = self.names.single(f"{target}_data"), self.names.single(f"{target}_blocks")
        if data is not None:
            name = format_for(target, self._quantization.format, self._quantization.overrides)
            if name is None:
                raise self._error(data, "no format for it in config.json", "a quantization_config of moestro")
            stem = data.removesuffix("data")
            part = {kind: (stem + kind,) for kind in KINDS if stem + kind in self._checkpoint}
            recipe = Recipe(target, shape, find_format(name), (part,))
        elif blocks is not None:
            scales = self._beside(f"{blocks.removesuffix('_blocks')}_scales", blocks)
            recipe = Recipe(target, shape, FORMATS["mxfp4"], ({"data": (blocks,), "scales": (scales,)},))
        else:
            recipe = self._published(path, target, projection, shape)
        return self._fitting(recipe)

    def _published(self, path: str, target: str, projection: Projection, shape: tuple[int, int, int]) -> Recipe:
        parts = [part for name in projection.parameters for part in self._parts(f"{path}.{name}", shape[0])]
        first = parts[0][0]
        dtype = Counter(self._checkpoint.entry(key).dtype for part in parts for key in part).most_common(1)[0][0]
        unstacked = not projection.flat and len(self._checkpoint.entry(first).shape) == 2
        if dtype in _DENSE:
            return Recipe(target, shape, _DENSE[dtype], tuple({"data": part} for part in parts), projection, unstacked)
        if dtype != torch.float8_e4m3fn:
            needs = f"{', '.join(f.name for f in DENSE_FORMATS)}, FP8 e4m3 with scales, MXFP4 blocks, or moestro's own"
            raise self._error(first, f"experts of {dtype}", needs)
        if projection.transposed or projection.flat:
            raise self._error(first, "FP8 experts stored transposed", "FP8 experts stored [N, K]")
        scaled = self._with_scales(parts)
        return Recipe(target, shape, self._fp8(scaled[0]), scaled, unstacked=unstacked)

    def _parts(self, parameter: str, num_experts: int) -> Iterator[tuple[str, ...]]:
        parts = self.names.parts(parameter)
        if not parts:
            raise self._missing(parameter)
        for part in parts:
            if len(part) not in (1, num_experts):
                first = f"{part[0]} in {self._checkpoint.entry(part[0]).file.name}"
                got = f"{len(part)} such tensors for the {num_experts} experts of {parameter}, {first} among them"
                keys = _of_experts(part, num_experts)
                raise self._error(min(keys ^ set(part), key=dot_natural_key, default=part[0]), got, "one an expert")
            yield part

    def _with_scales(self, parts: Iterable[tuple[str, ...]]) -> tuple[Part, ...]:
        return tuple(
            {"data": part, "scales": tuple(self._beside(f"{key}_scale_inv", key) for key in part)} for part in parts
        )

    def _beside(self, wanted: str, key: str) -> str:
        """The key of a tensor that `key` cannot be read without."""
        if wanted not in self._checkpoint:
            raise self._error(key, f"it without its {wanted}", "both: one holds the values, the other their scales")
        return wanted

    def _fp8(self, part: Part) -> WeightFormat:
        size = self._quantization.block_size
        if size == (128, 128):
            return FORMATS["fp8-e4m3-b128"]
        if size is not None:
            raise self._error(part["data"][0], f"FP8 scales of blocks {list(size)}", "blocks of [128, 128]")
        rows = self._checkpoint.entry(part["scales"][0]).shape
        return FORMATS["fp8-e4m3-tensor" if not rows or set(rows) == {1} else "fp8-e4m3-channel"]

    def _fitting(self, recipe: Recipe) -> Recipe:
        """The same, or an error unless its tensors make up the shape that the model's parameters say."""
        for part in recipe.parts:
            for keys in part.values():
                self._check_alike(keys)
        entries = [self._checkpoint.entry(key) for key in recipe.names]
        key = recipe.names[0]
        try:
            shape = tuple(
                recipe.build({e.name: torch.empty(e.shape, dtype=e.dtype, device="meta") for e in entries}).shape
            )
        except (MoestroError, RuntimeError, IndexError) as error:
            got = f"{recipe.target} in shapes that do not fit ({error})"
            raise self._error(key, got, "the shapes of the format") from error
        if shape != recipe.shape:
            needs = f"{list(recipe.shape)}, as the model's configuration says"
            raise self._error(key, f"{recipe.target} of shape {list(shape)}", needs)
        return recipe

    def _check_alike(self, keys: Sequence[str]) -> None:
        """Raise for a tensor whose dtype and shape are not those of most of the others."""
        entries = [self._checkpoint.entry(key) for key in keys]
        kinds = [f"{entry.dtype} of shape {list(entry.shape)}" for entry in entries]
        usual = Counter(kinds).most_common(1)[0][0]
        for key, kind in zip(keys, kinds, strict=True):
            if kind != usual:
                raise self._error(key, f"a tensor of {kind}", f"{usual}, as {keys[kinds.index(usual)]} has it")

    def _missing(self, parameter: str) -> MoestroError:
        got = f"{self._checkpoint.location} without a tensor for {parameter}"
        return invalid_input(OPERATION, got=got, needs="every weight of the model", fix=_AS_SAVED)

    def _error(self, key: str, got: str, needs: str) -> MoestroError:
        files = self._checkpoint
        where = f"in {files.entry(key).file}" if key in files else f"missing from {files.location}"
        return invalid_input(OPERATION, got=f"{key} {where}: {got}", needs=needs, fix=_AS_SAVED)


def _place(model: Any, layer: Found) -> tuple[Found, str, Projections]:
    """The module of a layer that holds the experts' parameters, and which they are."""
    if layer.adapter.projections is None:
        raise unsupported(
            OPERATION,
            got=f"{type(model).__name__}, whose {layer.path} belongs to {layer.adapter.family}",
            needs="a family whose experts are stacked, or stored one by one",
            fix=_THROUGH_TRANSFORMERS,
        )
    projections = layer.adapter.projections(layer.module, layer.plan)
    return layer, ".".join(filter(None, (layer.path, projections.holder))), projections


def _of_experts(keys: Sequence[str], num_experts: int) -> set[str]:
    """The names of one tensor an expert, by the number in which those that are there differ."""
    best: set[str] = set()
    for number in re.finditer(r"(?<=\.)\d+(?=\.)", keys[0]):
        before, after = keys[0][: number.start()], keys[0][number.end() :]
        names = {f"{before}{e}{after}" for e in range(num_experts)}
        best = max(best, names, key=lambda found: len(found & set(keys)))
    return best
