"""The default text is what the bundled model's training held out: no file of it was trained on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from moestro.errors import InvalidInputError
from moestro.quality.held_out import held_out
from source import ROOT


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch):
    """The training script, whose `read_corpus` splits the running Python's standard library."""
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import train_bundled

    yield train_bundled
    del sys.modules["train_bundled"]


def test_it_is_what_training_held_out(training) -> None:
    trained_on, kept = training.read_corpus()
    found = held_out()
    assert sorted(found) == sorted(kept)
    assert not set(found) & set(trained_on)
    assert found == held_out()


def test_a_folder_by_hand(tmp_path: Path, training) -> None:
    """Of 600 files the held-out ones, in an order that does not follow their folders; what is foreign is left out."""
    for i in range(600):
        folder = tmp_path / ("site-packages" if i % 50 == 49 else f"f{i % 7}")
        folder.mkdir(exist_ok=True)
        (folder / f"m{i}.py").write_text(f"x = {i}\n")
    paths = {p.relative_to(tmp_path).as_posix(): p for p in tmp_path.rglob("*.py")}
    kept = [n for n in paths if training.is_held_out(n) and "site-packages" not in n]
    assert len(kept) > 5
    paths[kept[0]].write_bytes(b"# \xff\n")
    found = held_out(tmp_path)
    assert sorted(found) == sorted(paths[n].read_text() for n in kept[1:])
    assert found != [paths[n].read_text() for n in sorted(kept[1:])]


def test_a_python_without_sources_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="standard library is not there as source files"):
        held_out(tmp_path)
