"""The text that a model's quality is measured on, as tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moestro.errors import invalid_input
from moestro.quality.held_out import held_out
from moestro.quality.report import Text
from moestro.quality.score import windows

OPERATION = "quality"
HELD_OUT = "held-out standard library"


@dataclass(frozen=True, eq=False)
class Corpus:
    """What is read: the text, documents as int64 [T] each, whose first token is given, and their windows."""

    text: Text
    documents: tuple[Tensor, ...]
    windows: tuple[tuple[Tensor, Tensor], ...]


def read_corpus(tokenizer: Any, context: int, path: Path | None = None, limit: int | None = None) -> Corpus:
    """Read and tokenise a text, whole documents first to last until `limit` tokens are predicted, or all.

    The text is one document in UTF-8, or, where no path is given, the held-out files. Windows have at most `context`
    tokens. It has to have two.
    """
    documents: list[Tensor] = []
    num_tokens = num_bytes = 0
    digest = hashlib.sha256()
    for text in held_out() if path is None else [_read(path)]:
        left = None if limit is None else limit - num_tokens
        if left == 0:
            break
        ids = tokenizer(text, verbose=False)["input_ids"]
        kept = ids if left is None else ids[: left + 1]
        if len(kept) < 2:
            continue
        documents.append(torch.tensor(kept))
        digest.update(text.encode())
        num_tokens += len(kept) - 1
        whole = len(text.encode()) if len(kept) == len(ids) else _num_bytes(tokenizer, kept)
        num_bytes += whole - _num_bytes(tokenizer, kept[:1])
    if not num_bytes:
        raise invalid_input(
            OPERATION,
            got=f"{path or HELD_OUT}, of which no token can be predicted",
            needs="a text of at least two tokens",
            fix="Take a longer text.",
        )
    name = HELD_OUT if path is None else str(path)
    text_of = Text(name, len(documents), num_tokens, num_bytes, context, digest.hexdigest())
    return Corpus(text_of, tuple(documents), tuple(w for d in documents for w in windows(d, context)))


def _read(path: Path) -> str:
    try:
        text = path.expanduser().read_bytes().decode("utf-8")
        problem = "" if text else ", which is empty"
    except UnicodeDecodeError as error:
        problem = f", whose byte {error.start} is no UTF-8"
    except (OSError, RuntimeError) as error:
        problem = f" ({getattr(error, 'strerror', None) or error})"
    if problem:
        fix = "Name one with --text, or leave it out."
        raise invalid_input(OPERATION, got=f"text {str(path)!r}{problem}", needs="a text file in UTF-8", fix=fix)
    return text


def _num_bytes(tokenizer: Any, ids: Sequence[int]) -> int:
    """Of the text that tokens stand for; a character that is cut in two counts as three bytes."""
    text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return len(text.encode())
