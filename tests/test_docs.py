"""The pages are true: links lead somewhere, Python runs, commands parse, and every page is in the navigation."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

import summary as tables
import tune
from moestro.cli import app
from source import ROOT

DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"])
FENCE = re.compile(r"^```([\w-]*)[^\n]*\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(\s*<?([^)>\s]+)>?[^)]*\)")
WIDEST = 98
"""Columns of a block of code."""
SHELL = {"sh", "bash", "console", "shell"}


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(path: Path) -> Iterator[tuple[str, str, int]]:
    """(language, text, number of lines above the text) of every fenced block."""
    text = path.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        yield found[1], found[2], text.count("\n", 0, found.start(2))


PYTHON_PAGES = [p for p in PAGES if any(language == "python" for language, _, _ in blocks(p))]


@pytest.mark.parametrize("page", PYTHON_PAGES, ids=label)
def test_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Top to bottom, in one namespace a page, offline, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for language, text, above in blocks(page):
        if language == "python":
            exec(compile("\n" * above + text, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=label)
def test_blocks_that_are_not_run_are_python(page: Path) -> None:
    """`py` blocks need a network, a package or a device that tests do not have."""
    for language, text, above in blocks(page):
        if language == "py":
            compile("\n" * above + text, str(page), "exec")


@pytest.mark.parametrize("page", [p for p in PAGES if not p.name.startswith(("add-", "log"))], ids=label)
def test_code_is_no_wider_than_a_page(page: Path) -> None:
    lines = [line for _, text, _ in blocks(page) for line in text.split("\n")]
    assert [line for line in lines if len(line) > WIDEST] == []


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as mkdocs makes them."""
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    found = set()
    for heading in re.findall(r"^#+\s+(.*?)\s*#*$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        found.add(re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower()))
    return found | set(re.findall(r'id="([^"]+)"', text))


@pytest.mark.parametrize("page", PAGES, ids=label)
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text(encoding="utf-8")))
    broken = []
    for target in LINK.findall(prose):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        outside = page.is_relative_to(DOCS) and not there.is_relative_to(DOCS)
        if not there.exists() or outside or (anchor and there.suffix == ".md" and anchor not in anchors(there)):
            broken.append(target)
    assert broken == []


def commands(path: Path) -> Iterator[list[str]]:
    """The arguments of every `moestro` command that a page shows."""
    for language, text, _ in blocks(path):
        if language not in SHELL:
            continue
        for line in text.replace("\\\n", " ").splitlines():
            for command in re.split(r"&&|\|", line.strip().removeprefix("$ ")):
                words = shlex.split(command, comments=True)
                while words and re.fullmatch(r"\w+=\S*", words[0]):
                    words.pop(0)
                if words[:3] == ["python", "-m", "moestro"]:
                    words = ["moestro", *words[3:]]
                if words and words[0] == "moestro":
                    yield words[1 : words.index(">")] if ">" in words else words[1:]


def parse(command: Any, arguments: list[str], parent: Any = None) -> None:
    """Parse as the command line would, and run nothing."""
    context = command.make_context("moestro", list(arguments), parent=parent)
    if hasattr(command, "commands"):
        _, inner, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        assert inner is not None
        parse(inner, rest, context)


ROOT_COMMAND = typer.main.get_command(app)
SCRIPTS = {"tune": typer.main.get_command(tune.app)}
"""Under benchmarks/."""
COMMANDS = [(label(page), words) for page in PAGES for words in commands(page)]


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=lambda v: v if isinstance(v, str) else " ".join(v)[:60])
def test_commands_parse(page: str, words: list[str]) -> None:
    if words[-1] in ("--help", "--version", "-h"):
        words = words[:-1]
    if words:
        parse(ROOT_COMMAND, words)


def test_a_command_that_does_not_exist_is_found() -> None:
    parse(ROOT_COMMAND, ["generate", "x", "--seed", "1"])
    for wrong in (["generate", "x", "--sead", "1"], ["generat", "x"], ["bench", "layer", "--no-such"]):
        with pytest.raises(Exception, match="No such"):
            parse(ROOT_COMMAND, wrong)


@pytest.mark.parametrize(
    ("names", "page"),
    [
        (["generate"], "cli"),
        (["chat"], "cli"),
        (["info"], "cli"),
        (["serve"], "cli"),
        (["quantize"], "cli"),
        (["tune"], "gpu"),
        (["quality"], "quality"),
        (["simulate"], "simulate"),
        (["cache"], "cache"),
        (["profile"], "profile"),
        (["plan"], "plan"),
        (["bench", "layer"], "bench"),
        (["bench", "parallel"], "bench"),
        (["bench", "scale"], "bench"),
        (["bench", "model"], "bench"),
    ],
    ids=str,
)
def test_every_option_is_documented(names: list[str], page: str) -> None:
    command: Any = ROOT_COMMAND
    for name in names:
        command = SCRIPTS[name] if name in SCRIPTS else command.commands[name]
    text = (DOCS / "reference" / f"{page}.md").read_text(encoding="utf-8")
    options = [o for p in command.params if p.param_type_name == "option" for o in (*p.opts, *p.secondary_opts)]
    assert [o for o in options if o not in ("--help", "-h") and f"`{o}`" not in text] == []


def pages_of(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, list):
        for item in nav:
            yield from pages_of(item)
    else:
        for item in nav.values():
            yield from pages_of(item)


def test_navigation_is_complete() -> None:
    listed = list(pages_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert len(listed) == len(set(listed))
    assert set(listed) == {str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md")}


def test_every_public_name_has_a_reference() -> None:
    import moestro

    text = "".join(p.read_text(encoding="utf-8") for p in (DOCS / "reference").glob("*.md"))
    names = set(moestro.__all__) - {"__version__"}
    assert {n for n in names if not re.search(rf"^#+ .*\b{n}\b|`moestro\.{n}\b", text, re.MULTILINE)} == set()


def test_readme_has_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert 'pip install -c constraints.txt . && moestro generate "def fibonacci(n):"' in text
    assert 'pip install -c constraints.txt ".[test]" && pytest' in text


def test_the_tables_of_benchmarks_are_what_the_results_say() -> None:
    text = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    assert tables.table() in text
    assert tables.formats_table() in text


def test_the_readme_has_the_best_and_the_worst_point() -> None:
    rows = [line for line in (ROOT / "README.md").read_text().split("\n") if line.startswith("| Sapphire Rapids")]
    found = {line.split("|")[2].strip(): re.findall(r"\d\.\d\dx", line) for line in rows}
    ratios = {}
    for what in ("mxfp4", "int8"):
        by_layer = [ours for (_, weights, _), ours in tables.against_best().items() if weights == what]
        ratios[what] = [ratio for ours in by_layer for t, (ratio, _) in ours.items() if t in tables.TOKENS]
    for dtype in ("bfloat16", "float32"):
        of_layers = tables.best_ratios(dtype).items()
        ratios[dtype] = [r for (layer, t), r in of_layers if layer in tables.LAYERS and t in tables.TOKENS]
    assert found == {what: [f"{max(all_):.2f}x", f"{min(all_):.2f}x"] for what, all_ in ratios.items()}


def test_tables_of_the_readme_are_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(table.count("\n|") <= 9 for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE))
