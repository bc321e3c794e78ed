"""Routings to simulate: drawn from a distribution, or recorded."""

from __future__ import annotations

import json
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from moestro import memory
from moestro.errors import InvalidInputError, invalid_input

MAX_PAIRS, MAX_EXPERTS, MOST_DRAWS = 2**28, 2**20, 10**5


def zipf_ids(num_tokens: int, num_experts: int, top_k: int, exponent: float = 0.0, seed: int = 0) -> Tensor:
    """Expert ids [T, K] of tokens that draw one expert after the other, none twice, the i-th likeliest by i^-exponent.

    Which expert is the i-th likeliest is drawn too, from the number of experts alone, so that another seed gives other
    tokens of the same kind. An exponent of 0 is uniform.

    Raises:
        InvalidInputError: a number below 1 or beyond all use, more slots than experts, an exponent or a seed below 0,
            or an exponent too steep for so many slots.
    """
    small = num_tokens * top_k <= MAX_PAIRS and num_experts <= MAX_EXPERTS
    if not (num_tokens >= 1 and 1 <= top_k <= num_experts and 0 <= exponent < float("inf") and seed >= 0 and small):
        raise invalid_input(
            "zipf_ids",
            got=f"num_tokens={num_tokens}, num_experts={num_experts}, top_k={top_k}, exponent={exponent}, seed={seed}",
            needs="at least one token, 1 <= top_k <= num_experts, exponent and seed of at least 0, at most "
            f"{MAX_PAIRS:,} pairs and {MAX_EXPERTS:,} experts",
            fix="An exponent of 0 is uniform; of 0.8 like the loads of models in use.",
        )
    if exponent * np.log(top_k) > np.log(MOST_DRAWS):
        raise invalid_input(
            "zipf_ids",
            got=f"top_k={top_k} with exponent={exponent}",
            needs=f"top_k ** exponent of at most {MOST_DRAWS:,}: so rarely the last slot's expert is drawn",
            fix="Lower the exponent; loads of models in use are like 0.8.",
        )
    weights = np.arange(1, num_experts + 1.0) ** -exponent
    up_to = np.cumsum(weights[np.random.default_rng(num_experts).permutation(num_experts)])
    rng = np.random.default_rng(seed)
    ids = np.full((num_tokens, top_k), -1)
    for slot in range(top_k):
        open_tokens = np.arange(num_tokens)
        while len(open_tokens):
            drawn = np.searchsorted(up_to, rng.random(len(open_tokens)) * up_to[-1], side="right").clip(
                0, num_experts - 1
            )
            again = (ids[open_tokens, :slot] == drawn[:, None]).any(1)
            ids[open_tokens, slot] = drawn
            open_tokens = open_tokens[again]
    return torch.from_numpy(ids)


def read_trace(path: str | Path, layer: int = 0) -> Tensor:
    """Recorded expert ids, int64 [T, K]: a .npy file of integers, or a .json file of lists of lists.

    Of a .npz file, which `moestro generate --trace` writes, those of one layer.

    Raises:
        InvalidInputError: a file that cannot be read, or holds something else; another layer than the file has.
    """
    path = Path(path)
    if path.suffix == ".npz":
        return torch.from_numpy(memory.read_trace(path).layer_ids(layer))
    if layer:
        got, needs = f"layer {layer} of {str(path)!r}", "a .npz file, for the others have one layer"
        raise invalid_input("read_trace", got=got, needs=needs, fix="Leave the layer out.")
    try:
        found = np.load(path, allow_pickle=False) if path.suffix == ".npy" else np.array(json.loads(path.read_text()))
    except (OSError, ValueError, EOFError, RecursionError, BadZipFile) as error:
        raise _no_trace(path, str(getattr(error, "strerror", None) or error)) from error
    if not isinstance(found, np.ndarray) or found.ndim != 2 or found.dtype.kind not in "iu" or not found.size:
        raise _no_trace(path, f"an array {list(getattr(found, 'shape', ()))}")
    if found.min() < -1 or found.max() >= MAX_EXPERTS:
        raise _no_trace(path, f"ids from {found.min()} to {found.max()}")
    return torch.from_numpy(found.astype(np.int64))


def _no_trace(path: Path, why: str) -> InvalidInputError:
    return invalid_input(
        "read_trace",
        got=f"{str(path)!r} ({why})",
        needs=f"a .npy or .json file with ids [num_tokens, top_k] below {MAX_EXPERTS:,}, -1 for an empty slot",
        fix="numpy.save(path, routing.expert_ids.numpy()) writes one.",
    )
