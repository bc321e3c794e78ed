"""What Transformers calls when experts are to stay as stored: a quantisation config, and the quantizer behind it.

Importing it registers both under "moestro": the ``config.json`` of what moestro wrote is then enough to load it.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import WeightConverter
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name
from transformers.utils.logging import tqdm

from moestro.checkpoint import Checkpoint, open_checkpoint
from moestro.checkpoint.scheme import MARK, METHOD, format_for, in_any_order
from moestro.checkpoint.write import INDEX, SINGLE
from moestro.errors import invalid_input, unsupported
from moestro.formats import WeightFormat, check_shape, dequantize, find_format
from moestro.hf.beside import serve_beside
from moestro.hf.config import MoestroConfig
from moestro.hf.dense import check_projections, check_whole
from moestro.hf.experts import Spread
from moestro.hf.families.base import INTERFACE
from moestro.hf.memory import check_memory, check_place, keep_here, keep_in_memory, plan_memory
from moestro.hf.residency import Residency
from moestro.hf.serving import Found, replace_forward
from moestro.hf.sharding import (
    Slices,
    cut_as_planned,
    cut_biases,
    own_part,
    recipe_of,
    share_batch,
    wanted_sharding,
)
from moestro.hf.sources import Reader
from moestro.hf.store import STORE, ExpertStore, Recipe, Stored, find_in_state
from moestro.memory.experts import ExpertMemory
from moestro.weights import ExpertWeights, check_input_format, quantize_experts


@register_quantizer(METHOD)
class MoestroQuantizer(HfQuantizer):
    """Keeps experts as their checkpoint stores them, or quantises them as they are read, one matrix at a time."""

    requires_calibration = False
    is_trainable = True
    is_compileable = True

    def __init__(self, quantization_config: MoestroConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        given = quantization_config.__dict__
        self._complete = given.pop("complete", False)
        own = quantization_config if kwargs.get("pre_quantized", True) else MoestroConfig()
        self.source: MoestroConfig = given.pop("source", own)
        # Transformers reads tensors ahead of their use for a quantised checkpoint, which may double the peak.
        self.pre_quantized = False

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Sequence[str] | None = None, device_map: Any = None, **others: Any
    ) -> None:
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise unsupported(
                "load",
                got='a device_map that leaves layers on "disk"',
                needs="every layer on a device: experts that stay as stored are read from their files anyway",
                fix='Map those layers to "cpu".',
            )
        self._sharding = wanted_sharding(model)
        self._checkpoint = _open(checkpoint_files)
        _warn_unmarked(self._checkpoint.files[0].with_name("config.json"))
        reader = Reader(model, self._checkpoint, self.source)
        self._layers, config = reader.layers, self.quantization_config
        self._targets = _targets(self._layers, config)
        config.overrides = in_any_order(self._targets, config.format, config.overrides)
        check_input_format(config.input_format, self._targets.values(), "load")
        if config.memory is not None:
            check_place(device_map)
            own = [stored for _, stored in self._layers]
            check_memory(config.memory, own, self._targets, self._checkpoint, self._sharding is not None)
        if self._sharding is not None:
            _check_served(self._layers, model)
            self._sharding.agree([stored for _, stored in self._layers], self._targets)
        check_projections(model, config.projections, "load")
        for layer, stored in self._layers:
            holder: Any = model.get_submodule(stored.path)
            for name in stored.projections.parameters:
                holder.register_parameter(name, None)
            for module in (holder, layer.module):
                module._is_hf_initialized = True
            _leave_alone(model, reader, stored.path.rpartition(".")[0])
        self._scaled = reader.scaled(model)
        if self._complete:
            reader.check_rest(model, [recipe.target for recipe, _ in self._scaled])
        with tqdm(desc="Comparing checksums", unit="B", unit_scale=True, delay=1) as bar:
            self._checkpoint.verify(partial(_show, bar))
        for recipe, _ in self._scaled:  # removed, so that nobody else looks for it
            module, name = get_module_from_name(model, recipe.target)
            module.register_parameter(name, None)
            module._is_hf_initialized = True
        taken = [f"{stored.path}." for _, stored in self._layers] + [recipe.target for recipe, _ in self._scaled]
        ignored = [rf"^{re.escape(name)}" for name in taken]
        model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), *ignored}

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        gone = {name for _, stored in self._layers for name in stored.projections.parameters}
        model._weight_conversions = [
            each
            for each in getattr(model, "_weight_conversions", None) or []
            if not isinstance(each, WeightConverter) or not gone & {t.split(".")[-1] for t in each.target_patterns}
        ]
        for recipe, dtype in self._scaled:
            module, name = get_module_from_name(model, recipe.target)
            blocks = [dequantize(block, dtype) for block in recipe.read(self._checkpoint).blocks(0)]
            self._release(recipe, 0)
            weight = blocks[0] if len(blocks) == 1 else torch.cat(blocks)
            module.register_parameter(name, nn.Parameter(weight, requires_grad=False))
            cut_as_planned(model, recipe.target)
        bar = tqdm(self._layers, desc="Quantizing experts", disable=self.quantization_config.changes_nothing or None)
        residency, first, memory = Residency(self._checkpoint), True, self._memory(model)
        stores: list[ExpertStore] = []
        for number, (layer, stored) in enumerate(bar):
            holder = model.get_submodule(stored.path)
            store = self._store(stored, holder)
            store.residency, store.warns, first = residency, first, False
            if memory is not None:
                store.keep_within(memory.layers[number])
            store.set_input_format(self.quantization_config.input_format, "load")
            device = _device_of(model, layer)
            stores.append(store if device.type == "cpu" else store.to(device))
            holder.add_module(STORE, stores[-1])
            replace_forward(layer, self._strategy(layer, stored))
        if memory is not None:
            keep_here(model)
        elif self._sharding is None:
            residency.fetch(name for store in stores if store.mapped for name in store.tensors)
        check_whole(model, self.quantization_config.projections, "load")  # of what is cut only after it was read
        serve_beside(model, self.quantization_config.projections)
        model.register_load_state_dict_pre_hook(find_in_state)
        if self._sharding is not None and len(self._sharding.ranks) > 1:
            share_batch(model, self._sharding.peers)
        del self._layers, self._scaled, self._checkpoint
        if self.quantization_config.changes_nothing and self.source.method != "fp8":
            self._forget(model)
        else:
            vars(model.config).update(MARK)
        return model

    def _memory(self, model: Any) -> ExpertMemory | None:
        """The slots of all experts, where they are within a budget."""
        budget = self.quantization_config.memory
        if budget is None:
            return None
        keep_in_memory(model)
        layers = [(layer.path, stored) for layer, stored in self._layers]
        return plan_memory(layers, self._checkpoint, model, budget)

    def _strategy(self, layer: Found, stored: Stored) -> str:
        """How a layer's rows are computed: here, or where their experts are."""
        if self._sharding is None:
            return "auto"
        return Spread("auto", self._sharding.layer_dispatcher(stored.projections.num_experts, layer.path))

    def _store(self, stored: Stored, holder: Any) -> ExpertStore:
        sharding = self._sharding
        own = (
            range(stored.projections.num_experts) if sharding is None else sharding.own(stored.projections.num_experts)
        )
        if sharding is not None and sharding.tp[1] > 1:
            return self._slices(stored, holder, own)
        (gate_up, first), (down, second) = (self._converted(recipe, own) for recipe in stored.recipes)
        kept, tensors = replace(stored, recipes=(gate_up, down)), first | second
        mapped = all(mine.format == its.format for mine, its in zip(kept.recipes, stored.recipes, strict=True))
        store = ExpertStore(kept, tensors, mapped)
        if sharding is not None:
            cut_biases(holder, stored, own)
            store.cut = True
        return store

    def _slices(self, stored: Stored, holder: Any, own: Sequence[int]) -> ExpertStore:
        """A slice along I of some experts, each cut while it is the only one that is whole in memory."""
        assert self._sharding is not None
        tensors = [{name: self._checkpoint.tensor(name) for name in recipe.names} for recipe in stored.recipes]
        biases, slices = cut_biases(holder, stored, own), Slices(self._sharding.tp, len(own))
        for i, expert in enumerate(own):
            whole = []
            for recipe, named in zip(stored.recipes, tensors, strict=True):
                part, views = own_part(recipe, named, [expert])
                wanted, search = self._targets[recipe.target], self.quantization_config.search
                name = f"{recipe.target}[{expert}]"
                found = part.build(views)
                whole.append(found if wanted == recipe.format else quantize_experts(found, wanted, search, name))
            row = [None if bias is None else bias[i : i + 1] for bias in biases]
            slices.add(ExpertWeights(whole[0], whole[1], row[0], row[1], stored.projections.activation))
            for recipe in stored.recipes:
                self._release(recipe, expert)
        store = ExpertStore(*slices.stored(holder, stored))
        store.cut = True
        return store

    def _converted(self, recipe: Recipe, own: Sequence[int]) -> tuple[Recipe, dict[str, Tensor]]:
        """Some experts of a projection in the format that it is to have, and their tensors."""
        wanted, search = self._targets[recipe.target], self.quantization_config.search
        tensors = {name: self._checkpoint.tensor(name) for name in recipe.names}
        if len(own) < recipe.shape[0]:
            part, tensors = own_part(recipe, tensors, own)
        else:
            part = recipe
        if wanted == recipe.format:
            return part, tensors
        stored = part.build(tensors)
        return recipe_of(
            recipe.target,
            quantize_experts(stored, wanted, search, recipe.target, lambda e: self._release(recipe, own[e])),
        )

    def _release(self, recipe: Recipe, expert: int) -> None:
        """Give back the memory that an expert's bytes took up when they were read from their file."""
        for name in recipe.names_of(expert):
            self._checkpoint.release(name)

    def _forget(self, model: Any) -> None:
        """Leave the model's configuration as the checkpoint had it: what is saved is what was read."""
        rest = self.quantization_config.rest
        self.remove_quantization_config(model)
        if rest is not None:
            model.config.quantization_config = rest

    def is_serializable(self, safe_serialization: bool | None = None) -> bool:
        return True


