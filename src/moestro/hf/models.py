"""Where a model is that somebody named, a folder here or an id of the hub, and where it is to go."""

from __future__ import annotations

import errno
import json
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig

from moestro.checkpoint import Checkpoint
from moestro.errors import InvalidInputError, MoestroError, invalid_input

_OF_OTHERS = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, OSError, RuntimeError),
    *(TypeError, ValueError, SafetensorError, StrictDataclassError),
)
_SENTENCE = 200
"""The most characters that are repeated of what another library says."""
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
_LAYERS = re.compile(r"(^|_)(num|n)_(\w+_)?(layers?|blocks?)$")
_WIDTHS = re.compile(r"(^|_)(num|n)_(\w+_)?(experts?|heads?)$|^hidden_size$|^head_dim$|^d_model$")
_NEVER_ZERO = ("decoder_sparse_step", "hidden_size", "num_attention_heads")
_TOP_K = re.compile(r"^(num_)?(selected_experts|experts_per_tok(en)?)$|^moe_(top_?)?k$|^top_k_experts$")
_EXPERTS = re.compile(r"^(moe_)?(num|n)_(local_|routed_)?experts$")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_FEW_LAYERS = 256
"""So many are built at once; where the files have fewer, the tensors that are missing are named then."""


def find_model(name: str | Path, operation: str) -> str:
    """The folder with a config.json, or the hub id, that a user named; "~" stands for a home folder."""
    folder = Path(os.path.expanduser(name))
    if (folder / "config.json").is_file():
        return str(folder)
    if folder.suffix == ".gguf" or any(folder.glob("*.gguf")):
        got, needs = f"{name}, in llama.cpp's GGUF format", "a folder with config.json and safetensors files"
        fix = "Name the checkpoint that it was made from; `moestro quantize` and --format make it as small."
    elif folder.exists():
        got, needs = f"{name}, which holds no config.json", "a folder written by save_pretrained"
        fix = "Name the folder that holds config.json and the weights."
    elif isinstance(name, Path) or name.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(name):
        got, fix = f"model {str(name)!r}, where there is no folder", "Check the path."
        needs = "a folder that exists, or a hub id such as allenai/OLMoE-1B-7B-0924"
    else:
        return name
    raise invalid_input(operation, got=got, needs=needs, fix=fix)


def read_config(source: str | Path, operation: str, checkpoint: Checkpoint | None = None) -> Any:
    """The configuration of the model in a folder, or of this hub id.

    Its sizes are compared with the files, where a checkpoint is given, before Transformers makes lists of them.
    """
    local = Path(source).is_dir()
    if local:
        _check_sizes(Path(source), checkpoint, operation)
    needs = "a configuration that Transformers knows" if local else "a folder here, or a hub id that can be reached"
    fix = "Check config.json, or update Transformers." if local else "Check the name and the connection."
    with explained(operation, source, needs, fix):
        config = AutoConfig.from_pretrained(source)
        _check_top_k(Path(source) / "config.json" if local else source, config.to_dict(), operation)
    return config


