"""How answers are drawn: markdown on a terminal, paragraphs printed once, nothing that a terminal would obey."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from moestro.cli.screen import MarkdownView, PlainView, complete, harmless, show_all
from moestro.serve.reasoning import HARMONY, THINK, Marks, Piece, Splitter

TEXT = "One **two**.\n\n```python\na\n\nb\n```\n\n* x\n* y\n\nlast"


@given(st.lists(st.sampled_from(["text", "", "```", "~~~", "````", "* x"]), max_size=12), st.integers(0, 60))
def test_what_is_complete_stays_so(lines: list[str], length: int) -> None:
    """Of a text that grows, the complete part only grows."""
    text = "\n".join(lines)
    early = complete(text[:length])
    assert early <= length
    assert early <= complete(text)


def test_code_is_not_cut_at_an_empty_line() -> None:
    assert complete("a\n\nb") == 3
    assert complete("```\na\n\nb") == 0
    assert complete("```\na\n\nb\n```\n\nc") == 14


def test_markdown_is_printed_once() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=40, height=10, color_system=None, legacy_windows=False)
    said: list[str] = []
    pieces = [Piece("so I think", True), *(Piece(character) for character in TEXT)]
    show_all(pieces, MarkdownView(console), said)
    assert "".join(said) == TEXT
    plain = Console(file=io.StringIO(), width=40)
    printed = out.getvalue()
    for word in ("One two.", "so I think", "• x", "last"):
        assert printed.count(word) >= 1, printed
    assert "**" not in printed
    assert plain.width == 40


def test_a_terminal_obeys_no_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert harmless("a\x1b]52;c;x\x07\tb\n\x9b1m") == "a\ufffd]52;c;x\ufffd\tb\n\ufffd1m"
    view = PlainView(terminal=True)
    view.show(Piece("\x1b[2Jx"))
    view.end()
    assert capsys.readouterr().out == "\ufffd[2Jx\n"


MARKED = [
    (THINK, "<think>\nhm < a</think>\n\nyes <b"),
    (
        HARMONY,
        "<|channel|>analysis<|message|>hm < a<|end|><|start|>assistant<|channel|>final<|message|>yes <b<|return|>",
    ),
]


@pytest.mark.parametrize("marks", [THINK, HARMONY], ids=["think", "harmony"])
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_reasoning_is_told_from_the_answer(marks: Marks, size: int) -> None:
    text, splitter = next(text for of, text in MARKED if of is marks), Splitter(marks)
    pieces = [piece for i in range(0, len(text), size) for piece in splitter.put(text[i : i + size])]
    pieces += splitter.end()
    assert "".join(piece.text for piece in pieces if piece.reasoning) == "hm < a"
    assert "".join(piece.text for piece in pieces if not piece.reasoning) == "yes <b"


def test_a_prompt_may_begin_the_reasoning() -> None:
    splitter = Splitter(THINK, reasoning=True)
    assert [*splitter.put("hm</think>yes"), *splitter.end()] == [Piece("hm", True), Piece("yes")]
