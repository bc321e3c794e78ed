"""Stored number systems as values. A format is data, never a flag, and never guessed."""

from moestro.formats.base import PackedTensor, Scaling, SplitTensor, StoredExperts, WeightFormat
from moestro.formats.decode import INTEGERS, dequantize, floats, integers
from moestro.formats.dense import dense
from moestro.formats.encode import check_shape, quantize
from moestro.formats.registry import FORMATS, find_format, is_registered

__all__ = [
    "FORMATS",
    "INTEGERS",
    "PackedTensor",
    "Scaling",
    "SplitTensor",
    "StoredExperts",
    "WeightFormat",
    "check_shape",
    "dense",
    "dequantize",
    "find_format",
    "floats",
    "integers",
    "is_registered",
    "quantize",
]
