"""The laws of the C++ sources: how they are formatted, and how long and how plain their parts are."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(
    [*(ROOT / "csrc").rglob("*.h"), *(ROOT / "csrc").rglob("*.cpp"), *(ROOT / "tests" / "native").glob("*.cpp")]
)
BY_NAME = pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)

MOST_LINES, MOST_FUNCTION, MOST_CLASS, MOST_COLUMNS, MOST_POSITIONS = 499, 60, 250, 120, 6

_NO_FUNCTION = re.compile(r"^\s*(namespace|struct|class|enum|union|if|for|while|switch|else|do|extern \")\b")
_NO_HEADER = re.compile(r"^\s*($|#|//|}|public:|private:|protected:)")
_CLASS = re.compile(r"^\s*(template <.*> )?(class|struct|union) ")


def blocks(lines: list[str]) -> Iterator[tuple[int, int]]:
    """First and last line, from 0, of what stands in braces; indents say it, since the files are formatted."""
    for stop, line in enumerate(lines):
        if not line.lstrip().startswith("}"):
            continue
        start = stop - 1
        while start > 0 and (depth_of(lines[start]) != depth_of(line) or _NO_HEADER.match(lines[start])):
            start -= 1
        yield start, stop


def depth_of(line: str) -> int:
    return len(line) - len(line.lstrip())


def initialisers(text: str, names: set[str]) -> Iterator[list[str]]:
    """The positions of each list in braces that initialises a struct of one of these names."""
    for found in re.finditer(rf"\b({'|'.join(sorted(names))})\b(?:\s+\w+)?\s*(?:=\s*)?\{{", text):
        if re.search(r"\b(struct|class|enum|union)\s+$", text[: found.start()]):
            continue
        depth, parts = 0, [""]
        for letter in text[found.end() :]:
            if letter in ")]}" and depth == 0:
                break
            depth += (letter in "([{") - (letter in ")]}")
            if letter == "," and depth == 0:
                parts.append("")
            else:
                parts[-1] += letter
        yield [part.strip() for part in parts if part.strip()]


def test_formatted():
    beside = Path(sys.executable).parent / "clang-format"
    tool = str(beside) if beside.exists() else shutil.which("clang-format")
    if tool is None:
        pytest.skip("clang-format is not installed: pip install clang-format, as constraints.txt pins it")
    pinned = re.search(r"^clang-format==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    said = subprocess.run([tool, "--version"], capture_output=True, text=True, check=True).stdout
    if pinned[1] not in said:
        pytest.skip(f"clang-format is {said.strip()}, and the sources are formatted with {pinned[1]}")
    wrong = subprocess.run(
        [tool, "--dry-run", "-Werror", *map(str, FILES)], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert wrong.returncode == 0, wrong.stderr[:3000]


@BY_NAME
def test_lines(file):
    lines = file.read_text().split("\n")
    assert len(lines) <= MOST_LINES
    assert [i + 1 for i, line in enumerate(lines) if len(line) > MOST_COLUMNS] == []


@BY_NAME
def test_functions_and_classes_are_short(file):
    lines = file.read_text().split("\n")
    long = []
    for start, stop in blocks(lines):
        length, header = stop - start + 1, " ".join(lines[start : start + 4])
        is_function = "(" in header and not _NO_FUNCTION.match(header) and depth_of(header) <= 4
        most = MOST_CLASS if _CLASS.match(header) else MOST_FUNCTION if is_function else length
        if length > most:
            long.append((start + 1, length))
    assert long == []


def test_no_struct_is_initialised_by_many_positions():
    texts = {file: file.read_text() for file in FILES}
    names = {
        name for text in texts.values() for name in re.findall(r"\b(?:struct|class) (?:alignas\(\d+\) )?(\w+)", text)
    }
    wrong = [
        f"{file.name}: {positions[:3]} and {len(positions) - 3} more"
        for file, text in texts.items()
        for positions in initialisers(text, names)
        if len(positions) > MOST_POSITIONS
    ]
    assert wrong == []


PAGE = (ROOT / "docs" / "reference" / "engine.md").read_text(encoding="utf-8")
MOST_HOPS = 12
KERNELS = ("four_rows", "eight_rows", "outer_products", "rows")
"""Members of the tables of an instruction set that point to kernels."""


def hops() -> list[tuple[str, Path]]:
    """The functions from `MoE.forward` to a kernel, and their files, as the page lists them."""
    rows = re.findall(r"^\| +(\d+) \| `([\w.:]+)` \| `([\w./]+)` \|", PAGE, re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == list(range(1, len(rows) + 1))
    return [(name, ROOT / file) for _, name, file in rows]


def bodies(name: str, file: Path) -> list[str]:
    """The definitions of a C++ function in a file; of a member, those in its class or under its full name."""
    lines = file.read_text().split("\n")
    spans = [(start, stop, "\n".join(lines[start : stop + 1])) for start, stop in blocks(lines)]
    *owner, plain = name.split("::")
    classes = [(a, b) for a, b, text in spans if owner and re.match(rf"\s*class {owner[0]}\b", text)]
    found = []
    for start, stop, text in spans:
        header = text.split("{")[0]
        inside = not owner or f"{name}(" in header or any(a < start and stop < b for a, b in classes)
        if inside and re.search(rf"\b{plain}\(", header) and not _NO_FUNCTION.match(text):
            found.append(text)
    return found


def calls(body: str, name: str) -> bool:
    return re.search(rf"\b{name.split('::')[-1]}\(", body.partition("{")[2]) is not None


def test_a_call_takes_no_more_hops_than_the_page_lists():
    """Those of Python are counted as they run, by tests/ops/test_dispatch.py."""
    found = hops()
    assert len(found) == MOST_HOPS
    native = [hop for hop in found if hop[1].parent.name == "csrc"]
    assert native == found[-len(native) :]
    for (name, file), wanted in zip(native, [*((name,) for name, _ in native[1:]), KERNELS], strict=True):
        own = bodies(name, file)
        assert own, f"{name} is not in {file.name}"
        assert any(calls(body, each) for body in own for each in wanted), f"{name} does not call {wanted}"


def test_the_page_has_the_numbers_inside_kernels():
    rows = re.findall(r"^\| `(k\w+)` \| `([\w*./]+)` \| (\d*) ?\| (\d*) ?\| (\d*) ?\|", PAGE, re.MULTILINE)
    assert len(rows) >= 11
    for name, pattern, wide, neon, narrow in rows:
        for file in sorted((ROOT / "csrc").glob(pattern)):
            value = constant(name, file.read_text())
            assert value is not None, f"{name} is not in {file.name}"
            by_ending = {"neon": neon, "avx2": narrow, "portable": narrow}
            assert value == int(by_ending.get(file.stem.rpartition("_")[2], wide)), f"{name} in {file.name}"


def constant(name: str, text: str) -> int | None:
    found = re.search(rf"constexpr int(?:64_t)? [^;]*\b{name} = (\d+)(?: << (\d+))?", text)
    return None if found is None else int(found[1]) << int(found[2] or 0)


def test_the_laws_find_what_they_look_for():
    body = ["void long_one(int a,", "              int b) {", *["    ++a;"] * 60, "}"]
    assert list(blocks(body)) == [(0, 62)]
    assert [len(p) for p in initialisers("Pair p = {1, f(2, 3), {4, 5}};", {"Pair"})] == [3]
