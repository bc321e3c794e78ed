"""Step-3.x: an experts module with the interface's own signature, and a gate that clamps after the activation."""

from __future__ import annotations

from dataclasses import replace

from moestro.hf.families.base import INTERFACE

STEP3P7 = replace(INTERFACE, family="Step-3.7", module="Step3p7Experts", layout="clamp after the activation")