def _warn_unmarked(path: Path) -> None:
    """Say how to mend a config.json that moestro wrote before it marked what only moestro can read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # a variant whose configuration has another name
        return
    if not isinstance(found, dict) or all(found.get(key) == value for key, value in MARK.items()):
        return
    kept = found.get("quantization_config")
    if isinstance(kept, dict) and kept.get("quant_method") == METHOD:
        line = ", ".join(f'"{key}": "{value}",' for key, value in MARK.items())
        warnings.warn(
            f"{path} was written by an earlier moestro. It loads correctly here, but Transformers alone would fill its"
            f" experts with random numbers: add the line {line} after its first brace, and that becomes an error.",
            stacklevel=2,
        )


def _check_served(layers: Sequence[tuple[Found, Stored]], model: Any) -> None:
    """Refuse layers around whose forward Transformers cuts more than experts, where it is Transformers that cuts."""
    others = [layer for layer, _ in layers if layer.adapter is not INTERFACE]
    if others and getattr(model.config, "distributed_config", None) is not None:
        raise unsupported(
            "load",
            got=f"{type(others[0].module).__name__}, whose experts stay as stored, and a DistributedConfig",
            needs="experts of Transformers' interface",
            fix="Use moestro.load(path, device=mesh).",
        )


def _show(bar: Any, done: int, total: int) -> None:
    bar.total, bar.n = total, done
    bar.update(0)


def _targets(layers: list[tuple[Found, Stored]], config: MoestroConfig) -> dict[str, WeightFormat]:
    """The format of every projection, checked against its shape before anything is read."""
    targets: dict[str, WeightFormat] = {}
    for recipe in (recipe for _, stored in layers for recipe in stored.recipes):
        name = format_for(recipe.target, config.format, config.overrides)
        targets[recipe.target] = form = recipe.format if name is None else find_format(name)
        if form != recipe.format:
            check_shape(form, recipe.shape[1], recipe.shape[2], f"load {recipe.target}")
    unused = [pattern for pattern in config.overrides if not any(fnmatchcase(t, pattern) for t in targets)]
    if unused:
        raise invalid_input(
            "MoestroConfig",
            got=f"overrides for {', '.join(unused)}, which no expert projection matches",
            needs=f"patterns on names such as {next(iter(targets))}",
            fix="A format is for experts only; routers and other layers keep their dtype.",
        )
    return targets


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


def _leave_alone(model: Any, reader: Reader, path: str) -> None:
    """Keep Transformers from filling in experts by way of the module above them, if that has all other weights."""
    module = model.get_submodule(path)
    if path and all(reader.names.keys(f"{path}.{name}") for name, _ in module.named_parameters()):
        module._is_hf_initialized = True


def _device_of(model: Any, layer: Found) -> torch.device:
    """Where the layer's other weights are: of its own module, or of the nearest one around it that has any."""
    path = layer.path
    while True:
        device: torch.device | None = next(
            (p.device for p in model.get_submodule(path).parameters() if not p.is_meta), None
        )
        if device is not None or not path:
            return device or torch.device("cpu")
        path = path.rpartition(".")[0]


