"""Find the experts of a model among the tensors of its checkpoint, in whatever published layout it has."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import dot_natural_key

from moestro.checkpoint import Checkpoint, ExpertSource, open_checkpoint
from moestro.checkpoint.scheme import METHOD, check_keys
from moestro.errors import MoestroError, invalid_input, unsupported
from moestro.formats import FORMATS, WeightFormat, dequantize, find_format
from moestro.formats.dense import DENSE_FORMATS
from moestro.hf.models import explained, read_config
from moestro.hf.names import NameMap
from moestro.hf.projections import Projection, Projections
from moestro.hf.serving import Found, find
from moestro.hf.store import SUFFIXES, Part, Recipe, Stored

OPERATION = "load"
QUANTIZED = ("fp8", "mxfp4", "moestro")
"""Transformers' names of the methods whose checkpoints are read as they are."""

_DENSE = {f.storage: f for f in DENSE_FORMATS}
_AS_SAVED = "Download or save the checkpoint again."
_THROUGH_TRANSFORMERS = "Load the model with Transformers, and call moestro.accelerate on it."


@dataclass(frozen=True)
class Quantization:
    """What a checkpoint's configuration says of how it is stored.

    Attributes:
        method: "" for none, or Transformers' name of it ("fp8", "mxfp4", "moestro").
        block_size: of fp8 scales, or None for one scale a tensor.
        format: of the experts that moestro quantised.
        overrides: patterns on a projection's full name, and the format of those that match; the last one decides.
    """

    method: str = ""
    block_size: tuple[int, int] | None = None
    format: str | None = None
    overrides: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Mapping[str, Any] | None) -> Quantization:
        """Read the `quantization_config` of a config.json.

        Raises:
            UnsupportedError: a method whose experts moestro cannot read as they are.
            InvalidInputError: it is not of the form that Transformers and moestro write, or of a later version.
        """
        if config is None:
            return cls()
        check_form(config, OPERATION)
        method = str(getattr(config.get("quant_method"), "value", config.get("quant_method", "")))
        if method == METHOD:
            check_keys(config, OPERATION)
            rest = cls.of(config.get("rest"))
            return cls(rest.method or method, rest.block_size, config.get("format"), config.get("overrides") or {})
        if method not in QUANTIZED:
            raise unsupported(
                OPERATION,
                got=f"a checkpoint quantised by {method or 'an unnamed method'}",
                needs="one in bfloat16, float16 or float32, in published FP8 or MXFP4, or quantised by moestro",
                fix=_THROUGH_TRANSFORMERS,
            )
        size = config.get("weight_block_size")
        return cls(method, None if size is None else (int(size[0]), int(size[1])))

    def format_of(self, target: str) -> str | None:
        """The format of the projection of this full name, if moestro quantised it."""
        found = self.format
        for pattern, name in self.overrides.items():
            if fnmatchcase(target, pattern):
                found = name
        return found


def check_form(config: Any, operation: str) -> None:
    """Raise unless a `quantization_config` has the form that its readers rely on."""
    found = config if isinstance(config, Mapping) else {}
    size, overrides = found.get("weight_block_size"), found.get("overrides") or {}
    sizes = size is None or (isinstance(size, list | tuple) and [type(n) for n in size] == [int, int])
    mapping = overrides if isinstance(overrides, Mapping) else {"": None}
    names = [*mapping.values(), found.get("format") or ""]
    objects = isinstance(config, Mapping) and isinstance(found.get("rest") or {}, Mapping)
    if not objects or not sizes or not all(isinstance(name, str) for name in names):
        raise invalid_input(
            operation,
            got=f"quantization_config {config!r}",
            needs="a JSON object, its weight_block_size two whole numbers and its overrides formats by pattern",
            fix="Check config.json, or download it again.",
        )


def read_sources(folder: str | Path) -> tuple[Any, Checkpoint, list[ExpertSource]]:
    """A checkpoint's configuration, its tensors, and its experts as stored; no weight is read.

    Raises:
        InvalidInputError, UnsupportedError: as for `load`.
    """
    checkpoint = open_checkpoint(Path(folder))
    config = read_config(folder, OPERATION, checkpoint)
    quantization = take_quantization(config)
    fix = "Check config.json, or update Transformers."
    with explained(OPERATION, folder, "a configuration that a model can be made of", fix):
        with torch.device("meta"):
            model = _empty(config)
        layers = find_stored(model, checkpoint, Quantization.of(quantization))
    sources = []
    for _, stored in layers:
        for projection, recipe in zip(stored.projections.both, (stored.gate_up, stored.down), strict=True):
            experts = recipe.build({name: checkpoint.tensor(name) for name in recipe.names})
            sources.append(ExpertSource(projection.target(stored.path), experts, recipe.names))
    return config, checkpoint, sources


