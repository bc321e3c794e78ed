"""Imports point down the layers only, and optional parts are imported only where they are used."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from source import MODULES, NAMES, ROOT, Import, Source, imports

# Lowest first. A module may import from its own layer and from those below it.
LAYERS: list[set[str]] = [
    {"errors", "settings", "types", "machine", "tolerances"},
    {"formats", "weights", "reference"},
    {"ops"},
    {"routing", "experts", "shared", "memory"},
    {"moe"},
    {"checkpoint", "explain"},
    {"bench", "quality", "parallel"},
    {"hf", "profiling"},
    {"serve", "planning"},
    {"cli", "__main__"},
]
LAYER_OF = {part: i for i, parts in enumerate(LAYERS) for part in parts}
SURFACE = "moestro"
"""moestro/__init__.py gathers the public names; only what lies above the layer, and nothing in it, may import it."""

OF_SERVE = {"fastapi", "starlette", "uvicorn", "openai", "prometheus_client", "jinja2", "llguidance"}
OPTIONAL = {"transformers", "tokenizers", "triton", "typer", "rich", "matplotlib", "huggingface_hub", *OF_SERVE}
FREE_AT_IMPORT = {
    "hf": {"transformers", "tokenizers", "huggingface_hub", "rich"},
    "serve": {"transformers", "tokenizers", *OF_SERVE},
    "planning": {"transformers"},
    "cli": {"typer", "rich"},
    "bench": {"rich", "matplotlib"},
}
REQUIRED = {"torch", "numpy", "safetensors"}


def part(name: str) -> str:
    """The part of the package a dotted name belongs to: "moestro.ops.topk" -> "ops"; the package itself: ""."""
    return name.split(".")[1] if "." in name else ""


def layer(name: str) -> int:
    return LAYER_OF[part(name)]


def upward(module: Source, found: Import) -> str | None:
    """Why this import breaks the rule, or None."""
    where = f"{module.where}:{found.line}"
    if found.target == SURFACE:
        return None if layer(module.name) >= LAYER_OF["bench"] else f"{where}: imports the package's surface"
    if layer(found.target) > layer(module.name):
        return f"{where}: {part(module.name)} imports {found.target}, which lies above it"
    return None


def own(module: Source) -> list[Import]:
    return [i for i in imports(module) if i.target.split(".")[0] == SURFACE]


def test_every_part_has_a_layer() -> None:
    assert {part(name) for name in NAMES} - {""} <= LAYER_OF.keys()


def test_imports_point_down() -> None:
    surface = next(module for module in MODULES if module.name == SURFACE)
    assert all(layer(i.target) < LAYER_OF["hf"] for i in own(surface) if i.at_import), "hf and cli are loaded on use"
    others = [module for module in MODULES if module is not surface]
    assert [text for module in others for i in own(module) if (text := upward(module, i))] == []


def too_early(module: Source) -> list[str]:
    """Optional parts that a module imports when it is imported itself, and may not."""
    kept = OPTIONAL - FREE_AT_IMPORT.get(part(module.name), set())
    if module.path.name.startswith("triton_"):  # themselves imported on use; test_public_api.py holds that
        kept -= {"triton"}
    return [f"{module.where}:{i.line}: {i.target}" for i in imports(module) if i.at_import and root(i) in kept]


def test_optional_parts_are_imported_on_use() -> None:
    assert [early for module in MODULES for early in too_early(module)] == []


FOLDERS = ("benchmarks", "tools", "examples")
"""Beside the package. Each imports the package and itself; tests import them all, the package none of them."""


def names_in(folder: str) -> set[str]:
    """What scripts of a folder import as their own: its modules and its packages."""
    return {path.stem for path in (ROOT / folder).iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}


@pytest.mark.parametrize("folder", FOLDERS)
def test_folders_beside_the_package_import_it_and_themselves(folder: str) -> None:
    foreign = {name for other in (*FOLDERS, "tests") if other != folder for name in names_in(other)} - names_in(folder)
    files = [Source(path.stem, path) for path in sorted((ROOT / folder).rglob("*.py"))]
    assert {f"{m.where}: {i.target}" for m in files for i in imports(m) if root(i) in foreign} == set()


def test_peers_know_nothing_of_the_sweep() -> None:
    files = [Source(path.stem, path) for path in (ROOT / "benchmarks" / "peers").glob("*.py")]
    mine = names_in("benchmarks") - {"peers"}
    assert {f"{m.where}: {i.target}" for m in files for i in imports(m) if root(i) in mine} == set()


def is_of_gpus(module: Source) -> bool:
    return module.path.name.startswith(("triton", "gpu"))


def native_parts(module: Source) -> list[str]:
    """What a module takes of the native engine: by an import, or as a part of a package that it imported."""
    taken = [f"{module.where}:{i.line}" for i in own(module) if i.target.split(".")[-1] in ("native", "_native", "cpu")]
    calls = {id(node.func) for node in ast.walk(module.tree) if isinstance(node, ast.Call)}
    return taken + [
        f"{module.where}:{node.lineno}"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute) and node.attr in ("native", "cpu") and id(node) not in calls
    ]


def test_gpu_modules_import_no_native_ones() -> None:
    modules = [module for module in MODULES if is_of_gpus(module)]
    assert modules
    assert [part for module in modules for part in native_parts(module)] == []


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("from moestro.ops import native", 1),
        ("from moestro.ops.topk.cpu import find", 1),
        ("from moestro.ops import topk\ntopk.cpu.find(x, 2)", 1),
        ("from moestro.ops import tensors\ny = x.cpu()", 0),
    ],
)
def test_the_reader_of_native_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, count: int) -> None:
    path = tmp_path / "triton.py"
    path.write_text(text)
    monkeypatch.setattr(Source, "where", "triton.py")
    assert len(native_parts(Source("moestro.ops.topk.triton", path))) == count


def root(found: Import) -> str:
    return found.target.split(".")[0]


def test_third_parties_are_the_declared_ones() -> None:
    import sys

    known = set(sys.stdlib_module_names) | OPTIONAL | REQUIRED | {SURFACE}
    assert {f"{m.where}: {i.target}" for m in MODULES for i in imports(m) if root(i) not in known} == set()


@pytest.mark.parametrize(
    ("text", "target", "at_import"),
    [
        ("import moestro.cli", "moestro.cli", True),
        ("def f():\n    import moestro.hf", "moestro.hf", False),
        ("from moestro import settings", "moestro.settings", True),
        ("from moestro import use", "moestro", True),
        ("from .. import settings", "moestro.settings", True),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import moestro.moe", "moestro.moe", False),
        ("try:\n    import triton\nexcept ImportError:\n    pass", "triton", True),
    ],
)
def test_the_reader_of_imports(tmp_path: Path, text: str, target: str, at_import: bool) -> None:
    path = tmp_path / "m.py"
    path.write_text(text)
    found = list(imports(Source("moestro.ops.m", path)))[-1]
    assert (found.target, found.at_import) == (target, at_import)


def test_an_upward_import_is_found(tmp_path: Path) -> None:
    path = tmp_path / "types.py"
    path.write_text("from moestro.moe import MoE")
    found = next(imports(Source("moestro.types", path)))
    assert layer(found.target) > layer("moestro.types")
    assert isinstance(ast.parse(path.read_text()), ast.Module)
