"""The bundled model is worth what its page says: measured on held-out text, through moestro."""

from __future__ import annotations

import hashlib
import json
import lzma
import math
import re
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoTokenizer

from moestro.hf.generate import Sampling, generate
from moestro.hf.text_model import TextModel, bundled_folder, load_text_model

ROOT = Path(__file__).parents[1]
SMALLEST, LARGEST, IN_ALL = 1_000, 5_000, 20_000


def held_out() -> list[str]:
    """Short held-out files of this Python, by the rule of examples/train_bundled.py, up to `IN_ALL` bytes."""
    root, found, total = Path(sysconfig.get_paths()["stdlib"]), [], 0
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(root).as_posix()
        if not is_held_out(path) or {"site-packages", "dist-packages"} & set(file.parts):
            continue
        data = file.read_bytes()
        if SMALLEST <= len(data) <= LARGEST and total + len(data) <= IN_ALL and data.isascii():
            total += len(data)
            found.append(data.decode())
    return found


def is_held_out(path: str) -> bool:
    return int(hashlib.sha256(path.encode()).hexdigest()[:8], 16) % 1000 < 25


def published() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "examples/train_bundled.results.json").read_text())
    return found


@pytest.fixture(scope="module")
def bundled() -> TextModel:
    return load_text_model(dtype="float32")


def windows(ids: list[int]) -> list[tuple[list[int], int]]:
    """Pieces of up to 1,024 tokens, each with how many of its predictions another piece has made already."""
    starts = range(0, max(len(ids) - 512, 1), 512)
    return [(ids[start : start + 1024], 511 if start else 0) for start in starts]


def test_it_compresses_better_than_xz_and_uses_every_expert(bundled: TextModel) -> None:
    texts = held_out()
    raw = [text.encode() for text in texts]
    assert len(texts) >= 3
    model, bits = bundled.model, 0.0
    counts = torch.zeros(len(bundled.served), model.config.num_experts)

    def count(layer: int, chosen: torch.Tensor) -> None:
        counts[layer] += torch.bincount(chosen.flatten(), minlength=counts.shape[1])

    hooks = [
        model.get_submodule(s.path).register_forward_pre_hook(lambda _m, args, i=i: count(i, args[1]))
        for i, s in enumerate(bundled.served)
    ]
    with torch.inference_mode():
        for text in texts:
            for ids, skip in windows(bundled.tokenizer(text, verbose=False)["input_ids"]):
                piece = torch.tensor([ids])
                logits = model(piece[:, :-1], use_cache=False).logits[0, skip:].float()
                bits += F.cross_entropy(logits, piece[0, 1 + skip :], reduction="sum").item() / math.log(2)
    for hook in hooks:
        hook.remove()
    size = sum(map(len, raw))
    xz = 8 * len(lzma.compress(b"".join(raw), preset=9 | lzma.PRESET_EXTREME)) / size
    assert bits / size < xz
    assert bits / size == pytest.approx(published()["bits_per_byte"], rel=0.5)
    assert (counts / counts.sum(1, keepdim=True)).min() > 0.005


def test_architecture_and_size(bundled: TextModel) -> None:
    config = bundled.model.config
    assert type(bundled.model).__name__ == "Qwen3MoeForCausalLM"
    assert config.num_experts >= 16
    assert config.num_experts_per_tok == 4
    assert len(bundled.served) == config.num_hidden_layers
    assert sum(file.stat().st_size for file in bundled_folder().iterdir()) < 16_000_000


def test_the_tokenizer_starts_every_text_and_loses_nothing() -> None:
    tokenizer = AutoTokenizer.from_pretrained(bundled_folder())
    for text in ("", "def f():\n\treturn 'é漢🙂'\n", *held_out()):
        ids = tokenizer(text, verbose=False)["input_ids"]
        assert ids[0] == 0
        assert 0 not in ids[1:]
        assert tokenizer.decode(ids[1:]) == tokenizer.decode(ids, skip_special_tokens=True) == text


def test_greedy_text_is_the_same_every_time(bundled: TextModel) -> None:
    greedy = Sampling(max_new_tokens=12, do_sample=False)
    one, again = (generate(bundled, "def ", greedy).text for _ in range(2))
    assert one == again
    assert one.strip()


def test_published_numbers_are_the_measured_ones() -> None:
    page, numbers = (bundled_folder() / "README.md").read_text(), published()
    rows = dict(re.findall(r"^\| ([^|]+?) \| (\d\.\d+) \|$", page, re.MULTILINE))
    assert rows == {
        "this model": f"{numbers['bits_per_byte']:.3f}",
        "`xz -9e`, each file by itself": f"{numbers['xz_9e_per_file_bits_per_byte']:.3f}",
        "`xz -9e`, all files joined into one": f"{numbers['xz_9e_together_bits_per_byte']:.3f}",
    }
    flat = " ".join(page.split())
    assert f"On the {numbers['held_out_files']} held-out files ({numbers['held_out_bytes']:,} bytes" in flat
    least, most = min(numbers["expert_share_min_per_layer"]), max(numbers["expert_share_max_per_layer"])
    assert f"from {least:.1%} ".replace("%", " %") in flat
    assert f"to {most:.1%} ".replace("%", " %") in flat
    for text in numbers["completions"].values():
        assert f"```python\n{text.rstrip()}\n```" in page
