"""Streaming: the pieces of a text, its timing, and the ranges of the sampling options."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moestro.errors import InvalidInputError
from moestro.hf.generate import Generation, Sampling, Streamer


class Bytes:
    """Token ids are bytes; those above 255 are special."""

    def decode(self, token_ids: list[int], **options: object) -> str:
        assert options["skip_special_tokens"]
        return bytes(i for i in token_ids if i < 256).decode(errors="replace")


class Words:
    """As SentencePiece tokenizers do, the first word of whatever is decoded loses the space before it."""

    def decode(self, token_ids: list[int], **options: object) -> str:
        return " ".join(f"w{i}" for i in token_ids)


def stream(prompt: list[int], new: list[int], tokenizer: object = None) -> tuple[list[str], Streamer]:
    pieces: list[str] = []
    streamer = Streamer(tokenizer or Bytes(), pieces.append)
    streamer.put(torch.tensor([prompt]))
    for token in new:
        streamer.put(torch.tensor([token]))
    streamer.end()
    return pieces, streamer


@given(st.text(min_size=1, max_size=12), st.text(max_size=30))
def test_pieces_are_the_text_and_characters_stay_whole(prompt: str, text: str) -> None:
    text = text.replace("\ufffd", "?")
    pieces, streamer = stream(list(prompt.encode()), list(text.encode()))
    assert "".join(pieces) == text == streamer.text
    assert len(pieces) == len(text), "one piece a character, as soon as its last byte is there"
    assert len(streamer.times) == len(text.encode())


def test_bytes_that_never_become_a_character_come_at_the_end() -> None:
    pieces, _ = stream([65], [*"é".encode(), 0xF0, 0x9F])
    assert pieces == ["é", "\ufffd"]


def test_special_tokens_are_no_text() -> None:
    pieces, streamer = stream([65], [66, 300])
    assert pieces == ["B"]
    assert len(streamer.times) == 2


def test_the_space_after_the_prompt_is_kept() -> None:
    pieces, _ = stream([1, 2], [3, 4], Words())
    assert pieces == [" w3", " w4"]


def test_nothing_generated() -> None:
    assert stream([65], [])[0] == []


def test_speeds_count_the_first_token_with_the_prompt() -> None:
    found = Generation("", 100, 11, prompt_seconds=0.5, new_seconds=2.0, stopped="end", prompt_ran=(), new_ran=())
    assert found.prompt_tokens_per_second == 200
    assert found.new_tokens_per_second == 5


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 1},
        {"top_k": 0},
        {"top_p": 1.0},
        {"min_p": 0.0},
        {"min_p": 1.0},
        {"repetition_penalty": 1.0},
        {"no_repeat_ngram_size": 0},
    ],
)
def test_the_ends_of_ranges_belong_to_them(options: dict[str, float]) -> None:
    Sampling(**options)


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty"])
def test_nan_is_no_value(name: str) -> None:
    with pytest.raises(InvalidInputError, match=f"{name}=nan"):
        Sampling(**{name: float("nan")})
