"""A tokenizer for a model that has none to ship: every byte is a token, every other id is shown by its number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

ROLES = ("eos", "bos", "pad")


def special_tokens(*configs: dict[str, Any]) -> dict[int, str]:
    """By id, a name for each special token that the configurations mention."""
    found: dict[int, str] = {}
    for role in ROLES:
        for config in configs:
            ids = config.get(f"{role}_token_id")
            for number in ids if isinstance(ids, list) else [] if ids is None else [ids]:
                found.setdefault(
                    number, f"<|{role}|>" if f"<|{role}|>" not in found.values() else f"<|{role}-{number}|>"
                )
    return found


def write_tokenizer(folder: Path, vocab_size: int, special: dict[int, str]) -> None:
    """Write tokenizer.json and tokenizer_config.json.

    A byte-level BPE without merges. Ids are those of the model: the special ones where its configuration has them, the
    256 bytes in the lowest places left, and at every other place a word no text is encoded to.
    """
    free = (number for number in range(vocab_size) if number not in special)
    ids = dict(special)
    for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
        ids[next(free)] = symbol
    ids |= {number: f"Ġ#{number}" for number in free}
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in sorted(ids.items())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([token for _, token in sorted(special.items())])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {f"{role}_token": f"<|{role}|>" for role in ROLES if f"<|{role}|>" in special.values()}
    settings = {"backend": "tokenizers", "clean_up_tokenization_spaces": False, "tokenizer_class": "TokenizersBackend"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named | settings, indent=2) + "\n")
