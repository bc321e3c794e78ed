"""What counts as Python, and as a line said three times; and that the bundled model is worth what its card says."""

from __future__ import annotations

import json

import pytest

import function_heads
from moestro.hf.text_model import bundled_folder
from source import ROOT

PUBLISHED = json.loads((ROOT / "examples/train_bundled.results.json").read_text())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def f(n):\n    return n\n\ndef g(", True),
        ("def f(n):\n    return n", False),
        ("def f(n):", False),
        ('def f(n):\n    """Never closed\n', False),
        ("def f(n):\n\treturn n\n        pass\n", False),
        ('def f():\n    return "\\d"\n', True),
    ],
)
def test_parses_up_to_the_last_whole_line(text: str, expected: bool) -> None:
    assert function_heads.parses(text) is expected


def test_empty_lines_are_not_repeated_ones() -> None:
    assert function_heads.most_repeated_line("a\n\n\n\n  b\n b\n") == 2


def test_the_card_has_what_was_measured() -> None:
    numbers = PUBLISHED["function_heads"]
    assert PUBLISHED["bits_per_byte"] <= 0.80
    assert numbers["heads"] == len(set(function_heads.HEADS)) == 50
    parse, repeat = numbers["parse"], numbers["a_line_three_times"]
    assert parse[0] >= 0.6 * 50
    assert sum(parse[1:]) >= 0.6 * 50 * (len(parse) - 1)
    page = " ".join((bundled_folder() / "README.md").read_text().split())
    assert f"{min(parse)} to {max(parse)} parse as Python when cut behind their last whole line" in page
    assert f"({sum(parse)} of all {50 * len(parse)}, {parse[0]} in the first draw)" in page
    assert f"in the other five {sum(parse[1:])} of 250 parse" in page
    assert (
        f"{sum(repeat)} of all {50 * len(repeat)} texts say one line three times, {repeat[0]} in the first draw" in page
    )


def test_the_bundled_model_completes_heads() -> None:
    """Other processors round otherwise, and draw other texts: of twelve a third is far below what the card says."""
    texts = function_heads.complete(bundled_folder(), function_heads.HEADS[:12])
    assert all(text.startswith(head) for text, head in zip(texts, function_heads.HEADS, strict=False))
    assert sum(map(function_heads.parses, texts)) >= 4
