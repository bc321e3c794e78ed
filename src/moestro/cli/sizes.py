"""Sizes as options are given them."""

from __future__ import annotations

from moestro.memory.amounts import parse_bytes

__all__ = ["parse_bytes"]
