"""One word for one thing: names that the word table of CONTRIBUTING.md has replaced do not come back."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from source import PACKAGE, ROOT

REPLACED = {
    "activation_int8": "input_format",
    "again": "prepare, or say what is done again",
    "carry_out": "compute",
    "described": "the noun: handle, arguments, layout",
    "edition": "version",
    "excludes": "why_unsupported",
    "experts_apart": "unstacked",
    "facts": "call_key or layout_key",
    "few_tokens": "group_scaled_dots",
    "guarded": "crash_isolated, or what is guarded against",
    "known": "kept, registered, or what it is",
    "lie": "layout",
    "places": "row_interleave, or what they are",
    "row_format": "input_format",
    "rounded": "input_format, or int8",
    "run_any": "run",
    "seams": "what is joined",
    "select": "dispatch",
    "stands": "is_current",
    "supports": "prepare, or why_unsupported",
    "trusted": "Routing.checked_for",
    "turned": "transposed",
    "untaken": "why_unsupported",
}
"""By the word that a module, class, function or parameter of the package may not be called: what to call it."""

PHRASES = ("experts apart", "lie apart", "rows as int8", "row format", "whoever watches")
"""That no sentence of the package says."""

FILES = sorted(path for path in PACKAGE.rglob("*.py"))


def names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from (a.arg for a in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs])


def plain(name: str) -> str:
    """A name in small letters and underscores, without those that it begins and ends with."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).strip("_").lower()


def test_names_are_those_of_the_table() -> None:
    replaced, phrases = {}, []
    for path in FILES:
        text, where = path.read_text(encoding="utf-8"), str(path.relative_to(PACKAGE))
        found = {plain(name) for name in [*names(ast.parse(text)), path.stem]}
        replaced |= {f"{where}: {name}": REPLACED[name] for name in found & REPLACED.keys()}
        phrases += [(where, phrase) for phrase in PHRASES if phrase in text]
    assert FILES
    assert replaced == {}
    assert phrases == []


def test_the_table_is_in_contributing() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    words = ("input format", "unstacked experts", "int8 residual", "row interleave", "Prepared", "projection", "pair")
    for word in words:
        assert word in page, word
