"""The blocks of a how-to that change the tree, read out of the page and applied to a copy of the tree.

A block is fenced and has a title: the path it is about. A `diff` block changes a file that exists: lines that stay
begin with a space, old ones with "-", new ones with "+", and "@@" stands between two places. What stays or goes must be
found exactly once. Any other block with a title is a file as it is, and those called `try.py` and `try.cpp` are run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r'^```(\w+) title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
TRIALS = ("try.py", "try.cpp")


@dataclass(frozen=True)
class Block:
    """One block: the page and the line where its text begins, its path from the root of the tree, and the text."""

    page: str
    line: int
    path: str
    is_diff: bool
    text: str

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_trial(self) -> bool:
        return self.path in TRIALS


def read_blocks(page: Path) -> Iterator[Block]:
    """The blocks with a title, from top to bottom."""
    text = page.read_text(encoding="utf-8")
    for found in _FENCE.finditer(text):
        line = text.count("\n", 0, found.start(3)) + 1
        yield Block(page.name, line, found[2], found[1] == "diff", found[3])


def apply(block: Block, tree: Path) -> None:
    """Change the file, or write it.

    Raises:
        ValueError: the block does not go with the tree: what it keeps or removes is not there exactly once, or a file
            to be written exists.
    """
    file = tree / block.path
    if not block.is_diff:
        if file.exists() and not block.is_trial:
            raise ValueError(f"{block.where}: {block.path} exists, and the block is no diff")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(block.text, encoding="utf-8")
        return
    if not file.exists():
        raise ValueError(f"{block.where}: there is no {block.path}")
    text = "\n" + file.read_text(encoding="utf-8")
    for hunk in re.split(r"^@@.*\n", block.text, flags=re.MULTILINE):
        text = _replaced(text, hunk.splitlines(), block)
    file.write_text(text[1:], encoding="utf-8")


def _replaced(text: str, hunk: list[str], block: Block) -> str:
    if any(line[:1] not in ("", " ", "-", "+") for line in hunk) or not any(line[:1] in "+-" for line in hunk if line):
        raise ValueError(f"{block.where}: a diff's lines begin with a space, + or -, and some with + or -")
    old, new = ("\n".join(["", *(line[1:] for line in hunk if line[:1] in ("", " ", mark)), ""]) for mark in "-+")
    times = len(re.findall(f"(?={re.escape(old)})", text))
    if old == "\n" or times != 1:
        raise ValueError(f"{block.where}: {block.path} has this {times} times and not once:{old}")
    return text.replace(old, new)
