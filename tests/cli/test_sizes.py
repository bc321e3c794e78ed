"""Sizes of options."""

from __future__ import annotations

import pytest

from moestro.cli.sizes import parse_bytes
from moestro.errors import InvalidInputError

SIZES = {
    "5GB": 5 * 10**9, "2GiB": 2**31, "1.5 mb": 1_500_000, "700": 700, "3B": 3, " 2 kB": 2000, "0": 0, "4MiB": 4 << 20,
}  # fmt: skip
NO_SIZES = ["", "MB", "-1", "inf", "nan", "1e30", "0x10", "4MBMB", "4iB4", "9" * 400, "9" * 30 + "TB", "\u0663"]


def test_sizes() -> None:
    assert {text: parse_bytes("serve", "--x", text) for text in SIZES} == SIZES


@pytest.mark.parametrize("text", NO_SIZES)
def test_no_sizes(text: str) -> None:
    with pytest.raises(InvalidInputError, match="--x"):
        parse_bytes("serve", "--x", text)


def test_a_size_that_may_not_be_zero() -> None:
    with pytest.raises(InvalidInputError, match="at least 1"):
        parse_bytes("quantize", "--shard-size", "0", least=1)