def _check_sizes(folder: Path, checkpoint: Checkpoint | None, operation: str) -> None:
    """Refuse a config.json whose sizes no tensor of the files can have, before a module of these sizes is built.

    Sizes that the files could have are left to the comparison of every tensor with the model's parameters. So is text
    that is no JSON object left to Transformers, which says so.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return
    widest, layers = (math.inf, math.inf) if checkpoint is None else _largest(checkpoint)
    for key, value in ((key, value) for part in _sizes(config) for key, value in part.items()):
        deep, wide = _LAYERS.search(key), _WIDTHS.search(key)
        if (value < 0 and (deep or wide)) or (value < 1 and key in _NEVER_ZERO):
            raise _no_such_size(path, operation, key, value, "a size above 0")
        if deep and value > layers:
            raise _no_such_size(path, operation, key, value, f"no more than the {layers} layers that the files name")
        if wide and value > widest:
            raise _no_such_size(path, operation, key, value, f"no more than {widest}, the largest size in the files")


def _check_top_k(source: str | Path, config: Any, operation: str) -> None:
    """Refuse a configuration that sends a token to more experts than there are, or to none."""
    for part in _sizes(config):
        experts = max((value for key, value in part.items() if _EXPERTS.search(key)), default=0)
        for key, value in part.items():
            if experts > 0 and _TOP_K.search(key) and not 1 <= value <= experts:
                needs = f"a number from 1 to that of the experts, {experts}"
                raise _no_such_size(source, operation, key, value, needs)


def routed_experts_of(config: Any) -> int:
    """How many experts a token is routed to, at most; 1 where the configuration does not say."""
    found = (value for part in _sizes(config.to_dict()) for key, value in part.items() if _TOP_K.search(key))
    return max((value for value in found if value > 0), default=1)


def _sizes(config: Any) -> Iterator[dict[str, int]]:
    """The whole numbers of a configuration, and of each object in it."""
    pending = [config]
    while pending:
        found = pending.pop()
        if isinstance(found, dict):
            yield {str(key): value for key, value in found.items() if type(value) is int}
            pending += [inner for key, inner in found.items() if key != "quantization_config"]


def _largest(checkpoint: Checkpoint) -> tuple[int, int]:
    """The largest size of a dimension, or number of a module, and the largest number of layers."""
    widest, layers = 1, _FEW_LAYERS
    for name in checkpoint.names:
        numbers = [int(number) + 1 for number in _NUMBER.findall(f".{name}")]
        widest = max((widest, *checkpoint.entry(name).shape, *numbers))
        layers = max((layers, *numbers[:1]))
    return widest, layers


def _no_such_size(path: str | Path, operation: str, key: str, value: int, needs: str) -> InvalidInputError:
    fix = "Check config.json, or download the model again."
    return invalid_input(operation, got=f"{path} with {key} {value}", needs=needs, fix=fix)


def find_device(name: torch.device | str, operation: str) -> torch.device:
    """The device of this name, or an InvalidInputError where this machine has none."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device).tolist()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise invalid_input(
            operation,
            got=f"device {str(name)!r} ({first_sentence(error)})",
            needs="a device of this machine",
            fix="Try cpu.",
        ) from error
    return device


@contextmanager
def fitting(
    operation: str, source: str | Path, dtype: torch.dtype | str | None = None, format: str | None = None
) -> Iterator[None]:
    """Say that memory ran out, if it did, and what takes less than weights of this dtype, experts of this format."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if not out_of_memory(error):
            raise
        raise invalid_input(
            operation,
            got=f"{source}, for which the memory does not suffice",
            needs="memory for all of its weights",
            fix=_lighter(dtype, format),
        ) from error


def _lighter(dtype: torch.dtype | str | None, format: str | None) -> str:
    ways = ["a smaller model"]
    if format is None:
        ways.insert(0, 'experts of fewer bits (--format mxfp4, in Python format="mxfp4")')
    if str(dtype).removeprefix("torch.") in ("float32", "float64"):
        ways.insert(0, "a 16-bit dtype")
    return f"Choose {', '.join(ways[:-1])} or {ways[-1]}." if len(ways) > 1 else f"Choose {ways[0]}."


def out_of_memory(error: BaseException) -> bool:
    """Whether this is what torch or Python raise for memory that is not there."""
    return (
        isinstance(error, MemoryError | torch.OutOfMemoryError)
        or "allocate memory" in str(error)
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    )


@contextmanager
def explained(operation: str, source: str | Path, needs: str, fix: str) -> Iterator[None]:
    """Turn what Transformers raises for a model it cannot read into one line that names the model."""
    try:
        yield
    except MoestroError:
        raise
    except _OF_OTHERS as error:
        raise invalid_input(operation, got=f"{source} ({first_sentence(error)})", needs=needs, fix=fix) from error


def first_sentence(error: BaseException) -> str:
    """What an error says, in as much as fits into a sentence."""
    text = " ".join(str(error).split()) or type(error).__name__
    sentence = text.split(". ")[0].rstrip(".")
    return sentence if len(sentence) <= _SENTENCE else f"{sentence[:_SENTENCE]}..."
