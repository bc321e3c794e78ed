"""FP8 and MXFP4 checkpoints through Transformers' own loading, on a machine without a GPU.

There Transformers dequantises the whole model, or refuses. With ``experts_implementation="moestro"`` experts stay as
stored; with any other implementation, with ``dequantize=True`` or where there is a GPU, all is Transformers' own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer

from moestro.checkpoint.scheme import METHOD
from moestro.hf.quantization import MoestroConfig, MoestroQuantizer

METHODS = ("fp8", "mxfp4")


class KeepsExperts(HfQuantizer):
    """A quantizer of Transformers that hands over to moestro's where that was asked for; mixed in before its class."""

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
            config = MoestroConfig(rest=rest)
            config.source = rest
            self._own = MoestroQuantizer(config, pre_quantized=True)
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
    """Put the classes in the places of Transformers' own; a second call changes nothing."""
    for method in METHODS:
        own = AUTO_QUANTIZER_MAPPING[method]
        if not issubclass(own, KeepsExperts):
            AUTO_QUANTIZER_MAPPING[method] = type(f"Keeps{own.__name__}", (KeepsExperts, own), {})
