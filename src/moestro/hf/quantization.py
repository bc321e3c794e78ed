"""What Transformers calls when experts are to stay as stored: a quantisation config, and the quantizer behind it.

Importing it registers both under "moestro", so that the ``config.json`` of a checkpoint that moestro wrote is enough to
load it.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import WeightConverter
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.logging import tqdm
from transformers.utils.quantization_config import QuantizationConfigMixin

from moestro.checkpoint import Checkpoint, open_checkpoint
from moestro.checkpoint.scheme import MARK, METHOD, VERSION, check_keys
from moestro.checkpoint.write import INDEX, SINGLE
from moestro.errors import invalid_input, unsupported
from moestro.formats import PackedTensor, WeightFormat, check_shape, find_format
from moestro.hf.dense import check_choice, check_projections, serve_projections
from moestro.hf.names import NameMap
from moestro.hf.projections import Projection
from moestro.hf.residency import Residency
from moestro.hf.serving import Found, replace_forward
from moestro.hf.sources import Quantization, check_form, check_rest, find_scaled, find_stored
from moestro.hf.store import STORE, SUFFIXES, ExpertStore, Frozen, Part, Recipe, Stored, find_in_state
from moestro.types import InputFormat
from moestro.weights import check_input_format, quantize_experts

SEARCHES = ("nearest", "mse")


@register_quantization_config(METHOD)
class MoestroConfig(QuantizationConfigMixin):
    """How the experts of a model are stored, for ``from_pretrained(..., quantization_config=MoestroConfig("mxfp4"))``.

    Args:
        format: the format of every expert, or None to leave each as its checkpoint has it. Routers, attention and all
            other layers keep their dtype.
        search: how scales are chosen: "nearest", or "mse" for the least squared error.
        overrides: patterns (with ``*``) on the full name of a projection, such as "*.layers.0.*" or "*down_proj", each
            with the format of those that match; the last that matches decides.
        rest: the quantisation config of the checkpoint's other layers, where they have one.
        input_format: "int8" to round what meets the experts' weights to 8 bits, row by row, and multiply integers;
            "fp8-e4m3" to multiply 8-bit floats. That is how this run computes, and is not saved.
        projections: also run every `nn.Linear` of 16 bits in the native engine, as `moestro.accelerate` does. It is not
            saved either.

    Raises:
        InvalidInputError: an unknown format, search or input_format, projections that are neither True nor False, an
            argument that there is not, or a version later than this.
    """

    def __init__(
        self,
        format: str | None = None,
        search: str = "nearest",
        overrides: Mapping[str, str] | None = None,
        rest: Mapping[str, Any] | None = None,
        input_format: InputFormat = "float",
        projections: bool = False,
        **others: Any,
    ) -> None:
        check_keys(others, "MoestroConfig")
        check_form({"format": format, "overrides": overrides, "rest": rest}, "MoestroConfig")
        check_input_format(input_format, (), "MoestroConfig")
        check_choice(projections, "MoestroConfig")
        if search not in SEARCHES:
            raise invalid_input(
                "MoestroConfig", got=f"search={search!r}", needs=f"one of {', '.join(SEARCHES)}", fix="Pick one."
            )
        self.quant_method = METHOD
        self.version = VERSION
        self.format = None if format is None else find_format(format).name
        self.search = search
        self.overrides = {pattern: find_format(name).name for pattern, name in (overrides or {}).items()}
        self.rest = None if rest is None else dict(rest)
        self.input_format = input_format
        self.projections = projections

    @property
    def changes_nothing(self) -> bool:
        """Whether every expert stays as its checkpoint has it."""
        return self.format is None and not self.overrides


@register_quantizer(METHOD)
class MoestroQuantizer(HfQuantizer):
    """Keeps experts as their checkpoint stores them, or quantises them as they are read, one matrix at a time."""

    requires_calibration = False

    def __init__(self, quantization_config: MoestroConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        own = _as_read(quantization_config) if kwargs.get("pre_quantized", True) else None
        source = quantization_config.__dict__.pop("source", own)
        self.source = Quantization.of(source)
        self._own_files = source is not None and source.get("quant_method") == METHOD
        self._complete = quantization_config.__dict__.pop("complete", False)
        self._input_format: InputFormat = quantization_config.__dict__.pop("input_format", "float")
        self._projections: bool = quantization_config.__dict__.pop("projections", False)
        # Transformers reads tensors ahead of their use for a quantised checkpoint, which may double the peak.
        self.pre_quantized = False

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Sequence[str] | None = None, device_map: Any = None, **_: Any
    ) -> None:
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise unsupported(
                "load",
                got='a device_map that leaves layers on "disk"',
                needs="every layer on a device: experts that stay as stored are read from their files anyway",
                fix='Map those layers to "cpu".',
            )
        self._device_map = device_map
        self._checkpoint = _open(checkpoint_files)
        if self._own_files:
            _warn_unmarked(Path(self._checkpoint.files[0]).with_name("config.json"))
        self._layers = find_stored(model, self._checkpoint, self.source)
        config = self.quantization_config
        target = Quantization(METHOD, None, config.format, config.overrides)
        self._targets = _targets(self._layers, target)
        config.overrides = _settled(target, self._targets)
        check_input_format(self._input_format, self._targets.values(), "load")
        if self._projections:
            check_projections(model, "load")
        for layer, stored in self._layers:
            holder: Any = model.get_submodule(stored.path)
            for name in stored.projections.parameters:
                holder.register_parameter(name, None)
            holder._is_hf_initialized = True
            setattr(layer.module, "_is_hf_initialized", True)  # noqa: B010
        names = NameMap(model, self._checkpoint.names)
        for path in {stored.path.rpartition(".")[0] for _, stored in self._layers}:
            _leave_alone(model, names, path)
        self._scaled = find_scaled(model, self._checkpoint, self.source, names)
        if self._complete:
            check_rest(model, self._checkpoint, names, [weight.parameter for weight in self._scaled])
        _verify(self._checkpoint)
        for weight in self._scaled:
            weight.take(model)
        taken = [f"{stored.path}." for _, stored in self._layers] + [weight.parameter for weight in self._scaled]
        ignored = [rf"^{re.escape(name)}" for name in taken]
        model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), *ignored}

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        expert_parameters = {name for _, stored in self._layers for name in stored.projections.parameters}
        model._weight_conversions = [
            conversion
            for conversion in getattr(model, "_weight_conversions", None) or []
            if not any(target.split(".")[-1] in expert_parameters for target in _targets_of(conversion))
        ]
        for weight in self._scaled:
            weight.give(model, self._checkpoint)
        bar = tqdm(self._layers, desc="Quantizing experts", disable=self.quantization_config.changes_nothing or None)
        residency, frozen = Residency(self._checkpoint), Frozen()
        for layer, stored in bar:
            holder = model.get_submodule(stored.path)
            store = self._store(stored)
            device = _device_of(model, layer)
            store.residency, store.frozen = residency, frozen
            store.set_input_format(self._input_format, "load")
            holder.add_module(STORE, store if device.type == "cpu" else store.to(device))
            replace_forward(layer, "auto")
        if self._projections:
            serve_projections(model)
        model.register_load_state_dict_pre_hook(find_in_state)
        del self._layers, self._scaled, self._checkpoint
        if self.quantization_config.changes_nothing and self.source.method != "fp8":
            self._forget(model)
        else:
            vars(model.config).update(MARK)
        return model

    def _store(self, stored: Stored) -> ExpertStore:
        tensors: dict[str, Tensor] = {}
        recipes = []
        for projection, recipe in zip(stored.projections.both, (stored.gate_up, stored.down), strict=True):
            target = projection.target(stored.path)
            given = {name: self._checkpoint.tensor(name) for name in recipe.names}
            wanted = self._targets[target]
            if wanted != recipe.format:
                search = self.quantization_config.search
                release = partial(_release, self._checkpoint, recipe)
                converted = quantize_experts(recipe.build(given), wanted, search, target, release)
                recipe, given = _own(target, projection, converted)
            tensors |= given
            recipes.append(recipe)
        mapped = recipes == [stored.gate_up, stored.down]
        return ExpertStore(replace(stored, gate_up=recipes[0], down=recipes[1], mapped=mapped), tensors)

    def _forget(self, model: Any) -> None:
        """Leave the model's configuration as the checkpoint had it: what is saved is what was read."""
        rest = self.quantization_config.rest
        self.remove_quantization_config(model)
        if rest is not None:
            model.config.quantization_config = rest

    def is_serializable(self, safe_serialization: bool | None = None) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True