def take_quantization(config: Any) -> dict[str, Any] | None:
    """Remove the quantisation config from a model's configuration, and return it.

    Raises:
        UnsupportedError: it is of a method that moestro cannot read.
        InvalidInputError: it is not of the form that Transformers and moestro write.
    """
    found: dict[str, Any] | None = None
    with explained(OPERATION, config.name_or_path, "one configuration of its text model", "Check config.json."):
        text = config.get_text_config()
    for part in (config, text):
        given = getattr(part, "quantization_config", None)
        if given is not None:
            found = given.to_dict() if hasattr(given, "to_dict") else given
            del part.quantization_config
    Quantization.of(found)
    return None if found is None else dict(found)


def model_class(config: Any) -> Any:
    """The class that the checkpoint was saved from, or the one for text generation."""
    names = config.architectures if isinstance(config.architectures, list | tuple) else ()
    for found in (getattr(transformers, name, None) for name in names if isinstance(name, str)):
        known = getattr(found, "config_class", None)
        if isinstance(found, type) and issubclass(found, PreTrainedModel) and known and isinstance(config, known):
            return found
    return AutoModelForCausalLM


def _empty(config: Any) -> Any:
    """A model of its class, on the device that is the default."""
    found = model_class(config)
    return found.from_config(config) if found is AutoModelForCausalLM else found._from_config(config)


def find_stored(model: Any, checkpoint: Checkpoint, quantization: Quantization) -> list[tuple[Found, Stored]]:
    """How each expert layer of a model, made of empty parameters, is stored in a checkpoint.

    Raises:
        UnsupportedError: a dense model, or experts that cannot be read as they are stored.
        InvalidInputError: tensors are missing, or of other shapes or dtypes than the model and the format say.
    """
    with torch.device("cpu"):  # Transformers builds models with the meta device as the default
        places = [_place(model, layer) for layer in find(model)]
    targets = [p.target(path) for _, path, projections in places for p in projections.both]
    suffixes = (*SUFFIXES, "blocks")  # those of moestro, and of published MXFP4
    names = NameMap(model, checkpoint.names, [f"{target}_{suffix}" for target in targets for suffix in suffixes])
    reader = _Reader(checkpoint, names, quantization)
    found: list[tuple[Found, Stored]] = []
    for layer, path, projections in places:
        holder = model.get_submodule(path)
        gate_up, down = (reader.recipe(path, holder, projections, p) for p in projections.both)
        found.append((layer, Stored(path, projections, gate_up, down, mapped=True)))
    return found


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
    path = ".".join(part for part in (layer.path, projections.holder) if part)
    return layer, path, projections


@dataclass(frozen=True)
class ScaledWeight:
    """A weight of a layer without experts that its checkpoint stores in FP8; it is dequantised as the model is loaded.

    Attributes:
        parameter: its full name in the model.
        recipe: the tensors it is made of, in one part for each that is concatenated along the rows.
        dtype: the parameter's.
    """

    parameter: str
    recipe: Recipe
    dtype: torch.dtype

    def take(self, model: nn.Module) -> None:
        """Remove the parameter, so that nobody else looks for it."""
        module, name = self._place(model)
        module.register_parameter(name, None)
        module._is_hf_initialized = True  # type: ignore[assignment]

    def give(self, model: nn.Module, checkpoint: Checkpoint) -> None:
        """Put the dequantised weight in its place."""
        module, name = self._place(model)
        stored = self.recipe.build({key: checkpoint.tensor(key) for key in self.recipe.names})
        blocks = [dequantize(block, self.dtype) for block in stored.blocks(0)]
        for key in self.recipe.names:
            checkpoint.release(key)
        weight = blocks[0] if len(blocks) == 1 else torch.cat(blocks)
        module.register_parameter(name, nn.Parameter(weight, requires_grad=False))

    def _place(self, model: nn.Module) -> tuple[nn.Module, str]:
        path, _, name = self.parameter.rpartition(".")
        return model.get_submodule(path), name


def find_scaled(model: Any, checkpoint: Checkpoint, quantization: Quantization, names: NameMap) -> list[ScaledWeight]:
    """The parameters of a model, other than experts, that a checkpoint stores in FP8.

    Raises:
        InvalidInputError: scales are missing or do not fit.
    """
    reader = _Reader(checkpoint, names, quantization)
    found = []
    for parameter, tensor in model.named_parameters():
        keys = names.keys(parameter)
        if any(checkpoint.entry(key).dtype == torch.float8_e4m3fn for key in keys):
            found.append(ScaledWeight(parameter, reader.scaled(parameter, tensor), tensor.dtype))
    return found


