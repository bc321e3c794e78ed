"""The text that quality is measured on by default: what the bundled model's training held out."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

from moestro.errors import invalid_input

PER_MILLE = 25
"""Of the standard library's files, by a hash of their paths; examples/train_bundled.py has the same rule."""


def held_out(root: Path | None = None) -> list[str]:
    """The held-out files of a standard library, the running Python's or that in `root`, by the hashes of their paths.

    That order is the same everywhere and follows no folder, so that the first of them stand for all.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    found: list[tuple[str, str]] = []
    for file in root.rglob("*.py"):
        path = file.relative_to(root).as_posix()
        order = hashlib.sha256(path.encode()).hexdigest()
        if int(order[:8], 16) % 1000 >= PER_MILLE or not file.is_file():
            continue
        try:
            text = file.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue  # a handful of test files in other encodings
        if text and not _left_out(path, text):
            found.append((order, text))
    if not found:
        raise invalid_input(
            "quality",
            got="a Python whose standard library is not there as source files",
            needs="a text",
            fix="Name one with --text.",
        )
    return [text for _, text in sorted(found)]


def _left_out(path: str, text: str) -> bool:
    """Whether a file was no part of the corpus: foreign, generated, or odd on purpose."""
    parts = path.split("/")
    return (
        bool({"site-packages", "dist-packages", "__pycache__"} & set(parts))
        or parts[0].startswith(("_sysconfigdata", "config-"))
        or parts[0] == "pydoc_data"
        or (parts[0] == "encodings" and "gencodec.py" in text)
        or path.startswith("lib2to3/tests/data/")
    )