def _as_read(config: MoestroConfig) -> dict[str, Any]:
    """The `quantization_config` of a config.json, out of what Transformers made of it: without how a run computes."""
    run = {"input_format": "float", "projections": False}
    return {key: value for key, value in config.to_dict().items() if key not in run or value != run[key]}


def _warn_unmarked(path: Path) -> None:
    """Say how to mend a config.json that moestro wrote before it marked what only moestro can read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # a variant whose configuration has another name
        return
    if isinstance(found, dict) and any(found.get(key) != value for key, value in MARK.items()):
        line = ", ".join(f'"{key}": "{value}",' for key, value in MARK.items())
        warnings.warn(
            f"{path} was written by an earlier moestro. It loads correctly here, but Transformers alone would fill its"
            f" experts with random numbers: add the line {line} after its first brace, and that becomes an error.",
            stacklevel=2,
        )


def _release(checkpoint: Checkpoint, recipe: Recipe, expert: int) -> None:
    """Give back the memory that an expert's bytes took up when they were read from their file."""
    for name in recipe.names_of(expert):
        checkpoint.release(name)


def _own(target: str, projection: Projection, packed: PackedTensor) -> tuple[Recipe, dict[str, Tensor]]:
    """The recipe and the tensors of a projection in moestro's own layout."""
    kinds = (packed.data, packed.scales, packed.zeros, packed.global_scales)
    tensors = {f"{target}_{s}": t for s, t in zip(SUFFIXES, kinds, strict=True) if t is not None}
    names = [(f"{target}_{s}",) if t is not None else () for s, t in zip(SUFFIXES, kinds, strict=True)]
    plain = Projection(projection.name, projection.parameters)
    e, n, k = packed.shape
    return Recipe(plain, (e, n, k), packed.format, (Part(*names),)), tensors


