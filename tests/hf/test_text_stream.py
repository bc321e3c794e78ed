"""Text from tokens: characters stay whole, stop strings end it whatever the tokens are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moestro.errors import InvalidInputError
from moestro.hf.text_stream import TextStream

LETTERS = st.text("abé🙂", max_size=24)
STOPS = st.lists(st.text("abé🙂", min_size=1, max_size=5), max_size=3)


class Bytes:
    """Token ids are bytes; those above 255 are special."""

    def decode(self, token_ids: list[int], **options: object) -> str:
        assert options["skip_special_tokens"]
        return bytes(i for i in token_ids if i < 256).decode(errors="replace")


def expected(text: str, stops: list[str]) -> tuple[str, str | None]:
    """By definition: the stop string that ends first, the longest of those that end together."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(LETTERS, STOPS, st.lists(st.integers(1, 5), min_size=1, max_size=8))
def test_a_stop_string_is_found_however_tokens_split_it(text: str, stops: list[str], sizes: list[int]) -> None:
    stream, pieces, data = TextStream(Bytes(), stops=stops), [], text.encode()
    whole, reached = expected(text, stops)
    while data:
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(stream.put(data[:size]))
        data = data[size:]
        so_far = "".join(pieces)
        assert whole.startswith(so_far), "a part of a stop string came out"
    pieces.append(stream.end())
    assert ("".join(pieces), stream.stopped) == (whole, reached)
    assert stream.text == whole


@given(LETTERS, STOPS)
def test_no_more_is_held_back_than_may_begin_a_stop_string(text: str, stops: list[str]) -> None:
    stream = TextStream(Bytes(), stops=stops)
    for end in range(1, len(text) + 1):
        stream.put(text[end - 1].encode())
        if stream.stopped is not None:
            return
        held = text[len(stream.text) : end]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_a_stop_string_that_ends_the_text_unfinished() -> None:
    stream = TextStream(Bytes(), stops=["</end>"])
    assert stream.put(b"ab</en") == "ab"
    assert stream.end() == "</en"
    assert stream.stopped is None


def test_nothing_follows_a_stop_string() -> None:
    stream = TextStream(Bytes(), stops=["\n\n"])
    assert stream.put(b"one\n") == "one"
    assert stream.put(b"\ntwo") == ""
    assert (stream.put(b"three"), stream.end(), stream.text, stream.stopped) == ("", "", "one", "\n\n")


def test_a_stop_string_begins_in_the_new_text() -> None:
    stream = TextStream(Bytes(), prompt_ids=b"as", stops=["st"])
    assert stream.put(b"tar") == "tar"
    assert stream.stopped is None


def test_a_long_stop_string_costs_little() -> None:
    """Tried anew at every character, this would take 10**10 steps."""
    stream = TextStream(Bytes(), stops=["a" * 100_000 + "b"])
    assert stream.put(b"a" * 100_001) == "a"
    assert stream.put(b"b") == ""
    assert stream.stopped is not None


@pytest.mark.parametrize("stop", ["", "\udcff"])
def test_stop_strings_that_cannot_be(stop: str) -> None:
    with pytest.raises(InvalidInputError, match="the stop string"):
        TextStream(Bytes(), stops=["x", stop])
