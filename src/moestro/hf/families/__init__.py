"""The families outside Transformers' experts interface, one adapter each."""

from __future__ import annotations

from dataclasses import replace

from moestro.hf.families.base import INTERFACE, Adapter
from moestro.hf.families.dbrx import DBRX
from moestro.hf.families.doge import DOGE
from moestro.hf.families.jetmoe import JETMOE
from moestro.hf.families.linears import NLLB_MOE, SWITCH
from moestro.hf.families.llama4 import LLAMA4
from moestro.hf.families.longcat import LONGCAT_FLASH

STEP3P7 = replace(INTERFACE, family="Step-3.7", module="Step3p7Experts", layout="clamp after the activation")
"""An experts module with the interface's own signature."""

ADAPTERS: dict[str, Adapter] = {
    adapter.module: adapter for adapter in (DBRX, DOGE, JETMOE, LLAMA4, LONGCAT_FLASH, NLLB_MOE, STEP3P7, SWITCH)
}
"""Adapters by the name of the module class they serve."""

LEFT = frozenset(name for adapter in ADAPTERS.values() for name in adapter.left)
"""Routed modules of served families that are no expert MLPs."""

REFUSED = {
    "VitPoseNaiveMoe": "its experts are single linear projections, picked per image by the caller and not by a router",
}
"""Known module classes that are no expert MLPs, with the reason."""
