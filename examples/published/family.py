"""A published model as a value, and what may be asked of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from published.tensors import Item, Stack

Config = dict[str, Any]
Experts = Callable[[Stack], Iterator[Item]]
Layout = Callable[[Config, Experts], Iterator[Item]]


def _nothing(_: Config) -> Config:
    return {}


@dataclass(frozen=True)
class Published:
    """A published checkpoint.

    Attributes:
        repository: where it is published.
        config: its config.json, without what `per_layer` adds.
        layout: from a configuration and a way to store experts to every tensor.
        experts: the way it stores its experts.
        tiny: what `config` becomes at a few hundred thousand weights; nested like it.
        generation: its generation_config.json, where it has one.
        per_layer: entries of config.json that follow from the number of layers.
        text: the key of the language model's own configuration, where it is nested.
        layers: the key of the number of layers.
        shards: how many files it comes in.
        file_name: of one of several files; its fields are a number and the last number.
        first_file: the number of the first of several files.
        own_formats: whether everything but the experts is bfloat16, so that moestro can store the experts alone.
        fusable: whether Transformers also reads the experts stacked.
    """

    repository: str
    config: Config
    layout: Layout
    experts: Experts
    tiny: Config
    generation: Config | None = None
    per_layer: Callable[[Config], Config] = _nothing
    text: str | None = None
    layers: str = "num_hidden_layers"
    shards: int | None = None
    file_name: str = "model-{:05d}-of-{:05d}.safetensors"
    first_file: int = 1
    own_formats: bool = True
    fusable: bool = True

    def text_config(self, config: Config) -> Config:
        """The part of `config` that describes the language model."""
        return config[self.text] if self.text else config

    def configure(self, tiny: bool, num_layers: int | None) -> Config:
        """config.json at full size or tiny, with all layers or the first `num_layers`."""
        config = merge(self.config, self.tiny if tiny else {})
        text = self.text_config(config)
        if num_layers is not None:
            text[self.layers] = num_layers
            if "num_nextn_predict_layers" in text:
                text["num_nextn_predict_layers"] = 0
        return merge(config, self.per_layer(config))


def merge(config: Config, changes: Config) -> Config:
    """`config` with `changes`, nested ones too; neither is touched."""
    merged = copy.deepcopy(config)
    for key, value in changes.items():
        nested = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if nested else copy.deepcopy(value)
    return merged
