"""The pages that say how to add something: their own blocks, applied to a copy of the tree, give what they promise."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from forked import python
from howto_edits import Block, apply, read_blocks
from moestro.ops import native
from source import ROOT

PAGES = ROOT / "docs" / "how-to"

FILES: dict[str, list[list[str]]] = {
    "add-an-element": [
        ["src/moestro/formats/elements.py", "src/moestro/formats/nf4.py", "src/moestro/formats/registry.py"],
        ["csrc/elements.h"],
        ["src/moestro/ops/expert_mlp/triton.py", "src/moestro/ops/triton_nibbles.py"],
    ],
    "add-an-architecture": [["src/moestro/hf/families/parrot.py", "src/moestro/hf/families/__init__.py"]],
    "add-a-dispatcher": [["slices.py"]],
    "add-an-op": [["src/moestro/ops/topk/by_hand.py", "src/moestro/ops/topk/__init__.py"]],
    "add-an-instruction-set": [
        ["csrc/bytes_avx2.h", "csrc/isa/vnni_256.cpp", "csrc/isas.cpp", "CMakeLists.txt"],
    ],
    "add-a-format": [
        ["src/moestro/formats/fp4.py"],
        ["src/moestro/formats/mxfp8.py", "src/moestro/formats/registry.py"],
    ],
    "add-an-activation": [
        ["src/moestro/types.py", "src/moestro/reference.py"],
        ["src/moestro/ops/expert_mlp/triton_kernels.py"],
        ["csrc/kinds.h"],
        ["src/moestro/ops/expert_mlp/backward.py"],
    ],
    "add-a-scoring": [
        ["src/moestro/routing/scoring.py"],
        ["src/moestro/routing/triton.py", "src/moestro/routing/triton_kernels.py"],
    ],
}
"""By page: the files that its blocks change or add, before each trial. What an addition costs is meant to stay this."""

TRITON = find_spec("triton") is not None
SETTINGS = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
IMPORTS = (
    "torch._inductor.config",
    "transformers.core_model_loading",
    *(["triton.language"] if find_spec("triton") else []),
)
"""What the trials import before moestro, whose sources each has changed."""

_BEFORE = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "Redirecting" not in type(f).__name__]  # of an editable install
sys.path.insert(0, {source!r})
import moestro
assert moestro.__file__.startswith({source!r}), moestro.__file__
exec(compile(open({script!r}).read(), {name!r}, "exec"), {{"__name__": "__main__"}})
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the sources, with the engine that is installed."""
    ignore = shutil.ignore_patterns("__pycache__", "bundled", "*.so")
    for name in ("src", "csrc", "tests/native"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignore)
    shutil.copy(ROOT / "CMakeLists.txt", tmp_path)
    if native.module is not None and native.module.__file__ is not None:
        engine = Path(native.module.__file__)
        (tmp_path / "src" / "moestro" / engine.name).symlink_to(engine)
    return tmp_path


def run_python(block: Block, tree: Path) -> None:
    """Run a `try.py` on the changed tree: on the CPU, and in Triton's interpreter where it asks for that."""
    source = _BEFORE.format(source=str(tree / "src"), script=str(tree / block.path), name=block.where)
    run([*python(*IMPORTS, **SETTINGS), "-c", source], block, tree, {**os.environ, **SETTINGS})


def run_cpp(block: Block, tree: Path, changed: list[str]) -> None:
    """Compile a `try.cpp` with the headers of the changed tree, and run it.

    Its first line may name further flags and sources: ``// flags: -mavx2 csrc/processor.cpp``. Sources of the engine
    that the page has changed must compile too.
    """
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    first = block.text.split("\n", 1)[0]
    flags = shlex.split(first.removeprefix("// flags:")) if first.startswith("// flags:") else []
    options = [*compiler, "-std=c++17", "-O0", "-I", "csrc", *(flag for flag in flags if flag.startswith("-"))]
    preprocess = [*options, "-E", "-x", "c++", os.devnull]
    if shutil.which(compiler[0]) is None or subprocess.run(preprocess, cwd=tree, capture_output=True).returncode:
        pytest.skip(f"{compiler[0]} is not there, or does not take {' '.join(flags)}")
    for source in changed:
        if source.startswith("csrc/") and source.endswith(".cpp"):
            run([*options, "-fsyntax-only", source], block, tree, dict(os.environ))
    sources = [block.path, *(flag for flag in flags if not flag.startswith("-"))]
    run([*options, *sources, "-o", "try"], block, tree, dict(os.environ))
    run(["./try"], block, tree, dict(os.environ))


def run(command: list[str], block: Block, tree: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, f"{block.where}:\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("page", FILES)
def test_a_page_is_true(page: str, tree: Path) -> None:
    changed: list[str] = []
    for block in read_blocks(PAGES / f"{page}.md"):
        apply(block, tree)
        if not block.is_trial:
            changed.append(block.path)
        elif block.path.endswith(".py"):
            run_python(block, tree)
        else:
            run_cpp(block, tree, changed)


@pytest.mark.parametrize("page", FILES)
def test_an_addition_costs_the_files_that_its_page_names(page: str) -> None:
    stages: list[list[str]] = [[]]
    for block in read_blocks(PAGES / f"{page}.md"):
        if block.is_trial:
            stages.append([])
        elif block.path not in stages[-1]:
            stages[-1].append(block.path)
    assert stages == [*FILES[page], []]


def test_every_page_with_blocks_is_followed() -> None:
    with_blocks = {page.stem for page in PAGES.glob("*.md") if any(read_blocks(page))}
    assert with_blocks == set(FILES)


def block(text: str, path: str = "a.py", is_diff: bool = True) -> Block:
    return Block("page.md", 1, path, is_diff, text)


def test_a_diff_is_applied_in_each_of_its_places(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("one\n\ntwo\nthree\n")
    apply(block(" one\n\n-two\n+2\n@@\n three\n+four\n"), tmp_path)
    assert (tmp_path / "a.py").read_text() == "one\n\n2\nthree\nfour\n"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (block(" two\n+x\n"), "2 times and not once"),
        (block(" five\n+x\n"), "0 times and not once"),
        (block(" one\n"), "some with \\+ or -"),
        (block("+x\n"), "times and not once"),
        (block(" one\n+x\n", "b.py"), "there is no b.py"),
        (block("x\n", is_diff=False), "the block is no diff"),
    ],
    ids=["twice", "absent", "nothing", "nowhere", "no file", "a file that exists"],
)
def test_a_block_that_does_not_go_with_the_tree_is_refused(wrong: Block, words: str, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("one\ntwo\ntwo\n")
    with pytest.raises(ValueError, match=words):
        apply(wrong, tmp_path)
