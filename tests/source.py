"""The package as source, for the tests that hold its laws."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "moestro"


@dataclass(frozen=True)
class Source:
    """One module: its dotted name, its path and its syntax tree."""

    name: str
    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, str(self.path))

    @property
    def package(self) -> str:
        """The package that relative imports of this module start from."""
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]

    @property
    def where(self) -> str:
        return str(self.path.relative_to(ROOT))


def _dotted(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = [
    Source(_dotted(path), path)
    for path in sorted(PACKAGE.rglob("*.py"))
    if "bundled" not in path.relative_to(PACKAGE).parts
]
NAMES = {module.name for module in MODULES}


@dataclass(frozen=True)
class Import:
    """One imported module.

    Attributes:
        target: dotted name; for ``from package import submodule`` that of the submodule.
        line: where.
        at_import: whether it runs when the module is imported (not in a function, not under TYPE_CHECKING).
    """

    target: str
    line: int
    at_import: bool


def imports(module: Source) -> Iterator[Import]:
    """Every import of a module, nested ones included."""
    yield from _imports(module, module.tree, True)


def _imports(module: Source, node: ast.AST, at_import: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, child.lineno, at_import)
        elif isinstance(child, ast.ImportFrom):
            base = child.module or ""
            if child.level:
                above = module.package.split(".")[: len(module.package.split(".")) - child.level + 1]
                base = ".".join([*above, base] if base else above)
            for alias in child.names:
                submodule = f"{base}.{alias.name}"
                yield Import(submodule if submodule in NAMES else base, child.lineno, at_import)
        elif isinstance(child, ast.If) and _is_type_checking(child.test):
            yield from _imports(module, ast.Module(child.body, []), False)
            yield from _imports(module, ast.Module(child.orelse, []), at_import)
        else:
            function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imports(module, child, at_import and not function)


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST, inside: str = "") -> Iterator[tuple[str, Function, bool]]:
    """(qualified name, node, whether it is a method) of every function, nested ones included."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, Function):
            name = f"{inside}{child.name}"
            yield name, child, isinstance(tree, ast.ClassDef)
            yield from functions(child, f"{name}.")
        elif isinstance(child, ast.ClassDef):
            yield from functions(child, f"{inside}{child.name}.")
        else:
            yield from functions(child, inside)
