"""How the experts of a model are stored, as a quantisation config of Transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers.quantizers.auto import register_quantization_config
from transformers.utils.quantization_config import QuantizationConfigMixin

from moestro.checkpoint.scheme import KEYS, METHOD, VERSION, check_keys
from moestro.errors import invalid_input, unsupported
from moestro.formats import find_format
from moestro.formats.encode import check_search
from moestro.hf.dense import check_choice
from moestro.memory.budget import MemoryBudget
from moestro.types import InputFormat
from moestro.weights import check_input_format

QUANTIZED = ("fp8", "mxfp4", METHOD)
"""Transformers' names of the methods whose checkpoints are read as they are."""


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
        input_format, projections: as for `moestro.load`: how this run computes, which is not saved.
        memory, device_memory: by name only; as for `moestro.load`.

    Raises:
        InvalidInputError: an unknown format, search, input_format or projections, an argument that there is not, or a
            version later than this.
    """

    def __init__(
        self,
        format: str | None = None,
        search: str = "nearest",
        overrides: Mapping[str, str] | None = None,
        rest: Mapping[str, Any] | None = None,
        input_format: InputFormat = "float",
        projections: str = "torch",
        **others: Any,
    ) -> None:
        memory, device_memory = others.pop("memory", None), others.pop("device_memory", None)
        check_keys(others, "MoestroConfig")
        _check_form(format, overrides, rest)
        check_input_format(input_format, (), "MoestroConfig")
        check_choice(projections, "MoestroConfig")
        check_search(search, "MoestroConfig")
        self.quant_method = METHOD
        self.version = VERSION
        self.format = None if format is None else find_format(format).name
        self.search = search
        self.overrides = {pattern: find_format(name).name for pattern, name in (overrides or {}).items()}
        self.rest = None if rest is None else dict(rest)
        self.input_format = input_format
        self.projections = projections
        self.memory = None if memory is device_memory is None else MemoryBudget.of(memory, device_memory)

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other) if isinstance(other, MoestroConfig) else NotImplemented

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """As every quantisation config; of a config.json, which does not say how a run computes."""
        check_keys(config_dict, "load")
        return super().from_dict(config_dict, return_unused_kwargs, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """What is saved."""
        return {key: value for key, value in super().to_dict().items() if key in KEYS}

    @classmethod
    def of(cls, config: Any) -> MoestroConfig:
        """What the `quantization_config` of a config.json says, whoever wrote it; None is that of no quantisation.

        Raises:
            UnsupportedError: a method whose experts moestro cannot read as they are.
            InvalidInputError: it is not of the form that Transformers and moestro write, or of a later version.
        """
        own: MoestroConfig = cls.from_dict(config) if _method(config) == METHOD else cls(rest=config)
        return own

    @property
    def method(self) -> str:
        """Transformers' name of how the checkpoint was published ("fp8", "mxfp4"); "" for none."""
        return _method(self.rest)

    @property
    def block_size(self) -> tuple[int, ...] | None:
        """Of published fp8 scales, or None for one scale a tensor."""
        size = (self.rest or {}).get("weight_block_size")
        return None if size is None else tuple(size)

    @property
    def changes_nothing(self) -> bool:
        """Whether every expert stays as its checkpoint has it."""
        return self.format is None and not self.overrides


def _method(config: Any) -> str:
    found = config.get("quant_method", "") if isinstance(config, Mapping) else ""
    return str(getattr(found, "value", found))


def _check_form(format: Any, overrides: Any, rest: Any) -> None:
    """Raise unless these have the form that their readers rely on, and what is published can be read."""
    size = rest.get("weight_block_size") if isinstance(rest, Mapping) else None
    names = [format or "", *(overrides.values() if isinstance(overrides, Mapping) else ())]
    if (
        not isinstance(overrides or {}, Mapping)
        or not isinstance({} if rest is None else rest, Mapping)
        or not (size is None or (isinstance(size, list | tuple) and [type(n) for n in size] == [int, int]))
        or not all(isinstance(name, str) for name in names)
    ):
        raise invalid_input(
            "load",
            got=f"quantization_config with format {format!r}, overrides {overrides!r} and rest {rest!r}",
            needs="a format's name, formats by pattern, and a JSON object whose weight_block_size is two whole numbers",
            fix="Check config.json, or download it again.",
        )
    if rest is not None and _method(rest) not in QUANTIZED[:2]:
        raise unsupported(
            "load",
            got=f"a checkpoint quantised by {_method(rest) or 'an unnamed method'}",
            needs="one in bfloat16, float16 or float32, in published FP8 or MXFP4, or quantised by moestro",
            fix="Load the model with Transformers, and call moestro.accelerate on it.",
        )