def check_rest(model: Any, checkpoint: Checkpoint, names: NameMap, checked: Sequence[str]) -> None:
    """Check the weights that Transformers will read, from the headers of the files.

    Args:
        model: made of empty parameters.
        checkpoint: the files.
        names: of the same model and files.
        checked: names of weights that have been checked.

    Raises:
        InvalidInputError: one is missing, or of another shape or kind of number than the model's.
    """
    tied = model.all_tied_weights_keys
    optional = {*checked, *tied.keys(), *tied.values()}
    patterns = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_missing or ()]
    reader = _Reader(checkpoint, names, Quantization())
    for name, tensor in model.state_dict().items():
        if name in optional or any(pattern.search(name) for pattern in patterns):
            continue
        if not names.keys(name):
            raise reader.missing(name)
        key = names.single(name)
        if key is not None:
            reader.check(key, tensor)


@dataclass(frozen=True, eq=False)
class _Reader:
    checkpoint: Checkpoint
    names: NameMap
    quantization: Quantization

    @cached_property
    def _stored_keys(self) -> frozenset[str]:
        return frozenset(self.checkpoint.names)

    @property
    def _folder(self) -> Path:
        return Path(self.checkpoint.files[0]).parent

    def recipe(self, path: str, holder: nn.Module, projections: Projections, projection: Projection) -> Recipe:
        target = projection.target(path)
        wanted = [
            projection.stack(holder.get_parameter(name), projections.num_experts) for name in projection.parameters
        ]
        shape = (projections.num_experts, sum(t.shape[1] for t in wanted), wanted[0].shape[2])
        own = self.names.single(f"{target}_data")
        blocks = self.names.single(f"{target}_blocks")
        if own is not None:
            recipe = self._own(target, own, projection, shape)
        elif blocks is not None:
            scales = self._beside(f"{blocks.removesuffix('_blocks')}_scales", blocks)
            recipe = Recipe(projection, shape, FORMATS["mxfp4"], (Part((blocks,), (scales,)),))
        else:
            recipe = self._published(path, projection, shape)
        self._fit(recipe, target)
        return recipe

    def scaled(self, parameter: str, tensor: Tensor) -> Recipe:
        """How a plain weight [N, K] is read from FP8 tensors."""
        parts = list(self._parts(parameter, 1))
        scaled = tuple(Part(part, tuple(self._scale(key) for key in part)) for part in parts)
        shape = (1, tensor.shape[0], tensor.shape[-1])
        recipe = Recipe(Projection(parameter, (parameter,)), shape, self._fp8(scaled[0]), scaled, apart=True)
        self._fit(recipe, parameter)
        return recipe

    def check(self, key: str, tensor: Tensor) -> None:
        """Raise unless a tensor of the checkpoint can become this one of the model."""
        entry = self.checkpoint.entry(key)
        if tuple(entry.shape) != tuple(tensor.shape):
            needs = f"{list(tensor.shape)}, as the model's configuration says"
            raise self._error(key, f"a tensor of shape {list(entry.shape)}", needs)
        if (entry.dtype in _DENSE) != tensor.is_floating_point():
            kind = "bfloat16, float16 or float32" if tensor.is_floating_point() else "whole numbers"
            raise self._error(key, f"a tensor of {entry.dtype}", f"one of {kind} in its place")

    def missing(self, parameter: str) -> MoestroError:
        """The error about a parameter that no tensor is for."""
        got = f"{self._folder} without a tensor for {parameter}"
        return invalid_input(OPERATION, got=got, needs="every weight of the model", fix=_AS_SAVED)

    def _own(self, target: str, data: str, projection: Projection, shape: tuple[int, int, int]) -> Recipe:
        name = self.quantization.format_of(target)
        if name is None:
            raise self._error(data, "no format for it in config.json", "a quantization_config of moestro")
        weight_format = find_format(name)
        scaling = weight_format.scaling
        wanted = (
            True,
            scaling is not None,
            scaling is not None and scaling.zeros,
            scaling is not None and scaling.global_scales,
        )
        keys = [
            (self._beside(data.removesuffix("data") + suffix, data),) if want else ()
            for suffix, want in zip(SUFFIXES, wanted, strict=True)
        ]
        plain = Projection(projection.name, projection.parameters)
        return Recipe(plain, shape, weight_format, (Part(*keys),))

    def _published(self, path: str, projection: Projection, shape: tuple[int, int, int]) -> Recipe:
        parts = [part for name in projection.parameters for part in self._parts(f"{path}.{name}", shape[0])]
        keys = [key for part in parts for key in part]
        self._check_alike(keys, whole=False)
        dtype = self.checkpoint.entry(keys[0]).dtype
        apart = not projection.flat and len(self.checkpoint.entry(parts[0][0]).shape) == 2
        if dtype in _DENSE:
            return Recipe(projection, shape, _DENSE[dtype], tuple(Part(part) for part in parts), apart)
        if dtype != torch.float8_e4m3fn:
            needs = f"{', '.join(f.name for f in DENSE_FORMATS)}, FP8 e4m3 with scales, MXFP4 blocks, or moestro's own"
            raise self._error(parts[0][0], f"experts of {dtype}", needs)
        if projection.transposed or projection.flat:
            raise self._error(parts[0][0], "FP8 experts stored transposed", "FP8 experts stored [N, K]")
        scaled = tuple(Part(part, tuple(self._scale(key) for key in part)) for part in parts)
        return Recipe(projection, shape, self._fp8(scaled[0]), scaled, apart)

    def _parts(self, parameter: str, num_experts: int) -> Iterator[tuple[str, ...]]:
        named = self.names.named(parameter)
        if named is None:
            raise self.missing(parameter)
        for part in named.parts:
            if len(part) not in (1, num_experts):
                first = f"{part[0]} in {self.checkpoint.entry(part[0]).file.name}"
                got = f"{len(part)} such tensors for the {num_experts} experts of {parameter}, {first} among them"
                keys = _of_experts(part, num_experts)
                raise self._error(min(keys ^ set(part), key=dot_natural_key, default=part[0]), got, "one an expert")
            yield part

    def _scale(self, key: str) -> str:
        return self._beside(f"{key}_scale_inv", key)

    def _beside(self, wanted: str, key: str) -> str:
        """The key of a tensor that `key` cannot be read without."""
        if wanted not in self._stored_keys:
            raise self._error(key, f"it without its {wanted}", "both: one holds the values, the other their scales")
        return wanted

    def _fp8(self, part: Part) -> WeightFormat:
        size = self.quantization.block_size
        if size == (128, 128):
            return FORMATS["fp8-e4m3-b128"]
        if size is not None:
            raise self._error(part.data[0], f"FP8 scales of blocks {list(size)}", "blocks of [128, 128]")
        rows = self.checkpoint.entry(part.scales[0]).shape
        return FORMATS["fp8-e4m3-tensor" if not rows or set(rows) == {1} else "fp8-e4m3-channel"]

    def _fit(self, recipe: Recipe, target: str) -> None:
        """Raise unless the tensors make up the shape that the model's parameters say; only their headers are read."""
        for part in recipe.parts:
            for keys in filter(None, (part.data, part.scales, part.zeros, part.global_scales)):
                self._check_alike(keys)
        empty = {}
        for key in recipe.names:
            entry = self.checkpoint.entry(key)
            empty[key] = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
        key = recipe.parts[0].data[0]
        try:
            shape = tuple(recipe.build(empty).shape)
        except (MoestroError, RuntimeError, IndexError) as error:
            raise self._error(
                key, f"{target} in shapes that do not fit ({error})", "the shapes of the format"
            ) from error
        if shape != recipe.shape:
            needs = f"{list(recipe.shape)}, as the model's configuration says"
            raise self._error(key, f"{target} of shape {list(shape)}", needs)

    def _check_alike(self, keys: Sequence[str], whole: bool = True) -> None:
        """Raise for a tensor whose dtype, or dtype and shape where `whole`, is not that of most of the others."""
        found = {}
        for key in keys:
            entry = self.checkpoint.entry(key)
            found[key] = f"{entry.dtype} of shape {list(entry.shape)}" if whole else str(entry.dtype)
        usual = Counter(found.values()).most_common(1)[0][0]
        first = next(key for key, value in found.items() if value == usual)
        for key, value in found.items():
            if value != usual:
                raise self._error(key, f"a tensor of {value}", f"{usual}, as {first} has it")

    def _error(self, key: str, got: str, needs: str) -> MoestroError:
        where = f"in {self.checkpoint.entry(key).file}" if key in self._stored_keys else f"missing from {self._folder}"
        return invalid_input(OPERATION, got=f"{key} {where}: {got}", needs=needs, fix=_AS_SAVED)


def _of_experts(keys: Sequence[str], num_experts: int) -> set[str]:
    """The names of one tensor an expert, by the number in which those that are there differ."""
    best: set[str] = set()
    for number in re.finditer(r"(?<=\.)\d+(?=\.)", keys[0]):
        before, after = keys[0][: number.start()], keys[0][number.end() :]
        names = {f"{before}{e}{after}" for e in range(num_experts)}
        best = max(best, names, key=lambda found: len(found & set(keys)))
    return best
