"""The code of the pages on routing runs, top to bottom, each page in one namespace."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import moestro.routing
from moestro.routing import PRESETS

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ["reference/routers.md", "reference/rewrites.md", "how-to/add-a-router.md"]
BESIDE = ["reference/training_balance.md"]


@pytest.mark.parametrize("page", PAGES)
def test_samples_run(page: str, capsys: pytest.CaptureFixture[str]):
    text = (DOCS / page).read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert blocks
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, page, "exec"), namespace)


@pytest.mark.parametrize("page", PAGES[:2])
def test_every_public_name_is_documented_and_every_named_one_exists(page: str):
    pages = "".join((DOCS / p).read_text() for p in PAGES + BESIDE)
    missing = [n for n in moestro.routing.__all__ if n not in pages]
    assert not missing, missing
    called = set(re.findall(r"^\| `(\w+)\(", (DOCS / page).read_text(), re.MULTILINE))
    assert called <= set(moestro.routing.__all__)


def test_the_presets_in_the_docs_are_the_presets():
    text = (DOCS / PAGES[0]).read_text()
    for name, scoring in PRESETS.items():
        assert f'| `"{name}"` | `{scoring}` |' in text
