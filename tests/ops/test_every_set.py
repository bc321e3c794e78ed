"""`tools/every_set.py`: pytest passes over names to leave out that no test has."""

from __future__ import annotations

import re

import pytest

import every_set
from source import ROOT


@pytest.mark.parametrize("test", every_set.WITHOUT)
def test_what_is_left_out_is_a_test_of_those_that_run(test: str) -> None:
    path, _, function = test.partition("::")
    assert path in every_set.TESTS
    assert re.search(rf"^def {function}\(", (ROOT / path).read_text(), re.MULTILINE)