def _targets(layers: list[tuple[Found, Stored]], wanted: Quantization) -> dict[str, WeightFormat]:
    """The format of every projection, checked against its shape before anything is read."""
    targets: dict[str, WeightFormat] = {}
    for _, stored in layers:
        for projection, recipe in zip(stored.projections.both, (stored.gate_up, stored.down), strict=True):
            target = projection.target(stored.path)
            name = wanted.format_of(target)
            targets[target] = recipe.format if name is None else find_format(name)
            if targets[target] != recipe.format:
                check_shape(targets[target], recipe.shape[1], recipe.shape[2], f"load {target}")
    unused = [p for p in wanted.overrides if not any(Quantization(overrides={p: "x"}).format_of(t) for t in targets)]
    if unused:
        raise invalid_input(
            "MoestroConfig",
            got=f"overrides for {', '.join(unused)}, which no expert projection matches",
            needs=f"patterns on names such as {next(iter(targets))}",
            fix="A format is for experts only; routers and other layers keep their dtype.",
        )
    return targets


def _settled(wanted: Quantization, targets: Iterable[str]) -> Mapping[str, str]:
    """The same formats by overrides whose order does not matter: Transformers sorts the keys of what it saves."""
    by_name = replace(wanted, overrides=dict(sorted(wanted.overrides.items())))
    chosen = {target: name for target in targets if (name := wanted.format_of(target)) is not None}
    if all(by_name.format_of(target) == name for target, name in chosen.items()):
        return wanted.overrides
    return {target: name for target, name in chosen.items() if name != wanted.format}


def _targets_of(conversion: Any) -> list[str]:
    targets = conversion.target_patterns if isinstance(conversion, WeightConverter) else []
    return list(targets)


def _open(files: Sequence[str] | None) -> Checkpoint:
    paths = [Path(file) for file in files or ()]
    if not paths or any(path.suffix != ".safetensors" for path in paths):
        raise invalid_input(
            "load",
            got=f"weights in {', '.join(path.name for path in paths) or 'no file'}",
            needs="safetensors files, whose tensors can be used where they are",
            fix="Save the model again with save_pretrained.",
        )
    folder = paths[0].parent
    found = {path.name for path in folder.glob("*.safetensors")}
    named = SINGLE in found or (folder / INDEX).is_file()  # Transformers also takes variants, which have other names
    return open_checkpoint(folder if named and found == {path.name for path in paths} else paths)


def _leave_alone(model: Any, names: NameMap, path: str) -> None:
    """Keep Transformers from filling in experts by way of the module above them, if that has all other weights."""
    module = model.get_submodule(path)
    if path and all(names.keys(f"{path}.{name}") for name, _ in module.named_parameters()):
        module._is_hf_initialized = True


def _verify(checkpoint: Checkpoint) -> None:
    """Compare all bytes with the checkpoint's checksums, where it has any."""
    seen = 0

    def count(done: int, _: int) -> None:
        nonlocal seen
        bar.update(done - seen)
        seen = done

    options = {"desc": "Comparing checksums", "unit": "B", "unit_scale": True, "delay": 1}
    with tqdm(total=checkpoint.nbytes, **options) as bar:
        checkpoint.verify(count)


def _device_of(model: Any, layer: Found) -> torch.device:
    """Where the layer's other weights are: of its own module, or of the nearest one around it that has any."""
    path = layer.path
    while True:
        for parameter in model.get_submodule(path).parameters():
            if parameter.device.type != "meta":
                return torch.device(parameter.device)
        if not path:
            return torch.device("cpu")
        path = path.rpartition(".")[0]
