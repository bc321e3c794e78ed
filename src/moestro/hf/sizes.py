"""Compare the sizes that a config.json claims with the files beside it, before a module of these sizes is built."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from moestro.checkpoint import Checkpoint
from moestro.errors import InvalidInputError, invalid_input

_LAYERS = re.compile(r"(^|_)(num|n)_(\w+_)?(layers?|blocks?)$")
_WIDTHS = re.compile(r"(^|_)(num|n)_(\w+_)?(experts?|heads?)$|^hidden_size$|^head_dim$|^d_model$")
_NEVER_ZERO = ("decoder_sparse_step", "hidden_size", "num_attention_heads")
_TOP_K = re.compile(r"^(num_)?(selected_experts|experts_per_tok(en)?)$|^moe_(top_?)?k$|^top_k_experts$")
_EXPERTS = re.compile(r"^(moe_)?(num|n)_(local_|routed_)?experts$")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_FEW_LAYERS = 256
"""So many are built at once; where the files have fewer, the tensors that are missing are named then."""


def check_sizes(folder: Path, checkpoint: Checkpoint | None, operation: str) -> None:
    """Refuse a config.json whose sizes no tensor of the files can have.

    Sizes that the files could have are left to the comparison of every tensor with the model's parameters. So is text
    that is no JSON object left to Transformers, which says so.

    Args:
        folder: of the model.
        checkpoint: its files, or None where only the numbers by themselves are looked at.
        operation: for errors.

    Raises:
        InvalidInputError: more layers, experts, heads or columns than the files have; a size below 0, or of 0 where
            that is none.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return
    widest, layers = (None, None) if checkpoint is None else _largest(checkpoint)
    for part in _objects(config):
        for key, value in part.items():
            if type(value) is not int:
                continue
            deep, wide = _LAYERS.search(key), _WIDTHS.search(key)
            if (value < 0 and (deep or wide)) or (value < 1 and key in _NEVER_ZERO):
                raise _error(path, operation, f"{key} {value}", "a size above 0")
            if deep and layers is not None and value > layers:
                raise _error(path, operation, f"{key} {value}", f"no more than the {layers} layers that the files name")
            if wide and widest is not None and value > widest:
                raise _error(path, operation, f"{key} {value}", f"no more than {widest}, the largest size in the files")


def _objects(value: Any) -> Iterator[Mapping[str, Any]]:
    """Every object of a configuration that has sizes: it, and those in it."""
    pending = [value]
    while pending:
        found = pending.pop()
        if isinstance(found, dict):
            yield found
            pending += [inner for key, inner in found.items() if key != "quantization_config"]


def check_top_k(source: str | Path, config: Any, operation: str) -> None:
    """Refuse a configuration that sends a token to more experts than there are.

    Args:
        source: of the model.
        config: as an object of JSON, with the values that its class adds.
        operation: for errors.

    Raises:
        InvalidInputError: it does, or to none.
    """
    for part in _objects(config):
        experts = [
            value for key, value in part.items() if _EXPERTS.search(str(key)) and type(value) is int and value > 0
        ]
        for key, value in part.items():
            if experts and _TOP_K.search(str(key)) and type(value) is int and not 1 <= value <= max(experts):
                needs = f"a number from 1 to that of the experts, {max(experts)}"
                raise _error(source, operation, f"{key} {value}", needs)


def _largest(checkpoint: Checkpoint) -> tuple[int, int]:
    """The largest size of a dimension, or number of a module, and the largest number of layers."""
    widest, layers = 1, _FEW_LAYERS
    for name in checkpoint.names:
        numbers = [int(number) + 1 for number in _NUMBER.findall(f".{name}")]
        widest = max((widest, *checkpoint.entry(name).shape, *numbers))
        layers = max((layers, *numbers[:1]))
    return widest, layers


def _error(path: str | Path, operation: str, got: str, needs: str) -> InvalidInputError:
    fix = "Check config.json, or download the model again."
    return invalid_input(operation, got=f"{path} with {got}", needs=needs, fix=fix)