class KeepsExperts(HfQuantizer):
    """A quantizer of Transformers that hands over to moestro's where that was asked for; mixed in before its class.

    Without a GPU, Transformers dequantises FP8 and MXFP4 checkpoints as a whole, or refuses them. Then, with
    ``experts_implementation="moestro"`` and without ``dequantize=True``, experts stay as stored.
    """

    pre_quantized: bool

    def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._published = dict(quantization_config.to_dict())
        self._dequantize = bool(getattr(quantization_config, "dequantize", False))  # Mxfp4Config leaves it out above
        self._own: MoestroQuantizer | None = None
        self._check: Callable[[], object] | None = None

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Put off what Transformers' own way asks for, or warns of, where that way may not be taken."""
        check = partial(super().validate_environment, *args, **kwargs)
        if self.pre_quantized and not self._dequantize and not _has_gpu():
            self._check = check
        else:
            check()

    def preprocess_model(self, model: Any, dtype: Any = None, **kwargs: Any) -> None:
        """Decide, before weights are read."""
        served = getattr(model.config, "_experts_implementation", None) == METHOD
        if served and self._check is not None:
            rest = {name: getattr(value, "value", value) for name, value in self._published.items()}
            self._own = MoestroQuantizer(MoestroConfig(rest=rest), pre_quantized=True)
            self.pre_quantized = False
            self._own.preprocess_model(model, dtype=dtype, **kwargs)
            return
        if self._check is not None:
            self._check()
        super().preprocess_model(model, dtype=dtype, **kwargs)

    def update_weight_conversions(self, weight_conversions: list[Any], *args: Any) -> list[Any]:
        """Transformers' own, unless moestro reads what is quantised. Transformers before 5.21 passes no model."""
        if self._own is not None:
            return weight_conversions
        found: list[Any] = super().update_weight_conversions(weight_conversions, *args)
        return found

    def postprocess_model(self, model: Any, **kwargs: Any) -> Any:
        """After weights were read."""
        if self._own is None:
            return super().postprocess_model(model, **kwargs)
        model.hf_quantizer = self._own
        return self._own.postprocess_model(model, **kwargs)


def _has_gpu() -> bool:
    """Whether Transformers has kernels of its own for these checkpoints here."""
    return torch.cuda.is_available() or torch.xpu.is_available()


def register() -> None:
    """Put such classes in the places of Transformers' own; a second call changes nothing."""
    for method in ("fp8", "mxfp4"):
        own = AUTO_QUANTIZER_MAPPING[method]
        if not issubclass(own, KeepsExperts):
            AUTO_QUANTIZER_MAPPING[method] = type(f"Keeps{own.__name__}", (KeepsExperts, own), {})
