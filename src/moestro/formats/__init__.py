"""Stored number systems as values. A format is data, never a flag, and never guessed."""

from moestro.formats.base import PackedTensor, Scaling, SplitTensor, StoredExperts, WeightFormat
from moestro.formats.dense import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, dense

__all__ = ["BFLOAT16", "FLOAT16", "FLOAT32", "FLOAT64", "PackedTensor", "Scaling", "SplitTensor", "StoredExperts", "WeightFormat", "dense"]
