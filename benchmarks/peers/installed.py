"""Where peers from outside lie: the folder that benchmarks/install_peers.py fills, named by MOESTRO_BENCH_PEERS."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moestro import machine, settings
from moestro.bench.layers import Layer, LayerSpec
from moestro.types import GPT_OSS_SWIGLU, SWIGLU

INSTALL = f"run `python benchmarks/install_peers.py FOLDER` and set {settings.BENCH_PEERS_VARIABLE} to that folder"
SERVED = (SWIGLU, GPT_OSS_SWIGLU)


def folder() -> Path | None:
    """The folder of peers; None where the environment names none."""
    named = settings.bench_peers()
    return Path(named) if named else None


def features() -> set[str]:
    """Those of the processor that are not masked for moestro; its peers do without them too where they can."""
    return set(machine.features()) - set(settings.MASKED)


def missing(peer: str, file: str) -> str | None:
    """None if `file` of a peer is there, else the sentence why it is not and how to get it."""
    place = folder()
    if place is None:
        return f"it is not installed: {INSTALL}"  # one sentence for all of them
    return None if (place / file).exists() else f"{peer} is not in {place}: {INSTALL}"


def path(file: str) -> Path:
    """A file that `missing` found."""
    place = folder()
    assert place is not None
    return place / file


def module(name: str, of: str = "python") -> Any:
    """A Python module out of a peer's part of the folder, behind everything that is installed.

    Raises:
        ImportError: it is not there.
    """
    place = folder()
    if place is not None and str(place / of) not in sys.path:
        sys.path.append(str(place / of))
    return importlib.import_module(name)


def versions() -> dict[str, str]:
    """What the installer wrote down of the versions it took; nothing where there is no folder."""
    place = folder()
    found = None if place is None else place / "versions.json"
    return {} if found is None or not found.is_file() else dict(json.loads(found.read_text()))


def refuses(spec: LayerSpec, activations: tuple[object, ...] = SERVED) -> str | None:
    """What no peer from outside computes, and activations beyond the named ones."""
    if spec.weight_on == "input":
        return "it multiplies outputs by the routing weights, not inputs"
    if spec.activation not in activations:
        return "it has no clamped SwiGLU" if spec.activation == GPT_OSS_SWIGLU else "it has no such activation"
    return None


def matrices(layer: Layer) -> tuple[Tensor, Tensor]:
    """gate_up [E, 2 * I, H] and down [E, H, I] of a layer, in its own dtype."""
    gate_up, down = layer.weights.gate_up.tensors[0], layer.weights.down.tensors[0]
    return gate_up, down


def biases(layer: Layer) -> tuple[Tensor | None, Tensor | None]:
    """Both biases in float32."""
    gate_up, down = layer.weights.gate_up_bias, layer.weights.down_bias
    return (None if gate_up is None else gate_up.float()), (None if down is None else down.float())


def rows_in_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[E, N, K] -> int8 [E, N, K] and scales [E, N], each row's largest magnitude at 127; an expert at a time."""
    codes = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(weight.shape[:2])
    for e in range(weight.shape[0]):
        wide = weight[e].float()
        scales[e] = wide.abs().amax(-1).clamp_min(torch.finfo(torch.float32).tiny) / 127
        codes[e] = (wide / scales[e, :, None]).round_().to(torch.int8)
    return codes, scales
